"""Associative recall: sequences worked by hand and by an interpreter, and the distribution of keys, values and queries."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.tasks import IGNORED, MQAR, MQRAR
from tests.helpers.errors import raises
from tests.helpers.tiny import tiny_run
from tests.tasks.chi_square import ALPHA, contingency, independent_p, same_distribution_p, shares_p, uniform_p

X = IGNORED


def test_every_key_is_asked_once_by_hand():
    """The sequence of the docstring, with keys 1 and 2 and values from 10 on; the filler is 0."""
    task = MQAR(vocabulary=20, tokens=16, pairs=2, more_pairs=2)
    batch = task.with_targets(np.array([[1, 11, 2, 12, 0, 0, 2, 12, 0, 0, 0, 0, 1, 11, 0, 0, 0]]))
    assert batch.inputs_NT.tolist() == [[1, 11, 2, 12, 0, 0, 2, 0, 0, 0, 0, 0, 1, 0, 0, 0]]
    assert batch.targets_NT.tolist() == [[X, X, X, X, X, X, 12, X, X, X, X, X, 11, X, X, X]]
    assert (batch.answers_NT == (batch.targets_NT != X)).all()
    last = task.shortcuts(batch.inputs_NT)["the last value, of any key"]
    assert last[0, [6, 12]].tolist() == [12, 12]  # the second is wrong


def test_a_variable_is_asked_for_an_earlier_value_by_hand():
    """The sequence of the docstring, with variables 1 and 2 and values from 10 on."""
    task = MQRAR(vocabulary=20, tokens=16, variables=2, more_variables=3, n_back=2)
    whole = [1, 11, 1, 12, 2, 13, 1, 11, 1, 14, 1, 12, 2, 15, 2, 13, 0]
    batch = task.with_targets(np.array([whole]))
    assert batch.inputs_NT.tolist() == [[1, 11, 1, 12, 2, 13, 1, 0, 1, 14, 1, 0, 2, 15, 2, 0]]
    assert batch.targets_NT.tolist() == [[X, X, X, X, X, X, 11, X, X, X, 12, X, X, X, 13, X]]
    rules = task.shortcuts(batch.inputs_NT)
    assert rules["the last value, of any key"][0, [6, 10, 14]].tolist() == [13, 14, 15]
    assert rules["the latest value of the variable"][0, [6, 10, 14]].tolist() == [12, 14, 15]
    assert set(task.model_copy(update={"n_back": 1}).shortcuts(batch.inputs_NT)) == {"the last value, of any key"}


def test_a_wrong_answer_is_a_target_too():
    """So that the perplexity of any of the values can be asked for."""
    batch = MQAR(vocabulary=20, tokens=8, pairs=2, more_pairs=2).with_targets(np.array([[1, 11, 2, 12, 1, 12]]))
    assert batch.inputs_NT.tolist() == [[1, 11, 2, 12, 1]]
    assert batch.targets_NT.tolist() == [[X, X, X, X, 12]]


@given(
    pairs=st.integers(1, 5),
    more_pairs=st.integers(1, 5),
    slots=st.integers(10, 16),
    vocabulary=st.integers(12, 40),
    power_a=st.floats(0, 2),
    random=st.booleans(),
    split=st.sampled_from(["train", "in_dist", "more_pairs"]),
)
@settings(max_examples=60, deadline=None)
def test_every_key_is_asked_once(pairs, more_pairs, slots, vocabulary, power_a, random, split):
    task = MQAR(
        vocabulary=vocabulary,
        tokens=2 * slots,
        pairs=pairs,
        more_pairs=more_pairs,
        power_a=power_a,
        random_non_queries=random,
    )
    number = more_pairs if split == "more_pairs" else pairs
    batch = task.sequences(split, 1, 0, 20)
    for inputs, targets in zip(batch.inputs_NT.tolist(), batch.targets_NT.tolist(), strict=True):
        keys, values = inputs[: 2 * number : 2], inputs[1 : 2 * number : 2]
        assert len(set(keys)) == len(set(values)) == number
        assert all(1 <= key < vocabulary // 2 for key in keys)
        assert all(vocabulary // 2 <= value < vocabulary for value in values)
        value_of = dict(zip(keys, values, strict=True))
        asked = [place for place, target in enumerate(targets) if target != IGNORED]
        assert sorted(inputs[place] for place in asked) == sorted(keys)
        assert all(place >= 2 * number and place % 2 == 0 for place in asked)
        assert all(targets[place] == value_of[inputs[place]] for place in asked)
        assert all(inputs[place + 1] == 0 for place in asked)
        if not random:
            assert sum(token != 0 for token in inputs) == 3 * number


@given(
    variables=st.integers(1, 4),
    more_variables=st.integers(1, 4),
    n_back=st.integers(1, 3),
    slots=st.integers(13, 20),
    vocabulary=st.integers(40, 50),
    split=st.sampled_from(["train", "in_dist", "more_variables"]),
)
@settings(max_examples=60, deadline=None)
def test_every_answer_is_that_of_an_interpreter(variables, more_variables, n_back, slots, vocabulary, split):
    task = MQRAR(
        vocabulary=vocabulary, tokens=2 * slots, variables=variables, more_variables=more_variables, n_back=n_back
    )
    batch = task.sequences(split, 1, 0, 20)
    for inputs, targets in zip(batch.inputs_NT.tolist(), batch.targets_NT.tolist(), strict=True):
        assigned, seen = {}, set()
        for place in range(0, len(inputs), 2):
            key, value = inputs[place : place + 2]
            assert 1 <= key < vocabulary // 2
            assert targets[place + 1] == IGNORED
            history = assigned.setdefault(key, [])
            if value:
                assert vocabulary // 2 <= value < vocabulary
                assert value not in seen
                assert targets[place] == IGNORED
                seen.add(value)
                history.append(value)
            else:
                assert targets[place] == history[-n_back]
        assert len(assigned) <= (more_variables if split == "more_variables" else variables)
        assert any(target != IGNORED for target in targets)


@pytest.mark.parametrize("power_a", [0.01, 1, 1.5])
@pytest.mark.parametrize("random", [False, True], ids=["filler", "random"])
def test_slots_of_queries_follow_the_power_law(power_a, random):
    """χ² of the slot of one query, whose share is ∝ r^(a − 1), and of the slots of two, drawn without replacement."""
    one = MQAR(vocabulary=200, tokens=24, pairs=1, more_pairs=1, power_a=power_a, random_non_queries=random)
    slots = one.sequences("train", 0, 0, 8000).answers_NT.argmax(axis=1) // 2 - 1
    assert shares_p(np.bincount(slots, minlength=11), np.arange(1, 12) ** (power_a - 1)) > ALPHA

    two = MQAR(vocabulary=200, tokens=12, pairs=2, more_pairs=2, power_a=power_a, random_non_queries=random)
    batch = two.sequences("train", 0, 0, 8000)
    first, second = ((batch.inputs_NT == batch.inputs_NT[:, [place]]) & batch.answers_NT for place in (0, 2))
    found = contingency(first.argmax(axis=1) // 2 - 2, second.argmax(axis=1) // 2 - 2)
    p = np.arange(1, 5) ** (power_a - 1.0)
    p /= p.sum()
    cells = list(itertools.permutations(range(4), 2))
    assert found.sum() == sum(found[i, j] for i, j in cells) == 8000
    assert shares_p([found[i, j] for i, j in cells], [p[i] * p[j] / (1 - p[i]) for i, j in cells]) > ALPHA


def test_keys_and_values_are_uniform_without_replacement():
    task = MQAR(vocabulary=14, tokens=16, pairs=3, more_pairs=4)
    inputs = task.sequences("train", 0, 0, 9000).inputs_NT
    for first_id, places, choices in ((1, (0, 2, 4), 6), (7, (1, 3, 5), 7)):
        drawn = inputs[:, places] - first_id
        found = np.zeros((choices,) * 3, dtype=int)
        np.add.at(found, tuple(drawn.T), 1)
        cells = list(itertools.permutations(range(choices), 3))
        assert sum(found[cell] for cell in cells) == 9000
        assert uniform_p([found[cell] for cell in cells]) > ALPHA
    assert independent_p(contingency(inputs[:, 0], inputs[:, 1])) > ALPHA


def test_random_tokens_are_uniform():
    task = MQAR(vocabulary=50, tokens=32, pairs=2, more_pairs=2, random_non_queries=True)
    batch = task.sequences("train", 0, 0, 4000)
    slots = (batch.inputs_NT[:, 4::2], batch.inputs_NT[:, 5::2])
    others = ~batch.answers_NT[:, 4::2]
    assert uniform_p(np.bincount(slots[0][others], minlength=50)) > ALPHA
    # A random value that would make its slot a query is replaced by the filler, so the filler alone is more frequent.
    counts = np.bincount(slots[1][others], minlength=50)
    assert uniform_p(counts[1:25]) > ALPHA
    assert uniform_p(counts[25:]) > ALPHA
    assert counts[25:].mean() == pytest.approx(counts[1:25].mean(), rel=0.1)


@pytest.mark.parametrize("n_back", [1, 3])
def test_variables_are_uniform_and_half_of_what_may_ask_asks(n_back):
    task = MQRAR(vocabulary=200, tokens=100, variables=3, more_variables=5, n_back=n_back)
    inputs = task.sequences("train", 0, 0, 2000).inputs_NT
    keys, asks = inputs[:, ::2], inputs[:, 1::2] == 0
    may_ask = np.array([[row[:slot].count(key) >= n_back for slot, key in enumerate(row)] for row in keys.tolist()])
    assert not asks[~may_ask].any()
    last = 49 - may_ask[:, ::-1].argmax(axis=1)
    assert asks[np.arange(2000), last].all()
    may_ask[np.arange(2000), last] = False
    assert shares_p([asks[may_ask].sum(), (~asks[may_ask]).sum()], [1, 1]) > ALPHA
    # A slot takes the variable of the slot before in one of three sequences, early and late.
    repeats = keys[:, 1:] == keys[:, :-1]
    assert shares_p([repeats.sum(), (~repeats).sum()], [1, 2]) > ALPHA
    assert same_distribution_p(repeats[:, :24].sum(axis=1), repeats[:, 25:].sum(axis=1)) > ALPHA


def test_the_errors_of_shortcuts():
    """The last pair's key is one of four; a variable's last value is not the last but one."""
    errors = MQAR(tokens=32, more_pairs=8).shortcut_errors("in_dist", 4000)
    assert errors.pop("the most frequent answer") > 99
    assert errors == {"the last value, of any key": 75.0}
    errors = MQRAR(tokens=64, variables=3, more_variables=4, n_back=2).shortcut_errors("in_dist", 2000)
    assert errors["the latest value of the variable"] == 100
    errors = MQRAR(tokens=64, variables=3, more_variables=4).shortcut_errors("in_dist", 2000)
    assert 40 < errors["the last value, of any key"] < 67


def test_sizes_of_the_papers():
    assert [MQAR().length("train"), MQAR().vocabulary_size, MQAR().pairs, MQAR().power_a] == [64, 8192, 4, 0.01]
    assert [MQRAR().length("train"), MQRAR().variables] == [768, 32]
    assert MQRAR(n_back=4).sequences("more_variables", 0, 0, 1).answers_NT.any()


def test_labels():
    task = MQAR(vocabulary=20, tokens=32, more_pairs=8)
    assert [task.token_label(token) for token in (0, 1, 9, 10, 19)] == ["_", "k1", "k9", "v0", "v9"]


@pytest.mark.parametrize(
    ("task", "fields", "code", "data"),
    [
        (MQAR, {"tokens": 31}, "multiple_of", {"key": "tokens"}),
        (MQAR, {"pairs": 17}, "invalid_value", {"key": "pairs", "value": 17, "tokens": 64}),
        (MQAR, {"tokens": 32}, "invalid_value", {"key": "more_pairs", "value": 16, "tokens": 32}),
        (MQAR, {"vocabulary": 30}, "invalid_value", {"key": "more_pairs", "value": 16, "largest": 14}),
        (MQRAR, {"n_back": 6}, "invalid_value", {"key": "more_variables", "value": 64, "n_back": 6, "tokens": 768}),
        (MQRAR, {"vocabulary": 766}, "invalid_value", {"key": "vocabulary", "value": 766, "smallest": 768}),
        (MQRAR, {"vocabulary": 80}, "invalid_value", {"key": "more_variables", "value": 64, "largest": 39}),
    ],
)
def test_impossible_sizes_are_errors(task, fields, code, data):
    with raises(code, **data):
        task(**fields)


def test_the_smallest_vocabulary_with_enough_values():
    MQRAR(vocabulary=767).sequences("train", 0, 0, 1)


def test_longer_sequences_need_values():
    task = MQRAR(vocabulary=100, tokens=40, variables=2, more_variables=3)
    assert task.longer(2).length("in_dist") == 80
    with raises("invalid_value", key="vocabulary", value=100, smallest=120):
        task.longer(3)
    with raises("invalid_value", key="vocabulary", value=100):
        tiny_run(task=task.model_dump(), **{"evaluate.lengths": [2, 3]})
    assert tiny_run(task=task.model_dump(), **{"evaluate.lengths": [2]}).evaluate.lengths == (2,)
