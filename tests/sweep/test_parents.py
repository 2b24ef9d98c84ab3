"""Longer runs are trained from the state of finished, shorter ones."""

import pytest

from cope_sweep.config import Resources
from cope_sweep.store import Store
from cope_sweep.sweep.executor import Workload, parent_of, run_local
from tests.tiny import tiny_run


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store", create=True)


def train(store, *runs):
    run_local(Workload(runs, store, Resources(), "sweep"))


def test_the_longest_finished_run_that_kept_its_state(store):
    short, longer, longest = (tiny_run(**{"train.steps": steps}) for steps in (4, 6, 12))
    assert parent_of(longest, store) is None
    train(store, short, longer)
    assert parent_of(longest, store) == longer.run_id
    assert parent_of(tiny_run(seed=5, **{"train.steps": 12}), store) is None
    store.run(longer.run_id).final_state.unlink()
    assert parent_of(longest, store) == short.run_id


def test_a_sweep_continues_shorter_runs(store):
    short, long = (tiny_run(**{"train.steps": steps}) for steps in (6, 12))
    train(store, short)
    train(store, long)
    record = store.index.records([long.run_id])[long.run_id]
    assert (record.status, record.parent_id) == ("finished", short.run_id)
    assert record.facts["resumed_from_step"] == 6
