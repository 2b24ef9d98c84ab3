"""`--server`: commands print what a service answers as they print what is in a store."""

import contextlib
import json
import threading

import pytest
from cope_services.http.settings import Settings

from cope_sweep.store import read_submission
from cope_sweep.store.sweeps import SweepRecord
from tests.read.tables.ablations import finish
from tests.services.sample_store import serving
from tests.services.scripted_cluster import scripted_cluster
from tests.store.waiting import until

pytestmark = pytest.mark.slow  # starts servers


@contextlib.contextmanager
def service(shell, **changes):
    """The address of a service for the folder of a shell."""
    values = {"ablations": shell.folder / "ablations", "store": shell.folder / "store", "device": "cpu"}
    with serving(Settings.model_validate(values | changes)) as client:
        yield str(client.base_url).rstrip("/")


def plain(text):
    """A text without the blanks that depend on the width of the terminal."""
    return [line.rstrip() for line in text.strip().splitlines()]


def test_questions_are_answered_as_from_the_store(stored):
    run, sweep = stored.runs[0].run_id, stored.sweep_id
    questions = [
        ("list",),
        ("list", "--json"),
        ("status",),
        ("status", "--json"),
        ("status", "tiny"),
        ("status", "tiny", "--json"),
        ("status", sweep),
        ("status", sweep, "--json"),
        ("status", stored.runs[1].run_id),
        ("status", run, "--json"),
        ("runs", "--filter", "model.layers>=1", "--sort", "in_dist/token_error", "--descending"),
        ("runs", "--status", "finished", "--filter", "model.position=cope", "--json"),
        ("runs", "--sweep", sweep, "--limit", "2"),
        ("diff", run, stored.runs[2].run_id),
        ("diff", sweep, sweep),
        ("table", "tiny"),
        ("table", "tiny", "--format", "latex"),
        ("table", "tiny", "--json"),
        ("logs", stored.runs[1].run_id),
        ("plan", "tiny"),
        ("plan", "tiny", "--json"),
        ("plan", "tiny", "--set", "seeds=[0]", "--set", "train.steps=7"),
        ("plan", "mine.yaml", "--json"),
        ("table", "tiny", "--compare", "CoPE"),
        ("runs", "--ablation", "tiny"),
        ("runs", "--format", "csv", "--filter", "model.position=cope"),
        ("runs", "--curves", "--format", "json"),
        ("figure", "tiny", "--format", "csv", "--metric", "train/loss", "--row", "CoPE"),
        ("figure", "tiny", "--kind", "summary", "--format", "csv"),
    ]
    stored.environment["COLUMNS"] = "160"  # the width at which the service renders a table
    (stored.folder / "mine.yaml").write_text((stored.folder / "ablations" / "tiny.yaml").read_text())
    with service(stored) as url:
        for words in questions:
            here, there = stored(*words)[0], stored(*words, "--server", url)[0]
            assert plain(there) == plain(here), words


def test_no_command_silently_uses_a_local_store(stored):
    with service(stored) as url:
        here = stored("status", stored.sweep_id)[0]
        stored.environment["COPE_SWEEP_SERVER"] = url
        (stored.folder / "store").rename(stored.folder / "elsewhere")
        assert plain(stored("status", "--store", "elsewhere", stored.sweep_id)[0]) == plain(here), "it was named"
        (stored.folder / "elsewhere").rename(stored.folder / "store")
        assert plain(stored("status", stored.sweep_id)[0]) == plain(here)
        for words in (["run", "tiny"], ["prune"], ["sync"], ["store", "check"], ["store", "rebuild"], ["serve"]):
            _, err = stored(*words, code=2)
            assert f"COPE_SWEEP_SERVER names a service, and `{words[-1] if words[0] == 'store' else words[0]}`" in err
        assert "0 B in 0 files" in stored("prune", "--store", "store")[0]
        for words in (
            ["plan", "tiny", "--measure"],
            ["table", "tiny", "--set", "seeds=[0]"],
            ["report", "--all", "--out", "o"],
        ):
            assert "needs the files of this machine" in stored.error(*words)


def test_figures_and_exports_are_files(stored):
    with service(stored) as url:
        for words in (
            ("runs", "-o", "runs.parquet"),
            ("table", "tiny", "--runs", "-o", "runs.csv"),
            ("figure", "tiny", "--kind", "summary", "-o", "summary.svg"),
            ("report", "tiny", "-o", "report.html"),
        ):
            path = stored.folder / words[-1]
            contents = []
            for server in ((), ("--server", url)):
                stored(*words, *server)
                contents.append(path.read_bytes())
                path.unlink()
            assert contents[0] == contents[1], words
        answer = stored.json("figure", "tiny", "--server", url)
        assert (answer["file"], answer["kind"], answer["format"]) == ("tiny-curves.png", "curves", "png")


def test_probe(trained):
    run = trained.json("runs", "--filter", "model.position=cope", "--status", "finished")["runs"][0]["run_id"]
    with service(trained) as url:
        for words in (("--index", "1"), ("--tokens", "1 4 2 5 1 2", "--head", "0"), ("--mark", "data")):
            here, there = (trained.json("probe", run, *words, *server) for server in ((), ("--server", url)))
            assert [head["layer"] for head in here["heads"]] == [head["layer"] for head in there["heads"]]
            for one, other in zip(here["heads"], there["heads"], strict=True):
                assert one["marks"].keys() == other["marks"].keys()
                for name, mark in one["marks"].items():
                    assert other["marks"][name] == pytest.approx(mark, rel=1e-4)
        assert "AUC" in trained("probe", run, "--server", url)[0]
        assert "--count needs the files" in trained.error("probe", run, "--count", "2", "--server", url)


