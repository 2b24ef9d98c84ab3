"""Verdicts of claims, by hand."""

from pathlib import Path

import pytest

from cope_sweep.config import expand, load_ablation, with_overrides
from cope_sweep.read.tables.claims import claim_findings, claims_layout, hypothesis_verdict, with_q
from cope_sweep.read.tables.model import table_model
from cope_sweep.read.tables.results import with_learning
from cope_sweep.read.tables.rules import SEQUENCES
from cope_sweep.read.tables.stats import benjamini_hochberg
from cope_sweep.records import RunRecord
from tests.helpers.errors import raises
from tests.helpers.finished_runs import COUNTING, plan_of
from tests.read.tables.test_table_model import FIVE, METRIC, model_of, records_of

NEAR, FAR = FIVE[:5], FIVE[5:10]
"""Values of five seeds: p of the two is 2 / 252."""
GRID = {"model.position": {"CoPE": ["cope"], "RoPE": ["rope"], "None": []}}
TWO = {"model.position": {"CoPE": ["cope"], "RoPE": ["rope"]}}
METRIC_AT_2 = "in_dist/token_error@2x"


def findings_of(*values, seeds=5, claim=None, **changes):
    """The findings of one claim: that CoPE is better than RoPE and no encoding."""
    stated = {
        "text": "CoPE is better",
        "better": {"model.position": "CoPE"},
        "than": {"model.position": ["RoPE", "None"]},
    }
    plan = plan_of(**{"grid": GRID} | changes, seeds=list(range(seeds)), claims=[stated | (claim or {})])
    return claim_findings(plan, model_of(plan, *values))


@pytest.mark.parametrize(
    ("values", "text", "hypothesis"),
    [
        ([*NEAR, *FAR, *FAR], "shown", "supported"),
        ([*NEAR, *FAR, *NEAR], "shown in part (1 of 2 pairs)", "supported in part"),
        ([*NEAR, *NEAR, *NEAR], "not shown", "not supported"),
        ([*FAR, *NEAR, *FAR], "opposite", "contradicted"),
        ([*FAR, *NEAR, *[9.0] * 5], "mixed (1 of 2 pairs)", "supported in part, contradicted in part"),
        ([*NEAR], "not trained", "not tested yet"),
        ([*NEAR, *FAR], "shown in part (1 of 2 pairs)", "supported in part"),  # the other pair is not trained
    ],
)
def test_verdicts(values, text, hypothesis):
    (one,) = findings_of(*values)
    assert one.verdict_text == text
    assert hypothesis_verdict([one]) == hypothesis


def test_two_seeds_cannot_show_a_claim():
    (one,) = findings_of(1.0, 1.1, 5.0, 5.1, 5.2, 5.3, seeds=2)
    assert (one.verdict, hypothesis_verdict([one])) == ("too few seeds", "not testable with so few seeds")


def test_a_claim_about_rows_that_are_all_stuck_cannot_be_tested():
    task = plan_of(base=COUNTING, metrics=METRIC).runs[0].task
    rule = min(task.shortcut_errors("in_dist", SEQUENCES).values())
    stuck, learned = [rule + value for value in NEAR], [0.01 * value for value in NEAR]
    (none_learns,) = findings_of(*stuck, *stuck, *stuck, base=COUNTING, metrics=METRIC)
    assert none_learns.verdict == "not testable"
    assert hypothesis_verdict([none_learns]).startswith("not testable: most seeds of every row are stuck at a rule")
    (all_differ,) = findings_of(
        *stuck, *[2 * value for value in stuck], *[2 * value for value in stuck], base=COUNTING, metrics=METRIC
    )
    assert all_differ.verdict == "not testable", "a difference between rows that have learned nothing"
    (few_seeds,) = findings_of(*[rule] * 6, base=COUNTING, metrics=METRIC, seeds=2)
    assert few_seeds.verdict == "not testable", "more seeds would not help"
    (one_learns,) = findings_of(*learned, *stuck, *stuck, base=COUNTING, metrics=METRIC)
    assert one_learns.verdict == "shown"


