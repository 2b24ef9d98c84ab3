"""Dyck words: every answer by a stack, all words equally likely, and the scores of rules without a stack."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.tasks import Dyck
from tests.helpers.errors import raises
from tests.tasks.chi_square import ALPHA, uniform_p


def tokens_of(task, text):
    labels = [task.token_label(token) for token in range(task.vocabulary_size)]
    return [labels.index(each) for each in text.split()]


def test_the_row_of_the_docstring():
    task = Dyck(brackets=8, longer_brackets=8, depth=2, deeper_depth=2)
    whole = tokens_of(task, "x ( [ ] [ ] ) ( )")
    batch = task.with_targets(np.array([whole]))
    assert batch.inputs_NT.tolist() == [whole[:-1]]
    assert batch.targets_NT.tolist() == [whole[1:]]
    assert np.flatnonzero(batch.answers_NT[0]).tolist() == [2, 4, 5, 7]
    counted = {name: np.flatnonzero(mask[0]).tolist() for name, mask in task.counted(batch, "in_dist").items()}
    assert counted == {
        "inner_error": [5],
        "distance_error@1": [2, 4, 7],
        "distance_error@3": [],
        "distance_error@7": [5],
    }
    assert [task.token_label(token) for token in task.choices("token_error")] == [")", "]"]


def test_valid_tokens_of_the_source():
    """After x: ( [; after `(`: ( [ ); after `[`, `]`, `[`: the closing one of the last bracket that is open."""
    task = Dyck()
    valid = task.valid_next(np.array([tokens_of(task, "x ( [ ] [")]))[0]
    labels = ["".join(task.token_label(token) for token in np.flatnonzero(row)) for row in valid]
    assert labels == ["([", "([)", "([]", "([)", "([]"]


@given(
    kinds=st.integers(2, 4),
    half=st.integers(1, 10),
    longer=st.integers(1, 14),
    data=st.data(),
    split=st.sampled_from(["train", "in_dist", "longer", "deeper", "longer_deeper"]),
)
@settings(max_examples=80, deadline=None)
def test_every_answer_is_that_of_a_stack(kinds, half, longer, data, split):
    depth, deeper = (data.draw(st.integers(1, half)) for _ in range(2))
    longer = max(longer, half)
    task = Dyck(kinds=kinds, brackets=2 * half, longer_brackets=2 * longer, depth=depth, deeper_depth=deeper)
    batch = task.sequences(split, 1, 0, 10)
    counted, valid_NTV, rules = (
        task.counted(batch, split),
        task.valid_next(batch.inputs_NT),
        task.shortcuts(batch.inputs_NT),
    )
    last_rule, counter_rule = rules.values()
    for row in range(10):
        inputs, targets = batch.inputs_NT[row].tolist(), batch.targets_NT[row].tolist()
        assert inputs[0] == 2 * kinds
        assert inputs[1:] == targets[:-1]
        stack, depths, opened, counts = [], [0], [], collections.Counter()
        for place, (token, target) in enumerate(zip(inputs, targets, strict=True)):
            if token < kinds:
                stack.append((token, place))
                opened.append(token)
                counts[token] += 1
            elif token < 2 * kinds:
                assert stack.pop()[0] == token - kinds
                counts[token - kinds] -= 1
            depths.append(len(stack))
            valid = set(range(kinds)) | ({kinds + stack[-1][0]} if stack else set())
            assert set(np.flatnonzero(valid_NTV[row, place])) == valid
            assert target in valid
            is_answer = target >= kinds
            assert batch.answers_NT[row, place] == is_answer
            distance = place + 1 - stack[-1][1] if stack else 0
            for name, mask_NT in counted.items():
                if name == "inner_error":
                    assert mask_NT[row, place] == (is_answer and distance > 1)
                else:
                    end = int(name.partition("@")[2])
                    inside = 2 ** (int(distance).bit_length()) - 1 == 2 ** end.bit_length() - 1
                    assert mask_NT[row, place] == (is_answer and inside)
            if is_answer:
                assert last_rule[row, place] == kinds + opened[-1]
                assert counter_rule[row, place] == kinds + max(range(kinds), key=lambda kind: counts[kind])
        assert len(stack) == 1
        assert stack[0][0] == targets[-1] - kinds
        assert max(depths) == (deeper if split.endswith("deeper") else depth)


@pytest.mark.parametrize(("brackets", "depth"), [(8, 2), (8, 3), (10, 4)])
def test_all_words_of_a_length_and_a_depth_are_equally_likely(brackets, depth):
    words = []
    for word in itertools.product((1, -1), repeat=brackets):
        depths = list(itertools.accumulate(word))
        if min(depths) == 0 == depths[-1] and max(depths) == depth:
            words.append(word)
    task = Dyck(brackets=brackets, longer_brackets=brackets, depth=depth, deeper_depth=depth)
    targets = task.sequences("train", 0, 0, 8000).targets_NT
    counts = collections.Counter(tuple(row) for row in np.where(targets < 2, 1, -1).tolist())
    assert counts.keys() == set(words)
    assert uniform_p([counts[word] for word in words]) > ALPHA
    opened = targets[targets < 2]
    assert uniform_p(np.bincount(opened)) > ALPHA


@pytest.mark.parametrize("brackets", [1200, 1204])
def test_words_as_deep_as_they_are_long(brackets):
    """The first word goes up 600 times, and then down; the other one has two pairs more."""
    task = Dyck(brackets=brackets, longer_brackets=brackets, depth=600, deeper_depth=600)
    tokens_NT = task.sequences("train", 0, 0, 64).whole()[:, 1:]
    depths_NT = np.where(tokens_NT < 2, 1, -1).cumsum(axis=1)
    assert (depths_NT.max(axis=1) == 600).all()
    assert (depths_NT.min(axis=1) == 0).all()
    assert (depths_NT[:, -1] == 0).all()


def test_f1_of_a_rule_by_hand():
    """`only opens brackets` on `x (`: all mass is valid; 2 of 2, then 2 of 3 valid tokens beat the others."""
    task = Dyck()
    tokens = np.array([tokens_of(task, "x (")])
    rule, p_NTV = next(task._rules(tokens))
    assert rule == "only opens brackets"
    share = (1 + 2 / 3) / 2
    assert task._f1(tokens, p_NTV) == pytest.approx(2 * share / (1 + share))


@pytest.mark.parametrize(("split", "opens", "closes_at_once"), [("in_dist", 0.83, 0.93), ("deeper", 0.80, 0.91)])
def test_f1_flatters_rules_without_a_stack(split, opens, closes_at_once):
    errors = Dyck().shortcut_errors(split, 2048, "f1_error")
    f1 = {rule: 1 - error / 100 for rule, error in errors.items()}
    assert f1["only opens brackets"] == pytest.approx(opens, abs=0.02)
    assert f1["opens a bracket, or closes the one before at once"] == pytest.approx(closes_at_once, abs=0.02)


@pytest.mark.parametrize(("split", "share"), [("in_dist", 0.69), ("deeper", 0.75)])
def test_the_last_bracket_that_was_opened_is_often_the_right_one(split, share):
    """Of all places, those at depth 0 included; of the closing brackets after an inner pair, it is right by chance."""
    task = Dyck()
    batch = task.sequences(split, 0, 0, 2048)
    valid_NTV = task.valid_next(batch.inputs_NT)
    rule = task.shortcuts(batch.inputs_NT)["closes the last bracket that was opened, even if it is closed"]
    assert np.take_along_axis(valid_NTV, rule[..., None], axis=2).mean() == pytest.approx(share, abs=0.03)
    errors = task.shortcut_errors(split, 2048, "inner_error")
    assert errors["closes the last bracket that was opened, even if it is closed"] == pytest.approx(50, abs=2)


def test_sizes_of_the_paper():
    task = Dyck()
    assert [task.length(split) for split in task.TESTS] == [32, 128, 32, 128]
    assert task.vocabulary_size == 5
    assert task.partial_errors("in_dist")[-1] == "distance_error@31"
    assert task.partial_errors("longer")[-1] == "distance_error@127"
    assert Dyck(depth=1).partial_errors("in_dist") == ()


@pytest.mark.parametrize(
    ("fields", "code", "data"),
    [
        ({"brackets": 7}, "multiple_of", {"key": "brackets"}),
        ({"brackets": 20}, "invalid_value", {"key": "deeper_depth", "value": 12, "largest": 10}),
        ({"kinds": 1}, "greater_than_equal", {"key": "kinds"}),
    ],
)
def test_impossible_sizes_are_errors(fields, code, data):
    with raises(code, **data):
        Dyck(**fields)
