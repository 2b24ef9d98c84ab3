"""Summaries on SQLite and on PostgreSQL."""

import pytest

from cope_sweep.store.index import Filter, Lease, RunQuery, summaries
from tests.store.index.rows import row, write_sweep
from tests.tiny import tiny_run

RUNS = [tiny_run(seed=seed) for seed in range(4)]
IDS = [run.run_id for run in RUNS]


@pytest.fixture
def used(index):
    """A finished, a failed, a running run and one that was never begun, in two sweeps."""
    index.write([row(RUNS[0], metrics={"loss": 2.0}, facts={"device": "cpu", "wall_s": 3})])
    index.write([row(RUNS[1], "failed")])
    assert isinstance(index.acquire(row(RUNS[2], "running"), "owner", 60.0), Lease)
    write_sweep(index, "a", RUNS)
    write_sweep(index, "b", RUNS[:1], ablation="other", started_ms=2)
    return index


def test_sweeps_are_paged_newest_first(used):
    total, page = summaries.sweep_page(used, limit=1)
    assert (total, [sweep.sweep_id for sweep in page]) == (2, ["b"])
    assert [sweep.sweep_id for sweep in summaries.sweep_page(used, limit=1, offset=1)[1]] == ["a"]
    assert [sweep.sweep_id for sweep in summaries.sweep_page(used, ablation="tiny")[1]] == ["a"]


def test_counts_of_sweeps_and_plans(used):
    expected = {"finished": 1, "failed": 1, "running": 1, "pending": 1}
    assert summaries.sweep_counts(used, ["a", "b", "none"]) == {"a": expected, "b": {"finished": 1}}
    assert summaries.plan_counts(used, IDS) == expected
    assert summaries.plan_counts(used, IDS[2:]) == {"running": 1, "pending": 1}
    assert summaries.plan_counts(used, []) == {}


def test_a_run_whose_lease_expired_counts_as_interrupted(used):
    used.renew("owner", -1.0)
    assert summaries.plan_counts(used, IDS) == {"finished": 1, "failed": 1, "interrupted": 1, "pending": 1}
    assert summaries.sweep_counts(used, ["a"])["a"] == {"finished": 1, "failed": 1, "interrupted": 1, "pending": 1}


def test_facts_and_places(used):
    found = summaries.facts(used, IDS, ["wall_s", "device"])
    assert found == {IDS[0]: (3, "cpu"), IDS[1]: (None, None), IDS[2]: (None, None)}
    assert summaries.places(used, IDS)[IDS[0]] == [("a", "tiny", "CoPE"), ("b", "other", "CoPE")]
    assert summaries.recorded_rows(used, "tiny") == [(run_id, {"n": str(i)}) for i, run_id in enumerate(IDS)]


def test_the_version_changes_with_every_change_and_with_a_rebuild(used):
    before = summaries.version(used)
    assert summaries.version(used) == before
    used.write([row(RUNS[1], "interrupted")])
    changed = summaries.version(used)
    assert changed != before
    used.mark_built()
    assert summaries.version(used) != changed


def test_more_run_ids_than_a_statement_may_have_variables(used):
    many = (*(f"{number:016x}" for number in range(70_000)), *IDS)
    assert used.statuses(many) == {IDS[0]: "finished", IDS[1]: "failed", IDS[2]: "running"}
    assert used.page(RunQuery(run_ids=many, filters=(Filter("loss", "<", 3),))).total == 1
    assert summaries.plan_counts(used, many)["finished"] == 1
    assert used.page(RunQuery(run_ids=())).total == 0


def test_records_without_values(used):
    assert used.records(IDS[:1])[IDS[0]].metrics == {"loss": 2.0}
    assert (used.records(IDS[:1], values=False)[IDS[0]].metrics, used.records([], values=False)) == ({}, {})
