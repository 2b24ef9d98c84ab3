"""The Triton kernels in Triton's interpreter, on the CPU, against the reference: output and every gradient.

Skipped where Triton does not interpret. `test_triton.py` runs this file in a process with TRITON_INTERPRET=1, which has to
be set before Triton is imported.
"""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; test_triton.py runs it so", allow_module_level=True)
pytest.importorskip("triton")

from cope_sweep.kernels import AttentionProblem, make_problem, triton_attention
from cope_sweep.kernels.triton_attention import Tiles, attention
from cope_sweep.positions import ALiBi, CoPE, CoPEALiBi, Relative
from cope_sweep.positions.terms import DistanceBias
from tests.kernels.accuracy import assert_equals_reference
from tests.kernels.cases import Case, make_inputs, random_tensors

SLOPE = CoPEALiBi(slopes="learned")
DEFAULTS = {"batch": 1, "heads": 1, "queries": 37, "head_dim": 16}


def case(*encodings, dtype=torch.float32, **options):
    return Case(encodings, **{**DEFAULTS, **options}), dtype


CASES = {
    "cope": case(CoPE(p_max=8), heads=2),
    "one token": case(CoPE(p_max=8), queries=1),
    "two tokens": case(CoPE(p_max=2), queries=2),
    "full blocks": case(CoPE(p_max=4), queries=48),
    "never saturates": case(CoPE(p_max="full")),
    "saturates at once": case(CoPE(p_max=1)),
    "saturates late": case(CoPE(p_max=4), queries=48, logit_shift=-4.0),
    "two embeddings": case(CoPE(p_max=2)),
    "odd head dim": case(CoPE(p_max=8), head_dim=24),
    "small head dim": case(CoPE(p_max=8), head_dim=5),
    "large head dim": case(CoPE(p_max=8), head_dim=80, queries=20),
    "all gates 0": case(CoPE(p_max=8), logit_shift=-40.0),
    "all gates 1": case(CoPE(p_max=20), logit_shift=40.0),
    "all gates one half": case(CoPE(p_max=12), query_std=0.0),
    "gates 0 or 1": case(CoPE(p_max=6), query_std=60.0),
    "values as gate keys": case(CoPE(p_max=4, gate="values"), rotated=True),
    "separate gate keys": case(CoPE(p_max=8, gate="separate"), head_dim=12),
    "separate gate keys, saturated, a table for each head": case(
        CoPE(p_max=3, gate="separate", per_head=True), heads=2, queries=48
    ),
    "gates after rotation": case(
        CoPE(p_max=5, gate_after_rotation=True, scale_positions=True), rotated=True, queries=20
    ),
    "relative": case(Relative()),
    "relative, one": case(Relative(positions=1)),
    "relative, near only": case(Relative(positions=5)),
    "relative, capped": case(Relative(positions=5, far="last")),
    "relative, capped at one": case(Relative(positions=1, far="last")),
    "cope and relative": case(CoPE(p_max=4), Relative(positions=7)),
    "cope and relative, capped": case(CoPE(p_max=4), Relative(positions=7, far="last"), queries=48),
    "cope-alibi": case(SLOPE),
    "cope-alibi, separate gate keys": case(CoPEALiBi(slopes="learned", gate="separate"), heads=2),
    "cope and cope-alibi": case(CoPE(p_max=5), SLOPE),
    "alibi": case(ALiBi(), heads=2),
    "cope and alibi": case(CoPE(p_max=3), ALiBi()),
    "no position": case(),
    "padding": case(CoPE(p_max=8), Relative(positions=6), batch=3, lengths=(0, 37, 18)),
    "padding of cope-alibi": case(SLOPE, batch=2, lengths=(5, 33)),
    "dropout": case(CoPE(p_max=8), dropout=0.3, heads=2),
    "dropout, saturated": case(CoPE(p_max=3), dropout=0.6, queries=48, batch=2),
    "cached keys": case(CoPE(p_max=4), queries=5, cached=34),
    "cached keys, padding": case(
        CoPE(p_max=4), Relative(positions=9), batch=2, queries=20, cached=19, lengths=(30, 39)
    ),
    "bfloat16": case(CoPE(p_max=8), dtype=torch.bfloat16),
    "float16": case(CoPE(p_max=3, gate="separate"), dtype=torch.float16),
    "all terms": case(
        CoPE(p_max=6, gate="values"),
        CoPEALiBi(slopes="learned", gate="values"),
        Relative(positions=7, far="last"),
        ALiBi(),
        heads=2,
        queries=24,
        dropout=0.2,
    ),
}


