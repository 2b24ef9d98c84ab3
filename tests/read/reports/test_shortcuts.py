"""Rules that do not solve a task, rows that score like one, and seeds that are stuck there."""

from markupsafe import escape

from cope_sweep.read.reports import evidence
from cope_sweep.read.tables import read_results
from cope_sweep.read.tables.rules import SEQUENCES, rule_errors
from tests.helpers.finished_runs import finish, plan_of
from tests.helpers.tiny import TINY, tiny_run

ERROR = "in_dist/token_error"
COUNTING_CONTENT = {
    "base": TINY | {"task": {"kind": "counting", "variables": 2, "operations": 12, "max_tokens": 40}},
    "metrics": [
        {"name": "in_dist/token_error", "label": "In-dist.", "unit": "%"},
        {"name": "longer/token_error", "label": "Longer", "unit": "%"},
        {"name": "in_dist/loss"},
    ],
    "seeds": [0, 1, 2],
}


def test_rows_that_score_like_a_shortcut_are_named(store):
    plan = plan_of(**COUNTING_CONTENT)
    rule = plan.runs[0].task.shortcut_errors("in_dist", SEQUENCES)
    near = rule["its increments, without resets"]
    for row, errors in zip(plan.rows, ([0.0, 0.1, near], [near, 1.1 * near, 0.0], [2 * near] * 3), strict=True):
        for run, error in zip(row.runs, errors, strict=True):
            finish(store, run, {"in_dist/token_error": error, "longer/token_error": 99.0, "in_dist/loss": 1.0})
    report = evidence(read_results(plan, store))
    found = report.shortcuts
    assert [header.text for header in found.layout.headers] == ["rule", "In-dist. (%)", "Longer (%)"]
    assert len(found.layout.rows) == 5
    assert found.layout.rows[0][0].text == "the most frequent answer"
    assert [text for text in found.rows_like_rules if "without resets" in text] == [
        f"In-dist. like “its increments, without resets” ({near:.2f} %): a_b <c> ({near:.2f})"
    ]
    assert "### Shortcuts" in report.to_markdown({})
    html = report.to_html()
    assert "<h3>Shortcuts</h3>" in html
    assert escape(found.rows_like_rules[0]) in html


def test_a_row_without_errors_is_not_like_a_rule_without_errors(store):
    """Where no instruction is ignored, the last bit is always right."""
    base = TINY | {"task": {"kind": "flip_flop", "pairs": 8, "dense_p_ignore": 0.0}}
    plan = plan_of(base=base, metrics=[{"name": "dense/token_error", "unit": "%"}])
    assert 0 in rule_errors(plan.runs[0], "dense/token_error").values()
    for run in plan.runs:
        finish(store, run, {"dense/token_error": 0.0})
    assert not evidence(read_results(plan, store)).shortcuts.rows_like_rules


def test_a_text_that_is_gone_has_no_rules():
    run = tiny_run(task={"kind": "last_sentence", "corpus": "gone", "folder": "gone.txt"})
    assert rule_errors(run, ERROR) == {}


def test_errors_on_some_answers_have_rules_of_their_own(store):
    task = {"kind": "grid_navigation", "dimensions": 2, "steps": 40, "sparse_steps": 50, "objects": 4}
    names = ["in_dist/token_error", "in_dist/map_error", "in_dist/map_error@2x", "in_dist/sequence_error"]
    content = {
        "base": TINY | {"task": task, "evaluate": {"lengths": [2]}},
        "metrics": [{"name": name} for name in names],
    }
    plan = plan_of(**COUNTING_CONTENT | content)
    run = plan.runs[0]
    rules = [rule_errors(run, name) for name in names]
    assert [each.get("the mirror rule, or blank") == 100 for each in rules] == [False, True, True, False]
    assert 20 < rules[0]["the mirror rule, or blank"] < 50
    assert rules[1] == run.task.shortcut_errors("in_dist", SEQUENCES, "map_error")
    assert not rules[3]
    for each in plan.runs:
        finish(store, each, dict.fromkeys(names, 99.0))
    found = evidence(read_results(plan, store)).shortcuts
    assert len(found.layout.headers) == 4
    assert "the mirror rule, or blank" in [row[0].text for row in found.layout.rows]


def test_errors_of_rules_at_ranges_and_f1():
    task = {"kind": "dyck", "brackets": 12, "longer_brackets": 16, "depth": 2, "deeper_depth": 3}
    run = plan_of(**COUNTING_CONTENT | {"base": TINY | {"task": task}, "metrics": [{"name": ERROR}]}).runs[0]
    assert set(rule_errors(run, "in_dist/f1_error")) == {
        "only opens brackets", "opens a bracket, or closes the one before at once", "a counter for each kind",
    }  # fmt: skip
    last = "closes the last bracket that was opened, even if it is closed"
    assert rule_errors(run, "in_dist/distance_error@1")[last] == 0
    assert rule_errors(run, "longer/distance_error@7")[last] > 20
    assert not rule_errors(run, "in_dist/distance_error@5")  # no range ends there
    assert not rule_errors(run, "in_dist/loss")


def test_a_seed_that_does_no_better_than_a_rule_is_stuck_and_has_not_learned(store):
    metrics = [{"name": ERROR, "label": "In-dist.", "unit": "%", "learned": 5.0}]
    plan = plan_of(**COUNTING_CONTENT | {"metrics": metrics})
    best = min(plan.runs[0].task.shortcut_errors("in_dist", SEQUENCES).values())  # about 1 %
    for row, errors in zip(plan.rows, ([0.0, 0.8 * best, 0.9 * best], [best, 4.9, 0.0], [0.0] * 3), strict=True):
        for run, error in zip(row.runs, errors, strict=True):
            finish(store, run, {ERROR: error})
    table = evidence(read_results(plan, store)).table
    some, most, none = (row.metrics[ERROR] for row in table.model.rows)
    assert (some.stuck, most.stuck, none.stuck) == ((2,), (0, 1), ())
    assert [cell.learned.k for cell in (some, most, none)] == [2, 1, 3]
    text = table.to_markdown()
    assert text.count(" † ") == 1  # most seeds of one row
    assert text.count(" 1/3† ") == 1  # one seed of another
    assert "†: most seeds are stuck. 1/3†: 1 of 3 seeds is stuck." in text
