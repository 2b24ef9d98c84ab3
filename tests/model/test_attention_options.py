"""`model.output_gate` and `model.qk_norm`, in every family."""

from pathlib import Path

import pytest
import torch

from cope_sweep.config import parameter_count
from cope_sweep.families import FAMILIES
from cope_sweep.kernels import observing
from cope_sweep.model import Transformer, load_model, save_model
from cope_sweep.model.attention import self_attention
from cope_sweep.model.packing import Packing
from tests.helpers.tiny import tiny_run
from tests.helpers.tiny_models import randomize

OPTIONS = [
    {"output_gate": "channel"},
    {"output_gate": "head"},
    {"qk_norm": True},
    {"output_gate": "channel", "qk_norm": True},
]
EXTRA = [8 * 8, 2 * 8, 2 * 4, 8 * 8 + 2 * 4]
"""Parameters of a layer of 8 with 2 heads."""


def run_of(options, family="gpt2", **overrides):
    fields = {f"model.{name}": value for name, value in options.items()}
    return tiny_run(**{"model.family": family, "model.layers": 2} | fields | overrides)


def random_model(run):
    """With random weights everywhere: at its start, gates are near ½ and gains 1."""
    model = Transformer(run).double().eval()
    randomize(model.parameters(), 1)
    return model


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize(("options", "extra"), list(zip(OPTIONS, EXTRA, strict=True)), ids=str)
def test_parameters(family, options, extra):
    run, plain = run_of(options, family), run_of({}, family)
    assert parameter_count(run) == parameter_count(plain) + 2 * extra
    assert parameter_count(run) == sum(parameter.numel() for parameter in Transformer(run).parameters())
    assert run.run_id != plain.run_id


def test_options_at_their_defaults_are_not_part_of_a_run():
    assert run_of({"output_gate": None, "qk_norm": False}).run_id == run_of({}).run_id


@pytest.mark.parametrize("family", list(FAMILIES))
def test_all_other_weights_start_as_without_the_options(family):
    fields = {"model.position": ["cope", "fox"]}
    plain = Transformer(run_of({}, family, **fields)).state_dict()
    model = Transformer(run_of(OPTIONS[-1], family, **fields)).state_dict()
    for name, value in plain.items():
        assert torch.equal(model[name], value), name


def test_gates_start_as_the_other_linear_layers_of_the_family_and_gains_with_1():
    sizes = {"model.dim": 128}
    gates = {
        family: Transformer(run_of(OPTIONS[-1], family, **sizes)).blocks[0].attention.gate.weight
        for family in FAMILIES
    }  # fmt: skip
    assert gates["gpt2"].std().item() == pytest.approx(0.02, rel=0.05)
    assert gates["llama"].std().item() == pytest.approx(0.02, rel=0.05)
    assert gates["post_norm"].abs().max().item() == pytest.approx(128**-0.5, rel=0.01)
    attention = Transformer(run_of({"qk_norm": True})).blocks[0].attention
    assert attention.query_norm.weight.tolist() == attention.key_norm.weight.tolist() == [1] * 4


@pytest.mark.parametrize("rows", [8, 2])
def test_the_output_is_multiplied_by_gates_of_the_input(rows):
    rng = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in [(2, 5, 8), (rows, 8)])
    parameters = {
        "attention.qkv.weight": torch.randn(24, 8, generator=rng, dtype=torch.float64),
        "attention.out.weight": torch.eye(8, dtype=torch.float64),
    }
    plain = self_attention(parameters, x, [], heads=2)
    gated = self_attention(parameters | {"attention.gate.weight": gate}, x, [], heads=2)
    for b in range(2):
        for t in range(5):
            for n in range(8):
                row = n if rows == 8 else n // 4
                expected = plain[b, t, n] / (1 + torch.exp(-(gate[row] @ x[b, t])))
                assert gated[b, t, n].item() == pytest.approx(expected.item())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_encodings_and_attention_get_normed_queries_and_keys(dtype):
    """Before the rotation, as CoPE's gates read them."""
    model = random_model(run_of({"qk_norm": True}, **{"model.position": ["cope", "rope"]})).to(dtype)
    seen = []
    with observing(lambda inputs, positions: seen.append(inputs)):
        model(torch.randint(0, 6, (2, 5)))
    for inputs, block in zip(seen, model.blocks, strict=True):
        for x, norm in ((inputs.q_BHTK, block.attention.query_norm), (inputs.k_BHSK, block.attention.key_norm)):
            assert x.dtype == dtype
            squares = (x.double() / norm.weight.double()).square().mean(-1)
            assert (squares - 1).abs().max() < (1e-3 if dtype == torch.float64 else 0.05)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_decoding_packing_and_checkpoints(family, options, tmp_path: Path):
    run = run_of(options, family, **{"model.position": ["rope", "cope"], "model.tied": False})
    model, tokens = random_model(run), torch.randint(0, 6, (2, 7))
    full = model(tokens)
    full.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    cache = [{} for _ in model.blocks]
    steps = [model(tokens[:, :3], cache), *(model(tokens[:, t : t + 1], cache) for t in range(3, 7))]
    torch.testing.assert_close(torch.cat(steps, dim=1), full)
    packed = model.logits(model.hidden(tokens, packing=Packing([7, 4])))
    torch.testing.assert_close(packed[0, :7], full[0])
    torch.testing.assert_close(packed[0, 7:], full[1, :4])
    save_model(tmp_path, model.float(), run)
    loaded, loaded_run = load_model(tmp_path)
    assert loaded_run == run
    assert torch.equal(loaded(tokens), model(tokens))


def test_gradients_agree_with_finite_differences():
    rng = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64, requires_grad=True)

    names = ("qkv.weight", "out.weight", "gate.weight", "query_norm.weight", "key_norm.weight")
    given = random(1, 3, 4), random(12, 4), random(4, 4), random(2, 4), random(2), random(2)

    def attention(x, *parameters):
        named = {f"attention.{name}": value for name, value in zip(names, parameters, strict=True)}
        return self_attention(named, x, [], heads=2)

    assert torch.autograd.gradcheck(attention, given)
