"""`submit --server`: a service trains the sweep, and the command shows its progress and its table."""

import contextlib
import threading

import pytest
from cope_services.http.settings import Settings

from cope_sweep.store import read_submission
from cope_sweep.store.sweeps import SweepRecord
from tests.helpers.finished_runs import finish
from tests.helpers.processes import until
from tests.helpers.sample_store import serving
from tests.helpers.scripted_cluster import scripted_cluster

pytestmark = pytest.mark.slow  # starts servers


@contextlib.contextmanager
def service(shell, **changes):
    """The address of a service for the folder of a shell."""
    values = {"ablations": shell.folder / "ablations", "store": shell.folder / "store", "device": "cpu"}
    with serving(Settings.model_validate(values | changes)) as client:
        yield str(client.base_url).rstrip("/")


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with scripted_cluster() as cluster:
        yield cluster


@contextlib.contextmanager
def ended_when_submitted(shell, cluster, status):
    """Record the end of the next sweep that is submitted meanwhile, as its job would."""
    before = len(cluster.submitted)

    def work():
        until(lambda: len(cluster.submitted) > before)
        sweep_id = cluster.submitted[before]["submission_id"]
        record = shell.store.sweep(sweep_id)
        if status == "finished":
            for run in shell.runs:
                finish(shell.store, run, {"in_dist/token_error": 1.0})
        changes = {"status": status, "ended_ms": 5}
        shell.store.write_sweep(SweepRecord.model_validate({**record.model_dump(), **changes}))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("interrupted", 130)])
def test_submit_follows_the_sweep_and_exits_with_its_code(stored, cluster, status, code):
    with service(stored, ray_address=cluster.url) as url, ended_when_submitted(stored, cluster, status):
        out, err = stored("submit", "tiny", "--set", "seeds=[0]", "--max-runs", "3", "--server", url, code=code)
    sweep_id = cluster.submitted[0]["submission_id"]
    assert out.splitlines()[0] == f"sweep {sweep_id}: {status}"
    assert f"sweep {sweep_id}; Ctrl-C stops it" in err
    submission = read_submission(stored.store, sweep_id)
    assert (submission.ablation, submission.sets, submission.max_runs) == ("tiny", ["seeds=[0]"], 3)


def test_submit_sends_the_text_of_a_file(stored, cluster):
    stored.write("mine", (stored.folder / "ablations" / "tiny.yaml").read_text())
    (stored.folder / "mine.yaml").write_text((stored.folder / "ablations" / "mine.yaml").read_text())
    (stored.folder / "ablations" / "mine.yaml").unlink()
    with service(stored, ray_address=cluster.url) as url:
        state = stored.json("submit", "mine.yaml", "--no-follow", "--server", url)
        assert (state["ablation"], state["runs"], state["status"]) == ("mine", 4, "pending")
        out, _ = stored("submit", "tiny", "--no-follow", "--server", url)
        assert "4 runs, pending" in out
        sweep_id = out.split()[1].removesuffix(":")
        assert f"curl -X POST {url}/api/v1/sweeps/{sweep_id}/stop   stops it" in out


def test_a_submitted_sweep_is_trained_again_here_too(stored, cluster):
    """As it was submitted, although the file has changed."""
    words = ("submit", "tiny", "--set", "seeds=[7]", "--max-runs", "1")
    with service(stored, ray_address=cluster.url) as url, ended_when_submitted(stored, cluster, "interrupted"):
        stored(*words, "--server", url, code=130)
    first = cluster.submitted[0]["submission_id"]
    stored.write("tiny", "title: Another\n")
    stored.refuses("conflicting_options", "retry", first, "--local", "--set", "seeds=[0]")
    ended = stored.json("retry", first, "--local", "--no-mlflow", code=130)["sweep"]
    assert (ended["trained"], ended["not_started"], ended["notes"]) == (
        1,
        1,
        ["stopped: the budget of 1 run is used up"],
    )
    out, _ = stored("retry", first, "--local", "--no-mlflow")
    assert "none" in out
    stored.refuses("not_submitted", "retry", stored.sweep_id, "--local", sweep_id=stored.sweep_id)


def test_options_of_a_cluster_are_not_those_of_a_service(shell):
    words = ("submit", "tiny", "--store", "here", "--server", "http://127.0.0.1:1")
    shell.refuses("conflicting_options", *words, options=["--store", "--server"])


def test_the_command_line_precedes_the_environment(shell):
    shell.environment["COPE_SWEEP_SERVER"] = "http://127.0.0.1:1"
    words = ("submit", "tiny", "--address", "http://192.0.2.1:8265")
    shell.refuses("missing_option", *words, option="--store", address="http://192.0.2.1:8265")


def test_what_is_no_address_of_a_service(shell):
    shell.refuses("invalid_address", "submit", "tiny", "--server", "nonsense://x", address="nonsense://x")


def test_a_service_without_a_cluster_says_so(stored):
    with service(stored) as url:
        stored.refuses("no_cluster", "submit", "tiny", "--server", url)
        stored.refuses("no_such_file", "submit", "mine.yaml", "--server", url, file="mine.yaml")
