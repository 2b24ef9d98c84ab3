"""Statistics, tables, reports and claims with few seeds, equal values, and no seeds in common."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cope_sweep.read.queries.claims import claim_results
from cope_sweep.read.reports.evidence import evidence
from cope_sweep.read.tables import read_results, table
from cope_sweep.read.tables.stats import NON_NEGATIVE, PERCENT, UNBOUNDED, paired_rows, summarise, two_rows
from cope_sweep.read.tables.table import FORMATS
from cope_sweep.store import Store
from tests.helpers.finished_runs import finish, plan_of

values = st.one_of(
    st.sampled_from([0.0, 50.0, 100.0, math.inf, -math.inf, 1e-200, 5e-324, 1e160, 1e308, math.nextafter(100, 0)]),
    st.floats(allow_nan=False),
)
rows = st.dictionaries(st.integers(0, 4), values, max_size=4)


@given(rows, rows, st.sampled_from([two_rows, paired_rows]))
def test_no_values_break_a_comparison(row, other, compare):
    got = compare(row, other)
    seeds = len(row.keys() & other.keys()) if compare is paired_rows else min(len(row), len(other))
    assert math.isnan(got.difference) or seeds > 0
    if seeds < 2:
        assert all(map(math.isnan, (got.p, got.ci_low, got.ci_high, got.effect, got.detectable)))
    assert math.isnan(got.p) or got.smallest_p <= got.p * (1 + 1e-9) <= 1.01


@given(st.lists(values, max_size=4), st.sampled_from([UNBOUNDED, NON_NEGATIVE, PERCENT]))
def test_no_values_break_a_summary(data, bounds):
    summary = summarise(data, bounds)
    assert summary.n == len(data)
    assert math.isnan(summary.std) or len(data) > 1
    assert math.isnan(summary.ci_low) == math.isnan(summary.ci_high) == (summary.method == "")


def test_two_pairs_have_a_p_and_no_effect():
    got = paired_rows({0: 3.0, 1: 5.0}, {0: 1.0, 1: 2.0})
    assert (got.difference, got.p, got.smallest_p, got.n) == (2.5, 0.5, 0.5, (2, 2))
    assert math.isnan(got.effect)
    assert math.isfinite(got.detectable)


# A store takes no NaN and no infinity: a run without the metric is a seed less.
CLAIMS = [{"text": "CoPE is better", "better": {"model.position": "CoPE"}, "than": {"model.position": "None"}}]
SEEDS = {
    "one": {0: 10.0},
    "two": {0: 10.0, 1: 20.0},
    "two equal": {0: 10.0, 1: 10.0},
    "the other one": {1: 10.0},
    "none": {},
    "huge": {0: 1e308, 1: -1e308},
}


@pytest.mark.parametrize("other", SEEDS)
def test_tables_reports_and_claims_have_no_nan(other, tmp_path):
    unpaired, paired = plans = [plan_of(paired=paired, claims=CLAIMS) for paired in (False, True)]
    assert unpaired.runs == paired.runs
    for name, values in SEEDS.items():
        store = Store(tmp_path / name.replace(" ", "-"), create=True)
        cope, _, none = unpaired.rows
        for row, by_seed in ((cope, values), (none, SEEDS[other])):
            for run in row.runs:
                if run.seed in by_seed:
                    finish(store, run, {"in_dist/token_error": by_seed[run.seed], "dense/loss": by_seed[run.seed]})
        for plan in plans:
            found = table(plan, store, compare="CoPE")
            texts = [found.to_markdown(), found.to_latex(), FORMATS["terminal"].render(found)]
            assert b"NaN" not in FORMATS["json"].render(found)
            claims = claim_results([read_results(plan, store)])
            assert all(claim.p is None or math.isfinite(claim.p) for claim in claims)
            if name == "two" and other != "huge":  # matplotlib draws no axis as wide as all floats
                report = evidence(read_results(plan, store))
                texts += report.to_markdown(report.pictures).split("## Provenance")[:1]
                if plan is paired:  # drawing takes long, and a figure of pairs has all that others have
                    assert report.drawn
            for text in texts:
                assert not re.search(r"\bnan\b", text.decode() if isinstance(text, bytes) else text), (name, text)
