"""Selective copy: sequences by a plain reading, and the distribution of slots and symbols."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.tasks import IGNORED, SelectiveCopy
from tests.helpers.errors import raises
from tests.tasks.chi_square import ALPHA, contingency, independent_p, uniform_p


@given(
    tokens=st.integers(1, 12),
    blanks=st.integers(0, 12),
    dense=st.integers(0, 5),
    sparse=st.integers(0, 30),
    vocabulary=st.integers(4, 20),
    copy_from=st.sampled_from(["markers", "outputs"]),
    split=st.sampled_from(["train", "in_dist", "dense", "sparse"]),
)
@settings(max_examples=60, deadline=None)
def test_every_sequence_by_a_plain_reading(tokens, blanks, dense, sparse, vocabulary, copy_from, split):
    task = SelectiveCopy(
        tokens=tokens,
        blanks=blanks,
        dense_blanks=dense,
        sparse_blanks=sparse,
        vocabulary=vocabulary,
        copy_from=copy_from,
    )
    blank, marker = vocabulary - 2, vocabulary - 1
    n_blanks = {"dense": dense, "sparse": sparse}.get(split, blanks)
    batch = task.sequences(split, 1, 0, 20)
    for inputs, targets in zip(batch.inputs_NT.tolist(), batch.targets_NT.tolist(), strict=True):
        slots = inputs[: tokens + n_blanks]
        data = [token for token in slots if token != blank]
        assert slots.count(blank) == n_blanks
        assert marker not in slots
        assert len(data) == tokens
        assert targets == [IGNORED] * len(slots) + data
        fed = inputs[len(slots) :]
        assert fed == ([marker] * tokens if copy_from == "markers" else [marker, *data[:-1]])


@pytest.mark.parametrize("split", ["train", "in_dist", "dense", "sparse"])
def test_slots_and_symbols_are_uniform_and_independent(split):
    """χ² of the choice of slots, of symbols, of pairs of symbols, and of their independence."""
    task = SelectiveCopy(tokens=2, blanks=4, dense_blanks=2, sparse_blanks=6)
    slots = {"dense": 4, "sparse": 8}.get(split, 6)
    batch = task.sequences(split, 0, 0, 8000)
    is_data = batch.inputs_NT[:, :slots] != 14
    places = is_data @ (1 << np.arange(slots))
    choices, which, counts = np.unique(places, return_inverse=True, return_counts=True)
    assert len(choices) == math.comb(slots, 2)
    assert uniform_p(counts) > ALPHA
    first, second = batch.targets_NT[:, -2], batch.targets_NT[:, -1]
    for symbols in (first, second):
        assert uniform_p(np.bincount(symbols, minlength=14)) > ALPHA
        assert independent_p(contingency(symbols, which)) > ALPHA
    assert independent_p(contingency(first, second)) > ALPHA
    assert uniform_p(contingency(first, second).ravel()) > ALPHA


def test_sizes_of_the_paper():
    task = SelectiveCopy()
    assert [task.length(split) for split in ("train", "in_dist", "dense", "sparse")] == [768, 768, 640, 1024]
    assert task.context == 1024
    assert task.vocabulary_size == 16


def test_the_row_of_mapformer():
    """Without a separator: 5 data tokens, C F E A C, and 3 blanks, then the copy."""
    task = SelectiveCopy(tokens=5, blanks=3, vocabulary=7, copy_from="outputs", separator=False)
    whole = ["CF_EA_C_CFEAC".translate(str.maketrans("ABCDEF_", "0123456"))[place] for place in range(13)]
    batch = task.with_targets(np.array([whole], dtype=np.int64))
    assert batch.inputs_NT.tolist() == [[2, 5, 6, 4, 0, 6, 2, 6, 2, 5, 4, 0]]
    assert batch.targets_NT.tolist() == [[IGNORED] * 7 + [2, 5, 4, 0, 2]]
    assert task.length("in_dist") == 12
    assert [task.token_label(token) for token in (0, 6)] == ["0", "_"]


@given(
    tokens=st.integers(1, 8),
    blanks=st.integers(0, 9),
    split=st.sampled_from(["train", "in_dist", "dense", "sparse"]),
)
@settings(max_examples=40, deadline=None)
def test_without_a_separator_the_copy_follows_the_last_slot(tokens, blanks, split):
    task = SelectiveCopy(
        tokens=tokens, blanks=blanks, dense_blanks=1, sparse_blanks=12, copy_from="outputs", separator=False
    )
    slots = tokens + {"dense": 1, "sparse": 12}.get(split, blanks)
    batch = task.sequences(split, 1, 0, 20)
    for inputs, targets in zip(batch.inputs_NT.tolist(), batch.targets_NT.tolist(), strict=True):
        data = [token for token in inputs[:slots] if token != 15]
        assert len(data) == tokens
        assert inputs[slots:] == data[:-1]
        assert targets == [IGNORED] * (slots - 1) + data


@pytest.mark.parametrize(("split", "right"), [("in_dist", 13), ("dense", 18), ("sparse", 10)])
def test_reading_the_proportional_place(split, right):
    """As an independent simulation of MapFormer's task says, with 16 symbols and a guess where there is a blank."""
    task = SelectiveCopy(
        tokens=128, blanks=128, dense_blanks=64, sparse_blanks=256, vocabulary=17, copy_from="outputs", separator=False
    )
    errors = task.shortcut_errors(split, 1024)
    assert 100 - errors["the input at the proportional place, or a guess"] == pytest.approx(right, abs=1)
    assert not SelectiveCopy().shortcuts(SelectiveCopy().sequences(split, 0, 0, 2).inputs_NT)


def test_no_separator_needs_the_outputs_as_inputs():
    with raises("invalid_value", key="copy_from", value="markers"):
        SelectiveCopy(separator=False)
