"""The section on seeds that have learned the task: their share, and their errors alone."""

from cope_sweep.read.reports import evidence
from cope_sweep.read.tables import read_results
from tests.helpers.finished_runs import finish, plan_of

ERROR, DENSE = "in_dist/token_error", "dense/token_error"
ERRORS = {"CoPE": [(0.5, 2.0), (0.0, 4.0), (60.0, 70.0), (0.2, None)], "none": [(50.0, 50.0)] * 4}
"""Row → error in distribution and out of it, of each seed; one value is missing."""


def report(store, **metric):
    plan = plan_of(
        grid={"model.position": {"CoPE": ["cope"], "none": []}},
        metrics=[
            {"name": ERROR, "label": "In-dist.", "unit": "%", **metric},
            {"name": DENSE, "label": "OOD", "unit": "%", "decimals": 1},
        ],
        seeds=[0, 1, 2, 3],
        published=[],
    )
    for row in plan.rows:
        for run, (error, dense) in zip(row.runs, ERRORS[row.name], strict=True):
            finish(store, run, {ERROR: error} | ({} if dense is None else {DENSE: dense}))
    return evidence(read_results(plan, store))


def test_share_and_errors_of_the_seeds_that_learned_by_hand(store):
    found = report(store, learned=1.0)
    assert [header.text for header in found.learned.headers] == ["row", "seeds that learned", "In-dist. (%)", "OOD (%)"]
    assert [[cell.text for cell in line] for line in found.learned.rows] == [
        ["CoPE", "3/4 (30–95 %)", "0.23 ± 0.25", "3.0 ± 1.4 (n=2)"],
        ["none", "0/4 (0–49 %)", "–", "–"],
    ]
    text = found.to_markdown({})
    assert "### Learned" in text
    assert "In-dist. ≤ 1 %" in found.learned.note


def test_no_section_where_no_seed_learns_or_nothing_is_to_be_learned(store):
    assert report(store).learned is None
    assert report(store, learned=-1.0).learned is None
