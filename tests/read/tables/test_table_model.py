import math

import pytest
import scipy.stats

from cope_sweep.config import expand, with_overrides
from cope_sweep.read.tables import table
from cope_sweep.read.tables.comparisons import compared, least_compared, reference, reference_label, with_published
from cope_sweep.read.tables.layout import comparison_layout, layout, runs_layout
from cope_sweep.read.tables.model import PublishedValue, column_of, table_model
from cope_sweep.read.tables.render import markdown_text
from cope_sweep.read.tables.results import with_learning
from cope_sweep.read.tables.rules import SEQUENCES
from cope_sweep.read.tables.stats import PERCENT, summarise
from cope_sweep.store import RunRecord
from tests.helpers.errors import raises
from tests.helpers.finished_runs import CONTENT, COUNTING, fail, finish, plan_of


def records_of(plan, *values, **facts):
    """One finished run per value, in the order of rows and seeds; None: a failed run."""
    runs = [run for row in plan.rows for run in row.runs]
    records = {run.run_id: RunRecord(run_id=run.run_id) for run in runs}
    for run, value in zip(runs, values, strict=False):
        metrics = {"in_dist/token_error": value, "dense/loss": value}
        records[run.run_id] = (
            RunRecord(run_id=run.run_id, status="failed", message="no")
            if value is None
            else RunRecord(run_id=run.run_id, status="finished", metrics=metrics, facts=facts)
        )
    return records


def model_of(plan, *values, **facts):
    """The table of `plan` with `records_of` these values."""
    return table_model(plan, records_of(plan, *values, **facts))


def best(model, metric):
    return [row.metrics[metric].best for row in model.rows]


def test_counts_and_progress():
    complete, partial, pending = model_of(plan_of(), 1.0, 2.0, None, 3.0).rows
    assert (complete.complete, complete.progress) == (True, "2/2")
    assert (partial.complete, partial.progress) == (False, "1/2: 1 failed")
    assert pending.progress == "0/2: 2 pending"
    assert partial.counts == {
        "finished": 1, "stopped": 0, "failed": 1, "running": 0, "interrupted": 0, "pending": 0,
    }  # fmt: skip


def test_of_a_run_without_a_finite_value_the_note_does_not_say_that_it_is_not_finished():
    texts = [layout(model_of(plan_of(), 1.0, value, 2.0, 3.0)).notes[0] for value in (math.nan, None)]
    assert "(n=…): only n seeds are finished with a finite value" in texts[0]
    assert "(n=…): only n seeds are finished." in texts[1]


def test_a_run_that_failed_has_not_learned_its_task():
    metric = {"name": "in_dist/token_error", "learned": 2.0}
    plan = plan_of(grid={"model.position": {"CoPE": ["cope"], "RoPE": ["rope"]}}, seeds=[0, 1, 2], metrics=[metric])
    model = model_of(plan, 1.0, None, None, None, 3.0)
    cope, rope = (row.metrics["in_dist/token_error"] for row in model.rows)
    assert (cope.lost, cope.learned_text.split()[0], cope.text) == ((1, 2), "1/3", "1.00")
    assert (rope.lost, rope.learned_text.split()[0]) == ((0,), "0/2"), "the third run is not finished"
    assert (
        "Failed or without a value: 3 of 6 runs; means leave them out, and k/n counts them as not learned"
        in layout(model).note
    )
    assert "Failed" not in layout(model_of(plan, 1.0, 2.0)).note


def test_an_interval_of_percentages_ends_at_100_printed():
    plan = plan_of(seeds=[0, 1, 2], metrics=[{"name": "in_dist/token_error", "unit": "%", "scale": 100}])
    cell = model_of(plan, 0.9, 1.0, 1.0).rows[0].metrics["in_dist/token_error"]
    assert 0 < cell.summary.ci_low < cell.summary.mean < cell.summary.ci_high < 1


@pytest.mark.parametrize(
    ("values", "lowest", "highest"),
    [
        ((1.0, 2.0, 3.0, 4.0, 5.0, 6.0), [True, False, False], [False, False, True]),
        ((5.0, 5.0, 1.0, None, 6.0, 6.0), [True, False, False], [False, False, True]),  # a seed is missing
        ((5.0, 5.0, 1.0), [False, False, False], [False, False, False]),
        ((1.0, 3.0, 2.0, 2.0, 9.0, 9.0), [True, True, False], [False, False, True]),  # equal means
        ((0.1, 0.7, 0.2, 0.6, 9.0, 9.0), [True, True, False], [False, False, True]),  # equal up to rounding
    ],
)
def test_the_best_mean_is_the_lowest_or_the_highest_of_the_complete_rows(values, lowest, highest):
    model = model_of(plan_of(), *values)
    assert best(model, "in_dist/token_error") == lowest
    assert best(model, "dense/loss") == highest


