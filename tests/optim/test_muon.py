import math

import pytest
import torch
from pydantic import ValidationError

from cope_sweep.optim import Muon
from cope_sweep.plan.estimate import memory_bytes, parameter_count
from cope_sweep.spec import Resources
from cope_sweep.train import Runtime, Trainer
from tests.tiny import tiny_run

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
def test_an_update_is_nearly_orthogonal(scale, factor):
    """In the first step, the update is the orthogonalised gradient, whose singular values are near 1 (0.5 … 1.5)."""
    trainer = trainer_of(
        **{
            "train.optimizer": {"kind": "muon", "scale": scale},
            "train.lr": 0.1,
            "train.weight_decay": 0,
            "train.batch": 64,
        }
    )
    weight = trainer.model.blocks[0].feed_forward.up.weight  # 32 × 8
    before = weight.detach().clone()
    trainer.train_step()
    singular_values = torch.linalg.svdvals((weight.detach() - before) / 0.1 / factor)
    # Newton–Schulz raises tiny singular values only partly; a random gradient's are not tiny.
    assert singular_values.max() < 1.5
    assert singular_values.median() > 0.5


def test_muon_has_a_learning_rate_of_its_own_and_follows_the_schedule():
    trainer = trainer_of(
        **{"train.optimizer": {"kind": "muon", "lr": 0.02}, "train.lr": 0.001, "train.schedule": "linear"}
    )
    for _ in range(4):
        trainer.train_step()
    rates = [{group["lr"] for group in optimizer.param_groups} for optimizer in trainer.optimizers]
    assert rates == [{pytest.approx(0.02 / 2)}, {pytest.approx(0.001 / 2)}]
    shared = trainer_of(**{"train.lr": 0.003})
    shared.train_step()
    assert {group["lr"] for optimizer in shared.optimizers for group in optimizer.param_groups} == {0.003}


def test_weight_decay_applies_to_matrices_alone():
    trainer = trainer_of(train={"steps": 1, "batch": 4, "lr": 0.1, "weight_decay": 0.5, "optimizer": "muon"})
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(2.0)
            parameter.grad = torch.zeros_like(parameter)
    for optimizer in trainer.optimizers:
        optimizer.step()
    for name, parameter in trainer.model.named_parameters():
        expected = 2 * (1 - 0.1 * 0.5) if parameter.dim() > 1 else 2.0
        assert parameter.mean().item() == pytest.approx(expected), name


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


def test_it_learns():
    run = {"train.steps": 150, "train.batch": 32, "model.dim": 32, "model.position": ["cope"], "train.lr": 3e-3}
    trainer = trainer_of(**run)
    trainer.train_step()
    first = trainer.mean_loss()
    while not trainer.done:
        trainer.train_step()
    trainer.losses = trainer.losses[-20:]
    assert trainer.mean_loss() < 0.7 * first


@pytest.mark.parametrize("options", [{"momentum": 1.0}, {"lr": 0}, {"iterations": 0}, {"scale": "none"}, {"betas": 1}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ValidationError):
        tiny_run(**{"train.optimizer": {"kind": "muon"} | options})


def test_options_are_part_of_the_identity():
    plain, own = tiny_run(**MUON), tiny_run(**{"train.optimizer": {"kind": "muon", "momentum": 0.9}})
    assert plain.identity["spec"]["train"]["optimizer"] == "muon"
    assert own.identity["spec"]["train"]["optimizer"] == {"kind": "muon", "momentum": 0.9}
    assert len({tiny_run().run_id, plain.run_id, own.run_id}) == 3
    assert tiny_run(**{"train.optimizer": {"kind": "muon", "momentum": 0.95}}).run_id == plain.run_id
