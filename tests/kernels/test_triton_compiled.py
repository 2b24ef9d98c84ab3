"""The Triton kernels as they are compiled for sm_80 and sm_90: their PTX in the emulator of `ptx/`, against the reference.

Triton's interpreter runs the kernels' Python; here run the layouts, barriers, asynchronous copies, products of 16-bit
matrices and inline assembly that a GPU gets, with a check of every access to memory. `test_ptx_*.py` show what the
emulator finds, and how it rounds.
"""

import os
import re

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton compiles nothing where it interprets", allow_module_level=True)

from cope_sweep.kernels import operator
from cope_sweep.kernels.triton_attention import launch
from cope_sweep.positions import T5, ALiBi, CoPE, CoPEALiBi, CoPEMLP, Relative
from cope_sweep.positions.fox import FoX
from tests.kernels.accuracy import assert_equals_reference, output_and_gradients
from tests.kernels.cases import Case, attention_by, dropout_seeds, fused, make_inputs, random_tensors
from tests.kernels.ptx.launches import emulated
from tests.kernels.ptx.machine import Shuffled, backwards, forwards
from tests.kernels.ptx.memory import Fault

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def case(*encodings, dtype=BF16, **options):
    return Case(encodings, **{"batch": 1, "heads": 1, "queries": 100, "head_dim": 16, **options}), dtype


SATURATING = case(CoPE(p_max=4), queries=140, head_dim=64)
PADDING = case(CoPE(p_max=4), Relative(positions=9), batch=3, queries=70, cached=7, head_dim=24, lengths=(0, 77, 40))
SM_80 = {
    "saturating": SATURATING,
    "padding": PADDING,
    "never saturating": case(CoPE(p_max="full"), logit_shift=3.0),
    "float32": case(CoPE(p_max=4), queries=70, dtype=FP32),
    "t5": case(T5(buckets=6, max_distance=40), queries=140),
    "cope-mlp": case(CoPEMLP(hidden=3), queries=70),
}
SM_90 = {
    "saturating": SATURATING,
    "float16, separate gate keys": case(CoPE(p_max=4, gate="separate"), queries=130, head_dim=32, dtype=FP16),
    "relative": case(Relative(positions=5, far="last"), queries=140),
    "fox": case(CoPE(p_max=4), FoX(), queries=140),
    "all terms": case(
        CoPE(p_max=6, gate="values"), CoPEALiBi(slopes="learned", gate="values"), Relative(positions=7, far="last"), ALiBi(),
        queries=70, dropout=0.2,
    ),
}  # fmt: skip
CASES = {
    **{f"sm_80, {name}": (*given, 80) for name, given in SM_80.items()},
    **{f"sm_90, {name}": (*given, 90) for name, given in SM_90.items()},
}
"""The GPUs differ in their products of matrices, so not every case runs as both have it."""


attend = attention_by("triton")


@pytest.mark.parametrize(("problem", "dtype", "capability"), CASES.values(), ids=CASES.keys())
def test_output_and_gradients_equal_the_reference(problem, dtype, capability):
    with emulated(Shuffled(0), capability=capability) as executed:
        assert_equals_reference(problem, attend, dtype)
    if problem is SATURATING[0]:  # all loops run, with their copies and products
        for kernel in executed.values():
            opcodes, never = kernel.opcodes(), [x.opcode for x in kernel.never()]
            assert opcodes["cp.async.cg.shared.global"] > 0
            assert any(n > 0 for x, n in opcodes.items() if x.startswith({80: "mma.", 90: "wgmma.mma"}[capability]))
            assert not [x for x in never if x.startswith(("mma", "wgmma"))]


@pytest.mark.parametrize("name", ["sm_80, saturating", "sm_80, padding", "sm_90, saturating"])
def test_the_order_of_warps_does_not_matter(name):
    problem, dtype, capability = CASES[name]
    found = []
    for order in (forwards, backwards):
        with emulated(order, capability=capability):
            found.append(output_and_gradients(problem, attend, dtype, dtype))
    assert all(torch.equal(x, found[1][tensor]) for tensor, x in found[0].items())


def forward_pass(problem, dtype, **options):
    """The output, the log-sum-exp, and where plain tiles end with the positions there."""
    tensors = {name: x.to(dtype) for name, x in random_tensors(problem, dtype).items()}
    # Logits are multiples of 1/8: their sums are exact however they are rounded.
    rng = torch.Generator().manual_seed(0)
    tensors |= {x: torch.randint(-2, 3, tensors[x].shape, generator=rng).to(dtype) for x in ("q", "k")}
    given = fused(*make_inputs(problem, tensors), problem.dropout, dropout_seeds(problem.batch))
    outputs = operator.empty_outputs(given, "triton")
    with emulated(**options):
        launch.forward(given, *outputs)
    return outputs


def test_positions_do_not_depend_on_how_tensor_cores_round():
    exact, cut_off = (forward_pass(*SATURATING, truncating=kernels) for kernels in ((), ("forward",)))
    assert torch.equal(exact[2], cut_off[2])
    torch.testing.assert_close(exact[1], cut_off[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kernel", ["forward", "backward_rows", "backward_keys"])
def test_kernels_may_round_products_differently(kernel):
    # wgmma and mma.sync need not round alike, and tiles of other sizes use the other one.
    with emulated(truncating=(kernel,)):
        assert_equals_reference(case(CoPE(p_max="full"))[0], attend, BF16)


@pytest.mark.parametrize(
    ("instruction", "fault"),
    [(r"bar\.sync\s+0;", "nothing has stored|without a barrier"), (r"cp\.async\.wait_group\s+\w+;", "not waited for")],
)
def test_kernels_without_a_synchronisation_are_faulty(instruction, fault):
    # What the tests above exclude is what the emulator finds.
    with pytest.raises(Fault, match=f"forward.*({fault})"):
        forward_pass(*SATURATING, change=lambda ptx: re.sub(instruction, "", ptx))
