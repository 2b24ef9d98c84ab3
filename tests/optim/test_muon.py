import math

import pytest
import torch

from cope_sweep.config import Resources
from cope_sweep.config.estimate import memory_bytes, parameter_count
from cope_sweep.optim.muon import Muon
from cope_sweep.train import Runtime, Trainer
from tests.helpers.tiny import tiny_run

MUON = {"train.optimizer": "muon"}


def trainer_of(**overrides):
    return Trainer(tiny_run(**MUON | overrides), Runtime())


@pytest.mark.parametrize("family", ["gpt2", "llama", "post_norm"])
def test_muon_updates_the_matrices_of_the_blocks_and_adamw_the_rest(family):
    trainer = trainer_of(**{"model.family": family, "model.position": ["cope", "absolute"], "model.tied": False})
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    muon, adamw = (
        {names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]}
        for optimizer in trainer.optimizers
    )
    matrices = {"attention.qkv", "attention.out", "feed_forward.up", "feed_forward.down"}
    if family == "llama":
        matrices.add("feed_forward.gate")
    assert muon == {f"blocks.0.{name}.weight" for name in matrices}
    assert muon | adamw == set(names.values())
    assert not muon & adamw


@pytest.mark.parametrize(("scale", "factor"), [("match_adamw", 0.2 * math.sqrt(32)), ("original", 2.0)])
def test_the_first_update_is_the_orthogonalised_gradient(scale, factor):
    """Newton–Schulz maps the singular values of the normalised gradient by a polynomial, five times."""
    options = {"kind": "muon", "scale": scale}
    trainer = trainer_of(**{"train.optimizer": options, "train.lr": 0.1, "train.weight_decay": 0})
    weight = trainer.model.blocks[0].feed_forward.up.weight  # 32 × 8
    before = weight.detach().clone()
    # A random matrix is well conditioned, unlike a gradient, whose small singular values are lost in bfloat16.
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    trainer.optimizers[0].step()
    u, s, v = torch.linalg.svd(weight.grad, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    # Five iterations in bfloat16, each of which rounds values near 1 to 2⁻⁸ several times.
    torch.testing.assert_close((before - weight.detach()) / 0.1 / factor, u @ s.diag() @ v, rtol=0, atol=0.05)


def test_muon_has_a_learning_rate_of_its_own_and_follows_the_schedule():
    trainer = trainer_of(
        **{"train.optimizer": {"kind": "muon", "lr": 0.02}, "train.lr": 0.001, "train.schedule": "linear"}
    )
    for _ in range(4):
        trainer.train_step()
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    assert rates == pytest.approx([0.02 / 2, 0.001 / 2, 0.001 / 2])
    shared = trainer_of(**{"train.lr": 0.003})
    shared.train_step()
    assert {group["lr"] for optimizer in shared.optimizers for group in optimizer.param_groups} == {0.003}


def test_its_state_has_the_declared_size_and_the_estimate_counts_it():
    trainer = trainer_of()
    trainer.train_step()
    states = {parameter: state for optimizer in trainer.optimizers for parameter, state in optimizer.state.items()}
    total = 0
    for name, parameter in trainer.model.named_parameters():
        size_bytes = sum(value.nbytes for key, value in states[parameter].items() if key != "step")
        assert size_bytes == Muon().state_bytes(name, tuple(parameter.shape)) * parameter.numel()
        total += size_bytes
    saved = memory_bytes(tiny_run(), Resources()) - memory_bytes(tiny_run(**MUON), Resources())
    assert saved == 8 * parameter_count(tiny_run()) - total > 0
