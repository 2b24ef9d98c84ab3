import math

import pytest
import torch

from cope_sweep.spec import TrainSpec
from cope_sweep.tasks import IGNORED
from cope_sweep.train import Runtime, Trainer
from cope_sweep.train.trainer import learning_rate
from tests.tiny import tiny_run


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 1, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 + math.cos(3 * math.pi / 4)) / 2]),
    ],
)
def test_schedules(schedule, rates):
    spec = TrainSpec(steps=6, lr=1.0, warmup=2, schedule=schedule)
    assert [learning_rate(spec, step) for step in range(1, 7)] == pytest.approx(rates)


def test_a_step_is_adamw_s():
    """Against Loshchilov & Hutter's algorithm 2, by hand, in the first step: m̂ = g, v̂ = g²."""
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
        after = trainer.model.get_parameter(name)
        torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)


def test_position_parameters_are_not_decayed():
    trainer = Trainer(tiny_run(**{"model.position": ["cope", "absolute"]}), Runtime())
    decayed, exempt = (group["params"] for group in trainer.optimizer.param_groups)
    positional = {id(p) for p in trainer.model.position.parameters()}
    assert positional <= {id(p) for p in exempt}
    assert all(p.dim() > 1 for p in decayed)
    assert len(decayed) + len(exempt) == len(list(trainer.model.parameters()))


def test_clipping_bounds_the_gradient():
    run = tiny_run(**{"train.clip": 1e-3})
    trainer = Trainer(run, Runtime())
    trainer.train_step()
    norm = torch.stack([p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)


GPT2_LIKE = {
    "model.layers": 2,
    "model.position": [{"kind": "cope", "share_layers": True}, "absolute"],
    "train.batch": 7,
    "task.blanks": 30,
}


def gradients(run, runtime, steps=1):
    trainer = Trainer(run, runtime)
    for _ in range(steps):
        trainer.train_step()
    return trainer.mean_loss(), {name: p.grad for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 6, 7, 100])
def test_parts_of_a_batch_add_up_to_its_loss_and_gradient(micro_batch):
    """Flip-flops read different numbers of bits, so a mean of the parts' means would be another loss."""
    run = tiny_run(**GPT2_LIKE, **{"task": {"kind": "flip_flop", "pairs": 9}, "train.clip": None})
    loss, whole = gradients(run, Runtime())
    parts_loss, parts = gradients(run, Runtime(micro_batch=micro_batch))
    assert parts_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


def test_evaluation_in_parts_is_the_same():
    run = tiny_run(**GPT2_LIKE)
    assert Trainer(run, Runtime(micro_batch=2)).evaluate(20) == pytest.approx(Trainer(run, Runtime()).evaluate(20))


@pytest.mark.parametrize("family", ["gpt2", "llama", "post_norm"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_activations_computed_again_are_the_same_to_the_bit(family, dropout, micro_batch):
    run = tiny_run(**GPT2_LIKE, **{"model.family": family, "model.dropout": dropout})
    kept = gradients(run, Runtime(micro_batch=micro_batch), steps=3)
    again = gradients(run, Runtime(micro_batch=micro_batch, checkpoint_activations=True), steps=3)
    assert kept[0] == again[0]
    for name, gradient in kept[1].items():
        assert torch.equal(again[1][name], gradient), name


def test_activations_computed_again_are_not_kept():
    """What the graph of a forward pass holds on to, in bytes."""

    def kept(checkpoint_activations):
        run = tiny_run(**GPT2_LIKE | {"model.layers": 6})
        trainer = Trainer(run, Runtime(checkpoint_activations=checkpoint_activations))
        trainer.model.train()
        tokens = torch.from_numpy(run.task.sequences("train", 0, 0, 7).inputs_NT)
        sizes = {}

        def pack(tensor):
            sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logits = trainer.model(tokens)
        assert logits.grad_fn is not None
        return sum(sizes.values())

    assert kept(True) < kept(False) / 5


@pytest.mark.parametrize("position", [[], ["cope"], ["rope", "relative"], ["cope_mlp", "alibi"]])
def test_bf16_trains_like_fp32(position):
    """Autocast: weights and moments stay in float32, and the losses agree to bf16's three digits."""
    run = tiny_run(
        **{"model.position": position, "model.dim": 32, "train.steps": 40, "train.batch": 16, "task.blanks": 30}
    )
    losses = []
    for precision in ("fp32", "bf16"):
        trainer = Trainer(run, Runtime(precision=precision, micro_batch=9, checkpoint_activations=True))
        for _ in range(40):
            trainer.train_step()
        losses.append(trainer.mean_loss())
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("family", ["gpt2", "llama", "post_norm"])
def test_weight_decay_is_on_matrices_alone(family):
    """With no gradient to follow, a step of AdamW multiplies what decays by 1 − lr·weight_decay."""
    run = tiny_run(
        **{"model.family": family, "model.position": ["cope", "absolute"], "model.tied": False},
        train={"steps": 1, "batch": 4, "lr": 0.1, "weight_decay": 0.5},
    )
    trainer = Trainer(run, Runtime())
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(2.0)
            parameter.grad = torch.zeros_like(parameter)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.1
    trainer.optimizer.step()
    after = {name: parameter.mean().item() for name, parameter in trainer.model.named_parameters()}
    matrices = {
        "qkv.weight",
        "out.weight",
        "up.weight",
        "down.weight",
        "gate.weight",
        "embedding.weight",
        "head.weight",
    }
    for name, value in after.items():
        decays = any(name.endswith(matrix) for matrix in matrices)
        assert value == pytest.approx(2 * (1 - 0.1 * 0.5) if decays else 2.0), name


def test_evaluation_counts_wrong_answers_and_spoiled_sequences():
    trainer = Trainer(tiny_run(), Runtime())
    task = trainer.spec.task
    batch = task.sequences("in_dist", 0, 0, 8)
    predicted = trainer.model.eval()(torch.from_numpy(batch.inputs_NT)).argmax(-1).numpy()
    wrong = (predicted != batch.targets_NT) & batch.answers_NT
    metrics = trainer.evaluate(8)
    assert metrics["in_dist/token_error"] == pytest.approx(100 * wrong.sum() / batch.answers_NT.sum())
    assert metrics["in_dist/sequence_error"] == pytest.approx(100 * wrong.any(1).mean())
    assert set(metrics) == {f"{split}/{name}" for split in task.TESTS for name in task.METRICS}


def test_test_sets_do_not_depend_on_the_seed():
    run = tiny_run(**{"train.batch": 3})
    a = Trainer(run, Runtime()).evaluate(10)
    b = Trainer(run.model_copy(update={"train": run.train.model_copy(update={"batch": 7})}), Runtime()).evaluate(10)
    assert a == pytest.approx(b)  # nor on how they are batched
