"""A tiny model learns each generated task in seconds, far better than always giving the most frequent answer."""

import pytest

from cope_sweep.tasks import TASKS
from cope_sweep.train import Runtime, Trainer
from tests.helpers.tiny import tiny_run

pytestmark = pytest.mark.slow

GENERATED = {
    "flip_flop": {"pairs": 6},
    "selective_copy": {"tokens": 3, "blanks": 3, "dense_blanks": 2, "sparse_blanks": 5},
    "counting": {
        "operations": 10,
        "maximum": 3,
        "increment_weight": 2.0,
        "pass_weight": 2.0,
        "max_tokens": 24,
        "train_sequences": 2000,
    },
    "last_sentence": {"maximum": 1, "fewest_words": 1, "most_words": 3, "vocabulary": 9},
    "mqar": {"vocabulary": 6, "tokens": 8, "pairs": 2, "more_pairs": 1},
    "mqrar": {"vocabulary": 16, "tokens": 16, "variables": 1, "more_variables": 1, "n_back": 2},
}


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "flip_flop" else pytest.param(kind, marks=pytest.mark.thorough) for kind in GENERATED],
)
def test_a_tiny_model_learns(kind):
    steps, batch, lr, dim = (400, 64, 1e-3, 64) if kind == "last_sentence" else (400, 32, 3e-3, 32)
    run = tiny_run(
        task={"kind": kind} | GENERATED[kind],
        model={"layers": 2, "dim": dim, "heads": 2, "position": ["cope"]},
        train={"steps": steps, "batch": batch, "lr": lr, "schedule": "linear"},
    )
    trainer = Trainer(run, Runtime(threads=1))
    while not trainer.done:
        trainer.train_step()
    metrics = trainer.evaluate(512)
    trivial = majority_baseline_error(run.task.sequences("in_dist", 0, 0, 512))
    assert metrics.get("in_dist/majority_baseline_error", trivial) == pytest.approx(trivial)
    assert trivial > 45
    assert metrics["in_dist/token_error"] < trivial / 10


def majority_baseline_error(batch):
    answers = batch.targets_NT[batch.answers_NT].tolist()
    return 100 * (1 - max(map(answers.count, set(answers))) / len(answers))


def test_every_task_that_generates_is_listed():
    assert set(GENERATED) == {
        kind for kind, task in TASKS.items() if not task.NON_IDENTITY_FIELDS or kind == "last_sentence"
    }
