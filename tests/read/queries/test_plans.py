import os

import pytest

from cope_sweep.config import Resources, expand, load_ablation, parameter_count, row_of, with_overrides
from cope_sweep.config.estimate import RAY_START_S, run_flops, shape_of
from cope_sweep.read.queries.plans import measured_rates, plan_cost, worker_groups
from cope_sweep.store import Lease, Store, SweepRun
from cope_sweep.store.reading import read_run
from tests.config.test_expand import BASE
from tests.helpers.finished_runs import begin, stop
from tests.helpers.sweeps import end, sweep_record


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "good.yaml").write_text(BASE + "seeds: [0, 1, 2]\nschedule: asha\n")
    return tmp_path


@pytest.fixture
def plan(folder):
    return expand(load_ablation(folder / "good.yaml"))


@pytest.fixture
def used(plan, store):
    """The store with the first run finished, the second failed and the third stopped."""
    first, second, third = plan.runs
    finish(store, first)
    failed = begin(store, second, "node-2")
    failed.log({"step": 7, "train/loss": 1.0})
    failed.fail("ValueError: no", "Traceback …")
    end(store, failed)
    stop(store, third)
    return store


def finish(store, run, wall_s=3.0, **facts):
    folder = begin(store, run, "node-1")
    folder.finish({"in_dist/token_error": 1.0}, {"steps": 1000, "resumed_from_step": 0, "wall_s": wall_s} | facts)
    end(store, folder)


def test_costs(plan, used):
    costs = plan_cost(plan, used)
    assert (costs.finished, costs.to_do) == (1, 1), "a stopped run is not trained again"
    assert costs.estimated_s == costs.least_s == RAY_START_S + 3.0
    assert costs.counts == {"finished": 1, "failed": 1, "stopped": 1}
    assert [(run.seed, run.row, run.status) for run in costs.runs] == [
        (0, "base", "finished"),
        (1, "base", "failed"),
        (2, "base", "stopped"),
    ]
    assert {run.parameters for run in costs.runs} == {parameter_count(plan.runs[0])}


def test_runs_beyond_the_limit_are_not_to_do(plan, store):
    costs = plan_cost(plan, store, max_runs=2)
    assert (costs.to_do, [run.to_do for run in costs.runs]) == (2, [True, True, False])


@pytest.mark.parametrize(
    ("schedule", "leave_out", "to_do"),
    [("asha", [], [1]), ("asha", ["failed"], []), ("none", [], [1, 2]), ("none", ["stopped"], [1])],
)
def test_stopped_runs_are_to_do_without_a_schedule(plan, used, schedule, leave_out, to_do):
    plan = expand(with_overrides(plan.ablation, assignments=[f"schedule={schedule}"]))
    costs = plan_cost(plan, used, leave_out=leave_out)
    assert [run.seed for run in costs.runs if run.to_do] == to_do
    assert costs.to_do == len(to_do)


def test_estimates_include_the_start_and_say_when_the_machine_is_busy(plan, used, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "getloadavg", lambda: (6.0, 1.0, 1.0))
    costs = plan_cost(plan, used, start_s=5.0)
    assert (costs.least_s, costs.estimated_s) == (8.0, 4 * 8.0)
    assert "5 s until the first run starts" in costs.basis
    assert "load 6.0 on 2 cores" in costs.basis
    unknown = plan_cost(plan, Store(used.root.parent / "empty", create=True), start_s=5.0)
    one_s = unknown.runs[0].estimated_s  # by the rule of thumb, which is one number
    assert {run.estimated_s for run in unknown.runs} == {one_s}
    assert unknown.estimated_s == pytest.approx(4 * unknown.least_s, rel=0.01)
    one_by_one = plan_cost(plan, Store(used.root.parent / "empty"), start_s=5.0, groups=1)
    assert one_by_one.least_s == pytest.approx(5.0 + 3 * one_s, rel=0.01)
    nothing = plan_cost(plan, used, leave_out={"finished", "failed", "stopped"})
    assert (nothing.estimated_s, nothing.basis) == (0.0, None)


def test_a_run_whose_owner_died_reads_as_interrupted_until_its_lease_is_ended(plan, store):
    """The worker finished it, and its sweep died before it wrote that to the index."""
    run = plan.runs[0]
    folder = begin(store, run)
    assert isinstance(store.index.acquire(read_run(folder), "sweep", 0.0), Lease)
    assert store.index.statuses() == {run.run_id: "interrupted"}
    folder.finish({"in_dist/token_error": 1.0}, {"wall_s": 1.0})
    assert plan_cost(plan, store).counts == {"interrupted": 1, "pending": 2}
    assert store.end_expired() == [run.run_id]
    assert plan_cost(plan, store).counts == {"finished": 1, "pending": 2}


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
    times = {run.run_id: (run.estimated_s, run.basis) for run in plan_cost(plan, store).runs}
    assert times[one[0].run_id] == (60.0, "measured on this store, same shapes")
    assert times[three[0].run_id][1] == "scaled from this store's finished runs"


@pytest.mark.parametrize(("groups", "expected"), [(3, 3), ("auto", None)])
def test_worker_groups_fit_the_cores_of_this_machine(folder, groups, expected):
    options = [f"resources.groups={groups}", "resources.cpus=2", "resources.workers=1000"]
    plan = expand(with_overrides(load_ablation(folder / "good.yaml"), assignments=options))
    assert worker_groups(plan) == (expected or 1)


def test_what_a_search_has_suggested_is_part_of_the_plan(tmp_path, store):
    search = "search: {kind: optuna, samples: 3, metric: in_dist/token_error, space: {train.lr: {log_uniform: [1e-4, 1e-2]}}}\n"
    (tmp_path / "searched.yaml").write_text(BASE + search)
    plan = expand(load_ablation(tmp_path / "searched.yaml"))
    costs = plan_cost(plan, store)
    assert (costs.runs, costs.to_do, costs.to_suggest) == ([], 3, 3)
    assert costs.estimated_s > 0
    row = row_of(plan.ablation, {"train.lr": 0.001})
    run = row.runs[0]
    member = SweepRun(run_id=run.run_id, row=row.name, labels=row.labels, seed=run.seed)
    store.write_sweep(sweep_record(runs=[member], ablation="searched", status="interrupted"))
    finish(store, run)
    (known,) = plan_cost(plan, store).runs
    assert (known.run_id, known.status) == (run.run_id, "finished")
    costs = plan_cost(plan, store)
    assert (costs.finished, costs.to_do, costs.to_suggest) == (1, 2, 2)
