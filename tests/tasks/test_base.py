import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.tasks import FlipFlop, SelectiveCopy

TASKS = [FlipFlop(pairs=6), SelectiveCopy(tokens=3, blanks=4, dense_blanks=1, sparse_blanks=9)]
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)


def same(a, b):
    return all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("inputs_NT", "targets_NT", "answers_NT"))


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
@pytest.mark.parametrize("split", ["train", "in_dist", "dense", "sparse"])
def test_shapes_and_types(task, split):
    batch = task.sequences(split, 0, 0, 5)
    for array in (batch.inputs_NT, batch.targets_NT, batch.answers_NT):
        assert array.shape == (5, task.length(split))
    assert batch.inputs_NT.dtype == batch.targets_NT.dtype == np.int64
    assert batch.inputs_NT.min() >= 0
    assert batch.inputs_NT.max() < task.vocabulary_size
    assert (batch.targets_NT[batch.answers_NT] >= 0).all()


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match=r"unknown split 'valid'; this task has train, in_dist"):
        TASKS[0].sequences("valid", 0, 0, 1)


@pytest.mark.parametrize(
    ("task", "digest"),
    [(TASKS[0], "ac7b75efebf6d765"), (TASKS[1], "5eeecfe73d8ad7e2")],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_the_same_bytes_on_every_machine(task, digest):
    """A change here changes every published number: bump the task's VERSION."""
    inputs = task.sequences("train", 0, 0, 100).inputs_NT.astype("<i8")
    assert hashlib.sha256(inputs.tobytes()).hexdigest()[:16] == digest
