import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.tasks import Counting, FlipFlop, LastSentence, SelectiveCopy

TASKS = [
    FlipFlop(pairs=6),
    SelectiveCopy(tokens=3, blanks=4, dense_blanks=1, sparse_blanks=9),
    Counting(operations=12, max_tokens=25, pass_weight=4, train_sequences=None),
    LastSentence(most_words=7, vocabulary=40),
]
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)


def same(a, b):
    arrays = all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("inputs_NT", "targets_NT", "answers_NT"))
    return arrays and {n: c.tolist() for n, c in a.units_N.items()} == {n: c.tolist() for n, c in b.units_N.items()}


@each_task
@given(start=st.integers(0, 300), count=st.integers(1, 200))
@settings(max_examples=25, deadline=None)
def test_any_range_is_a_part_of_the_whole(task, start, count):
    whole = task.sequences("train", 3, 0, start + count)
    assert same(task.sequences("train", 3, start, count), whole[slice(start, start + count)])


@each_task
def test_seeds_and_splits_differ(task):
    base = task.sequences("train", 0, 0, 64).inputs_NT
    assert not np.array_equal(base, task.sequences("train", 1, 0, 64).inputs_NT)
    assert not np.array_equal(base, task.sequences("in_dist", 0, 0, 64).inputs_NT)


@each_task
def test_no_two_splits_share_a_generator(task, monkeypatch):
    """What "splits never overlap" means of generated sequences: whatever the seeds, no draw of one serves another.

    Two independent draws can still come out equal, and do where a task's sequences are short enough.
    """
    drawn = []
    original = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda key: drawn.append(tuple(key)) or original(key))
    splits = ("train", *task.TESTS)
    for split in splits:
        for seed in (101, 102):
            task.sequences(split, seed, 0, 4096)
    assert len(drawn) == len(set(drawn))
    assert len({(seed, key) for seed, key, _ in drawn}) == 2 * len(splits)


@pytest.mark.parametrize("task", [FlipFlop(), SelectiveCopy(), LastSentence()], ids=lambda task: task.kind)
def test_at_the_papers_size_no_sequence_comes_twice(task):
    seen = [row.tobytes() for split in ("train", *task.TESTS) for row in task.sequences(split, 0, 0, 1000).inputs_NT]
    assert len(set(seen)) == len(seen)


def test_at_the_papers_size_counting_repeats_its_short_sequences_only():
    """One in 170 has three operations, which are often `pass; pass; a = 0 ;`: so it is with the released generator."""
    task = Counting()
    trained = {row.tobytes() for row in task.sequences("train", 0, 0, 10_000).inputs_NT}
    assert len(trained) > 9900
    for split in task.TESTS:
        batch = task.sequences(split, 0, 0, 1024)
        again = [len(trained & {row.tobytes()}) for row in batch.inputs_NT]
        assert sum(again) < 10
        assert not np.array(again)[batch.answers_NT.argmax(1) > 100].any()


@each_task
def test_shapes_and_types(task):
    for split in ("train", *task.TESTS):
        batch = task.sequences(split, 0, 0, 5)
        for array in (batch.inputs_NT, batch.targets_NT, batch.answers_NT):
            assert array.shape == (5, task.length(split))
        assert batch.inputs_NT.dtype == batch.targets_NT.dtype == np.int64
        assert batch.inputs_NT.min() >= 0
        assert batch.inputs_NT.max() < task.vocabulary_size
        assert (batch.targets_NT[batch.answers_NT] >= 0).all()
        assert batch.targets_NT.max() < task.vocabulary_size


@each_task
def test_marks_are_of_the_tokens_shape_and_tell_them_apart(task):
    tokens = task.sequences("train", 0, 0, 20).inputs_NT
    marks = list(task.marks(tokens).values())
    assert marks
    assert all(mark.shape == tokens.shape and mark.dtype == bool and mark.any() for mark in marks)
    assert np.sum(marks, axis=0).max() == 1


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match=r"unknown split 'valid'; this task has train, in_dist"):
        TASKS[0].sequences("valid", 0, 0, 1)


@pytest.mark.parametrize(
    ("task", "digest"),
    [
        (TASKS[0], "ac7b75efebf6d765"),
        (TASKS[1], "5eeecfe73d8ad7e2"),
        (TASKS[2], "6e2d89f5f1b107e4"),
        (TASKS[3], "52f5e37fd68f055a"),
        (Counting(operations=12, max_tokens=25, variables=3, train_sequences=70), "3383d0cd0cf1c928"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_the_same_bytes_on_every_machine(task, digest):
    """A change here changes every published number: bump the task's VERSION."""
    inputs = task.sequences("train", 0, 0, 100).inputs_NT.astype("<i8")
    assert hashlib.sha256(inputs.tobytes()).hexdigest()[:16] == digest