def test_p_is_corrected_for_the_pairs_of_the_claim_and_the_values_are_named():
    (one,) = findings_of(*NEAR, *FAR, *NEAR)
    assert [each.comparison.p_adjusted for each in one.pairs] == [pytest.approx(2 * 2 / 252), 1.0]
    assert one.ours == "CoPE 1.00 ± 0.08, RoPE 5.20 ± 0.16, None 1.00 ± 0.08"
    assert one.headline == "CoPE 1.00, None 1.00 (weakest of 2 pairs)"
    drawn = claims_layout([one])
    assert [header.text for header in drawn.headers] == [
        "claim", "paper", "measure", "ours", "difference [95 %]", "n", "p", "verdict",
    ]  # fmt: skip
    assert [cell.text for cell in drawn.rows[0][4:]] == [
        "+0.00 [-0.13, 0.13] (CoPE − None)", "5", "1.000", "shown in part (1 of 2 pairs)",
    ]  # fmt: skip


def test_a_pair_without_runs_counts_in_the_correction():
    trained, partly = (findings_of(*values)[0] for values in ([*NEAR, *FAR, *FAR], [*NEAR, *FAR]))
    assert [each.comparison.p_adjusted for each in partly.pairs] == [pytest.approx(2 * 2 / 252)]
    assert partly.pairs[0].comparison.p_adjusted == trained.pairs[0].comparison.p_adjusted
    assert partly.without_values == 1
    assert "has no value" in claims_layout([partly]).note
    assert "has no value" not in claims_layout([trained]).note


LEARNED = [
    {"name": "in_dist/token_error", "unit": "%", "learned": 3.0},
    {"name": "of_learned/in_dist/token_error", "unit": "%"},
]


@pytest.mark.parametrize(
    ("values", "text", "hypothesis"),
    [
        ([*NEAR, *FAR, *FAR], "too few seeds", "not testable with so few seeds"),  # RoPE and None have learned nothing
        ([*NEAR, *FAR], "too few seeds", "not testable with so few seeds"),  # and of RoPE that is known
        ([*NEAR], "not trained", "not tested yet"),
    ],
)
def test_rows_of_which_no_seed_has_learned_the_task_have_runs_and_no_value(values, text, hypothesis):
    claim = {"metric": LEARNED[1]["name"]}
    stated = {"text": "x", "better": {"model.position": "CoPE"}, "than": {"model.position": ["RoPE", "None"]}}
    plan = plan_of(grid=GRID, seeds=list(range(5)), metrics=LEARNED, claims=[stated | claim])
    records = with_learning(plan, records_of(plan, *values), None)
    (one,) = claim_findings(plan, table_model(plan, records))
    assert (one.verdict_text, hypothesis_verdict([one])) == (text, hypothesis)


@pytest.mark.parametrize(
    ("values", "claim", "text", "note"),
    [
        ([*NEAR[:4], None, *FAR], {}, "too few seeds", "Failed or without a value: 1 of 10 runs;"),  # p is 2 / 126
        ([*NEAR, *FAR[:4]], {}, "too few seeds", "Not finished: 1 of 10 runs."),
        ([*NEAR, *[None] * 5], {}, "too few seeds", "Failed or without a value: 5 of 10 runs;"),
        ([*NEAR[:4], None, *NEAR], {"says": "equivalent", "margin": 1.0}, "too few seeds", "1 of 10 runs"),
        ([*NEAR], {}, "not trained", ""),
        ([*NEAR, *FAR], {}, "shown", ""),
    ],
)
def test_a_claim_does_not_choose_the_runs_that_did_not_fail(values, claim, text, note):
    (one,) = findings_of(*values, grid=TWO, claim={"than": {"model.position": "RoPE"}} | claim)
    assert one.verdict_text == text
    assert note in claims_layout([one]).note
    assert note in one.meaning
    assert bool(note) == ("Pairs of rows with such runs" in claims_layout([one]).note)


def test_a_pair_with_a_run_that_failed_counts_as_one_that_does_not_differ():
    (one,) = findings_of(*NEAR, *FAR, *FAR[:4], None)
    assert one.verdict_text == "shown in part (1 of 2 pairs)"
    assert "Failed or without a value: 1 of 15 runs;" in claims_layout([one]).note


