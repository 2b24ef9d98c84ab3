"""`train.position_lr`: the learning rate of the encodings' parameters."""

import pytest
import torch

from cope_sweep.train import Runtime, Trainer
from cope_sweep.train.resume import load_state, snapshot_state, write_state
from tests.helpers.errors import raises
from tests.helpers.tiny import tiny_run

POSITION = [{"kind": "cope", "p_max": 8, "std": 0.5, "gate_bias": -1.0, "gate_bias_learned": True}]
OPTIMIZERS = ["adamw", "muon"]


def trainer_of(**overrides):
    return Trainer(tiny_run(**{"model.position": POSITION} | overrides), Runtime())


def changes(trainer):
    """By how much a step changes each parameter."""
    before = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
    trainer.train_step()
    return {name: x.detach() - before[name] for name, x in trainer.model.named_parameters()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_position_parameters_have_a_factor_on_their_learning_rate(optimizer):
    common = {"train.optimizer": optimizer, "train.weight_decay": 0.0}
    plain, faster = (changes(trainer_of(**common, **more)) for more in ({}, {"train.position_lr": 8.0}))
    moved = [name for name in plain if name.startswith("position.")]
    assert {name.rpartition(".")[2] for name in moved} == {"e", "shift"}
    for name, change in plain.items():
        factor = 8 if name in moved else 1
        torch.testing.assert_close(faster[name], factor * change, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_parameter_is_updated_once_and_the_schedule_applies_to_all(optimizer):
    trainer = trainer_of(**{"train.optimizer": optimizer, "train.position_lr": 8.0, "train.schedule": "linear"})
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    ids = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(ids) == sorted(id(parameter) for parameter in trainer.model.parameters())
    trainer.train_step()
    trainer.train_step()
    full = trainer.spec.train.lr
    rate = trainer.spec.train.learning_rate(full, 2)
    assert rate < full
    positions = {id(parameter) for parameter in trainer.model.position.parameters()}
    for group in groups:
        for parameter in group["params"]:
            assert group["lr"] == pytest.approx(8 * rate if id(parameter) in positions else rate)


def test_a_constant_bias_is_not_updated():
    position = POSITION[0] | {"gate_bias_learned": False}
    trainer = trainer_of(**{"model.position": [position], "train.position_lr": 8.0})
    change = changes(trainer)
    assert all(not x.any() for name, x in change.items() if name.endswith("shift"))


def test_it_continues_to_the_bit(tmp_path):
    overrides = {"train.position_lr": 8.0}
    whole, first, second = (trainer_of(**overrides) for _ in range(3))
    for _ in range(4):
        whole.train_step()
    first.train_step()
    first.train_step()
    write_state(tmp_path / "state", snapshot_state(first, {}))
    load_state(tmp_path / "state", second)
    second.train_step()
    second.train_step()
    state = second.model.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in whole.model.state_dict().items())


def test_its_default_is_not_part_of_a_run_s_identity():
    default, set_to_default, other = (
        tiny_run(**{"model.position": POSITION} | more)
        for more in ({}, {"train.position_lr": 1.0}, {"train.position_lr": 2.0})
    )
    assert default.run_id == set_to_default.run_id != other.run_id
    assert default.train.learning_rates == {"train/lr": default.train.lr}
    assert other.train.learning_rates == {"train/lr": other.train.lr, "train/lr_positions": 2 * other.train.lr}


@pytest.mark.parametrize("position", [[], ["rope"], [{"kind": "cope_alibi", "gate_bias": -1.0}]])
def test_it_needs_parameters_to_act_on(position):
    with raises("invalid_value", key="train.position_lr"):
        tiny_run(**{"model.position": position, "train.position_lr": 2.0})
