"""The tolerance of the kernels' tests: what it is built on, and that it rejects small faults."""

import pytest
import torch

from cope_sweep.kernels import Inputs, LayerEncoding, reference
from cope_sweep.positions import ALiBi, CoPE, CoPEMLP, Relative
from tests.kernels.accuracy import AT_MOST, assert_equals_reference, expected, output_and_gradients
from tests.kernels.cases import Case

CASES = [
    Case((), queries=20),
    Case((CoPE(p_max=9),), queries=40, smooth=True),
    Case((CoPE(p_max=6, gate="values"), ALiBi()), queries=30, cached=5, rotated=True, dropout=0.2, lengths=(35, 9)),
    Case((CoPEMLP(hidden=4, p_max=12), Relative(positions=5, far="last")), queries=30),
    Case((CoPE(p_max=9, gate_bias_learned=True),), queries=40),
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_the_reference_in_float32_passes(case):
    assert_equals_reference(case, reference, torch.float32)


class Scaled(torch.autograd.Function):
    """The identity, with a gradient that is wrong by `fault`."""

    @staticmethod
    def forward(ctx, x, fault):
        ctx.fault = fault
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + ctx.fault), None


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_a_fault_of_1e_3_in_the_output_is_rejected(case):
    with pytest.raises(AssertionError, match="output"):
        assert_equals_reference(case, lambda *arguments: reference(*arguments) * 1.001, torch.float32)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("case", CASES[:2], ids=range(2))
def test_a_fault_of_1e_3_in_one_gradient_is_rejected(case, name):
    def faulty(inputs, positions, dropout, seed):
        q, k, v = (
            Scaled.apply(x, 1e-3 * (name == each))
            for each, x in (("q", inputs.q_BHTK), ("k", inputs.k_BHSK), ("v", inputs.v_BHSK))
        )
        return reference(Inputs(q, k, v, q, k, inputs.features_BHSF), positions, dropout, seed)

    errors = expected(case, torch.float32).errors_over_limit(
        output_and_gradients(case, faulty, torch.float32, torch.float32)
    )
    assert [wrong for wrong, error in errors.items() if error > AT_MOST] == [name]


@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[4]], ids=["table", "mlp", "gate bias"])
def test_a_fault_of_1e_3_in_a_parameter_s_gradient_is_rejected(case):
    def faulty(inputs, positions, dropout, seed):
        first, *rest = positions
        parameters = {name: Scaled.apply(x, 1e-3) for name, x in first.parameters.items()}
        return reference(inputs, [LayerEncoding(first.encoding, parameters), *rest], dropout, seed)

    errors = expected(case, torch.float32).errors_over_limit(
        output_and_gradients(case, faulty, torch.float32, torch.float32)
    )
    # The gradient of CoPE-MLP's b₂, which adds the same to all scores of a row, is 0.
    faults = {name for name in errors if name.startswith("0.") and name != "0.b2"}
    assert {wrong for wrong, error in errors.items() if error > AT_MOST} == faults
