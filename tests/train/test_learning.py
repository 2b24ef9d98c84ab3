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
    "grid_navigation": {
        "steps": 12,
        "width": 3,
        "objects": 3,
        "p_empty": 0.0,
        "max_run": 2,
        "dense_steps": 8,
        "dense_width": 3,
        "sparse_steps": 8,
        "sparse_width": 3,
    },
    "word_problem": {"group": "S2", "elements": 6, "longer_elements": 8},
    "dyck": {"brackets": 8, "longer_brackets": 10, "depth": 2, "deeper_depth": 3},
    "indirect_indexing": {"min_letters": 3, "max_letters": 3, "longer_letters": 4, "max_shift": 1, "farther_shift": 2},
    "forgetting_mqar": {"vocabulary": 10, "tokens": 14, "pairs": 2, "updates": 1, "more_updates": 2},
}
BINDING = ("indirect_indexing", "forgetting_mqar")
"""Tasks of which a token alone tells little: a short convolution binds it to the ones before."""
RECIPES = {"last_sentence": (64, 1e-3, 64), "indirect_indexing": (128, 6e-3, 32)}
"""Batch, learning rate and width, where they are not 32, 3e-3 and 32."""


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "flip_flop" else pytest.param(kind, marks=pytest.mark.thorough) for kind in GENERATED],
)
def test_a_tiny_model_learns(kind):
    batch, lr, dim = RECIPES.get(kind, (32, 3e-3, 32))
    position = ["cope", *(["short_convolution"] if kind in BINDING else [])]
    run = tiny_run(
        task={"kind": kind} | GENERATED[kind],
        model={"layers": 2, "dim": dim, "heads": 2, "position": position},
        train={"steps": 400, "batch": batch, "lr": lr, "schedule": "linear"},
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