def test_parameters_are_those_of_the_first_finished_run():
    rows = model_of(plan_of(), None, 1.0, 2.0, parameters=77).rows
    assert [row.parameters for row in rows] == [77, 77, None]


def test_a_value_that_a_run_lacks_does_not_count():
    plan = plan_of(metrics=[{"name": "facts.tokens_per_s"}])
    cell = model_of(plan, 1.0, 2.0).rows[0].metrics["facts.tokens_per_s"]
    assert cell.summary.n == 0
    assert math.isnan(cell.summary.mean)
    assert model_of(plan, 1.0, 2.0, tokens_per_s=5).rows[0].metrics["facts.tokens_per_s"].summary.mean == 5.0


@pytest.mark.parametrize("key", ["search", "schedule"])
def test_a_choice_by_a_reported_metric_is_a_warning(key):
    chooser = {
        "search": {"kind": "optuna", "space": {"train.lr": {"log_uniform": [1e-4, 1e-2]}}, "samples": 2},
        "schedule": {"kind": "asha", "grace": 2},
    }[key]
    base = CONTENT["base"] | {"train": {"steps": 60, "batch": 2}, "evaluate": {"every": 5}}
    grid = {} if key == "search" else CONTENT["grid"]

    def warnings(evaluate):
        plan = plan_of(base=base | {"evaluate": {"every": 5, **evaluate}}, grid=grid, seeds=[0], **{key: chooser})
        return table_model(plan, {run.run_id: RunRecord(run_id=run.run_id) for run in plan.runs}).warnings

    (warning,) = warnings({})
    assert warning.startswith(f"The {key} chose runs by in_dist/token_error, which this table reports")
    assert warnings({"validation": True}) == ()


METRIC = [{"name": "in_dist/token_error", "label": "In-dist.", "unit": "%"}]
PUBLISHED = [
    {
        "match": {"model.position": label},
        "values": {"in_dist/token_error": value},
        "std": {"in_dist/token_error": std},
        "seeds": 3,
    }
    for label, value, std in (("CoPE", 4.9, 0.4), ("a_b <c>", 20.3, 2.9), ("None", 21.7, 7.9))
]


def verdict(values, value, std=None, seeds=3):
    return with_published(summarise(values, PERCENT), PublishedValue(value, std, "Table", seeds))


def test_a_verdict_by_hand():
    # Ours 5 ± 1 of 5, theirs 5.2 ± 1.2 of 3: variance 1/5 + 1.44/3 + 0.1²/12 = 0.680833;
    # ν = 0.680833² / (0.2²/4 + 0.48²/2) = 3.7025; 90 % reach = t(0.95, 3.7025) · 0.825126 = 1.8101; margin 2.4.
    got = verdict([3.7753, 4.5, 5.0, 5.5, 6.2247], 5.2, 1.2)
    assert got.difference.difference == pytest.approx(-0.2)
    assert got.margin == 2.4
    assert (got.difference.ci_high - got.difference.ci_low) / 2 == pytest.approx(2.3662, rel=0.02)
    assert got.verdict == "agrees"
    assert verdict([3.7753, 4.5, 5.0, 5.5, 6.2247], 7.2, 1.2).verdict == "inconclusive"
    assert verdict([3.7753, 4.5, 5.0, 5.5, 6.2247], 12.0, 1.2).verdict == "differs"


@pytest.mark.parametrize(
    ("values", "value", "std", "expected"),
    [
        ([0.0, 0.0, 0.0], 0.0, 0.0, "agrees"),  # within the rounding of 0.0
        ([0.02, 0.0, 0.01], 0.0, 0.0, "agrees"),
        ([0.5, 0.4, 0.6], 0.0, 0.0, "differs"),
        ([0.003, 0.009, 0.0, 0.001, 0.002], 0.004, 0.006, "agrees"),
        ([40.0, 0.0, 1.0], 6.8, 6.9, "inconclusive"),
        ([5.0, 5.1], 67.6, 1.5, "descriptive"),  # two runs
        ([18.72, 18.76, 18.74], 19.1, None, "descriptive"),  # one run of the paper, of an unknown spread
        ([0.0, 0.0, 0.0], 0.02, None, "descriptive"),
    ],
)
def test_verdicts(values, value, std, expected):
    assert verdict(values, value, std).verdict == expected


