import math

import pytest
import torch

from cope_sweep.spec import TrainSpec
from cope_sweep.tasks import IGNORED
from cope_sweep.train import Execution, Trainer
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
    trainer, fresh = Trainer(run, Execution()), Trainer(run, Execution())
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
    trainer = Trainer(tiny_run(**{"model.position": ["cope", "absolute"]}), Execution())
    decayed, exempt = (group["params"] for group in trainer.optimizer.param_groups)
    positional = {id(p) for p in trainer.model.position.parameters()}
    assert positional <= {id(p) for p in exempt}
    assert all(p.dim() > 1 for p in decayed)
    assert len(decayed) + len(exempt) == len(list(trainer.model.parameters()))


def test_clipping_bounds_the_gradient():
    run = tiny_run(**{"train.clip": 1e-3})
    trainer = Trainer(run, Execution())
    trainer.train_step()
    norm = torch.stack([p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)


def test_evaluation_counts_wrong_answers_and_spoiled_sequences():
    trainer = Trainer(tiny_run(), Execution())
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
    a = Trainer(run, Execution()).evaluate(10)
    b = Trainer(run.model_copy(update={"train": run.train.model_copy(update={"batch": 7})}), Execution()).evaluate(10)
    assert a == pytest.approx(b)  # nor on how they are batched


@pytest.mark.parametrize(
    ("task", "position", "bound"),
    [
        ({"kind": "selective_copy", "tokens": 3, "blanks": 3, "dense_blanks": 2, "sparse_blanks": 5}, ["cope"], 5.0),
        ({"kind": "flip_flop", "pairs": 6}, ["cope"], 5.0),
    ],
    ids=["selective_copy", "flip_flop"],
)
def test_a_small_model_learns_far_beyond_chance(task, position, bound):
    """Chance is 93 % wrong for the copy, 50 % for the flip-flop."""
    run = tiny_run(
        task=task,
        model={"layers": 2, "dim": 32, "heads": 2, "position": position},
        train={"steps": 400, "batch": 32, "lr": 3e-3},
    )
    trainer = Trainer(run, Execution(threads=1))
    while not trainer.done:
        trainer.train_step()
    assert trainer.evaluate(256)["in_dist/token_error"] < bound
