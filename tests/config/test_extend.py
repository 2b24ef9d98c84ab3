import pytest
import torch

from cope_sweep.config.run import parent_ids
from cope_sweep.optim import SCHEDULES
from cope_sweep.train.runtime import Runtime
from cope_sweep.train.trainer import Trainer
from tests.tiny import tiny_run

LONG, SHORT = tiny_run(**{"train.steps": 12}), tiny_run()


def continues(run, shorter):
    """Whether `shorter` is among the parents of `run`, by the steps that it has."""
    return shorter.run_id in parent_ids(run, [shorter.train.steps])


def test_a_run_with_more_steps_continues_the_shorter_one():
    assert continues(LONG, SHORT)
    assert not continues(SHORT, LONG)
    assert not continues(SHORT, SHORT)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 1),
        ("train.lr", 2e-3),
        ("train.batch", 8),
        ("train.warmup", 2),
        ("model.position", ["cope"]),
        ("task.blanks", 3),
        ("evaluate.every", 2),
        ("evaluate.final_sequences", 16),
    ],
)
def test_every_other_difference_makes_another_run(key, value):
    assert not continues(LONG, tiny_run(**{key: value}))
    assert continues(tiny_run(**{key: value, "train.steps": 12}), tiny_run(**{key: value}))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_only_a_constant_learning_rate_does_not_depend_on_the_steps(schedule):
    long, short = tiny_run(**{"train.steps": 12, "train.schedule": schedule}), tiny_run(**{"train.schedule": schedule})
    steps = range(1, short.train.steps + 1)
    same = all(long.train.learning_rate(1.0, step) == short.train.learning_rate(1.0, step) for step in steps)
    assert continues(long, short) == same == (schedule == "constant")
    assert bool(parent_ids(long, [6])) == same


def test_parents_are_found_by_their_ids():
    ids = parent_ids(LONG, [6, 12, 100, 3, 6, 11])
    assert list(ids.values()) == [11, 6, 3]
    assert ids[SHORT.run_id] == 6


def test_a_parent_has_finished_the_warm_up():
    long = tiny_run(**{"train.steps": 12, "train.warmup": 5})
    assert list(parent_ids(long, [4, 5, 6]).values()) == [6, 5]


def test_files_are_no_part_of_what_has_to_agree():
    text = {"kind": "code", "tokens": 8, "vocabulary": 300, "corpus": "mine"}
    long = tiny_run(**{"task": text | {"folder": "/data"}, "train.steps": 12})
    assert continues(long, tiny_run(task=text | {"folder": "/elsewhere"}))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_state_after_the_same_steps_is_the_same_to_the_bit(optimizer):
    """What the continuation of a shorter run rests on."""
    states = []
    for run in (LONG, SHORT):
        options = {"train.optimizer": optimizer, "train.warmup": 2, "model.dropout": 0.1, "model.position": ["cope"]}
        trainer = Trainer(tiny_run(**options | {"train.steps": run.train.steps}), Runtime())
        for step in range(SHORT.train.steps):
            trainer.train_step()
            if step == 3:
                trainer.evaluate(8)
        states.append(
            (trainer.model.state_dict(), [each.state_dict()["state"] for each in trainer.optimizers], trainer.losses)
        )
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
