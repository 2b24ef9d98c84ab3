import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.tasks import IGNORED, FlipFlop

W, I, R = 2, 3, 4  # noqa: E741


@given(
    pairs=st.integers(2, 20),
    p=st.floats(0, 1),
    split=st.sampled_from(["train", "in_dist", "sparse", "dense"]),
    loss=st.sampled_from(["reads", "all"]),
)
@settings(max_examples=60, deadline=None)
def test_every_answer_is_what_an_interpreter_says(pairs, p, split, loss):
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


@pytest.mark.parametrize(("split", "p"), [("train", 0.8), ("in_dist", 0.8), ("sparse", 0.98), ("dense", 0.1)])
def test_instructions_come_as_often_as_said(split, p):
    n = 200
    tokens = FlipFlop().sequences(split, 0, 0, n).inputs_NT
    free = tokens[:, 2:-1:2]
    for symbol, share in ((I, p), (W, (1 - p) / 2), (R, (1 - p) / 2)):
        sigma = (share * (1 - share) / free.size) ** 0.5
        assert abs((free == symbol).mean() - share) < 4 * sigma


def test_written_and_ignored_bits_are_even():
    batch = FlipFlop().sequences("train", 0, 0, 300)
    instructions, bits = batch.inputs_NT[:, :-1:2], batch.inputs_NT[:, 1::2]
    for symbol in (W, I):
        chosen = bits[instructions == symbol]
        assert abs(chosen.mean() - 0.5) < 4 * 0.5 / len(chosen) ** 0.5


def test_lengths_at_the_papers_size():
    assert FlipFlop().length("train") == 511  # 256 pairs, the last bit being predicted
    assert FlipFlop().vocabulary_size == 5
