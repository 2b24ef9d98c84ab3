"""The operator `cope_sweep::attention`: torch's rules for operators, and models compiled without a graph break."""

import inspect
from dataclasses import replace

import pytest
import torch

from cope_sweep.config import RunSpec
from cope_sweep.kernels import attend, operator, using
from cope_sweep.kernels.arguments import DIFFERENTIABLE, Arguments
from cope_sweep.model import Transformer
from cope_sweep.positions import T5, ALiBi, CoPE, CoPEALiBi, CoPEMLP, Relative
from tests.helpers.tiny_models import randomize
from tests.kernels.cases import Case, make_inputs, problem_of, random_tensors

PROBLEMS = {
    "cope, relative and slope, dropout": Case(
        (CoPE(p_max=9), Relative(positions=5), CoPEALiBi(slopes="learned")), queries=20, dropout=0.1
    ),
    "separate gates, a table for each head, padding": Case(
        (CoPE(p_max=5, gate="separate", per_head=True), T5(buckets=4, max_distance=9)), queries=20, lengths=(20, 7)
    ),
    "mlp and alibi, rotated": Case((CoPEMLP(hidden=3, p_max=6), ALiBi()), queries=20, rotated=True),
    "no position, cached keys": Case((), queries=5, cached=15),
}


@pytest.mark.parametrize("case", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_the_operator_follows_torch_s_rules_for_operators(case):
    torch.library.opcheck(torch.ops.cope_sweep.attention.default, (*problem_of(case, torch.float32), "native"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fake_results_have_the_types_and_strides_of_real_ones(dtype):
    kernel = "native"
    given = problem_of(PROBLEMS["separate gates, a table for each head, padding"], dtype)
    with torch.no_grad():
        out, lse, carry = torch.ops.cope_sweep.attention(*given, kernel)
        gradients = torch.ops.cope_sweep.attention_backward(torch.ones_like(out), out, lse, carry, *given, kernel)
        expected = (*operator.empty_outputs(given, kernel), *operator.empty_gradients(given, kernel))
    expected = [x for x in expected if x is not None]
    for real, fake in zip((out, lse, carry, *gradients), expected, strict=True):
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())
    inputs = [x for x in given[:DIFFERENTIABLE] if x is not None]
    assert [x.dtype for x in gradients] == [x.dtype for x in inputs] == [dtype] * len(inputs)


def test_the_schema_lists_the_arguments_in_their_order():
    names = [argument.name for argument in torch.ops.cope_sweep.attention.default._schema.arguments]
    assert names == [*Arguments._fields, "kernel"]
    assert names == [*inspect.signature(Arguments).parameters, "kernel"]


def model(position, **fields):
    task = {"kind": "selective_copy", "tokens": 2, "vocabulary": 6, "blanks": 40, "dense_blanks": 1, "sparse_blanks": 4}
    size = {"layers": 1, "dim": 16, "heads": 2}
    built = Transformer(RunSpec.model_validate({"task": task, "model": {**size, "position": position, **fields}}))
    randomize(built.position.parameters(), 0.5)
    return built


def output_and_gradients(call, parameters):
    tokens = torch.randint(0, 6, (2, 42), generator=torch.Generator().manual_seed(2))
    torch.manual_seed(3)
    logits = call(tokens)
    gradients = torch.autograd.grad(logits.square().mean(), parameters, allow_unused=True)
    return [logits.detach(), *(x for x in gradients if x is not None)]


def assert_compiled_equals_eager(built, **options):
    """Without a graph break, forward and backward."""
    torch.compiler.reset()
    parameters = list(built.parameters())
    eager = output_and_gradients(built, parameters)
    compiled = output_and_gradients(torch.compile(built, fullgraph=True, **options), parameters)
    assert len(compiled) == len(eager) > 10
    for one, other in zip(compiled, eager, strict=True):
        torch.testing.assert_close(one, other)


POSITIONS = {
    "none": [],
    "absolute": ["absolute"],
    "cope": ["cope"],
    "cope, separate gates": [{"kind": "cope", "gate": "separate", "per_head": True}],
    "cope, value gates": [{"kind": "cope", "gate": "values", "p_max": "full"}],
    "cope and rope": ["cope", "rope"],
    "relative, capped": [{"kind": "relative", "positions": 5, "far": "last"}],
    "alibi": ["alibi"],
    "t5": ["t5"],
    "cope_mlp": [{"kind": "cope_mlp", "hidden": 5}],
    "cope_alibi and relative": [{"kind": "cope_alibi", "slopes": "learned"}, "relative"],
}


FEW = ("cope and rope",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "position",
    [
        pytest.param(position, id=name, marks=[] if name in FEW else pytest.mark.thorough)
        for name, position in POSITIONS.items()
    ],
)
def test_a_model_with_any_encoding_compiles_as_one_graph(position):
    assert_compiled_equals_eager(model(position), backend="aot_eager")


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_a_chosen_implementation_with_dropout_compiles_as_one_graph(implementation):
    """The compiled graph draws the same seeds of dropout from torch's generator, and computes the same masks."""
    with using(implementation):
        assert_compiled_equals_eager(model(["cope", "rope"], dropout=0.2, layers=2), backend="aot_eager")


# 15 s of an idle core, for the C++ compiler; a busy machine took 240 s.
@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_attention_compiles_with_inductor():
    case = Case((CoPE(p_max=5),), queries=40)
    tensors = {n: x.float().requires_grad_() for n, x in random_tensors(case, torch.float32).items()}
    inputs, positions = make_inputs(case, tensors)

    def loss(q, k):
        changed = replace(inputs, q_BHTK=q, rotated_q_BHTK=q, k_BHSK=k, rotated_k_BHSK=k)
        return attend(changed, positions, implementation="native").square().sum()

    given = tensors["q"], tensors["k"]
    eager, compiled = loss(*given), torch.compile(loss, fullgraph=True)(*given)
    torch.testing.assert_close(compiled, eager)
    for one, other in zip(torch.autograd.grad(compiled, given), torch.autograd.grad(eager, given), strict=True):
        torch.testing.assert_close(one, other)
