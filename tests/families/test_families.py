"""What every model family has to do, and what a family from outside the package can do."""

from typing import Literal

import pytest
import torch

from cope_sweep.config import parameter_count
from cope_sweep.families import FAMILIES, GPT2
from cope_sweep.model import Transformer
from cope_sweep.train import Runtime, Trainer
from tests.helpers.tiny import tiny_run

POSITIONS = [
    [],
    ["cope", "absolute"],
    [{"kind": "cope", "gate": "separate", "layers": [0], "per_head": True}, "rope", "t5"],
    [{"kind": "relative", "share_layers": True}],
    [{"kind": "cope_mlp", "share_layers": True}, {"kind": "cope_alibi", "slopes": "learned"}],
]


def run_of(family, **overrides):
    return tiny_run(**{"model.family": family, "model.layers": 2} | overrides)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("position", POSITIONS, ids=str)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ffn_dim", [None, 20])
def test_the_declared_parameters_are_those_of_the_model(family, position, tied, ffn_dim):
    run = run_of(family, **{"model.position": position, "model.tied": tied, "model.ffn_dim": ffn_dim})
    model = Transformer(run)
    assert parameter_count(run) == sum(parameter.numel() for parameter in model.parameters())
    sizes, shapes = run.sizes, {name: tuple(value.shape) for name, value in model.named_parameters()}
    declared = run.model.family.input_parameters(sizes) | run.model.family.output_parameters(sizes)
    for layer in range(run.model.layers):
        declared |= {f"blocks.{layer}.{name}": each for name, each in run.model.family.block_parameters(sizes).items()}
    assert {name: each.shape for name, each in declared.items()} == {
        name: shape for name, shape in shapes.items() if not name.startswith("position.")
    }
    assert ("head.weight" in shapes) != tied


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_parameter_receives_a_gradient(family):
    model = Transformer(run_of(family, **{"model.tied": False, "model.position": ["absolute"]}))
    model(torch.randint(0, 6, (2, 5))).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("family", list(FAMILIES))
def test_dropout_applies_in_training_alone_and_to_both_branches(family):
    """With dropout near 1, both branches vanish in training: a block returns its input, normalised if it is post-norm."""
    model = Transformer(run_of(family, **{"model.dropout": 0.999999}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(20)  # so that the branches are not near 0 by themselves
    torch.manual_seed(0)
    block, x = model.blocks[0], torch.randn(1, 5, 8)
    evaluated = block.eval()(x, [])
    assert torch.equal(block(x, []), evaluated)
    trained = block.train()(x, [], seeds_B=torch.tensor([7]))
    expected = torch.nn.functional.layer_norm(x, (8,)) if family == "post_norm" else x
    torch.testing.assert_close(trained, expected, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(evaluated, expected, rtol=1e-3, atol=1e-3)


class WideGPT2(GPT2):
    """A family from outside the package: GPT-2 with another default width and an option."""

    kind: Literal["wide_gpt2"] = "wide_gpt2"
    factor: int = 6

    def default_feed_forward_dim(self, dim):
        return self.factor * dim


def wide_run(**options):
    base = tiny_run()
    return base.model_copy(update={"model": base.model.model_copy(update={"family": WideGPT2(**options)})})


def test_a_family_from_outside_the_package():
    run, wider = wide_run(), wide_run(factor=8)
    assert run.model.feed_forward_dim == 48
    assert parameter_count(run) == sum(parameter.numel() for parameter in Transformer(run).parameters())
    assert run.model_dump(mode="json")["model"]["family"] == "wide_gpt2"
    # The module distinguishes it from families of the same name.
    assert run.identity["spec"]["model"]["family"] == f"{__name__}.wide_gpt2"
    assert wider.identity["spec"]["model"]["family"] == {"kind": f"{__name__}.wide_gpt2", "factor": 8}
    assert wide_run(factor=6).run_id == run.run_id != wider.run_id
    trainer = Trainer(wider, Runtime())
    trainer.train_step()
    assert trainer.mean_loss() > 0
