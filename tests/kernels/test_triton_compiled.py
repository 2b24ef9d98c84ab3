"""The Triton kernels as they are compiled for sm_80: their PTX in the emulator of `ptx/`, against the reference.

Triton's interpreter runs the kernels' Python; here run the layouts, barriers, asynchronous copies, products of 16-bit
matrices and inline assembly that a GPU gets, with a check of every access to memory. `test_ptx_machine.py` proves the
emulator.
"""

import os
import re
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton compiles nothing where it interprets", allow_module_level=True)

from cope_sweep.kernels import make_problem, operator
from cope_sweep.kernels.arguments import Arguments
from cope_sweep.kernels.operator import attention
from cope_sweep.kernels.triton_attention import launch
from cope_sweep.positions import T5, ALiBi, CoPE, CoPEALiBi, CoPEMLP, Relative
from tests.kernels.accuracy import assert_equals_reference, output_and_gradients
from tests.kernels.cases import DROPOUT_SEED, Case, make_inputs, random_tensors
from tests.kernels.ptx.launches import compiled, emulated
from tests.kernels.ptx.machine import Shuffled, backwards, forwards
from tests.kernels.ptx.memory import Fault

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def case(*encodings, dtype=BF16, **options):
    return Case(encodings, **{"batch": 1, "heads": 1, "queries": 100, "head_dim": 16, **options}), dtype


SATURATING = case(CoPE(p_max=4), queries=140, head_dim=64)
PADDING = case(CoPE(p_max=4), Relative(positions=9), batch=4, queries=70, cached=7, head_dim=24, lengths=(0, 77, 40, 1))
CASES = {
    "saturating": SATURATING,
    "padding": PADDING,
    "never saturating": case(CoPE(p_max="full"), heads=2, logit_shift=3.0),
    "float16, separate gate keys": case(CoPE(p_max=4, gate="separate"), queries=130, head_dim=32, dtype=FP16),
    "float32": case(CoPE(p_max=4), queries=70, dtype=FP32),
    "dropout": case(CoPE(p_max=4), queries=130, dropout=0.3),
    "relative": case(Relative(positions=5, far="last"), queries=140),
    "t5": case(T5(buckets=6, max_distance=40), queries=140),
    "cope-alibi": case(CoPEALiBi(slopes="learned")),
    "cope-mlp": case(CoPEMLP(hidden=3), queries=70),
    "all terms": case(
        CoPE(p_max=6, gate="values"), CoPEALiBi(slopes="learned", gate="values"), Relative(positions=7, far="last"), ALiBi(),
        heads=2, queries=70, dropout=0.2,
    ),
}  # fmt: skip


def attend(inputs, positions, dropout, seed):
    return attention(make_problem(inputs, positions, dropout, seed), "triton")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """New memory is NaN, so that reading what was not written shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("problem", "dtype"), CASES.values(), ids=CASES.keys())
def test_output_and_gradients_equal_the_reference(problem, dtype):
    with emulated(Shuffled(0)) as executed:
        assert_equals_reference(problem, attend, dtype)
    for kernel in executed.values():
        never = [x.text for x in kernel.never() if x.opcode.startswith("mma")]
        if problem is SATURATING[0]:  # all loops run, with their copies
            assert not never, never
            assert kernel.opcodes()["cp.async.cg.shared.global"] > 0


@pytest.mark.parametrize("name", ["saturating", "padding"])
def test_the_order_of_warps_does_not_matter(name):
    problem, dtype = CASES[name]
    found = []
    for order in (forwards, backwards, Shuffled(1)):
        with emulated(order):
            found.append(output_and_gradients(problem, attend, dtype, dtype))
    for other in found[1:]:
        assert all(torch.equal(x, other[tensor]) for tensor, x in found[0].items())


def forward_pass(problem, dtype, **options):
    """The output, the log-sum-exp, and where plain tiles end with the positions there."""
    tensors = {name: x.to(dtype) for name, x in random_tensors(problem, dtype).items()}
    # Logits are multiples of 1/8: their sums are exact however they are rounded.
    rng = torch.Generator().manual_seed(0)
    tensors |= {x: torch.randint(-2, 3, tensors[x].shape, generator=rng).to(dtype) for x in ("q", "k")}
    inputs, positions = make_inputs(problem, tensors)
    given = make_problem(inputs, positions, problem.dropout, DROPOUT_SEED)
    outputs = operator.empty_outputs(given, "triton")
    with emulated(**options):
        launch.forward(given, *outputs)
    return outputs


def test_positions_do_not_depend_on_how_tensor_cores_round():
    exact, cut_off = (forward_pass(*SATURATING, truncating=truncating) for truncating in (False, True))
    assert torch.equal(exact[2], cut_off[2])
    torch.testing.assert_close(exact[1], cut_off[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("instruction", "fault"),
    [(r"bar\.sync\s+0;", "nothing has stored|without a barrier"), (r"cp\.async\.wait_group\s+\w+;", "not waited for")],
)
def test_kernels_without_a_synchronisation_are_faulty(instruction, fault):
    # What the tests above exclude is what the emulator finds.
    with pytest.raises(Fault, match=f"forward.*({fault})"):
        forward_pass(*SATURATING, change=lambda ptx: re.sub(instruction, "", ptx))


def own_assembly(ptx):
    """The kinds of inline assembly of our own, without names of registers; not those that Triton itself makes."""
    texts = re.findall(r"// begin inline asm\n(.*?)\n\s*// end inline asm", ptx, re.DOTALL)
    kinds = {re.sub(r"%(rd|rs|r|p)\d+", r"%\1", re.sub(r"\t\.loc.*\n", "", text)).strip() for text in texts}
    return {kind for kind in kinds if re.match(r"\{ \.reg|ex2|rcp|fma\.rz|add\.rz|ld\.global\.v4\.f32", kind)}


def test_gpus_get_the_same_inline_assembly():
    q, k, v = torch.zeros(3, 1, 1, 256, 64, dtype=BF16)
    none = dict.fromkeys(Arguments._fields)
    none |= {"limit": 0.0, "e_scale": 1.0, "relative_scale": 1.0, "far_last": False, "dropout": 0.0, "scale": 0.125}
    given = Arguments(**{**none, "q": q, "k": k, "v": v, "e": torch.zeros(64, 64, dtype=BF16)})
    found = {}
    for capability in (80, 90):

        def compile_instead(kernel, grid, arguments, sizes, capability=capability):
            found[capability, kernel] = own_assembly(compiled(kernel, arguments, sizes, capability).ptx)

        with (
            mock.patch.object(launch, "run", compile_instead),
            mock.patch.object(launch, "architecture_of", return_value="sm_80"),  # the same tiles for both
        ):
            outputs = operator.empty_outputs(given, "triton")
            launch.forward(given, *outputs)
            launch.backward(given, q, *outputs, operator.empty_gradients(given, "triton"))
    for kernel in launch.KERNELS:
        assert len(found[80, kernel]) >= 5
        assert found[80, kernel] == found[90, kernel]
