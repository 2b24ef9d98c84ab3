import pytest

from cope_sweep.errors import UserError
from cope_sweep.plan import expand
from cope_sweep.queries import catalogue, cost, run_status
from cope_sweep.record import Ledger
from cope_sweep.spec import load_ablation
from tests.plan.test_expand import BASE


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "store", create=True)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "good.yaml").write_text(BASE + "seeds: [0, 1]\n")
    (tmp_path / "bad.yaml").write_text("title: [\n")
    return tmp_path


def test_catalogue_shows_progress_and_survives_a_bad_file(folder, ledger):
    bad, good = catalogue(folder, ledger)
    assert "not valid YAML" in bad["error"]
    assert (good["name"], good["rows"], good["seeds"], good["runs"], good["finished"]) == ("good", 1, 2, 2, 0)


def test_an_empty_folder_is_said(tmp_path, ledger):
    with pytest.raises(UserError, match="no ablation files"):
        catalogue(tmp_path / "nowhere", ledger)


def test_cost_and_standing_agree_with_the_ledger(folder, ledger):
    plan = expand(load_ablation(folder / "good.yaml"))
    first, second = plan.runs
    done, failed = ledger.run(first.run_id), ledger.run(second.run_id)
    with done.lock():
        done.begin(first, "here")
        done.finish({"in_dist/token_error": 1.0}, {"steps": 1000, "resumed_from_step": 0, "wall_s": 3.0})
    with failed.lock():
        failed.begin(second, "there")
        failed.log({"step": 7, "train/loss": 1.0})
        failed.fail("ValueError: no", "Traceback …")
    costs = cost(plan, ledger)
    assert (costs["finished"], costs["to_do"], costs["estimated_s"]) == (1, 1, 3.0)
    assert [run["status"] for run in run_status(plan, ledger)["runs"]] == ["finished", "failed"]
    assert run_status(plan, ledger)["runs"][1]["message"] == "ValueError: no"
    assert run_status(plan, ledger)["runs"][1]["step"] == 7