def test_without_a_number_of_seeds_two_are_assumed():
    """Error² 1/5 + 1.44/2 + 0.1²/12 = 0.920833; ν = 0.920833² / (0.2²/4 + 0.72²/1) = 1.6047."""
    ours = [3.7753, 4.5, 5.0, 5.5, 6.2247]
    unknown, three = verdict(ours, 5.2, 1.2, seeds=None), verdict(ours, 5.2, 1.2, seeds=3)
    assert unknown == verdict(ours, 5.2, 1.2, seeds=2)
    assert unknown.difference.n == (5, 2)
    variance = summarise(ours).std ** 2 / 5 + 1.44 / 2 + 0.01 / 12
    dof = variance**2 / ((summarise(ours).std ** 2 / 5) ** 2 / 4 + 0.72**2)
    assert unknown.difference.ci_high - unknown.difference.difference == pytest.approx(
        scipy.stats.t.ppf(0.975, dof) * math.sqrt(variance)
    )
    assert (three.verdict, unknown.verdict) == ("agrees", "inconclusive")


@pytest.mark.parametrize(("ours", "expected"), [(123_651_840, "agrees"), (123.8e6, "agrees"), (124.4e6, "differs")])
def test_a_number_of_parameters_does_not_vary(ours, expected):
    """One run tells; the unit of the last digit is that of 123.7 M."""
    found = with_published(summarise([ours]), PublishedValue(123.7e6, None, "Table 5"), scale=1e-6, exact=True)
    assert found.verdict == expected
    assert found.margin == pytest.approx(1e5)


def test_what_is_assumed_about_published_values_is_printed():
    parameters = [{"name": "facts.parameters", "unit": "M", "scale": 1e-6, "decimals": 0}]
    values = {"in_dist/token_error": 5.0, "facts.parameters": 124.4e6}
    row = {"match": {"model.position": "CoPE"}, "values": values, "source": "Table 9"}

    def rules(**published):
        plan = plan_of(published=[row | published], metrics=[*METRIC, *parameters], seeds=[0, 1, 2])
        model = compared(model_of(plan, 4.8, 4.9, 5.0, parameters=123_653_376), "paper")
        drawn = comparison_layout(model)
        return drawn.rules[0], [cell.text for row in drawn.rows for cell in row]

    text, drawn = rules()
    assert text.startswith("A published value without a standard deviation is a single run")
    assert drawn[2:5] == ["-0.10", "–", "descriptive"]
    assert "does not give the number of seeds" not in text
    assert drawn[-5:] == ["CoPE", "facts.parameters", "-0.7", "± 0.1", "differs"]
    assert (
        "does not give the number of seeds of Table 9; the comparison assumes 2"
        in rules(std={"in_dist/token_error": 1.0})[0]
    )
    assert "assumes 2" not in rules(std={"in_dist/token_error": 1.0}, seeds=3)[0]
    assert "fewer than 3 finished runs" not in text
    assert text.endswith("at most one unit of the last published digit.")


def test_a_row_is_not_compared_with_the_paper_by_the_runs_that_are_left():
    plan = plan_of(published=PUBLISHED, metrics=METRIC, seeds=[0, 1, 2, 3])
    model = compared(model_of(plan, 4.8, 4.9, 5.0, None, 4.8, 4.9, 5.0, 5.1), "paper")
    failed, complete, _ = cells(model)
    assert (failed.verdict, complete.verdict) == ("descriptive", "differs")
    assert model.rules[0].endswith("Rows with runs that failed, have no value, or are not finished are descriptive.")
    whole = compared(model_of(plan, 4.8, 4.9, 5.0, 4.9), "paper")
    assert cells(whole)[0].verdict == "agrees"
    assert "not finished" not in whole.rules[0]


def cells(model, metric="in_dist/token_error"):
    return [row.metrics[metric].comparison for row in model.rows]


FIVE = (1.0, 1.1, 0.9, 1.05, 0.95, 5.0, 5.2, 5.1, 5.3, 5.4, 1.1, 1.0, 1.2, 0.9, 0.8)
"""Values of five seeds of three rows: the second is far from the first, the third is not."""


