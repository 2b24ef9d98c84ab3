"""States that sweeps of the same runs can reach; see `explorer.py`.

Each exploration has a process of its own: greenlets switch inside of SQLAlchemy's calls, and in a process with many threads
and extensions, one of them has crashed SQLite.
"""

import json

import pytest

from tests.ablations.update_readme import ROOT
from tests.processes import output_of


def explored(runs, events, *, files, sweeps="ab", limit=None):
    """The numbers of states and of ends that were visited."""
    words = [json.dumps(each) for each in (sweeps, runs, events, files, limit)]
    return json.loads(output_of("-m", "tests.store.explorer", *words, cwd=ROOT, timeout_s=3600).splitlines()[-1])


@pytest.mark.thorough
def test_three_runs():
    states, ends = explored(3, {}, files=False)
    assert states > 100
    assert ends >= 1


# Two minutes of an idle core, and two more for the last test.
@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("runs", "events"), [(3, {"expire": 1}), (2, {"kill": 1, "expire": 1})])
def test_all_states_with_leases_that_expire_and_killed_processes(runs, events):
    states, ends = explored(runs, events, files=False)
    assert states > 500
    assert ends > 1


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_many_states_with_pauses_at_every_file():
    """Too many to visit all of them: the faults that were found this way showed within 5,000."""
    states, ends = explored(1, {"expire": 1}, files=True, limit=10_000)
    assert states >= 10_000
    assert ends > 1


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("events", [{"kill": 1}, {"crash": 1}])
def test_all_states_of_a_sweep_that_ends_between_any_two_files(events):
    """Its process is killed, or its machine loses power."""
    states, ends = explored(1, events, files=True, sweeps="a")
    assert states > 800
    assert ends > 20


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_many_states_of_two_sweeps_whose_machine_loses_power():
    states, ends = explored(1, {"crash": 1, "expire": 1}, files=True, limit=10_000)
    assert states >= 10_000
    assert ends > 1
