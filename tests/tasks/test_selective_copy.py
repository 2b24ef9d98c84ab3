import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cope_sweep.tasks import IGNORED, SelectiveCopy


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
def test_every_sequence_is_what_a_plain_reading_says(tokens, blanks, dense, sparse, vocabulary, copy_from, split):
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


def test_places_and_tokens_are_even():
    """χ² of the data's places (over 8 slots) and symbols (over 14): both far from rejection."""
    task = SelectiveCopy(tokens=2, blanks=6)
    slots = task.sequences("train", 0, 0, 8000).inputs_NT[:, :8]
    places = (slots != 14).sum(axis=0)
    symbols = np.bincount(slots[slots != 14], minlength=14)
    for counts, critical in ((places, 24.3), (symbols, 34.5)):  # χ² at p = 0.001 for 7 and 13 degrees of freedom
        expected = counts.sum() / len(counts)
        assert ((counts - expected) ** 2 / expected).sum() < critical


def test_a_blank_can_be_last():
    task = SelectiveCopy(tokens=2, blanks=2)
    assert (task.sequences("train", 0, 0, 64).inputs_NT[:, 3] == 14).any()


def test_lengths_at_the_papers_size():
    task = SelectiveCopy()
    assert [task.length(split) for split in ("train", "in_dist", "dense", "sparse")] == [768, 768, 640, 1024]
    assert task.context == 1024
    assert task.vocabulary_size == 16


def test_no_room_for_data_symbols_is_refused():
    with pytest.raises(ValidationError):
        SelectiveCopy(vocabulary=2)