def test_rows_are_compared_with_one_of_them_by_the_primary_metric():
    model = compared(model_of(plan_of(seeds=[0, 1, 2, 3, 4]), *FIVE), "CoPE")
    own, far, near = cells(model)
    assert own is None
    assert (far.verdict, near.verdict) == ("worse", "no significant difference")
    # The least p of 5 and 5 runs is 2 / 252, and there are two comparisons of the primary metric.
    assert far.p_adjusted == pytest.approx(2 * 2 / 252)
    other = cells(model, "dense/loss")[1]
    assert (other.verdict, other.p_adjusted) == ("descriptive", None)
    assert other.difference.difference != 0
    (rule,) = model.rules
    assert "corrected for 2 comparisons (Holm). With 5 runs a row, p is at least 0.016" in rule
    assert "not corrected for the number of comparisons" in rule
    assert rule.endswith("The other metrics are descriptive.")
    assert model.answer == "By In-dist. (%). Worse than CoPE: a_b <c>. No significant difference from CoPE: None."
    drawn = comparison_layout(model)
    assert [header.text for header in drawn.headers] == ["position", "difference", "95 % interval", "p", "verdict"]
    assert [cell.text for cell in drawn.rows[0]][:5] == ["a_b <c>", "+4.20", "[4.00, 4.40]", "0.016", "worse"]
    assert len(drawn.rows) == 2
    assert all("minus" not in header.text for header in layout(model).headers)


def test_another_metric_may_be_the_primary_one():
    model = compared(model_of(plan_of(seeds=[0, 1, 2, 3, 4], primary="dense/loss"), *FIVE), "CoPE")
    verdicts = [each.verdict for each in cells(model, "dense/loss")[1:]]
    assert verdicts == ["better", "no significant difference"], "its goal is max"
    assert {each.verdict for each in cells(model)[1:]} == {"descriptive"}
    assert model.answer.startswith("By dense/loss. Better than CoPE: a_b <c>. ")


def test_texts_name_rows_by_the_axes_in_which_they_differ():
    grid = {"model.position": {"CoPE": ["cope"], "None": []}, "model.layers": [1], "model.heads": [1, 2]}
    model = compared(model_of(plan_of(seeds=[0, 1, 2, 3, 4], grid=grid), *[1.0] * 20), "position=CoPE")
    assert [row.row for row in model.rows][1:3] == ["CoPE · 1 · 2", "None · 1 · 1"]
    assert model.answer == "By In-dist. (%). No significant difference from CoPE: None · heads 1, None · heads 2."


def test_a_label_without_its_axis_may_have_an_equals_sign():
    grid = {"model.position": [[{"kind": "cope", "p_max": 2}], ["rope"]], "model.heads": [1, 2]}
    model = model_of(plan_of(seeds=[0, 1, 2, 3, 4], grid=grid), *[1.0] * 20)
    label = "cope(p_max=2)"
    for against in (label, f"position={label}"):
        assert compared(model, against).references == {f"rope · {heads}": f"{label} · {heads}" for heads in "12"}
        assert reference_label(model, against) == ("model.position", label)
    assert reference_label(model, f"{label} · 1") is None, "a row"
    with raises("unknown_axis", axis="places"):
        compared(model, "places=rope")


def test_an_answer_names_the_rows_of_each_verdict():
    near, far = FIVE[:5], FIVE[5:10]
    rows = {"CoPE": ["cope"], "None": [], "RoPE, half": [{"kind": "rope", "rotated": 0.5}]}
    grid = {"model.heads": [1, 2], "model.position": rows}
    model = compared(
        model_of(plan_of(seeds=[0, 1, 2, 3, 4], grid=grid), *near, *far, *far, *near, *near, *far), "position=CoPE"
    )
    assert model.answer == (
        "By In-dist. (%). Worse than CoPE: heads 1 · None; heads 1 · RoPE, half; heads 2 · RoPE, half. "
        "No significant difference from CoPE: heads 2 · None."
    )


TWO_TASKS = {
    "Copy": {"kind": "selective_copy", "tokens": 4, "blanks": 4},
    "Flip-Flop": {"kind": "flip_flop", "pairs": 4},
}


def tasks_plan(**axes):
    base = {key: values for key, values in CONTENT["base"].items() if key != "task"}
    return plan_of(seeds=[0, 1, 2, 3, 4], base=base, grid={"task": TWO_TASKS} | axes)


