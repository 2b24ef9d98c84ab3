"""Word problems: every product by composing permutations in plain Python, the ids of elements, and simple rules."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.tasks import IGNORED, WordProblem
from tests.helpers.errors import raises
from tests.tasks.chi_square import ALPHA, contingency, independent_p, uniform_p

GROUPS = ["S2", "S3", "S4", "S5", "A3", "A4", "A5", "Z60", "Z120"]


def is_even(permutation):
    return sum(a > b for a, b in itertools.combinations(permutation, 2)) % 2 == 0


def elements_of(group):
    """The permutations of a group in lexicographic order."""
    return [each for each in itertools.permutations(range(int(group[1:]))) if group[0] == "S" or is_even(each)]


def product(group, ids):
    if group[0] == "Z":
        return sum(ids) % int(group[1:])
    elements = elements_of(group)
    moved = list(range(int(group[1:])))
    for number in ids:  # the left factor first
        moved = [elements[number][place] for place in moved]
    return elements.index(tuple(moved))


def test_the_row_of_the_docstring():
    task = WordProblem(group="A5")
    batch = task.with_targets(np.array([[60, 60, 49, 32, 8, 23, 45, 53]]))
    assert batch.inputs_NT.tolist() == [[60, 49, 41, 15, 12, 19, 42]]
    assert batch.targets_NT.tolist() == [[60, 49, 32, 8, 23, 45, 53]]
    assert batch.answers_NT.tolist() == [[False] + 6 * [True]]
    assert [product("A5", [49, 41, 15, 12, 19, 42][:number]) for number in range(1, 7)] == [49, 32, 8, 23, 45, 53]


@given(
    group=st.sampled_from(GROUPS),
    elements=st.integers(1, 12),
    longer=st.integers(1, 20),
    split=st.sampled_from(["train", "in_dist", "longer"]),
)
@settings(max_examples=60, deadline=None)
def test_every_answer_is_the_product(group, elements, longer, split):
    task = WordProblem(group=group, elements=elements, longer_elements=longer)
    batch = task.sequences(split, 1, 0, 10)
    start = task.vocabulary_size - 1
    counted = task.counted(batch, split)
    last = longer if split == "longer" else elements
    assert batch.inputs_NT.shape == (10, last + 1)
    for inputs, targets in zip(batch.inputs_NT.tolist(), batch.targets_NT.tolist(), strict=True):
        assert inputs[0] == targets[0] == start
        assert start not in inputs[1:]
        for place in range(1, last + 1):
            assert targets[place] == product(group, inputs[1 : place + 1])
    ends = [int(name.partition("@")[2]) for name in counted if "@" in name]
    assert ends[-1] == last
    assert sum(mask_NT for name, mask_NT in counted.items() if "@" in name).tolist() == batch.answers_NT.tolist()
    for before, end in itertools.pairwise([0, *ends]):
        assert np.flatnonzero(counted[f"position_error@{end}"][0]).tolist() == [*range(before + 1, end + 1)]
    assert np.flatnonzero(counted["last_error"][0]).tolist() == [last]


def test_elements_are_uniform_and_independent():
    inputs = WordProblem(group="S3").sequences("train", 0, 0, 4000).inputs_NT[:, 1:]
    assert uniform_p(np.bincount(inputs.ravel(), minlength=6)) > ALPHA
    assert independent_p(contingency(inputs[:, :-1], inputs[:, 1:])) > ALPHA
    assert uniform_p(contingency(inputs[:, 0], inputs[:, 1]).ravel()) > ALPHA


@pytest.mark.parametrize(("group", "order", "commutes"), [
    ("S2", 2, True), ("S3", 6, False), ("S4", 24, False), ("S5", 120, False), ("A3", 3, True), ("A4", 12, False),
    ("A5", 60, False), ("Z60", 60, True), ("Z120", 120, True),
])  # fmt: skip
def test_groups(group, order, commutes):
    assert WordProblem(group=group).vocabulary_size == order + 1
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, order, (200, 2)).tolist()
    assert all(product(group, pair) == product(group, pair[::-1]) for pair in pairs) == commutes


def test_rules_by_hand():
    task = WordProblem(group="S3", elements=4)
    batch = task.with_targets(np.array([[6, 6, 1, 3, 2, 2]]))
    inputs = batch.inputs_NT[0].tolist()
    rules = {name: answers[0, 1:].tolist() for name, answers in task.shortcuts(batch.inputs_NT).items()}
    assert rules["the last element"] == inputs[1:]
    assert rules["the product of the last two"] == [
        product("S3", inputs[max(1, place - 1) : place + 1]) for place in range(1, 5)
    ]
    elements = elements_of("S3")
    for place in range(2, 5):
        answer = rules["the first place, then one with the right sign"][place - 1]
        assert is_even(elements[answer]) == is_even(elements[batch.targets_NT[0, place]])
    assert len(WordProblem(group="A5").shortcuts(batch.inputs_NT)) == 2


@pytest.mark.parametrize(("elements", "right"), [(20, 6.6), (128, 2.4), (512, 1.9)])
def test_the_first_place_flatters_short_sequences(elements, right):
    task = WordProblem(elements=elements)
    errors = task.shortcut_errors("in_dist", 1024)
    assert 100 - errors["the last element"] == pytest.approx(right, abs=0.4)
    assert 100 - task.shortcut_errors("in_dist", 2048, "last_error")["the last element"] == pytest.approx(1.7, abs=1)
    assert task.shortcut_errors("in_dist", 1024, "position_error@2")["the product of the last two"] == 0


def test_the_sign_doubles_the_chance():
    errors = WordProblem(group="S5").shortcut_errors("in_dist", 8192, "last_error")
    assert 100 - errors["the first place, then one with the right sign"] == pytest.approx(100 / 60, abs=0.45)
    assert 100 - errors["the last element"] == pytest.approx(100 / 120, abs=0.35)


def test_metrics_of_each_test_set():
    task = WordProblem(elements=5, longer_elements=9)
    assert task.partial_errors("in_dist") == (
        "last_error", "position_error@1", "position_error@2", "position_error@4", "position_error@5",
    )  # fmt: skip
    assert task.partial_errors("longer")[-2:] == ("position_error@8", "position_error@9")


def test_an_unknown_group_is_an_error():
    with raises("literal_error", key="group"):
        WordProblem(group="S6")
    assert IGNORED not in WordProblem().sequences("train", 0, 0, 2).targets_NT
