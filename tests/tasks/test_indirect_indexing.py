"""Indirect indexing: answers by string operations, the distribution of places and shifts, and simple rules."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.tasks import IGNORED, IndirectIndexing
from tests.helpers.errors import raises
from tests.tasks.chi_square import ALPHA, uniform_p

LABELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789,+-_"


def text_of(tokens):
    return "".join(LABELS[token] for token in tokens)


def tokens_of(text):
    return [LABELS.index(label) for label in text.replace(" ", "")]


def answer_to(text):
    """The answer of `NZTUIGWkX,N,+4,`, and its parts."""
    string, letter, shift, rest = text.split(",")
    assert set(rest) <= {"_"}
    place = string.index(letter)
    return string, place, int(shift), string[place + int(shift)]


def test_the_row_of_the_docstring():
    task = IndirectIndexing(min_letters=9, max_letters=10, max_shift=4, farther_shift=8)
    batch = task.with_targets(np.array([tokens_of("N Z T U I G W k X , N , + 4 , I _ _")]))
    assert text_of(batch.inputs_NT[0]) == "NZTUIGWkX,N,+4,__"
    assert np.flatnonzero(batch.targets_NT[0] != IGNORED).tolist() == [14]
    assert text_of([batch.targets_NT[0, 14]]) == "I"
    assert (batch.answers_NT == (batch.targets_NT != IGNORED)).all()
    assert np.flatnonzero(task.counted(batch, "in_dist")["distance_error@4"]).tolist() == [14]


def test_the_example_of_the_paper():
    whole = "NZTUIGWkXrFhCJDzscat,N,+4,"
    batch = IndirectIndexing().with_targets(np.array([tokens_of(whole + "I")]))
    assert text_of(batch.inputs_NT[0]) == whole
    assert text_of([batch.targets_NT[0, -1]]) == "I"


@given(
    fewest=st.integers(3, 20),
    data=st.data(),
    split=st.sampled_from(["train", "in_dist", "longer", "farther"]),
)
@settings(max_examples=60, deadline=None)
def test_every_answer_is_at_the_shift(fewest, data, split):
    most = data.draw(st.integers(fewest, 52))
    longer = data.draw(st.integers(most, 52))
    shift = data.draw(st.integers(1, fewest - 2))
    farther = data.draw(st.integers(shift + 1, fewest - 1))
    task = IndirectIndexing(
        min_letters=fewest, max_letters=most, longer_letters=longer, max_shift=shift, farther_shift=farther
    )
    batch = task.sequences(split, 1, 0, 20)
    counted = task.counted(batch, split)
    for row in range(20):
        text = text_of(batch.inputs_NT[row])
        string, place, by, letter = answer_to(text)
        assert set(string) <= set(LABELS[:52])
        assert len(set(string)) == len(string)
        assert len(string) == longer if split == "longer" else fewest <= len(string) <= most
        assert (shift < abs(by) <= farther) if split == "farther" else (1 <= abs(by) <= shift)
        assert 0 <= place + by < len(string)
        asked = text.rstrip("_").rindex(",")
        targets = batch.targets_NT[row].tolist()
        assert [target != IGNORED for target in targets] == [column == asked for column in range(len(text))]
        assert text_of([targets[asked]]) == letter
        ends = [int(name.partition("@")[2]) for name, mask_NT in counted.items() if mask_NT[row].any()]
        assert len(ends) == 1
        assert counted[f"distance_error@{ends[0]}"][row, asked]
        assert min(end for end in [1, 2, 4, 8, 16, 32, 64] if end >= abs(by)) >= ends[0] >= abs(by)


def test_all_pairs_of_a_place_and_a_shift_are_equally_likely():
    task = IndirectIndexing(min_letters=5, max_letters=5, longer_letters=5, max_shift=3, farther_shift=4)
    counts = {}
    for row in task.sequences("train", 0, 0, 8000).inputs_NT:
        _, place, shift, _ = answer_to(text_of(row))
        counts[place, shift] = counts.get((place, shift), 0) + 1
    assert counts.keys() == {
        (place, other - place) for place in range(5) for other in range(5) if 1 <= abs(other - place) <= 3
    }
    assert uniform_p(list(counts.values())) > ALPHA


def test_letters_and_lengths_are_uniform():
    inputs = IndirectIndexing().sequences("train", 0, 0, 8000).inputs_NT
    assert uniform_p(np.bincount(inputs[:, 0], minlength=52)) > ALPHA
    assert uniform_p(np.bincount((inputs == LABELS.index(",")).argmax(axis=1), minlength=41)[20:]) > ALPHA


def test_rules_score_as_an_independent_simulation_says():
    """What RoPE and learned positions get in the paper, 10 to 11 %, is a letter on the right side."""
    right = {rule: 100 - error for rule, error in IndirectIndexing().shortcut_errors("in_dist", 20_000).items()}
    assert right["the most frequent answer"] == pytest.approx(1.9, abs=0.5)
    assert right["any letter of the string"] == pytest.approx(3.6, abs=0.5)
    assert right["a letter within 15 places"] == pytest.approx(4.8, abs=0.5)
    assert right["a letter within 15 places on the right side"] == pytest.approx(9.2, abs=0.7)


def test_sizes_of_the_paper():
    task = IndirectIndexing()
    assert task.vocabulary_size == 66  # the paper's 65, and padding
    assert [task.length(split) for split in ("train", "in_dist", "longer", "farther")] == [47, 47, 59, 47]
    assert task.partial_errors("in_dist")[-1] == "distance_error@15"
    assert task.partial_errors("farther") == ("distance_error@16", "distance_error@19")
    assert "".join(map(task.token_label, range(66))) == LABELS


@pytest.mark.parametrize(
    ("fields", "data"),
    [
        ({"min_letters": 41}, {"key": "max_letters", "value": 40, "smallest": 41}),
        ({"farther_shift": 15}, {"key": "farther_shift", "value": 15, "smallest": 16}),
        ({"farther_shift": 20}, {"key": "min_letters", "value": 20, "smallest": 21}),
        ({"longer_letters": 39}, {"key": "longer_letters", "value": 39, "smallest": 40}),
    ],
)
def test_impossible_sizes_are_errors(fields, data):
    with raises("invalid_value", **data):
        IndirectIndexing(**fields)
