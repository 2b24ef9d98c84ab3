"""All generated tasks: ranges, generators per split, repeated sequences, and the exact bytes."""

import hashlib

import numpy as np
import pytest

from cope_sweep.tasks import (
    MQAR,
    MQRAR,
    Counting,
    Dyck,
    FlipFlop,
    ForgettingMQAR,
    GridNavigation,
    IndirectIndexing,
    LastSentence,
    SelectiveCopy,
    WikiText,
    WordProblem,
)
from tests.helpers.errors import raises

TASKS = [
    FlipFlop(pairs=6),
    SelectiveCopy(tokens=3, blanks=4, dense_blanks=1, sparse_blanks=9),
    Counting(operations=12, max_tokens=25, pass_weight=4, train_sequences=None),
    LastSentence(most_words=7, vocabulary=40),
    MQAR(vocabulary=200, tokens=24, more_pairs=5),
    MQRAR(vocabulary=60, tokens=20, variables=2, more_variables=4, n_back=2),
    GridNavigation(dimensions=2, steps=20, dense_steps=10, sparse_steps=30),
    WordProblem(group="A4", elements=8, longer_elements=12),
    Dyck(brackets=12, longer_brackets=20, depth=3, deeper_depth=5),
    IndirectIndexing(min_letters=8, max_letters=10, longer_letters=12, max_shift=3, farther_shift=5),
    ForgettingMQAR(vocabulary=60, tokens=32, pairs=4, updates=2, more_updates=3, more_rounds=2),
]
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)


@each_task
def test_no_two_splits_share_a_generator(task, monkeypatch):
    """Splits of generated sequences are independent: no random generator is used for two splits, seeds or blocks.

    Two independent sequences can still be equal, and are if they are short enough.
    """
    keys = []
    original = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda key: keys.append(tuple(key)) or original(key))
    splits = ("train", *task.TESTS)
    for split in splits:
        for seed in (101, 102):
            task.sequences(split, seed, 0, 4096)
    assert len(keys) == len(set(keys))
    assert len({(seed, key) for seed, key, _ in keys}) == 2 * len(splits)


@each_task
def test_a_token_has_at_most_one_mark(task):
    tokens = task.sequences("train", 0, 0, 20).inputs_NT
    marks = list(task.marks(tokens).values())
    assert marks
    assert np.sum(marks, axis=0).max() == 1


def test_generate_of_a_task_that_reads_a_text_is_an_error():
    with pytest.raises(NotImplementedError):
        WikiText().generate("train", np.random.default_rng(0), 1)


def test_generated_tasks_have_no_text():
    task = FlipFlop()
    assert not task.has_windows
    assert task.fingerprint() is None
    assert task.tokenizer_json is None
    with raises("no_text", task="flip_flop"):
        task.windows("in_dist", 16, 16)


@pytest.mark.parametrize(
    ("task", "digest"),
    [
        (TASKS[0], "ac7b75efebf6d765"),
        (TASKS[1], "5eeecfe73d8ad7e2"),
        (TASKS[2], "6e2d89f5f1b107e4"),
        (TASKS[3], "52f5e37fd68f055a"),
        (TASKS[4], "7a328ab84fc762f3"),
        (TASKS[5], "4d35fcf6a79cdd2a"),
        (TASKS[6], "695ba982989650f6"),
        (TASKS[7], "f78ee4d3c5fde7da"),
        (TASKS[8], "31f91d2233ea70e0"),
        (TASKS[9], "81d6befb226199b6"),
        (TASKS[10], "c8294cbe98e0aed6"),
        (Counting(operations=12, max_tokens=25, variables=3, train_sequences=70), "3383d0cd0cf1c928"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_the_same_bytes_on_every_machine(task, digest):
    """If these change, so does every published number: then increase the VERSION of the task."""
    inputs = task.sequences("train", 0, 0, 100).inputs_NT.astype("<i8")
    assert hashlib.sha256(inputs.tobytes()).hexdigest()[:16] == digest
