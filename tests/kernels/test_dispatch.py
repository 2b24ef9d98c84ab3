"""Which implementation computes an attention, and how it is chosen."""

import subprocess
import sys
import threading

import pytest
import torch

from cope_sweep.kernels import Inputs, Position, attend, make_problem, reference, set_implementation, using
from cope_sweep.positions import ALiBi, CoPE, CoPEALiBi, CoPEMLP, Relative
from tests.kernels.accuracy import assert_equals_reference
from tests.kernels.cases import Case, make_inputs, random_tensors


def attention(dtype=torch.float64, tokens=20, encoding=None):
    rng = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, tokens, 4, generator=rng, dtype=dtype)
    encoding = encoding or CoPE(p_max=3)
    parameters = {"e": torch.ones(3, 4, dtype=dtype)} if isinstance(encoding, CoPE) else {}
    return Inputs.plain(q, k, v), [Position(encoding, parameters)]


class Probe(ALiBi):
    """ALiBi that records how it was used: `score` by the reference, `term` by the fused implementations."""

    kind: str = "probe"

    def score(self, parameters, attention):
        CALLS.append("score")
        return super().score(parameters, attention)

    def term(self, parameters, q_BHQK, keys, features_BHSF):
        CALLS.append("term")
        return super().term(parameters, q_BHQK, keys, features_BHSF)


CALLS = []
AUTO = ["term", "score"]
"""In float64 and with few keys, auto describes the problem for the kernels, and then uses the reference."""


def hooks_called(**options):
    CALLS.clear()
    attend(*attention(encoding=Probe()), **options)
    return CALLS


def test_the_argument_names_the_implementation():
    assert hooks_called(implementation="reference") == ["score"]
    assert hooks_called(implementation="blocked") == ["term"]


def test_using_applies_within_its_block_only():
    with using("reference"):
        assert hooks_called() == ["score"]
        with using("blocked"):
            assert hooks_called() == ["term"]
        assert hooks_called() == ["score"]
        assert hooks_called(implementation="blocked") == ["term"]
    assert hooks_called() == AUTO


def test_using_resets_the_choice_after_an_exception():
    with pytest.raises(ZeroDivisionError), using("reference"):
        raise ZeroDivisionError
    assert hooks_called() == AUTO


def test_set_implementation_lasts_and_is_of_its_thread():
    chosen = {}

    def choose():
        set_implementation("reference")
        chosen["own thread"] = list(hooks_called())

    thread = threading.Thread(target=choose)
    thread.start()
    thread.join()
    assert chosen == {"own thread": ["score"]}
    assert hooks_called() == AUTO


@pytest.mark.parametrize("implementation", ["auto", "blocked", "native", "triton"])
@pytest.mark.parametrize("tokens", [1, 5, 20, 300])
def test_all_give_the_same(implementation, tokens):
    inputs, positions = attention(tokens=tokens)
    expected = reference(inputs, positions)
    torch.testing.assert_close(
        attend(inputs, positions, implementation=implementation), expected, rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("implementation", ["auto", "blocked", "native", "triton"])
def test_without_scores_all_give_the_same(implementation):
    inputs, _ = attention()
    torch.testing.assert_close(attend(inputs, [], implementation=implementation), reference(inputs, []))


@pytest.mark.parametrize("implementation", ["auto", "blocked", "native"])
def test_contextual_encodings_with_different_gates_equal_the_reference(implementation):
    """A fused kernel has one source of gates: two of them go to the reference."""

    def attend_with(inputs, positions, dropout, seed):
        return attend(inputs, positions, dropout, seed, implementation)

    for encodings in (
        (CoPE(p_max=4), CoPEALiBi(gate="values")),
        (CoPE(p_max=4, gate="values"), CoPEALiBi(gate="separate")),
        (CoPE(p_max=4, gate="separate"), CoPEALiBi(gate="separate")),
    ):
        assert_equals_reference(Case(encodings, queries=30), attend_with, torch.float64)


@pytest.mark.parametrize(
    ("encodings", "reason"),
    [
        ((CoPE(p_max=4, rotated_query=True), Relative(positions=5)), "one table has rotated queries"),
        ((CoPE(p_max=4, rotated_query=True), CoPEALiBi()), "gates of contextual encodings differ"),
        ((CoPEMLP(hidden=3, activation="gelu"),), "the score of cope_mlp with these options has no form"),
        ((CoPE(p_max=4), CoPE(p_max=5)), "cope is not the only encoding with a LookUp term"),
    ],
)
@pytest.mark.parametrize("implementation", ["auto", "blocked", "native"])
def test_what_fused_kernels_cannot_express_equals_the_reference(implementation, encodings, reason):
    case = Case(encodings, queries=30, rotated=True)
    problem = make_problem(*make_inputs(case, random_tensors(case, torch.float64)), 0.0, None)
    assert isinstance(problem, str)
    assert reason in problem
    assert_equals_reference(
        case,
        lambda inputs, positions, dropout, seed: attend(inputs, positions, dropout, seed, implementation),
        torch.float64,
    )


def test_hard_attention_goes_to_the_reference():
    inputs, positions = attention()
    hard = Inputs(inputs.q_BHTK, inputs.k_BHSK, inputs.v_BHSK, inputs.q_BHTK, inputs.k_BHSK, (), hard=True)
    expected = reference(hard, positions)
    for implementation in ("auto", "blocked", "native"):
        torch.testing.assert_close(attend(hard, positions, implementation=implementation), expected, rtol=0, atol=0)


TWO_FALLBACKS = """
import torch
from cope_sweep.kernels import Inputs, Position, attend
from cope_sweep.positions import ALiBi
q, k, v = torch.randn(3, 1, 2, 20, 4, dtype=torch.float64)
for _ in range(2):
    attend(Inputs.plain(q, k, v), [Position(ALiBi(), {})], implementation="triton")
"""


@pytest.mark.slow
def test_a_fallback_is_logged_once_with_its_reason():
    """In a process of its own: each reason is logged once per process."""
    done = subprocess.run([sys.executable, "-c", TWO_FALLBACKS], capture_output=True, text=True, check=True)
    messages = [line for line in done.stderr.splitlines() if "triton" in line]
    assert len(messages) == 1
    assert "falling back to PyTorch" in messages[0]
