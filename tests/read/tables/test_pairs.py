"""A pair of rows that a claim compares has one p in a document."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.read.tables.claims import claim_findings, claims_layout
from cope_sweep.read.tables.comparisons import compared
from cope_sweep.read.tables.model import table_model
from cope_sweep.read.tables.pairs import claim_tests
from cope_sweep.read.tables.stats import holm
from cope_sweep.records import RunRecord
from tests.helpers.finished_runs import plan_of
from tests.read.tables.test_table_model import FIVE

METRICS = ("in_dist/token_error", "dense/loss")
ENCODINGS = {"CoPE": ["cope"], "RoPE": ["rope"], "ALiBi": ["alibi"], "None": []}
GRID = {"model.position": ENCODINGS, "model.heads": [1, 2]}
NEAR, FAR = FIVE[:5], FIVE[5:10]


def model_of(plan, values):
    """The table of a plan. `values`: one for each run and metric; None: not trained."""
    runs = [run for row in plan.rows for run in row.runs]
    records = {run.run_id: RunRecord(run_id=run.run_id) for run in runs}
    for run, of_run in zip(runs, values, strict=False):
        if of_run is not None:
            metrics = dict(zip(METRICS, of_run, strict=True))
            records[run.run_id] = RunRecord(run_id=run.run_id, status="finished", metrics=metrics)
    return table_model(plan, records)


labels = st.lists(st.sampled_from(list(ENCODINGS)), min_size=1, max_size=3, unique=True)
claims = st.builds(
    lambda better, than, metric, says: {
        "text": "it is so", "better": {"model.position": better}, "than": {"model.position": than}, "metric": metric,
        "says": says, "margin": 1.0,
    },
    labels, labels, st.sampled_from(METRICS), st.sampled_from(["better", "equivalent", "not worse"]),
).filter(lambda claim: set(claim["than"]["model.position"]) - set(claim["better"]["model.position"]))  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(
    st.lists(claims, min_size=1, max_size=3), st.integers(2, 6), st.booleans(), st.sampled_from(list(ENCODINGS)),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_claims_and_comparisons_of_a_table_agree(stated, seeds, paired, against, random):
    plan = plan_of(
        grid=GRID, seeds=list(range(seeds)), claims=stated, paired=paired, metrics=[{"name": name} for name in METRICS]
    )
    levels = {row.name: random.choice([0.0, 0.0, 5.0, None]) for row in plan.rows}
    values = [
        None if levels[row.name] is None else [levels[row.name] + random.choice([0.0, 0.25, 0.5, 1.0]) for _ in METRICS]
        for row in plan.rows
        for _ in row.runs
    ]
    check(plan, model_of(plan, values), against)


def check(plan, model, against):
    """What the claims and the table say about a pair of rows is the same."""
    table = {row.row: row for row in compared(model, f"model.position={against}").rows}
    seen = {}
    for finding in claim_findings(plan, model):
        column = finding.pairs[0].cell.column if finding.pairs else None
        for pair in finding.pairs:
            one, other = pair.better.row, pair.than.row
            key = frozenset([(one, column.name), (other, column.name)])
            assert seen.setdefault(key, pair.comparison.p_adjusted) == pair.comparison.p_adjusted
            for row, reference, better in ((one, other, "better"), (other, one, "worse")):
                cell = table[row].metrics[column.name]
                labels = table[row].labels | {"model.position": against}
                if cell.comparison is None or table[reference].labels != labels:
                    continue
                assert cell.comparison.p_adjusted == pair.comparison.p_adjusted
                expected = pair.comparison.verdict
                if expected:
                    assert (cell.comparison.verdict == better) == (expected == "better")
                    assert cell.comparison.verdict in ("better", "worse")
                else:
                    assert cell.comparison.verdict in ("no significant difference", "descriptive")
                if finding.says == "better" and finding.verdict == "shown":
                    assert cell.comparison.verdict == better


def test_pairs_of_all_claims_about_a_column_and_a_task_are_corrected_together():
    def claim(better, than, **others):
        return {"text": "so", "better": {"model.position": better}, "than": {"model.position": than}} | others

    stated = [
        claim("CoPE", ["RoPE", "ALiBi"]),
        claim("RoPE", "CoPE"),  # the opposite of a pair: the same test
        claim("ALiBi", "None"),
        claim("RoPE", "None", says="equivalent", margin=1.0),  # judged by its interval: corrected apart
        claim("CoPE", "None", metric="dense/loss"),  # another column
    ]
    plan = plan_of(grid=GRID, seeds=list(range(5)), claims=stated, metrics=[{"name": METRICS[0]}, {"name": METRICS[1]}])
    values = [
        (value, value)
        for row in plan.rows
        for value in (NEAR if row.labels["model.position"] in ("CoPE", "None") else FAR)
    ]
    model = model_of(plan, values)
    tests = claim_tests(model)
    first = METRICS[0]
    assert len(tests) == 2 * 2 * 5, "both directions of five pairs, for two numbers of heads"
    p = 2 / 252
    for heads in (1, 2):
        family = [("CoPE", "RoPE"), ("CoPE", "ALiBi"), ("ALiBi", "None")]
        found = [tests[(f"{a} · {heads}", first), (f"{b} · {heads}", first)].p for a, b in family]
        assert found == pytest.approx(holm([p, p, p]))
        assert tests[(f"RoPE · {heads}", first), (f"None · {heads}", first)].p == pytest.approx(p)
        there, back = (
            tests[(f"{a} · {heads}", first), (f"{b} · {heads}", first)] for a, b in (("CoPE", "RoPE"), ("RoPE", "CoPE"))
        )
        assert (there.p, there.smallest_p) == (back.p, back.smallest_p)
        assert there.difference.difference == -back.difference.difference < 0
        assert (there.difference.ci_low, there.difference.ci_high) == (
            -back.difference.ci_high,
            -back.difference.ci_low,
        )
        (alone,) = [
            test for key, test in tests.items() if key[0] == (f"CoPE · {heads}", METRICS[1])
        ]  # fmt: skip
        assert math.isclose(alone.p, 1.0), "equal rows, corrected for no other"
    one, opposite, *_ = claim_findings(plan, model)
    assert (one.verdict, opposite.verdict) == ("shown", "opposite")


def test_a_table_takes_the_p_of_claims_and_corrects_its_other_rows_among_themselves():
    claim = {"text": "so", "better": {"model.position": "CoPE"}, "than": {"model.position": "RoPE"}}
    plan = plan_of(
        grid={"model.position": ENCODINGS}, seeds=list(range(5)), claims=[claim], metrics=[{"name": METRICS[0]}]
    )
    values = [(value, value) for row in range(4) for value in (NEAR if row == 0 else FAR)]
    model = compared(model_of(plan, values), "CoPE")
    cells = {row.row: row.metrics[METRICS[0]].comparison for row in model.rows}
    assert cells["RoPE"].p_adjusted == pytest.approx(2 / 252)
    assert cells["ALiBi"].p_adjusted == cells["None"].p_adjusted == pytest.approx(2 * 2 / 252)
    assert {cells[name].verdict for name in ("RoPE", "ALiBi", "None")} == {"worse"}
    (rule,) = model.rules
    assert "secondary" in rule
    (without,) = compared(
        model_of(plan_of(grid={"model.position": ENCODINGS}, seeds=list(range(5))), values), "CoPE"
    ).rules
    assert "secondary" not in without


def test_claims_with_a_margin_cost_the_others_nothing():
    """Their pairs are corrected apart, unless another claim says that one of the rows is better."""
    better = {"text": "CoPE wins", "better": {"model.position": "CoPE"}, "than": {"model.position": "RoPE"}}
    same = {"text": "They match", "better": {"model.position": "CoPE"}, "says": "equivalent", "margin": 1.0}
    grid = {"model.position": ENCODINGS}
    metrics = [{"name": name} for name in METRICS]
    values = [[value, 0.0] for value in (*NEAR, *FAR, *FAR, *FAR)]
    one_p = 2 / 252

    def p_of(*claims):
        plan = plan_of(grid=grid, seeds=list(range(5)), claims=list(claims), metrics=metrics)
        return [
            round(each.weakest.comparison.p_adjusted / one_p) for each in claim_findings(plan, model_of(plan, values))
        ]

    assert p_of(better, same | {"than": {"model.position": "ALiBi"}}) == [1, 1]
    assert p_of(better, same | {"than": {"model.position": ["ALiBi", "None"]}}) == [1, 2]
    assert p_of(same | {"than": {"model.position": ["RoPE", "None"]}}, better) == [1, 1]
    assert p_of(better, better | {"than": {"model.position": "None"}}) == [2, 2]

    def says_so(*claims):
        plan = plan_of(grid=grid, seeds=list(range(5)), claims=list(claims), metrics=metrics)
        model = model_of(plan, values)
        texts = [claims_layout(claim_findings(plan, model)).note, *compared(model, "CoPE").rules]
        return ["only called equivalent or not worse are corrected among themselves." in text for text in texts]

    assert says_so(better, same | {"than": {"model.position": "ALiBi"}}) == [True, True]
    assert says_so(better) == says_so(same | {"than": {"model.position": "ALiBi"}}) == [False, False]


@pytest.mark.parametrize("finished", range(6))
def test_a_pair_with_too_few_runs_for_a_test_counts_in_the_correction(finished):
    """Two claims about 5 seeds that do not overlap: 2 · 2/252 by Holm, before and after the other row has a run."""
    stated = [
        {"text": f"CoPE or {other}", "better": {"model.position": "CoPE"}, "than": {"model.position": other}}
        for other in ("RoPE", "None")
    ]
    grid = {"model.position": {"CoPE": ["cope"], "RoPE": ["rope"], "None": []}}
    plan = plan_of(grid=grid, seeds=list(range(5)), claims=stated, metrics=[{"name": name} for name in METRICS])
    rows = [[[value, 0.0] for value in values] for values in (NEAR, FAR, FAR[:finished])]
    first, *_ = claim_findings(plan, model_of(plan, [*rows[0], *rows[1], *rows[2]]))
    assert (first.verdict, first.p) == ("shown", pytest.approx(4 / 252))
