"""A short run of the fault test: `make chaos` is the long one."""

import pytest

from tests.chaos.chaos import disturb, results, undisturbed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_under_random_kills_leaves_what_an_undisturbed_one_does(tmp_path):
    undisturbed(tmp_path / "undisturbed")
    trial = disturb(tmp_path / "disturbed", seed=1, kills=3)
    assert sum(trial.victims.values()) > 0
    expected, found = results(tmp_path / "undisturbed"), results(tmp_path / "disturbed")
    for name, value in expected.items():
        assert found[name] == value, name
