"""Sweeps, and counts of runs, on SQLite and on PostgreSQL."""

import pytest

from cope_sweep.store import Event
from cope_sweep.store.index import Filter, Lease, RunQuery, SweepPlace
from tests.helpers.tiny import tiny_run
from tests.store.index.rows import row, write_sweep

RUNS = [tiny_run(seed=seed) for seed in range(4)]
IDS = [run.run_id for run in RUNS]


@pytest.fixture
def used(index):
    """A finished, a failed, a running run and one that was never begun, in two sweeps."""
    index.write([row(RUNS[0], metrics={"loss": 2.0}, facts={"device": "cpu", "wall_s": 3})])
    index.write([row(RUNS[1], "failed")])
    assert isinstance(index.acquire(row(RUNS[2], "running"), "c", 60.0), Lease)
    index.renew("c", 60.0, [Event(run_id=IDS[2], status="running", worker_id="host:1")])
    write_sweep(index, "a", RUNS)
    write_sweep(index, "b", RUNS[:1], ablation="other", started_ms=2)
    return index


def test_sweeps_are_paged_newest_first(used):
    page = used.sweep_page(limit=1)
    assert (page.total, [sweep.sweep_id for sweep in page.sweeps]) == (2, ["b"])
    assert [sweep.sweep_id for sweep in used.sweep_page(limit=1, offset=1).sweeps] == ["a"]
    assert [sweep.sweep_id for sweep in used.sweep_page(ablation="tiny").sweeps] == ["a"]


def test_counts_of_sweeps_and_plans(used):
    expected = {"finished": 1, "failed": 1, "running": 1, "pending": 1}
    assert used.sweep_counts(["a", "b", "none"]) == {"a": expected, "b": {"finished": 1}}
    assert used.status_counts(IDS) == expected
    assert used.status_counts(IDS[2:]) == {"running": 1, "pending": 1}
    assert used.status_counts([]) == {}


def test_a_run_whose_lease_expired_counts_as_interrupted(used):
    used.renew("c", -1.0)
    assert used.status_counts(IDS) == {"finished": 1, "failed": 1, "interrupted": 1, "pending": 1}
    assert used.sweep_counts(["a"])["a"] == {"finished": 1, "failed": 1, "interrupted": 1, "pending": 1}


def test_facts_and_places(used):
    found = used.facts(IDS, ["wall_s", "device"])
    assert found == {IDS[0]: (3, "cpu"), IDS[1]: (None, None), IDS[2]: (None, None)}
    assert used.places(IDS)[IDS[0]] == [
        SweepPlace("a", "tiny", 1, "CoPE", 0, {"n": "0"}),
        SweepPlace("b", "other", 2, "CoPE", 0, {"n": "0"}),
    ]
    assert used.recorded_rows("tiny") == [(run_id, {"n": str(i)}) for i, run_id in enumerate(IDS)]


def test_the_state_changes_with_every_change_and_when_a_lease_expires(used):
    states = [used.state(), used.state()]
    used.write([row(RUNS[1], "interrupted")])
    states.append(used.state())
    used.renew("c", -1.0)
    states.append(used.state())
    assert [states.index(each) for each in states] == [0, 0, 2, 3]


def test_ids_that_begin_alike(used):
    assert used.ids_that_begin(IDS[0][:6], 3) == [IDS[0]]
    assert (used.ids_that_begin("", 9), used.ids_that_begin("%", 9)) == (sorted(IDS[:3]), [])
    assert used.sweep_ids_that_begin("", 1) == ["a"]


def test_the_progress_of_a_sweep(used):
    write_sweep(used, "c", RUNS, "running", ttl_s=60)
    used.renew("c", 60, [Event(run_id=IDS[2], status="running", step=2, worker_id="host:1")])
    found = used.sweep_progress("c", 5)
    assert found.counts == {"finished": 1, "failed": 1, "running": 1, "pending": 1}
    assert (found.status, found.groups, found.nodes) == ("running", 1, 1)
    assert [(each.run_id, each.row) for each in found.failures] == [(IDS[1], "CoPE")]
    steps = RUNS[0].train.steps
    assert (found.steps_done, found.steps_left) == (2, steps - 2 + steps)
    assert used.sweep_progress("none", 5) is None


def test_more_run_ids_than_a_statement_may_have_variables(used):
    many = (*(f"{number:016x}" for number in range(70_000)), *IDS)
    assert used.statuses(many) == {IDS[0]: "finished", IDS[1]: "failed", IDS[2]: "running"}
    assert used.page(RunQuery(run_ids=many, filters=(Filter("loss", "<", 3),))).total == 1
    assert used.status_counts(many)["finished"] == 1
    assert used.page(RunQuery(run_ids=())).total == 0


def test_records_without_values(used):
    assert used.records(IDS[:1])[IDS[0]].metrics == {"loss": 2.0}
    assert (used.records(IDS[:1], values=False)[IDS[0]].metrics, used.records([], values=False)) == ({}, {})