def test_rows_of_one_task_are_compared_and_named_among_themselves():
    near, far = FIVE[:5], FIVE[5:10]
    plan = tasks_plan(**{"model.position": {"CoPE": ["cope"]}, "model.position.cope.p_max": ["full", 2, 4]})
    model = compared(model_of(plan, *near, *far, *near, *far, *far, *near), reference(plan))
    copy, flip_flop = "Copy · CoPE · p_max full", "Flip-Flop · CoPE · p_max full"
    assert [model.references.get(row.row) for row in model.rows] == [None, copy, copy, None, flip_flop, flip_flop]
    assert model.answer == (
        "By In-dist. (%). Copy: worse than full: p_max 2. No significant difference from full: p_max 4. "
        "Flip-Flop: better than full: p_max 4. No significant difference from full: p_max 2."
    )
    assert best(model, "in_dist/token_error") == [True, False, True, False, False, True], "each task has its best rows"


def test_an_answer_about_several_tasks_names_encodings_once():
    near, far = FIVE[:5], FIVE[5:10]
    plan = tasks_plan(**{"model.position": {"CoPE": ["cope"], "None": []}})
    model = compared(model_of(plan, *near, *far, *far, *near), reference(plan))
    assert model.answer == "By In-dist. (%). Copy: worse than CoPE: None. Flip-Flop: better than CoPE: None."


def test_an_answer_has_no_order_of_rows_that_are_stuck():
    grid = {"model.position": {"CoPE": ["cope"], "RoPE": ["rope"], "None": []}}
    plan = plan_of(seeds=[0, 1, 2, 3, 4], base=COUNTING, metrics=METRIC, grid=grid)
    rule = min(plan.runs[0].task.shortcut_errors("in_dist", SEQUENCES).values())
    stuck = [rule + value for value in FIVE[:5]]
    model = compared(model_of(plan, *stuck, *[value + 2 for value in stuck], *FIVE[:5]), "CoPE")
    assert [each.verdict for each in cells(model)[1:]] == ["worse", "better"]
    assert model.answer == "By In-dist. (%). Stuck, as CoPE: RoPE. Better than CoPE: None."


@pytest.mark.parametrize(("rows", "named"), [(6, "MLP 1, MLP 2, MLP 3, MLP 4, MLP 5, MLP 6"), (7, "7 rows")])
def test_an_answer_counts_rows_where_they_are_many(rows, named):
    mlps = {f"MLP {n}": [{"kind": "cope_mlp", "hidden": n}] for n in range(1, rows + 1)}
    plan = plan_of(seeds=[0, 1, 2, 3, 4, 5, 6], grid={"model.position": {"CoPE": ["cope"]} | mlps})
    model = compared(model_of(plan, *[*FIVE[:5], 1.0, 1.2] * (rows + 1)), "CoPE")
    assert model.answer == f"By In-dist. (%). No significant difference from CoPE: {named}."


def test_rows_are_compared_with_one_row_where_several_have_the_encoding_of_the_reference():
    """RoPE has no p_max, so both rows with CoPE agree with it."""
    encodings = {"CoPE": ["cope"], "RoPE": ["rope"]}
    plan = plan_of(grid={"model.position": encodings, "model.position.cope.p_max": [4, 8]}, seeds=list(range(5)))
    assert [row.name for row in plan.rows] == ["CoPE · p_max 4", "CoPE · p_max 8", "RoPE"]
    assert reference(plan) == "CoPE · p_max 4"
    assert least_compared(plan) == 2
    model = compared(table_model(plan, {run.run_id: RunRecord(run_id=run.run_id) for run in plan.runs}), "CoPE")
    assert (model.references, "No other row agrees with exactly one such row" in model.rules[0]) == ({}, True)


def test_rows_are_compared_with_the_paper_if_it_has_numbers_for_a_column():
    published = [{"match": {}, "values": {"in_dist/loss": 1.5}}]
    plans = [plan_of(published=published, metrics=[{"name": name}]) for name in ("in_dist/loss", "in_dist/token_error")]
    assert [reference(plan) for plan in plans] == ["paper", "model.position=CoPE"]


def test_a_metric_of_learning_is_called_by_what_it_measures():
    error = "in_dist/token_error"
    metrics = [{"name": error, "learned": 3.0}]
    metrics += [{"name": f"{prefix}/{error}"} for prefix in ("steps_until", "share_learned", "of_learned")]
    columns = [column_of(metric) for metric in plan_of(metrics=metrics).ablation.content.metrics]
    quantities = ["token error", "steps until it is learned", "seeds that learned", "token error"]
    assert [column.quantity for column in columns] == quantities


