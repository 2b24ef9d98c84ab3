import pytest
import torch

from cope_sweep.optim import AdamW
from cope_sweep.tasks import IGNORED
from cope_sweep.train import Runtime, Trainer
from tests.helpers.tiny import tiny_run


def test_a_step_is_that_of_the_algorithm():
    """The first step of Loshchilov & Hutter's algorithm 2, by hand: m̂ = g, v̂ = g²."""
    run = tiny_run(**{"train.lr": 0.01, "train.weight_decay": 0.1, "train.clip": None})
    trainer, fresh = Trainer(run, Runtime()), Trainer(run, Runtime())
    trainer.train_step()
    batch = run.task.sequences("train", 0, 0, run.train.batch)
    logits = fresh.model(torch.from_numpy(batch.inputs_NT))
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(batch.targets_NT).flatten(), ignore_index=IGNORED
    )
    loss.backward()
    for name, before in fresh.model.named_parameters():
        decayed = before.dim() > 1
        expected = before * (1 - 0.01 * 0.1 * decayed) - 0.01 * before.grad / (before.grad.abs() + 1e-8)
        torch.testing.assert_close(trainer.model.get_parameter(name), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama", "post_norm"])
def test_weight_decay_applies_to_matrices_alone(family):
    """With a gradient of 0, a step multiplies the decayed parameters by 1 − lr·weight_decay."""
    run = tiny_run(
        **{"model.family": family, "model.position": ["cope", "absolute"], "model.tied": False},
        train={"steps": 1, "batch": 4, "lr": 0.1, "weight_decay": 0.5},
    )
    trainer = Trainer(run, Runtime())
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(2.0)
            parameter.grad = torch.zeros_like(parameter)
    for optimizer in trainer.optimizers:
        optimizer.step()
    matrices = (
        "qkv.weight",
        "out.weight",
        "up.weight",
        "down.weight",
        "gate.weight",
        "embedding.weight",
        "head.weight",
    )
    for name, parameter in trainer.model.named_parameters():
        decayed = name.endswith(matrices)
        assert parameter.mean().item() == pytest.approx(2 * (1 - 0.1 * 0.5) if decayed else 2.0), name


def test_its_state_has_the_declared_size():
    trainer = Trainer(tiny_run(), Runtime())
    trainer.train_step()
    (optimizer,) = trainer.optimizers
    for name, parameter in trainer.model.named_parameters():
        state = optimizer.state[parameter]
        size_bytes = sum(value.nbytes for key, value in state.items() if key != "step")
        assert size_bytes == AdamW().state_bytes(name, tuple(parameter.shape)) * parameter.numel()
