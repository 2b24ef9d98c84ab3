"""Associative recall with updates: answers by a dictionary, the distribution of updates, and simple rules."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.tasks import IGNORED, ForgettingMQAR
from tests.helpers.errors import raises
from tests.tasks.chi_square import ALPHA, shares_p, uniform_p

X = IGNORED


def test_the_row_of_the_docstring():
    task = ForgettingMQAR(vocabulary=40, tokens=24, pairs=4, updates=2, more_updates=3, more_rounds=2)
    context = [4, 24, 16, 22, 7, 38, 11, 32, 16, 28, 7, 25]
    whole = [*context, 4, 24, 16, 28, 7, 25, 0, 0, 11, 32, 0, 0, 0]
    batch = task.with_targets(np.array([whole]))
    assert batch.inputs_NT.tolist() == [[*context, 4, 0, 16, 0, 7, 0, 0, 0, 11, 0, 0, 0]]
    assert batch.targets_NT.tolist() == [[X] * 12 + [24, X, 28, X, 25, X, X, X, 32, X, X, X]]
    assert np.flatnonzero(batch.answers_NT[0]).tolist() == [12, 14, 16, 20]
    assert np.flatnonzero(task.counted(batch, "in_dist")["updated_error"][0]).tolist() == [14, 16]
    rules = {name: answers[0, [12, 14, 16, 20]].tolist() for name, answers in task.shortcuts(batch.inputs_NT).items()}
    assert rules["the first value of the key"] == [24, 22, 38, 32]
    assert rules["the last value, of any key"] == [25, 25, 25, 25]
    values = [[24], [22, 28], [38, 25], [32]]
    assert all(value in pair for value, pair in zip(rules["any value of the key"], values, strict=True))


@given(
    pairs=st.integers(1, 5),
    data=st.data(),
    rounds=st.integers(1, 3),
    more_rounds=st.integers(1, 3),
    random=st.booleans(),
    split=st.sampled_from(["train", "in_dist", "more_updates", "more_rounds"]),
)
@settings(max_examples=60, deadline=None)
def test_every_answer_is_the_last_value(pairs, data, rounds, more_rounds, random, split):
    updates, more_updates = (data.draw(st.integers(1, pairs)) for _ in range(2))
    task = ForgettingMQAR(
        vocabulary=44,
        tokens=60,
        pairs=pairs,
        updates=updates,
        more_updates=more_updates,
        rounds=rounds,
        more_rounds=more_rounds,
        random_non_queries=random,
    )
    updated = more_updates if split == "more_updates" else updates
    times = more_rounds if split == "more_rounds" else rounds
    written = pairs + updated * times
    batch = task.sequences(split, 1, 0, 20)
    counted = task.counted(batch, split)["updated_error"]
    for row, (inputs, targets) in enumerate(zip(batch.inputs_NT.tolist(), batch.targets_NT.tolist(), strict=True)):
        values = {}
        for slot in range(written):
            key, value = inputs[2 * slot : 2 * slot + 2]
            assert 1 <= key < 22 <= value < 44
            assert (key not in values) == (slot < pairs)
            values.setdefault(key, []).append(value)
        all_values = list(itertools.chain(*values.values()))
        assert len(set(all_values)) == len(all_values) == written
        assert sorted(map(len, values.values())) == [1] * (pairs - updated) + [times + 1] * updated
        for done in range(times):  # each round updates every key once
            keys = inputs[2 * (pairs + done * updated) : 2 * (pairs + (done + 1) * updated) : 2]
            assert len(set(keys)) == updated
        asked = [place for place, target in enumerate(targets) if target != IGNORED]
        assert sorted(inputs[place] for place in asked) == sorted(values)
        for place in asked:
            assert place >= 2 * written
            assert place % 2 == 0
            assert targets[place] == values[inputs[place]][-1]
            assert inputs[place + 1] == 0
            assert counted[row, place] == (len(values[inputs[place]]) > 1)
        others = [place for place in range(2 * written, 60, 2) if place not in asked]
        assert not any(inputs[place] in values for place in others)
        if not random:
            assert not any(inputs[place] or inputs[place + 1] for place in others)


def test_updates_and_queries_are_drawn_uniformly():
    task = ForgettingMQAR(
        vocabulary=40, tokens=24, pairs=4, updates=2, more_updates=3, rounds=1, more_rounds=2, power_a=0.01
    )
    batch = task.sequences("train", 0, 0, 8000)
    keys = batch.inputs_NT[:, ::2]
    order = (keys[:, 4:6, None] == keys[:, None, :4]).argmax(axis=2)
    counts = collections.Counter(map(tuple, order.tolist()))
    assert counts.keys() == set(itertools.permutations(range(4), 2))
    assert uniform_p(list(counts.values())) > ALPHA
    # One key's slot, without updates of others in the way: the first of the six slots is likely.
    one = ForgettingMQAR(vocabulary=40, tokens=20, pairs=1, updates=1, more_updates=1, rounds=2, more_rounds=1)
    slots = one.sequences("train", 0, 0, 8000).answers_NT.argmax(axis=1) // 2 - 3
    assert shares_p(np.bincount(slots, minlength=7), np.arange(1, 8) ** -0.99) > ALPHA


def test_the_errors_of_rules():
    """u of n keys are updated: the first value is right for 1 − u/n of them, any value for 1 − u/2n."""
    task = ForgettingMQAR()
    errors = task.shortcut_errors("in_dist", 4000)
    assert errors["the first value of the key"] == 50
    assert errors["any value of the key"] == pytest.approx(25, abs=1)
    updated = task.shortcut_errors("in_dist", 4000, "updated_error")
    assert updated["the first value of the key"] == 100
    assert updated["any value of the key"] == pytest.approx(50, abs=1.5)
    assert task.shortcut_errors("more_rounds", 4000, "updated_error")["any value of the key"] == pytest.approx(
        75, abs=2
    )
    assert task.shortcut_errors("more_updates", 4000)["the first value of the key"] == 100


@pytest.mark.parametrize(
    ("fields", "data"),
    [
        ({"updates": 9}, {"key": "updates", "value": 9, "largest": 8}),
        ({"more_updates": 9}, {"key": "more_updates", "value": 9, "largest": 8}),
        ({"tokens": 46}, {"key": "tokens", "value": 46, "smallest": 48, "split": "more_updates"}),
        ({"vocabulary": 30}, {"key": "vocabulary", "value": 30, "smallest": 31, "split": "more_updates"}),
        ({"vocabulary": 16}, {"key": "pairs", "value": 8, "largest": 7}),
    ],
)
def test_impossible_sizes_are_errors(fields, data):
    with raises("invalid_value", **data):
        ForgettingMQAR(**{"more_rounds": 1} | fields)


def test_the_smallest_sizes():
    task = ForgettingMQAR(vocabulary=31, tokens=48, more_rounds=1)
    assert task.sequences("more_updates", 0, 0, 1).answers_NT.sum() == 8
    assert task.longer(2).length("in_dist") == 96