@pytest.mark.parametrize(("left_out", "lost"), [(f"{METRIC_AT_2} is nan", 10), ("2x: 16 embeddings", 0)])
def test_rows_that_break_down_at_another_length_have_runs_and_no_value(left_out, lost):
    """No run has a value. Unlike rows of an encoding that is too short for it, these have lost it."""
    claim = {"text": "x", "better": {"model.position": "CoPE"}, "than": {"model.position": "RoPE"}}
    lengths = {"if": {}, "set": {"evaluate.lengths": [2]}}
    plan = plan_of(grid=TWO, seeds=list(range(5)), metrics=[{"name": METRIC_AT_2}], when=[lengths], claims=[claim])
    model = model_of(plan, *NEAR, *FAR, contexts_left_out=left_out)
    (one,) = claim_findings(plan, model)
    assert (one.verdict, len(one.missing)) == ("too few seeds", lost)
    assert sum(len(row.metrics[METRIC_AT_2].lost) for row in model.rows) == lost


def test_values_of_many_rows_are_a_range():
    grid = {"train.batch": [2, 3, 4, 5, 6]} | GRID
    values = [value for batch in range(5) for value in (batch, 10 - batch, 20 + batch) for seed in range(5)]
    (one,) = findings_of(*values, grid=grid)
    assert one.ours == (
        "5 rows from batch 2 · CoPE 0.00 ± 0.00 to batch 6 · CoPE 4.00 ± 0.00, "
        "10 others from batch 6 · RoPE 6.00 ± 0.00 to batch 6 · None 24.00 ± 0.00"
    )
    assert one.headline == "batch 6 · CoPE 4.00, batch 6 · RoPE 6.00 (weakest of 10 pairs)"


def test_rows_are_paired_where_the_other_axes_agree_and_another_metric_may_decide():
    grid = GRID | {"model.heads": [1, 2]}
    (one,) = findings_of(*NEAR, *NEAR, *FAR, *FAR, *FAR, *NEAR, grid=grid)
    assert [(each.better.row, each.than.row) for each in one.pairs] == [
        ("CoPE · 1", "RoPE · 1"), ("CoPE · 1", "None · 1"), ("CoPE · 2", "RoPE · 2"), ("CoPE · 2", "None · 2"),
    ]  # fmt: skip
    assert one.verdict_text == "shown in part (3 of 4 pairs)"
    p = [each.comparison.p_adjusted for each in one.pairs]
    assert p == [pytest.approx(2 * 2 / 252)] * 3 + [1.0], "corrected for two pairs a task"
    (other,) = findings_of(*NEAR, *FAR, *FAR, claim={"metric": "dense/loss"})
    assert other.verdict == "opposite", "more is better"


@pytest.mark.parametrize(
    ("heads", "of_than", "pairs"),
    [
        ([1, 2], [2, 1], [(1, 1), (2, 2)]),  # the same values: within each of them
        ([1, 2], 1, [(1, 1), (2, 1)]),
        (2, 1, [(2, 1)]),
    ],
)
def test_an_axis_that_both_sides_name_with_the_same_values_is_no_difference(heads, of_than, pairs):
    grid = {"model.position": {"CoPE": ["cope"], "RoPE": ["rope"]}, "model.heads": [1, 2]}
    claim = {
        "better": {"model.position": "CoPE", "model.heads": heads},
        "than": {"model.position": "RoPE", "model.heads": of_than},
    }
    (one,) = findings_of(*NEAR, *NEAR, *FAR, *FAR, grid=grid, claim=claim)
    assert [(each.better.row, each.than.row) for each in one.pairs] == [
        (f"CoPE · {n}", f"RoPE · {m}") for n, m in pairs
    ]


