"""All states that two sweeps of the same runs can reach; see `explorer.py`."""

import pytest

from tests.store.explorer import Explorer


def explored(runs, events, *, files):
    explorer = Explorer(runs, events, files=files)
    explorer.explore()
    return len(explorer.visited), explorer.ends


@pytest.mark.slow
def test_three_runs():
    states, ends = explored(3, {}, files=False)
    assert states > 100
    assert ends >= 1


# Minutes of an idle core.
@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("runs", "events", "files"),
    [(3, {"expire": 1}, False), (2, {"kill": 1, "expire": 1}, False), (1, {"expire": 1}, True)],
    ids=["three runs, leases expire", "two runs, a process is killed", "one run, pauses at each file"],
)
def test_all_states(runs, events, files):
    states, ends = explored(runs, events, files=files)
    assert states > 500
    assert ends > 1
