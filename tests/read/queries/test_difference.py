import pytest

from cope_sweep.read.queries.difference import store_difference
from tests.helpers.errors import raises
from tests.helpers.finished_runs import fail, finish, plan_of
from tests.read.queries.test_queries import sweep_of

FIRST, SECOND = "20260730-120000-abcd", "20260731-120000-abcd"


def changes(found):
    return {each.key: (each.left, each.right) for each in found}


def test_two_runs(store):
    plan = plan_of()
    cope, other = plan.rows[0].runs[0], plan.rows[2].runs[1]
    finish(store, cope, {"in_dist/token_error": 1.5, "only": 1.0}, {"parameters": 10, "device": "cpu", "host": "a"})
    finish(store, other, {"in_dist/token_error": 4.0}, {"parameters": 12, "device": "cpu", "host": "b"})
    found = store_difference(store, cope.run_id, other.run_id)
    spec = changes(found.spec)
    assert (spec["model.position"], spec["seed"]) == (("cope", "none"), ("0", "1"))
    assert spec["model.position.cope.p_max"][1] is None
    assert "train.steps" not in spec
    assert changes(found.facts) == {"parameters": ("10", "12")}
    error = {each.metric: each for each in found.metrics}["in_dist/token_error"]
    assert (error.left, error.right, error.difference.difference) == (1.5, 4.0, 2.5)
    assert error.p_adjusted is None, "one run each: no test"
    assert "only" not in {each.metric for each in found.metrics}
    assert error.difference.p is None


def test_two_sweeps_are_compared_row_by_row(store):
    before, after = (
        plan_of(seeds=[0, 1, 2, 3]),
        plan_of(seeds=[0, 1, 2, 3], base={**plan_of().ablation.content.base, "train": {"steps": 9}}),
    )
    for plan, sweep_id, rows, shift in ((before, FIRST, (0, 1), 0.0), (after, SECOND, (0, 2), 5.0)):
        runs = [run for index in rows for run in plan.rows[index].runs]
        for number, run in enumerate(runs):
            if number == len(runs) - 1:
                fail(store, run)
            else:
                finish(store, run, {"in_dist/token_error": shift + run.seed + 0.1 * (run.seed * shift) ** 0.5})
        store.write_sweep(sweep_of(plan, runs, sweep_id, ablation=plan.name, reused=[]))
    found = store_difference(store, FIRST, SECOND)
    assert (found.runs, found.finished) == ((8, 8), (7, 7))
    assert (found.only_left, found.only_right) == (["a_b <c>"], ["None"])
    assert changes(found.spec)["train.steps"] == ("6", "9")
    assert {each.row for each in found.metrics} == {"CoPE"}
    error = next(each for each in found.metrics if each.metric == "in_dist/token_error")
    assert error.difference.n == (4, 4)
    # 0, 1.0 … 3.0 and 5.0 … 9.2: of the 70 divisions of 4 and 4 runs two are as far apart, and two metrics are shown.
    assert error.difference.p == pytest.approx(2 / 70)


def test_unknown_names_and_mixed_kinds(store):
    plan = plan_of()
    finish(store, plan.runs[0], {})
    store.write_sweep(sweep_of(plan, [plan.runs[0]], FIRST))
    with raises("not_comparable", left=plan.runs[0].run_id, right=FIRST):
        store_difference(store, plan.runs[0].run_id, FIRST)
    with raises("not_found", run_id="nothing"):
        store_difference(store, plan.runs[0].run_id, "nothing")
    with raises("not_found", sweep_id=SECOND):
        store_difference(store, FIRST, SECOND)


def test_similar_ids_are_proposed(store):
    plan = plan_of()
    run_id = plan.runs[0].run_id
    finish(store, plan.runs[0], {})
    store.write_sweep(sweep_of(plan, [plan.runs[0]], FIRST))
    with raises("not_found", run_id=run_id[:8], near=[run_id]) as error:
        store_difference(store, run_id, run_id[:8])
    assert run_id in str(error.value)
    with raises("not_found", sweep_id=FIRST[:-1] + "e", near=[FIRST]):
        store_difference(store, FIRST[:-1] + "e", FIRST)
    with raises("not_found", near=[]):  # % is no wildcard
        store_difference(store, run_id, "%%%%%%%%")
