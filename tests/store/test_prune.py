"""What can be deleted from a store, and what is never named."""

import os
import time

import pytest

from cope_sweep.store.prune import delete, waste
from cope_sweep.store.tokens import token
from tests.helpers import sweeps
from tests.helpers.tiny import tiny_run
from tests.store.index.rows import row
from tests.store.test_store import finish

DAY_S = 86400.0


def aged(path, days=2.0):
    path.touch()
    os.utime(path, (time.time() - days * DAY_S,) * 2)
    return path


def found(store, *, older_than_s=DAY_S, statuses=(), kept=None):
    return {
        str(each.path.relative_to(store.root)).replace("runs/", "")
        for each in waste(store, older_than_s=older_than_s, statuses=statuses, planned_runs=kept)
    }


def test_what_is_named(store):
    stopped, failed, done = (tiny_run(seed=seed) for seed in range(3))
    store.run(stopped.run_id).begin(stopped, "here").set_state("stopped")
    store.run(failed.run_id).begin(failed, "here").fail("no", "")
    finish(store, done)
    for run in (stopped, failed, done):
        aged(store.run(run.run_id).resume)
    aged(store.run(done.run_id).path / "state.json.damaged")
    aged(store.run(done.run_id).path / ".result.json.1.abc")
    (store.run(failed.run_id).path / ".checkpoint.1.abc").mkdir()
    aged(store.run(failed.run_id).path / ".checkpoint.1.abc")
    assert store.index.statuses()  # the index is made
    left = [f"{done.run_id}/{name}" for name in ("resume.safetensors", "state.json.damaged", ".result.json.1.abc")]
    old = {*left, f"{failed.run_id}/.checkpoint.1.abc"}
    assert found(store) == old
    assert found(store, statuses=["stopped"]) == old | {f"{stopped.run_id}/resume.safetensors"}
    assert found(store, older_than_s=3 * DAY_S, statuses=["stopped", "failed"]) == set()
    assert found(store, older_than_s=9 * DAY_S, kept={stopped.run_id, done.run_id}) == {failed.run_id}


def test_runs_in_training_are_not_named(store):
    run = tiny_run()
    store.index.acquire(row(run, "running"), "sweep", 60)
    store.run(run.run_id).begin(run, "here", 1)
    aged(store.run(run.run_id).path / "state.json.damaged")
    assert found(store, kept=set()) == set()


def test_deleting(store):
    keep, drop = tiny_run(seed=0), tiny_run(seed=1)
    for run in (keep, drop):
        finish(store, run)
    assert len(store.index.statuses()) == 2
    aged(store.run(keep.run_id).path / "state.json.damaged").write_bytes(b"12345")
    aged(store.run(keep.run_id).path / "state.json.damaged")
    named = list(waste(store, older_than_s=DAY_S, statuses=(), planned_runs={keep.run_id}))
    assert delete(store, named) == named
    assert sum(each.size_bytes for each in named) > 5
    assert store.index.statuses() == {keep.run_id: "finished"}
    assert not store.run(drop.run_id).path.exists()
    assert found(store, kept={keep.run_id}) == set()


@pytest.mark.parametrize("ends", [True, False])
def test_a_run_that_is_trained_since_it_was_named_is_not_deleted(store, ends):
    keep, drop = tiny_run(seed=0), tiny_run(seed=1)
    for run in (keep, drop):
        store.run(run.run_id).begin(run, "here").set_state("interrupted")
        aged(store.run(run.run_id).resume)
    assert store.index.statuses()
    named = list(waste(store, older_than_s=DAY_S, statuses=["interrupted"], planned_runs={keep.run_id}))
    assert {each.path.name for each in named} == {"resume.safetensors", drop.run_id}
    for run in (keep, drop):
        own = sweeps.begin(store, run)
        if ends:
            own.set_state("interrupted")
            sweeps.end(store, own)
    assert delete(store, named) == []
    assert all(store.run(run.run_id).resume.exists() for run in (keep, drop))
    assert set(store.index.statuses().values()) == {"interrupted" if ends else "running"}


def test_a_log_that_was_written_since_is_not_named(store):
    folders = [store.root / "logs" / f"20260101-000000-{name}" for name in ("aa", "bb")]
    for folder in folders:
        folder.mkdir(parents=True)
        aged(folder / "driver.log")
    (folders[1] / "driver.log").touch()
    for folder in folders:
        aged(folder)
    assert found(store) == {f"logs/{folders[0].name}"}


def test_tokens_of_killed_sweeps_are_named(store):
    with token(store, "20260101-000000-bb"):
        store.write("ray/20260101-000000-aa.0123456789abcdef", b"")
        for path in (store.root / "ray").iterdir():
            aged(path)
        assert found(store) == {"ray/20260101-000000-aa.0123456789abcdef"}