def test_a_variant_decides_for_the_rows_that_are_called_worse():
    grid = {"model.position": {"CoPE": ["cope"], "Relative": ["relative"]}}
    named = ("in_dist/token_error", "capped/in_dist/token_error")
    capped = {"if": {"model.position": "Relative"}, "set": {"evaluate.variants": {"capped": {"relative.far": "last"}}}}
    claim = {"text": "CoPE is better", "better": {"model.position": "CoPE"}, "than": {"model.position": "Relative"}}
    plan = plan_of(
        grid=grid, seeds=list(range(5)), metrics=[{"name": name} for name in named], when=[capped],
        claims=[claim, claim | {"than_variant": "capped"}],
    )  # fmt: skip
    values = [(value, value) for value in NEAR] + list(zip(NEAR, FAR, strict=True))
    records = {
        run.run_id: RunRecord(run_id=run.run_id, status="finished", metrics=dict(zip(named, each, strict=True)))
        for run, each in zip((run for row in plan.rows for run in row.runs), values, strict=True)
    }
    plain, of_variant = claim_findings(plan, table_model(plan, records))
    assert (plain.verdict, of_variant.verdict) == ("not shown", "shown")
    assert of_variant.measure == " against ".join(named)


def test_a_row_may_be_compared_with_its_own_variant_seed_by_seed():
    """By hand: six paired differences of one sign have p = 2/2⁶, where two rows of six would have more."""
    named = ("in_dist/token_error", "cut/in_dist/token_error")
    row = {"model.position": "CoPE"}
    plan = plan_of(
        grid={"model.position": {"CoPE": ["cope"]}},
        seeds=list(range(6)),
        metrics=[{"name": name} for name in named],
        when=[{"if": row, "set": {"evaluate.variants": {"cut": {"cope.cut": 2}}}}],
        claims=[{"text": "A cut helps", "better": row, "than": row, "variant": "cut"}],
        paired=True,
    )
    records = {
        run.run_id: RunRecord(run_id=run.run_id, status="finished", metrics=dict(zip(named, values, strict=True)))
        for run, values in zip(plan.runs, [(10.0 * n, 10.0 * n - 1 - n) for n in range(1, 7)], strict=True)
    }
    (found,) = claim_findings(plan, table_model(plan, records))
    assert (found.verdict, found.measure) == ("shown", " against ".join(reversed(named)))
    assert found.pairs[0].comparison.p_adjusted == pytest.approx(2 / 2**6)


def test_a_hypothesis_is_supported_where_each_claim_is_shown():
    (shown,), (not_shown,) = findings_of(*NEAR, *FAR, *FAR), findings_of(*NEAR, *NEAR, *NEAR)
    assert hypothesis_verdict([shown, shown]) == "supported"
    assert hypothesis_verdict([shown, not_shown]) == "supported in part"
    assert hypothesis_verdict([]) == ""


def test_a_hypothesis_has_no_verdict_against_it_while_claims_are_not_trained():
    (shown,), (not_shown,), (not_trained,) = (
        findings_of(*values) for values in ([*NEAR, *FAR, *FAR], [*NEAR, *NEAR, *NEAR], NEAR)
    )
    assert hypothesis_verdict([not_shown, not_trained]) == "not tested in full yet"
    assert hypothesis_verdict([not_trained, not_trained]) == "not tested yet"
    assert hypothesis_verdict([shown, not_trained]) == "supported in part"


def test_a_claim_about_no_row_or_no_column_is_an_error():
    with raises("unknown_value"):
        findings_of(claim={"better": {"model.position": "CoPPE"}})
    with raises("unknown_column"):
        findings_of(claim={"metric": "in_dist/los"})


def test_set_may_leave_out_the_rows_of_a_claim():
    loaded = load_ablation(Path(__file__).parents[3] / "ablations" / "flip_flop.yaml")
    narrowed = with_overrides(loaded, assignments=["model.position=[{kind: alibi}]"])
    assert len(expand(narrowed).rows) == 1


SHIFTED = [value + 0.5 for value in NEAR]
"""Worse than `NEAR` by 0.5, in every arrangement that counts."""


def size_of(*values, says="equivalent", margin=1.0, **changes):
    """Verdict and size of a claim about CoPE and RoPE; values near 1 and 5 differ by 4.2, with an interval of ± 0.3."""
    claim = {"than": {"model.position": "RoPE"}, "says": says, "margin": margin}
    (one,) = findings_of(*values, claim=claim, grid=TWO, **changes)
    return one.verdict, one.weakest.size