def attend_triton(inputs, positions, dropout, seed):
    problem = make_problem(inputs, positions, dropout, seed)
    assert triton_attention.why_not(problem) is None
    return triton_attention.attend(problem)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """New memory is NaN, so that reading what was not written shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("problem", "dtype"), CASES.values(), ids=CASES.keys())
def test_output_and_gradients_equal_the_reference(problem, dtype):
    assert_equals_reference(problem, attend_triton, dtype)


UNEVEN_TILES = Tiles(
    edge=16,
    forward={"BLOCK_T": 32, "BLOCK_S": 16, "PLAIN_S": 32},
    backward_rows={"BLOCK_T": 16, "PLAIN_S": 32},
    backward_keys={"BLOCK_T": 16, "BLOCK_S": 32, "PLAIN_T": 32},
)


@pytest.mark.parametrize("name", ["cope and relative, capped", "padding", "all terms", "saturates late"])
def test_tiles_of_other_sizes(monkeypatch, name):
    monkeypatch.setattr(triton_attention, "INTERPRETER_TILES", UNEVEN_TILES)
    problem, dtype = CASES[name]
    problem = replace(problem, heads=1, queries=75, lengths=problem.lengths and (0, 75, 40), seed=5)
    assert_equals_reference(problem, attend_triton, dtype)


@pytest.mark.parametrize("name", ["cope", "cope-alibi", "padding", "separate gate keys"])
def test_backward_in_several_launches(monkeypatch, name):
    monkeypatch.setattr(triton_attention, "ROWS_PER_LAUNCH", 16)
    problem, dtype = CASES[name]
    assert_equals_reference(replace(problem, seed=6), attend_triton, dtype)


def float32_arguments(queries):
    """q, k, v and z of CoPE with 8 embeddings."""
    problem, dtype = case(CoPE(p_max=8), queries=queries)
    inputs, [position] = make_inputs(problem, random_tensors(problem, dtype))
    arguments = {"q": inputs.q_BHTK, "k": inputs.k_BHSK, "v": inputs.v_BHSK}
    arguments["z"] = inputs.q_BHTK @ position.parameters["e"].T
    return {name: x.float().requires_grad_() for name, x in arguments.items()}


def test_tensors_need_not_be_contiguous():
    given = {name: x.detach() for name, x in float32_arguments(20).items()}
    permuted = {name: x.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for name, x in given.items()}
    torch.testing.assert_close(attention(**permuted, scale=0.3), attention(**given, scale=0.3))


def test_gradients_have_the_same_bits_in_every_run():
    given = float32_arguments(37)
    first, second = (
        torch.autograd.grad(attention(**given, scale=0.3).square().sum(), given.values()) for _ in range(2)
    )
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_the_operator_follows_torch_s_rules_for_operators():
    given = float32_arguments(5)
    arguments = (given["q"], given["k"], given["v"], None, None, given["z"], *[None] * 5, 0.25, 0.0, False)
    torch.library.opcheck(
        torch.ops.cope_sweep.triton_attention, arguments, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q_BHTK": torch.zeros(1, 1, 3, 8, dtype=torch.float64)}, "float64"),
        ({"k_BHSK": torch.zeros(1, 1, 3, 8, dtype=torch.float16)}, "one type"),
        ({"v_BHSK": torch.zeros(1, 1, 3, 9)}, "one head dim"),
        ({"distance_bias": DistanceBias(torch.zeros(1, 3))}, "T5"),
        ({"look_up": SimpleNamespace(z_BHQP=torch.zeros(1, 1, 3, 4, dtype=torch.float64))}, "table"),
    ],
)
def test_why_not_names_what_is_not_supported(change, reason):
    q = torch.zeros(1, 1, 3, 8)
    problem = AttentionProblem(q, q, q, 1.0)
    assert triton_attention.why_not(problem) is None
    assert reason in triton_attention.why_not(replace(problem, **change))
