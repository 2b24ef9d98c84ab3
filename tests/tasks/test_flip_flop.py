"""Flip-Flop: answers by an interpreter, and the distribution of instructions and bits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.tasks import IGNORED, FlipFlop
from tests.tasks.chi_square import ALPHA, contingency, independent_p, shares_p, uniform_p

W, I, R = 2, 3, 4  # noqa: E741


@given(
    pairs=st.integers(2, 20),
    p=st.floats(0, 1),
    split=st.sampled_from(["train", "in_dist", "sparse", "dense"]),
    loss=st.sampled_from(["reads", "all"]),
)
@settings(max_examples=60, deadline=None)
def test_every_answer_is_that_of_an_interpreter(pairs, p, split, loss):
    task = FlipFlop(pairs=pairs, p_ignore=p, sparse_p_ignore=p, dense_p_ignore=p, loss=loss)
    batch = task.sequences(split, 0, 0, 20)
    for inputs, targets, answers in zip(batch.inputs_NT, batch.targets_NT, batch.answers_NT, strict=True):
        assert inputs[0] == W
        assert inputs[-1] == R
        memory = None
        for t in range(0, len(inputs), 2):
            instruction = inputs[t]
            bit = inputs[t + 1] if t + 1 < len(inputs) else targets[t]
            assert instruction in (W, I, R)
            assert bit in (0, 1)
            assert answers[t] == (instruction == R)
            if instruction == W:
                memory = bit
            if instruction == R:
                assert bit == memory == targets[t]
            elif loss == "reads":
                assert targets[t] == IGNORED
        assert not answers[1::2].any()
        if loss == "all":
            assert targets[:-1].tolist() == inputs[1:].tolist()


@pytest.mark.parametrize(
    "task",
    [FlipFlop(), FlipFlop(pairs=40, p_ignore=0.5, sparse_p_ignore=0.9, dense_p_ignore=0.0)],
    ids=["paper", "own"],
)
@pytest.mark.parametrize("split", ["train", "in_dist", "sparse", "dense"])
def test_instructions_have_the_declared_shares_and_are_independent(task, split):
    """χ² of the instructions between the first and the last."""
    p = {"sparse": task.sparse_p_ignore, "dense": task.dense_p_ignore}.get(split, task.p_ignore)
    free = task.sequences(split, 0, 0, 400).inputs_NT[:, 2:-1:2]
    counts = np.bincount(free.ravel(), minlength=5)[[I, W, R]]
    assert not counts[0] or p > 0
    assert (
        shares_p(counts[1:] if p == 0 else counts, [(1 - p) / 2] * 2 if p == 0 else [p, (1 - p) / 2, (1 - p) / 2])
        > ALPHA
    )
    assert independent_p(contingency(free[:, :-1], free[:, 1:])) > ALPHA
    # The same distribution early, in the middle and late.
    thirds = np.array_split(free, 3, axis=1)
    assert independent_p([np.bincount(third.ravel(), minlength=5)[2:] for third in thirds]) > ALPHA


def test_written_and_ignored_bits_are_uniform_and_independent():
    batch = FlipFlop().sequences("train", 0, 0, 300)
    instructions, bits = batch.inputs_NT[:, :-1:2], batch.inputs_NT[:, 1::2]
    for symbol in (W, I):
        chosen = bits[instructions == symbol]
        assert uniform_p(np.bincount(chosen)) > ALPHA
        assert independent_p(contingency(chosen[:-1], chosen[1:])) > ALPHA
    assert (
        independent_p(contingency(instructions[:, 1:], bits[:, :-1])) > ALPHA
    )  # a bit is independent of the next instruction


def test_sizes_of_the_paper():
    assert FlipFlop().length("train") == 511  # 256 pairs, the last bit being predicted
    assert FlipFlop().vocabulary_size == 5


def test_the_shortcut_repeats_the_bit_before():
    task = FlipFlop(pairs=20)
    tokens = np.array([[W, 0, I, 1, R, 0, I, 1, W, 1, R]])
    answer = task.shortcuts(tokens)["the last bit, ignored or not"]
    assert (answer[0, 4], answer[0, 10]) == (1, 1)  # the first is wrong: 0 was written
    # A read is answered wrongly where the pair before is ignored and its bit differs: p · ½.
    errors = task.shortcut_errors("in_dist", 4000)
    assert errors["the last bit, ignored or not"] == pytest.approx(40, abs=2)
    assert errors["the most frequent answer"] == pytest.approx(50, abs=2)