@pytest.mark.parametrize(
    ("says", "margin", "values", "expected"),
    [
        ("equivalent", 1.0, [*NEAR, *NEAR], ("shown", "equivalent")),
        ("equivalent", 1.0, [*NEAR, *SHIFTED], ("shown", "equivalent")),  # significant, but it does not matter
        ("equivalent", 0.5, [*NEAR, *SHIFTED], ("not shown", "better")),
        ("equivalent", 0.1, [*NEAR, *NEAR], ("not shown", "unclear")),  # its interval is ± 0.13
        ("equivalent", 1.0, [*NEAR, *FAR], ("opposite", "better")),
        ("equivalent", 1.0, [*FAR, *NEAR], ("opposite", "worse")),
        ("not worse", 1.0, [*NEAR, *NEAR], ("shown", "equivalent")),
        ("not worse", 1.0, [*NEAR, *FAR], ("shown", "better")),
        ("not worse", 1.0, [*FAR, *NEAR], ("opposite", "worse")),
        ("not worse", 0.5, [*SHIFTED, *NEAR], ("not shown", "worse")),
        ("not worse", 0.1, [*NEAR, *NEAR], ("not shown", "unclear")),
        ("better", 1.0, [*NEAR, *FAR], ("shown", "better")),
        ("better", 1.0, [*NEAR, *SHIFTED], ("shown", "equivalent")),  # better, by less than what matters
        ("better", 0.5, [*FAR, *NEAR], ("opposite", "worse")),
        ("better", "1 %", [*NEAR, *NEAR], ("not shown", "unclear")),
        ("equivalent", "20%", [*NEAR, *NEAR], ("shown", "equivalent")),
        ("equivalent", "5 %", [*NEAR, *NEAR], ("not shown", "unclear")),
    ],
)
def test_sizes_by_a_margin(says, margin, values, expected):
    assert size_of(*values, says=says, margin=margin) == expected


def test_more_may_be_better_and_a_margin_has_the_units_of_the_table():
    metrics = [{"name": "in_dist/token_error", "goal": "max", "scale": 100.0}]
    assert size_of(*FAR, *NEAR, says="not worse", margin=1, metrics=metrics) == ("shown", "better")
    assert size_of(*NEAR, *FAR, says="not worse", margin=1, metrics=metrics) == ("opposite", "worse")
    assert size_of(*NEAR, *NEAR, margin=14, metrics=metrics) == ("shown", "equivalent")
    assert size_of(*NEAR, *NEAR, margin=10, metrics=metrics) == ("not shown", "unclear")


def test_with_few_seeds_nothing_is_equivalent():
    values = [value for row in range(2) for value in NEAR[:3]]
    assert size_of(*values, seeds=3) == ("too few seeds", "unclear")
    assert size_of(*NEAR, *NEAR, paired=True) == ("too few seeds", "unclear"), "p of five pairs is at least 0.06"


def test_a_claim_is_as_strong_as_its_weakest_pair():
    (better,) = findings_of(*NEAR, *SHIFTED, *FAR)
    assert better.texts["difference"].startswith("-0.50 [")
    assert (better.texts["n"], better.texts["p"], better.texts["size"], better.texts["q"]) == ("5", "0.016", "–", "–")
    (equivalent,) = findings_of(*NEAR, *SHIFTED, *NEAR, claim={"says": "equivalent", "margin": 1})
    assert equivalent.verdict == "shown"
    assert equivalent.texts["difference"].startswith("-0.50 [")
    assert equivalent.texts["margin"] == "± 1.00"
    (in_part,) = findings_of(*NEAR, *SHIFTED, *FAR, claim={"says": "equivalent", "margin": 1})
    assert in_part.verdict_text == "mixed (1 of 2 pairs)"
    assert hypothesis_verdict([equivalent, better]) == "supported"
    (not_shown,) = findings_of(*NEAR, *NEAR, *NEAR, claim={"says": "equivalent", "margin": 0.1})
    assert hypothesis_verdict([better, not_shown]) == "supported in part"


