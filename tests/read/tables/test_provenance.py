import pytest

from cope_sweep.read.tables import table
from tests.read.tables.ablations import fail, finish, plan_of

ERROR = {"in_dist/token_error": 1.0}


def finished(store, plan, *facts):
    """The table with one finished run per row."""
    for row, each in zip(plan.rows, facts, strict=True):
        finish(store, row.runs[0], ERROR, each)
    return table(plan, store)


@pytest.mark.parametrize(
    ("fact", "name"), [("precision", "precision"), ("tokenizer", "tokenizer"), ("data", "data fingerprint")]
)
def test_rows_that_differ_are_named_in_every_format(store, fact, name):
    plan = plan_of(seeds=[0])
    drawn = finished(store, plan, {fact: "x1"}, {fact: "y2"}, {fact: "x1"})
    (warning,) = drawn.model.warnings
    assert warning == f"Rows differ in {name}, so they are not comparable: x1 (CoPE, None); y2 (a_b <c>)"
    assert drawn.to_json()["warnings"] == [warning]
    assert f"**Warning: Rows differ in {name}" in drawn.to_markdown()
    assert f"<strong>Warning: Rows differ in {name}" in drawn.to_html()
    assert f"Warning: Rows differ in {name}" in drawn.to_latex()


def test_runs_that_lack_a_fact_or_did_not_finish_are_not_compared(store):
    plan = plan_of(seeds=[0, 1])
    fail(store, plan.rows[0].runs[1])
    assert finished(store, plan, {}, {"precision": "fp32"}, {"precision": "fp32"}).model.warnings == ()


def test_seeds_of_a_row_that_differ_are_named_too(store):
    plan = plan_of(grid={}, seeds=[0, 1])
    for run, precision in zip(plan.runs, ("fp32", "bf16"), strict=True):
        finish(store, run, ERROR, {"precision": precision})
    assert table(plan, store).model.warnings == (
        "Rows differ in precision, so they are not comparable: fp32 (base); bf16 (base)",
    )


def test_different_tasks_may_have_different_data(store):
    plan = plan_of(grid={"task.tokens": [2, 3]}, seeds=[0])
    assert finished(store, plan, {"data": "x"}, {"data": "y"}).model.warnings == ()


def test_many_rows_are_shortened(store):
    plan = plan_of(grid={"train.lr": [0.1, 0.2, 0.3, 0.4, 0.5]}, seeds=[0])
    (warning,) = finished(store, plan, *[{"precision": "fp32"}] * 4, {"precision": "bf16"}).model.warnings
    assert warning.endswith("fp32 (0.1, 0.2, 0.3 and 1 more); bf16 (0.5)")
