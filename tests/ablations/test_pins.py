"""Plans, tables and reports are what they were. If a change is meant, `python -m tests.ablations.pins` pins them again."""

import json

import pytest

from cope_sweep.read.reports import evidence
from tests.ablations.pins import IDS, SET_CASES, TABLES, case_name, described, plan_of_case, table_digests
from tests.ablations.set_cases import CASES
from tests.ablations.test_ablation_plans import SIZES, plan
from tests.ablations.test_results import STEMS
from tests.ablations.update_readme import RESULTS, our_reports, stem_of

PINNED_IDS = json.loads(IDS.read_text(encoding="utf-8"))
PINNED_CASES = json.loads(SET_CASES.read_text(encoding="utf-8"))
PINNED_TABLES = json.loads(TABLES.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def reports():
    return {stem_of(report): report for report in our_reports()}


@pytest.mark.parametrize(("name", "scale"), SIZES)
def test_shipped_files_have_the_pinned_rows_and_runs(name, scale):
    assert described(plan(name, scale)) == PINNED_IDS[name][scale]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case_name(*case))
def test_overrides_give_the_pinned_rows_or_error(case):
    assert plan_of_case(*case) == PINNED_CASES[case_name(*case)]


def test_every_case_is_pinned():
    assert set(PINNED_CASES) == {case_name(*case) for case in CASES}
    assert set(PINNED_TABLES) == set(STEMS)


@pytest.mark.parametrize("stem", STEMS)
def test_tables_of_committed_results_are_the_pinned_bytes(stem, reports):
    assert table_digests(reports[stem]) == PINNED_TABLES[stem]


@pytest.mark.slow
@pytest.mark.parametrize("stem", STEMS)
def test_committed_reports_are_made_again_to_the_byte(stem, reports):
    """Their text and figures, from their runs and curves alone."""
    for name, content in evidence(reports[stem], None).documents.items():
        assert content == (RESULTS / name).read_bytes(), name