def test_perplexity(trained):
    run = trained.json("runs", "--status", "finished")["runs"][0]["run_id"]
    words = ("perplexity", run, "--tokens", "1 4 2 5 1 2")
    with service(trained) as url:
        here, there = trained.json(*words), trained.json(*words, "--server", url)
        assert there == pytest.approx(here, rel=1e-5)
        assert trained(*words, "--server", url)[0].startswith("perplexity ")
        labels = ("perplexity", run, "--text", "1 _ 2 > 1 2")
        assert trained.json(*labels) == here
        assert trained.json(*labels, "--server", url) == there
        labels = (*labels, "--context", "2", "--stride", "1")
        assert trained.json(*labels, "--server", url) == pytest.approx(trained.json(*labels), rel=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("status", "nosuch"), "no ablation 'nosuch'"),
        (("status", "0123456789abcdef"), "no run"),
        (("status", "20200101-000000-00"), "no sweep"),
        (("logs", "0123456789abcdef"), "no run"),
        (("stop", "20200101-000000-00"), "no sweep"),
        (("table", "tiny", "--set", "seeds=[0]"), "--set needs the files of this machine"),
        (("plan", "tiny", "--set", "train.stepz=1"), "train.stepz"),
        (("report", "tiny", "--out", "o"), "--out needs the files of this machine"),
        (("figure", "tiny", "--kind", "maps", "--show", "gates"), "--show needs the files of this machine"),
        (("figure", "0123456789abcdef"), "need a checkpoint on this machine"),
        (("status", "--store", "here"), "--store needs the files of this machine"),
        (("submit", "tiny"), "--ray-address"),
        (("retry", "tiny", "--failed", "--local"), "--local needs the files of this machine"),
    ],
)
def test_errors_are_those_of_the_service(stored, words, message):
    with service(stored) as url:
        assert message in stored.error(*words, "--server", url)


def test_a_service_that_does_not_answer(shell):
    _, err = shell("logs", "0123456789abcdef", "--server", "nonsense://x", code=2)
    assert "is not the address of a service" in err


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
        changes = {
            "status": status,
            "ended_ms": 5,
            "table": {"markdown": "| a table |", "csv": "", "json": {"rows": []}},
        }
        shell.store.write_sweep(SweepRecord.model_validate({**record.model_dump(), **changes}))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("failed", 1), ("interrupted", 130)])
def test_submit_follows_the_sweep_and_exits_with_its_code(stored, cluster, status, code):
    with service(stored, ray_address=cluster.url) as url, ended_when_submitted(stored, cluster, status):
        out, err = stored("submit", "tiny", "--set", "seeds=[0]", "--max-runs", "3", "--server", url, code=code)
    sweep_id = cluster.submitted[0]["submission_id"]
    assert out.splitlines()[:2] == ["| a table |", f"sweep {sweep_id}: {status}"]
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


def test_retry_trains_the_failed_runs_only(stored, cluster):
    with service(stored, ray_address=cluster.url) as url, ended_when_submitted(stored, cluster, "finished"):
        ended = json.loads(stored("retry", "tiny", "--failed", "--stopped", "--json", "--server", url)[0])
    assert ended["sweep"]["status"] == "finished"
    submission = read_submission(stored.store, ended["sweep"]["sweep_id"])
    assert (set(submission.leave_out), submission.sets) == (
        {"pending", "interrupted", "damaged"}, ["schedule.kind=none"],
    )  # fmt: skip


def test_retry_of_a_sweep_trains_what_it_has_left(stored, cluster):
    words = ("submit", "tiny", "--set", "seeds=[0, 7]", "--max-runs", "3")
    with service(stored, ray_address=cluster.url) as url:
        server = ("--server", url)
        with ended_when_submitted(stored, cluster, "interrupted"):
            stored(*words, *server, code=130)
        first = cluster.submitted[0]["submission_id"]
        assert "leave out --failed" in stored.error("retry", first, "--failed", *server)
        with ended_when_submitted(stored, cluster, "failed"):
            out, _ = stored("retry", first, *server, code=1)
        assert "no sweep" in stored.error("retry", "20200101-000000-00", *server)
    second = cluster.submitted[1]["submission_id"]
    assert out.splitlines()[:2] == ["| a table |", f"sweep {second}: failed"]
    submission = read_submission(stored.store, second)
    assert (submission.retry_of, submission.sets, submission.max_runs) == (first, ["seeds=[0, 7]"], 3)


def test_a_submitted_sweep_is_trained_again_here_too(stored, cluster):
    """As it was submitted, although the file has changed."""
    words = ("submit", "tiny", "--set", "seeds=[7]", "--max-runs", "1")
    with service(stored, ray_address=cluster.url) as url, ended_when_submitted(stored, cluster, "interrupted"):
        stored(*words, "--server", url, code=130)
    first = cluster.submitted[0]["submission_id"]
    stored.write("tiny", "title: Another\n")
    assert "leave out --failed" in stored.error("retry", first, "--local", "--set", "seeds=[0]")
    ended = stored.json("retry", first, "--local", "--no-mlflow", code=130)["sweep"]
    assert (ended["trained"], ended["not_started"], ended["notes"]) == (
        1,
        1,
        ["stopped: the budget of 1 run is used up"],
    )
    out, _ = stored("retry", first, "--local", "--no-mlflow")
    assert "none" in out
    assert f"sweep {stored.sweep_id} was not submitted; the command" in stored.error(
        "retry", stored.sweep_id, "--local"
    )