def test_among_seeds_that_learned_no_row_is_the_best():
    """A row whose fifth seed has not learned may have the smallest error of the other four."""
    metrics = [METRIC[0] | {"learned": 8.0}, {"name": f"of_learned/{METRIC[0]['name']}"}]
    plan = plan_of(
        metrics=metrics, grid={"model.position": {"CoPE": ["cope"], "RoPE": ["rope"], "None": []}}, seeds=[0, 1]
    )
    model = table_model(plan, with_learning(plan, records_of(plan, 1, 9, 3, 3, 4, 4), None))
    assert best(model, metrics[0]["name"]) == [False, True, False]
    assert best(model, metrics[1]["name"]) == [False, False, False]


def test_too_few_seeds_for_a_test_make_a_table_descriptive():
    model = compared(model_of(plan_of(seeds=[0, 1, 2]), 1.0, 1.1, 0.9, 5.0, 5.2, 5.1, 1.1, 1.0, 1.2), "CoPE")
    assert {each.verdict for each in cells(model)[1:]} == {"descriptive"}
    assert "with 3 runs a row and 2 comparisons" in model.rules[0]
    assert "p of an exact permutation test is at least 0.200" in model.rules[0]
    assert model.answer == "By In-dist. (%). Too few seeds for a test against CoPE: a_b <c>, None."
    one = compared(model_of(plan_of(seeds=[0]), 1.0, 5.0, 1.1), "CoPE")
    assert one.rules[0].endswith("Too few runs are finished for a test. The other metrics are descriptive.")


@pytest.mark.parametrize("lost", [(None,), ()])
def test_a_pair_with_a_planned_run_without_a_value_has_no_verdict(lost):
    """It failed, or is not finished. The others would do: p is 1 / 126."""
    grid = {"model.position": {"CoPE": ["cope"], "RoPE": ["rope"]}}
    model = compared(model_of(plan_of(seeds=[0, 1, 2, 3, 4], grid=grid), *FIVE[:5], *FIVE[5:9], *lost), "CoPE")
    found = model.rows[1].metrics["in_dist/token_error"].comparison
    assert (found.verdict, found.p_adjusted) == ("descriptive", pytest.approx(1 / 126))
    assert "Too few seeds for a test against CoPE: RoPE." in model.answer


def test_a_column_that_is_not_compared_has_no_best_stuck_or_tested_value():
    metrics = [
        {"name": "in_dist/token_error", "unit": "%"},
        {"name": "dense/loss", "goal": "max", "compared": False},
    ]
    model = compared(model_of(plan_of(seeds=[0, 1, 2, 3, 4], metrics=metrics), *FIVE), "CoPE")
    assert cells(model, "dense/loss") == [None, None, None]
    assert not any(row.metrics["dense/loss"].best or row.metrics["dense/loss"].stuck for row in model.rows)
    assert "other metrics" not in model.rules[0]


def test_an_unknown_row_names_the_rows():
    with raises("unknown_row", row="CoPA"):
        compared(model_of(plan_of()), "CoPA")
    with raises("nothing_published"):
        compared(model_of(plan_of()), "paper")


def test_cells_are_compared_with_the_paper():
    plan = plan_of(published=PUBLISHED, metrics=METRIC, seeds=[0, 1, 2])
    model = compared(model_of(plan, 4.8, 4.9, 5.0, 60.0, 61.0, 62.0, 5.0, None, 40.0), "paper")
    assert [each.verdict for each in cells(model)] == ["agrees", "differs", "descriptive"]
    drawn = comparison_layout(model)
    assert [header.text for header in drawn.headers] == ["position", "metric", "difference", "margin", "verdict"]
    assert [[cell.text for cell in row][2:] for row in drawn.rows] == [
        ["+0.00", "± 0.80", "agrees"], ["+40.70", "± 5.80", "differs"], ["+0.80", "–", "descriptive"],
    ]  # fmt: skip
    assert "90 % interval" in drawn.notes[-1]
    assert model.answer == "Published numbers: 3. Agrees: 1. Differs: 1. Not tested: 1."


def scaled(**changes):
    plan = plan_of(
        published=PUBLISHED, metrics=METRIC, seeds=[0, 1, 2, 3, 4], scales={"small": {"set": {"train.steps": 3}}}
    )
    return expand(with_overrides(plan.ablation, **changes))


