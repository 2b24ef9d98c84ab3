import json

import pytest

from cope_sweep.errors import UserError
from cope_sweep.plan import expand, parameter_count
from cope_sweep.plan.estimate import run_flops, shape_of
from cope_sweep.queries import catalogue, cost, measured_rates, run_status, worker_groups
from cope_sweep.spec import Resources, load_ablation, with_overrides
from cope_sweep.store import Store
from tests.plan.test_expand import BASE


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store", create=True)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "good.yaml").write_text(BASE + "seeds: [0, 1]\n")
    (tmp_path / "bad.yaml").write_text("title: [\n")
    return tmp_path


def test_the_catalogue_lists_invalid_files_with_their_error(folder, store):
    bad, good = catalogue(folder, store)
    assert "not valid YAML" in bad["error"]
    assert (good["name"], good["rows"], good["seeds"], good["runs"], good["finished"]) == ("good", 1, 2, 2, 0)


def test_a_folder_without_ablations_is_an_error(tmp_path, store):
    with pytest.raises(UserError, match="no ablation files"):
        catalogue(tmp_path / "nowhere", store)


@pytest.fixture
def plan(folder):
    return expand(load_ablation(folder / "good.yaml"))


@pytest.fixture
def used(plan, store):
    """The store with the first run finished and the second failed."""
    first, second = plan.runs
    finish(store, first)
    failed = store.run(second.run_id)
    with failed.lock():
        failed.begin(second, "node-2")
        failed.log({"step": 7, "train/loss": 1.0})
        failed.fail("ValueError: no", "Traceback …")
    return store


def finish(store, run, wall_s=3.0, **facts):
    folder = store.run(run.run_id)
    with folder.lock():
        folder.begin(run, "node-1")
        folder.finish({"in_dist/token_error": 1.0}, {"steps": 1000, "resumed_from_step": 0, "wall_s": wall_s} | facts)


def test_costs(plan, used):
    costs = cost(plan, used)
    assert (costs["finished"], costs["to_do"], costs["estimated_s"]) == (1, 1, 3.0)
    assert [(run["seed"], run["row"], run["status"]) for run in costs["runs"]] == [
        (0, "base", "finished"),
        (1, "base", "failed"),
    ]
    assert {run["parameters"] for run in costs["runs"]} == {parameter_count(plan.runs[0])}


def test_status_of_runs(plan, used):
    finished, failed = run_status(plan, used)["runs"]
    assert (finished["status"], finished["worker_id"], finished["message"]) == ("finished", "node-1", None)
    assert (failed["status"], failed["worker_id"], failed["message"]) == ("failed", "node-2", "ValueError: no")
    assert (failed["step"], failed["steps"]) == (7, plan.runs[1].train.steps)


def test_older_stores_have_the_worker_under_another_key(plan, used):
    path = used.run(plan.runs[1].run_id).path / "state.json"
    state = json.loads(path.read_text())
    state["where"] = state.pop("worker_id")
    path.write_text(json.dumps(state))
    assert run_status(plan, used)["runs"][1]["worker_id"] == "node-2"


def test_rates_are_medians_over_the_finished_runs_of_a_shape(tmp_path, store):
    (tmp_path / "rates.yaml").write_text(BASE + "grid: {model.layers: [1, 2, 3]}\nseeds: [0, 1, 2]\n")
    plan = expand(load_ablation(tmp_path / "rates.yaml"))
    assert measured_rates(plan, store) == {}
    one, two, three = (row.runs for row in plan.rows)
    for run, wall_s in zip(one, (50.0, 90.0, 60.0), strict=True):
        finish(store, run, wall_s)
    # Recomputed activations are more operations in the same time.
    finish(store, two[1], 40.0, checkpoint_activations=True)
    rates = measured_rates(plan, store)
    assert rates == {
        shape_of(one[0]): pytest.approx(60.0 / run_flops(one[0], Resources())),
        shape_of(two[0]): pytest.approx(40.0 / run_flops(two[0], Resources(checkpoint_activations=True))),
    }
    times = {run["run_id"]: (run["estimated_s"], run["basis"]) for run in cost(plan, store)["runs"]}
    assert times[one[0].run_id] == (60.0, "measured on this store, same shapes")
    assert times[three[0].run_id][1] == "scaled from this store's finished runs"


@pytest.mark.parametrize(("groups", "expected"), [(3, 3), ("auto", None)])
def test_worker_groups_fit_the_cores_of_this_machine(folder, groups, expected):
    options = [f"resources.groups={groups}", "resources.cpus=2", "resources.workers=1000"]
    plan = expand(with_overrides(load_ablation(folder / "good.yaml"), assignments=options))
    assert worker_groups(plan) == (expected or 1)
