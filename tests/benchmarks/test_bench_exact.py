"""The limit of a kernel's errors, proved on a CPU: it accepts correct kernels and rejects wrong ones, in each type.

The correct kernels are the native ones, and the definition in float64 with the errors of a kernel's roundings; the wrong ones
are the native ones with one fault.
"""

from dataclasses import replace

import pytest
import torch
from cope_benchmarks import exact
from cope_benchmarks.exact import Errors, computed_by, results
from cope_benchmarks.gpu_problems import DTYPES, Problem

from cope_sweep.kernels import operator


def native(given):
    return operator.attention(given, "native")


def computed(problem, leaves, weight, attend=native):
    return computed_by(lambda x: attend(problem.build(x)), leaves, weight)


LONG = {"heads": 1, "tokens": 300, "head_dim": 32}
ACCEPTED = {
    "saturating": Problem(**LONG),
    "never saturating": Problem(p_max="full", **LONG),
    "gates near 0": Problem(mean_gate=0.02, **LONG),
    "gates near 1": Problem(mean_gate=0.98, **LONG),
    "dropout": Problem(dropout=0.1, gate="separate", **LONG),
    "slope": Problem(p_max=None, slope=True, relative=20, **LONG),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACCEPTED)
def test_a_correct_kernel_is_accepted(name, dtype):
    problem = replace(ACCEPTED[name], dtype=dtype)
    leaves, weight = problem.leaves()
    assert problem.wrong(leaves, weight, computed(problem, leaves, weight)) is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "problem",
    [
        Problem(heads=1, tokens=40, head_dim=16, p_max=None, slope=True),  # the gradient of one number
        Problem(heads=1, tokens=40, head_dim=16, p_max=1),  # a gradient that is 0, but for roundings
        Problem(**LONG),
    ],
    ids=lambda problem: problem.name,
)
def test_a_kernel_is_not_rejected_by_chance(problem, dtype):
    problem = replace(problem, dtype=dtype)
    for seed in range(20):
        leaves, weight = problem.leaves(seed=seed)
        errors = Errors.of(DTYPES[dtype], 100 + seed)
        found = results(problem.build, {n: x.double() for n, x in leaves.items()}, weight.double(), errors)
        assert problem.wrong(leaves, weight, found) is None, seed


def gates_stop_after(given):
    """No gradient flows through the gates of the first 32 keys: a tile is taken for a plain one."""
    k = torch.cat([given.k[:, :, :32].detach(), given.k[:, :, 32:]], 2)
    return native(given._replace(k=k))


def last_entry_is_missing(given):
    return native(given._replace(e=given.e[:-1]))


def one_tile_of_values_is_wrong(given):
    v = given.v.clone()
    v[:, :, 64:96] = v[:, :, 64:96].roll(1, 2)
    return native(given._replace(v=v))


def results_are_2_percent_large(given):
    return native(given) * 1.02


def positions_are_off_by_a_fifth(given):
    shifted = torch.cat([given.e[1:], given.e[-1:]])
    return native(given._replace(e=0.8 * given.e + 0.2 * shifted))


FAULTS = [
    gates_stop_after, last_entry_is_missing, one_tile_of_values_is_wrong,
    results_are_2_percent_large, positions_are_off_by_a_fifth,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_rejected(fault, dtype):
    problem = replace(ACCEPTED["saturating"], dtype=dtype)
    leaves, weight = problem.leaves()
    assert problem.wrong(leaves, weight, computed(problem, leaves, weight, fault)) is not None


def test_a_gradient_that_is_not_a_number_is_rejected():
    problem = Problem(heads=1, tokens=30, head_dim=16)
    leaves, weight = problem.leaves()
    found = computed(problem, leaves, weight)
    found["k"][0, 0, 3, 1] = float("nan")
    assert "k is off by" in problem.wrong(leaves, weight, found)


@pytest.mark.parametrize("problem", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_blocks_of_queries_do_not_change_the_exact_results(problem, monkeypatch):
    leaves, weight = problem.leaves()
    leaves, weight = {name: x.double() for name, x in leaves.items()}, weight.double()
    whole = results(problem.build, leaves, weight)
    monkeypatch.setattr(exact, "BLOCK_SCORES", 70 * problem.tokens)
    for name, x in results(problem.build, leaves, weight).items():
        torch.testing.assert_close(x, whole[name])