def test_at_another_scale_the_order_is_compared():
    plan = scaled(scale="small")
    assert plan.ablation.replaced == ("train.steps",)
    values = (1.0, 1.1, 0.9, 1.05, 1.2, 5.0, 5.2, 5.1, 5.3, 5.4, 0.1, 0.2, 0.0, 0.1, 0.3)
    model = compared(model_of(plan, *values), "paper")
    best, second, third = cells(model)
    assert best is None, "CoPE is best in the paper"
    assert (second.against, second.verdict, third.verdict) == ("CoPE", "same order", "opposite order")
    assert "do not have the paper's size (train.steps differ)" in model.rules[0]
    assert "Worse than CoPE, as in the paper: a_b <c>. Better than CoPE, unlike in the paper: None." in model.answer


def test_only_keys_that_decide_what_is_trained_make_another_scale():
    assert scaled(assignments=["seeds=[0,1]", "evaluate.every=2"]).ablation.replaced == ()
    assert scaled(assignments=["train.lr=0.5"]).ablation.replaced == ("train.lr",)


def test_published_digits_are_kept(store):
    published = [
        {
            "match": {"model.position": "CoPE"},
            "values": {"in_dist/token_error": 0.004},
            "std": {"in_dist/token_error": 0.006},
        }
    ]
    plan = plan_of(published=published, metrics=METRIC)
    for row, value in zip(plan.rows, (0.005, 0.00004, 3.0), strict=True):
        for run in row.runs:
            finish(store, run, {"in_dist/token_error": value * (1 + run.seed)})
    texts = [[cell.text for cell in row[2:4]] for row in layout(table(plan, store).model).rows]
    assert texts == [["0.007 ± 0.004", "0.004 ± 0.006"], ["0.00006 ± 0.00003", "–"], ["4.50 ± 2.12", "–"]]


@pytest.mark.parametrize(
    ("against", "compared_numbers"), [("CoPE", ("difference", "interval", "p")), ("paper", ("difference", "margin"))]
)
def test_json_has_the_texts_that_markdown_shows(store, against, compared_numbers):
    plan = plan_of(published=PUBLISHED, metrics=METRIC, seeds=[0, 1, 2, 3, 4])
    for run, value in zip(plan.runs, FIVE, strict=True):
        finish(store, run, {"in_dist/token_error": value})
    drawn = table(plan, store, compare=against)
    shown = {cell.strip(" *") for line in drawn.to_markdown().splitlines() for cell in line.split("|")}
    text_of_run = {line[0].text: line[-1].text for line in runs_layout(drawn.model).rows}
    for row in drawn.to_json()["rows"]:
        cell = row["metrics"]["in_dist/token_error"]
        texts = [cell["text"], cell["published"]["text"]]
        if cell["comparison"]:
            texts += [cell["comparison"]["texts"][name] for name in compared_numbers]
        assert {markdown_text(text) for text in texts} <= shown
        assert {each["run_id"]: each["text"] for each in cell["values"]}.items() <= text_of_run.items()


def test_every_number_of_a_cell_has_the_unit_of_its_metric(store):
    metrics = [{"name": "facts.parameters", "unit": "M", "scale": 1e-6, "decimals": 1}]
    plan = plan_of(metrics=metrics, seeds=[0])
    for run in plan.runs:
        finish(store, run, {}, {"parameters": 1_512_345})
    cell = table(plan, store).to_json()["rows"][0]["metrics"]["facts.parameters"]
    assert (cell["text"], cell["mean"], cell["values"][0]["text"]) == ("1.5", 1_512_345, "1.5")


def test_comparisons_are_in_json_and_frames(store):
    plan = plan_of(seeds=[0, 1, 2])
    for index, row in enumerate(plan.rows):
        for run in row.runs:
            finish(store, run, {"in_dist/token_error": 10.0 * index + run.seed**2 * (index + 1), "dense/loss": 1.0})
    drawn = table(plan, store, compare="CoPE")
    got = drawn.to_json()
    assert got["compared"]["against"] == "CoPE"
    found = got["rows"][2]["metrics"]["in_dist/token_error"]["comparison"]
    assert (found["against"], found["n"], found["smallest_p"]) == ("CoPE", [3, 3], pytest.approx(0.1))
    assert got["compared"]["answer"].startswith("By In-dist. (%). Too few seeds for a test")
    frame = drawn.frame
    # Squares of the seeds 0, 1, 2 have the mean 5/3: 10 + 2 · 5/3 − 5/3, and 20 + 3 · 5/3 − 5/3.
    assert frame["in_dist/token_error.difference"].tolist()[1:] == pytest.approx([10 + 5 / 3, 20 + 10 / 3])
    assert math.isnan(frame["in_dist/token_error.p"][0])
    assert frame["in_dist/token_error.verdict"].isna().tolist() == [True, False, False]
    assert frame["dense/loss.p"].tolist()[1:] == [1.0, 1.0]
    for text in (drawn.to_markdown(), drawn.to_latex()):
        assert "descriptive" in text


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