def test_p_and_difference_are_of_one_pair():
    (in_part,) = findings_of(*NEAR, *FAR, *[value - 0.3 for value in FIVE[:5]])
    assert in_part.weakest.than.row == "None"
    assert in_part.p == max(pair.comparison.p_adjusted for pair in in_part.pairs)
    (opposite,) = findings_of(*FAR, *FAR, *NEAR)
    assert opposite.verdict == "opposite"
    assert (opposite.weakest.than.row, opposite.p) == ("None", pytest.approx(2 * 2 / 252)), "not RoPE's, which is 1"
    assert opposite.texts["difference"].startswith("+4.20 [")
    (equivalent,) = findings_of(*NEAR, *NEAR, *NEAR, claim={"says": "equivalent", "margin": 1})
    assert equivalent.texts["p"] == "–", "intervals decide"


def test_pairs_are_counted_where_runs_are_paired():
    values = [value for row in range(3) for value in FIVE[:8]]
    (one,) = findings_of(*values, seeds=8, paired=True)
    assert one.texts["n"] == "8 pairs"
    (missing,) = findings_of(*NEAR, None, None, *NEAR, *FAR, *NEAR, seeds=7)
    assert missing.texts["n"].startswith("5–")


def test_q_is_over_the_claims_of_a_page_that_rows_are_better():
    assert benjamini_hochberg([0.01, 0.04, 0.03, float("nan"), 0.5]) == pytest.approx(
        [0.04, 0.04 * 4 / 3, 0.04 * 4 / 3, float("nan"), 0.5], nan_ok=True
    )
    assert benjamini_hochberg([]) == []
    (shown,), (not_shown,) = findings_of(*NEAR, *FAR, *FAR), findings_of(*NEAR, *NEAR, *NEAR)
    (same,) = findings_of(*NEAR, *NEAR, *NEAR, claim={"says": "equivalent", "margin": 1})
    (alone,) = with_q([shown])
    assert alone.texts["q"] == "–"
    of_page = with_q([shown, same, not_shown])
    assert [one.q for one in of_page] == pytest.approx([2 * shown.p, float("nan"), 1.0], nan_ok=True)
    drawn = claims_layout(of_page)
    assert [header.text for header in drawn.headers][4:] == [
        "difference [95 %]", "n", "p", "q (report)", "margin", "size", "verdict",
    ]  # fmt: skip
    assert "Benjamini" in drawn.note
    assert "Benjamini" not in claims_layout([shown]).note


@pytest.mark.parametrize("says", ["equivalent", "not worse"])
def test_a_claim_of_equivalence_needs_a_margin(says):
    with raises("no_margin", says=says):
        findings_of(claim={"says": says})


@pytest.mark.parametrize("margin", ["-1 %", "half", 0.0, -2, "0 %", "1 % of it"])
def test_a_margin_is_a_number_or_a_share(margin):
    with raises("margin"):
        findings_of(claim={"margin": margin})


def test_a_row_that_several_rows_are_compared_with_is_listed_once():
    encodings = {name: [name] for name in ("cope", "rope", "alibi", "t5", "sinusoidal", "absolute", "fox")}
    *better, first, second = encodings
    claim = {
        "text": "These are better",
        "better": {"model.position": better},
        "than": {"model.position": [first, second]},
    }
    plan = plan_of(grid={"model.position": encodings}, seeds=list(range(5)), claims=[claim])
    (one,) = claim_findings(plan, model_of(plan, *NEAR * 5, *FAR * 2))
    assert one.ours.startswith("5 rows from cope ")
    assert ", 2 others from absolute " in one.ours


@pytest.mark.parametrize("says", ["better", "not worse"])
def test_rows_in_pairs_without_a_common_seed_are_not_compared(says):
    """CoPE failed with seeds 2 and 3, RoPE with 0 and 1."""
    claim = {"says": says, "margin": 1.0} if says == "not worse" else {}
    values = [1.0, 2.0, None, None, None, None, 4.0, 5.0, 5.0, 5.5, 6.0, 6.5]
    (one,) = findings_of(*values, seeds=4, paired=True, claim=claim)
    assert [pair.than.row for pair in one.pairs] == ["None"]
    assert (one.verdict, one.without_values, one.n) == ("too few seeds", 1, (2, 2))
