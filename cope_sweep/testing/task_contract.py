"""The contract of tasks: tests that every task has to pass.

Shapes: N sequences, T tokens.
"""

# ruff: noqa: S101 - test suites assert

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from cope_sweep.config import RunSpec
from cope_sweep.registry import Kind
from cope_sweep.tasks import IGNORED, Batch, GeneratedTask, Task
from cope_sweep.train import Runtime, Trainer

COUNT = 80
"""Sequences per comparison: more than one block (`tasks.base.BLOCK`), so that ranges cross its edges."""


class TaskContract:
    """Tests of tasks. Subclasses set `specs`."""

    specs: ClassVar[Sequence[Any]] = ()
    """The tasks under test, small ones. Each item is a spec, or a function that returns one.

    A function receives an empty folder, in which it can write the data that the task reads.
    """

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test that takes a `task` once per item of `specs`."""
        if "task" in metafunc.fixturenames:
            metafunc.parametrize("task", self.specs, indirect=True, ids=[_name(spec) for spec in self.specs])

    @pytest.fixture
    def task(self, request: pytest.FixtureRequest, tmp_path: Path) -> Task:
        """The task under test."""
        spec: Task | Callable[[Path], Task] = request.param
        return spec if isinstance(spec, Task) else spec(tmp_path)

    # -- sequences

    def test_any_range_is_a_slice_of_the_whole(self, task: Task) -> None:
        for split in task.splits:
            whole = task.sequences(split, 3, 0, COUNT)
            size = len(whole)
            for start, stop in ((0, 1), (1, min(30, size)), (min(30, size - 1), size), (size - 1, size)):
                assert _equal(task.sequences(split, 3, start, stop - start), whole[start:stop])

    def test_sequences_are_a_pure_function(self, task: Task) -> None:
        """Equal in each call and in an equal task, without reading or changing numpy's global random state."""
        before = task.sequences("train", 5, 7, 20)
        np.random.seed(1)
        state = np.random.get_state()
        equal_task = type(task).model_validate(task.model_dump(), strict=False)
        assert _equal(equal_task.sequences("train", 5, 7, 20), before)
        np.testing.assert_equal(np.random.get_state(), state)

    def test_seeds_and_splits_differ(self, task: Task) -> None:
        train = task.sequences("train", 0, 0, COUNT)
        assert not _equal(train, task.sequences("train", 1, 0, COUNT)), "two seeds have the same training sequences"
        for split in task.TESTS:
            assert not _equal(train, task.sequences(split, 0, 0, COUNT)), f"{split} has the sequences of train"

    def test_a_data_seed_fixes_the_training_sequences(self, task: Task) -> None:
        """Compare as sets: a finite training set is visited in an order that still depends on the run's seed."""
        if not isinstance(task, GeneratedTask):
            pytest.skip("no generated task with a data_seed")

        def train(fixed: Task, seed: int) -> list[bytes]:
            batch = fixed.sequences("train", seed, 0, getattr(fixed, "train_sequences", None) or COUNT)
            rows_NT = np.concatenate((batch.inputs_NT, batch.targets_NT), axis=1)
            return sorted(row_T.tobytes() for row_T in rows_NT)

        fixed = task.model_copy(update={"data_seed": 5})
        assert train(fixed, 0) == train(fixed, 1) == train(task, 5) != train(task, 0)
        for split in task.TESTS:
            assert _equal(fixed.sequences(split, 0, 0, 20), task.sequences(split, 0, 0, 20))

    def test_a_text_has_the_same_test_sets_for_every_seed(self, task: Task) -> None:
        if not task.has_windows:
            pytest.skip("a generated task; the trainer always passes the same seed for its test sets")
        for split in task.TESTS:
            assert _equal(task.sequences(split, 0, 0, 20), task.sequences(split, 1, 0, 20))

    def test_a_finite_test_set_ends(self, task: Task) -> None:
        for split in task.TESTS:
            batch = task.sequences(split, 0, 10**7, 3)
            assert len(batch) <= 3
            assert batch.inputs_NT.shape[1] == task.length(split)

    def test_shapes_types_and_ids(self, task: Task) -> None:
        assert task.context == max(task.length(split) for split in task.splits)
        for split in task.splits:
            batch = task.sequences(split, 0, 0, 5)
            for array in (batch.inputs_NT, batch.targets_NT, batch.answers_NT):
                assert array.shape == (5, task.length(split))
            assert batch.inputs_NT.dtype == batch.targets_NT.dtype == np.int64
            assert batch.answers_NT.dtype == bool
            assert 0 <= batch.inputs_NT.min() <= batch.inputs_NT.max() < task.vocabulary_size
            for counts_N in batch.units_N.values():
                assert counts_N.dtype == np.int64
                assert counts_N.shape == (5,)

    def test_targets_and_answers_agree(self, task: Task) -> None:
        """Targets are ids or `IGNORED`, every sequence has an answer, and every answer has a target."""
        for split in task.splits:
            batch = task.sequences(split, 0, 0, 20)
            targets = batch.targets_NT[batch.targets_NT != IGNORED]
            assert targets.min() >= 0
            assert targets.max() < task.vocabulary_size
            assert batch.answers_NT.any(axis=1).all()
            assert (batch.targets_NT[batch.answers_NT] != IGNORED).all()

    def test_whole_sequences_have_the_targets_of_training(self, task: Task) -> None:
        """`with_targets` of sequences that contain their answers gives the inputs and targets of the split."""
        for split in task.splits:
            batch = task.sequences(split, 0, 0, 20)
            scored_NT = batch.targets_NT != IGNORED
            read_NT = np.logical_or.accumulate(scored_NT[:, ::-1], axis=1)[:, ::-1]  # up to the last target
            again = task.with_targets(batch.whole())
            assert (again.targets_NT == batch.targets_NT)[read_NT].all()
            assert (again.inputs_NT == batch.inputs_NT)[read_NT].all()

    def test_inputs_depend_on_the_tokens_so_far(self, task: Task) -> None:
        """Generation relies on it; a task whose inputs depend on later tokens says so by `LOOKS_AHEAD`."""
        tokens_NL = task.sequences("train", 0, 0, 20).whole()
        changed_NL = tokens_NL.copy()
        middle = tokens_NL.shape[1] // 2
        changed_NL[:, middle:] = (changed_NL[:, middle:] + 1) % task.vocabulary_size
        inputs_NT, changed_NT = (task.with_targets(each).inputs_NT[:, :middle] for each in (tokens_NL, changed_NL))
        assert np.array_equal(inputs_NT, changed_NT) is not task.LOOKS_AHEAD

    def test_an_unknown_split_is_an_error(self, task: Task) -> None:
        with pytest.raises(ValueError, match="no-such-split"):
            task.sequences("no-such-split", 0, 0, 1)

    # -- descriptions

    def test_the_test_sets_and_metrics_have_names(self, task: Task) -> None:
        assert task.TESTS
        assert "train" not in task.TESTS
        assert len(set(task.TESTS)) == len(task.TESTS)
        for split in task.TESTS:
            assert len(set(task.metrics(split))) == len(task.metrics(split))

    def test_partial_errors_count_targets(self, task: Task) -> None:
        """In each test set, each of them counts some."""
        for split in task.TESTS:
            batch = task.sequences(split, 0, 0, COUNT)
            counted = task.counted(batch, split)
            assert set(counted) == set(task.partial_errors(split))
            for name, counted_NT in counted.items():
                assert counted_NT.shape == batch.targets_NT.shape
                assert counted_NT.dtype == bool
                assert counted_NT.any(), name
                assert (batch.targets_NT[counted_NT] != IGNORED).all(), name

    def test_answers_are_among_the_choices(self, task: Task) -> None:
        for split in task.TESTS:
            batch = task.sequences(split, 0, 0, 20)
            counted = {"token_error": batch.answers_NT} | task.counted(batch, split)
            for name, counted_NT in counted.items():
                if choices := task.choices(name):
                    assert np.isin(batch.targets_NT[counted_NT], choices).all(), name

    def test_marks_have_the_shape_of_the_tokens(self, task: Task) -> None:
        tokens_NT = task.sequences("train", 0, 0, 20).inputs_NT
        for tokens in (tokens_NT, tokens_NT[0]):
            for name, mark in task.marks(tokens).items():
                assert mark.shape == tokens.shape, name
                assert mark.dtype == bool, name
        assert all(mark.any() for mark in task.marks(tokens_NT).values()), "a mark without any token"

    def test_longer_sequences_have_the_same_tokens(self, task: Task) -> None:
        """Sequences of the first test set, where the task has longer ones; other tasks say that they have none."""
        if not task.LENGTHS:
            with pytest.raises(ValueError, match=task.kind):
                task.longer(2)
            return
        longer, first = task.longer(3), task.TESTS[0]
        assert longer.vocabulary_size == task.vocabulary_size
        assert 2 * task.length(first) < longer.length(first) <= 3 * task.length(first) + 3
        batch = longer.sequences(first, 0, 0, 8)
        assert batch.inputs_NT.shape == (8, longer.length(first))
        assert batch.inputs_NT.max() < task.vocabulary_size
        assert batch.answers_NT.any(1).all()

    def test_every_token_has_a_label(self, task: Task) -> None:
        labels = [task.token_label(token) for token in range(min(task.vocabulary_size, 1000))]
        assert all(isinstance(label, str) and label for label in labels)
        assert len(set(labels)) == len(labels), "two tokens have the same label"

    def test_spec_round_trips_through_json(self, task: Task) -> None:
        run = _run(task)
        again = RunSpec.model_validate_json(json.dumps(run.model_dump(mode="json")))
        assert again == run
        assert again.run_id == run.run_id
        assert hash(again.task) == hash(task)

    # -- training

    def test_a_model_trains_and_is_measured(self, task: Task) -> None:
        task.prepare()
        trainer = Trainer(_run(task), Runtime(threads=1))
        with trainer.runtime.applied():
            trainer.train_step()
            measured = trainer.evaluate(COUNT)
        assert set(measured) >= {f"{split}/{metric}" for split in task.TESTS for metric in task.metrics(split)}
        assert all(np.isfinite(value) for value in measured.values()), measured


def _run(task: Task) -> RunSpec:
    """A one-layer model without positions on this task."""
    model = {"layers": 1, "dim": 8, "heads": 2}
    return RunSpec.model_validate({"task": task, "model": model, "train": {"steps": 2, "batch": 2}})


def _equal(sequence: Batch, other: Batch) -> bool:
    arrays = ("inputs_NT", "targets_NT", "answers_NT")
    return (
        all(np.array_equal(getattr(sequence, name), getattr(other, name)) for name in arrays)
        and sequence.units_N.keys() == other.units_N.keys()
        and all(np.array_equal(counts_N, other.units_N[name]) for name, counts_N in sequence.units_N.items())
    )


def _name(spec: Any) -> str:
    return spec.kind if isinstance(spec, Kind) else str(getattr(spec, "__name__", spec)).strip("_")