TWO_SIZES = {"model.position": {"CoPE": ["cope"], "None": []}, "model.heads": [1, 2]}


def test_p_is_corrected_for_the_rows_that_are_compared_with_the_same_one():
    grid = TWO_SIZES | {"model.position": {"CoPE": ["cope"], "None": [], "RoPE": ["rope"]}}
    values = [*FIVE[:5], *FIVE[:5], *FIVE[5:10], *FIVE[:5], *FIVE[5:10], *FIVE[:5]]  # heads 1 and 2 of each encoding
    model = compared(model_of(plan_of(seeds=[0, 1, 2, 3, 4], grid=grid), *values), "position=CoPE")
    assert [each and round(each.p_adjusted, 4) for each in cells(model)] == [None, None, 0.0159, 1.0, 0.0159, 1.0]
    assert "corrected for 2 comparisons with the same row (Holm)" in model.rules[0]


def test_the_best_is_marked_among_rows_that_differ_in_their_encoding_alone():
    plan = plan_of(seeds=[0], grid=TWO_SIZES)
    assert best(model_of(plan, 1.0, 7.0, 2.0, 6.0), "in_dist/token_error") == [True, False, False, True]
    without = plan_of(seeds=[0], grid={"model.heads": [1, 2], "model.layers": [1, 2]})
    assert best(model_of(without, 1.0, 7.0, 2.0, 6.0), "in_dist/token_error") == [True, False, False, False]


def test_runs_of_the_same_seed_are_compared_in_pairs_where_the_ablation_says_so():
    """Seeds differ by 10 and more, rows by 1 in each seed. Sign flips of 6 pairs have p = 2 / 64."""
    ours = [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]
    options = {"seeds": list(range(6)), "grid": {"model.position": {"CoPE": ["cope"], "None": []}}}
    theirs = [value + 1 for value in ours]
    apart = compared(model_of(plan_of(**options), *ours, *theirs), "CoPE")
    assert cells(apart)[1].verdict == "no significant difference"
    pairs = compared(model_of(plan_of(**options, paired=True), *ours, *theirs), "CoPE")
    assert cells(pairs)[1].p_adjusted == 2 / 64
    assert cells(pairs)[1].verdict == "worse"
    assert "sign-flip test" in pairs.rules[0]
    assert "6 pairs of runs" in pairs.rules[0]


def finished_on(hardware):
    """Warnings of a table with two rows; (device, torch) of the runs of the first row, then of the other."""
    plan = plan_of(grid={"model.position": {"CoPE": ["cope"], "None": []}}, seeds=list(range(len(hardware) // 2)))
    facts = iter(hardware)
    records = {}
    for row in plan.rows:
        for run in row.runs:
            device, torch = next(facts)
            records[run.run_id] = RunRecord(
                run_id=run.run_id, status="finished", seed=run.seed, metrics={"in_dist/token_error": 1.0},
                facts={"device": device, "torch": torch},
            )  # fmt: skip
    return table_model(plan, records).warnings


CPU, GPU = ("cpu", "2.15.0+cpu"), ("NVIDIA H100", "2.15.0+cu132")


@pytest.mark.parametrize(
    ("hardware", "warned"),
    [
        ([CPU, CPU, CPU, CPU], False),
        ([CPU, CPU, ("cpu", "2.15.0+cu132"), CPU], False),
        ([CPU, GPU, GPU, CPU], False),
        ([CPU, GPU, CPU, CPU], True),  # half of the runs have other hardware
        ([*[CPU] * 3, GPU, *[CPU] * 2, *[GPU] * 2], False),
        ([*[CPU] * 3, GPU, CPU, *[GPU] * 3], True),
        ([CPU, CPU, GPU, GPU], True),
        ([CPU, CPU, ("cpu", "2.11.0"), ("cpu", "2.11.0")], True),
    ],
)
def test_a_table_warns_where_hardware_follows_the_row(hardware, warned):
    warnings = finished_on(hardware)
    assert bool(warnings) == warned
    assert all("CoPE" in text and "None" in text for text in warnings)
