"""The exact attention that GPU kernels are compared with, and the limit of their errors, proved on a CPU.

A limit is good if it accepts a correct kernel and rejects a wrong one, in each type. The correct kernel here is the
blocked path in float32; the wrong ones are the blocked path with one fault.
"""

from dataclasses import replace

import pytest
import torch
from cope_benchmarks import exact as exact_module
from cope_benchmarks.exact import Rounding, computed_by, exact
from cope_benchmarks.gpu_problems import DTYPES, Problem

from cope_sweep.kernels import operator

SMALL = {"heads": 2, "tokens": 75, "head_dim": 16}


def blocked(problem):
    return operator.attention(problem, "blocked")


def computed(problem, leaves, weight, attend=blocked):
    return computed_by(lambda x: attend(problem.build(x)), leaves, weight)


PROBLEMS = {
    "cope": Problem(p_max=8, **SMALL),
    "full": Problem(p_max="full", projection=True, **SMALL),
    "no position": Problem(p_max=None, **SMALL),
    "separate gate keys, heads of their own": Problem(p_max=8, gate="separate", per_head=True, **SMALL),
    "keys before the rotation": Problem(p_max=8, gate="keys", mean_gate=0.2, **SMALL),
    "values": Problem(p_max=8, gate="values", mean_gate=0.9, **SMALL),
    "slope": Problem(p_max=5, slope=True, **SMALL),
    "segments": Problem(p_max=None, knots=5, relative=7, far="last", **SMALL),
    "distances": Problem(p_max=None, relative=20, buckets=9, alibi=True, **SMALL),
    "dropout, padding, cached keys": Problem(
        p_max=8, relative="full", batch=2, lengths=(100, 40), cached=30, dropout=0.3, **SMALL
    ),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_it_equals_the_blocked_path_in_float64(problem, monkeypatch):
    monkeypatch.setattr(exact_module, "BLOCK_ENTRIES", 1)  # several blocks of the least size
    leaves, weight = replace(problem, dtype="float32").leaves()
    leaves = {name: x.double() for name, x in leaves.items()}
    expected = computed(problem, leaves, weight.double())
    found = exact(problem.build, leaves, weight)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def test_a_position_worked_by_hand():
    # Two tokens, logits 0: gates ½, so key 0 is at position 1 of query 1 and key 1 at ½. z = (0, 2), v = (1, 3).
    problem = Problem(heads=1, tokens=2, head_dim=1, p_max=2)
    leaves = {
        "q": torch.tensor([[[[2.0], [2.0]]]]), "k": torch.zeros(1, 1, 2, 1),
        "v": torch.tensor([[[[1.0], [3.0]]]]), "e": torch.tensor([[0.0], [1.0]]),
    }  # fmt: skip
    out = exact(problem.build, leaves, torch.ones(1, 1, 2, 1))["output"]
    e2, e1 = torch.e**2, torch.e
    assert out.flatten().tolist() == pytest.approx([1.0, (e2 * 1 + e1 * 3) / (e2 + e1)])


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


def gates_stop_after(problem):
    """No gradient flows through the gates of the first 32 keys: a tile is taken for a plain one."""
    k = torch.cat([problem.k[:, :, :32].detach(), problem.k[:, :, 32:]], 2)
    return blocked(problem._replace(k=k))


def last_entry_is_missing(problem):
    return blocked(problem._replace(e=problem.e[:-1]))


def one_tile_of_values_is_wrong(problem):
    v = problem.v.clone()
    v[:, :, 64:96] = v[:, :, 64:96].roll(1, 2)
    return blocked(problem._replace(v=v))


def results_are_2_percent_large(problem):
    return blocked(problem) * 1.02


def positions_are_off_by_one_gate(problem):
    shifted = torch.cat([problem.e[1:], problem.e[-1:]])
    return blocked(problem._replace(e=0.8 * problem.e + 0.2 * shifted))


FAULTS = [
    gates_stop_after, last_entry_is_missing, one_tile_of_values_is_wrong,
    results_are_2_percent_large, positions_are_off_by_one_gate,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_rejected(fault, dtype):
    problem = replace(ACCEPTED["saturating"], dtype=dtype)
    leaves, weight = problem.leaves()
    assert problem.wrong(leaves, weight, computed(problem, leaves, weight, fault)) is not None


def test_a_gradient_that_is_not_a_number_is_rejected():
    problem = PROBLEMS["cope"]
    leaves, weight = problem.leaves()
    results = computed(problem, leaves, weight)
    results["k"][0, 0, 3, 1] = float("nan")
    assert "k is off by" in problem.wrong(leaves, weight, results)


class AsKernelsRound(Rounding):
    """The weights before their division by the row's sum, of which the largest is 1, and nothing at random."""

    def weights(self, a):
        largest = a.amax(-1, keepdim=True)
        return self(a / largest) * largest

    def noise(self, x_norms, y_norms):
        return torch.zeros(())

    def moved(self, p):
        return p


def test_a_gradient_of_one_number_is_not_rejected_by_chance():
    """Two draws with equal roundings rejected 18 of 100: the limit is near 0 where they happen to cancel."""
    problem = Problem(batch=1, heads=1, tokens=40, head_dim=16, p_max=None, slope=True)
    for seed in range(100):
        leaves, weight = problem.leaves(seed=seed)
        rounding = AsKernelsRound(torch.bfloat16, 1, torch.Generator())
        rounded = exact_module._output_and_gradients(problem.build, leaves, weight, rounding)
        assert problem.wrong(leaves, weight, rounded) is None, seed
