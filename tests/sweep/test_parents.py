"""Longer runs are trained from the state of finished, shorter ones."""

import pytest

from cope_sweep.config import Resources
from cope_sweep.store import Store
from cope_sweep.sweep.executor import Parents, Workload
from cope_sweep.sweep.local import run_local
from tests.tiny import tiny_run


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store", create=True)


def train(store, *runs):
    run_local(Workload(runs, store, Resources(), "sweep"))


def test_the_longest_finished_run_that_kept_its_state(store):
    short, longer, longest = (tiny_run(**{"train.steps": steps}) for steps in (4, 6, 12))
    assert Parents(store).of(longest) is None
    train(store, short, longer)
    assert Parents(store).of(longest) == longer.run_id
    assert Parents(store).of(tiny_run(seed=5, **{"train.steps": 12})) is None
    store.run(longer.run_id).final_state.unlink()
    assert Parents(store).of(longest) == short.run_id


def test_a_sweep_continues_shorter_runs(store):
    short, long = (tiny_run(**{"train.steps": steps}) for steps in (6, 12))
    train(store, short)
    train(store, long)
    record = store.index.records([long.run_id])[long.run_id]
    assert (record.status, record.parent_id) == ("finished", short.run_id)
    assert record.facts["resumed_from_step"] == 6
