import math
from unittest import mock

import numpy as np
import pytest
import torch

from cope_sweep.model import next_token_loss
from cope_sweep.tasks import IGNORED, TASKS, Batch
from cope_sweep.train import Runtime, Trainer
from cope_sweep.train.evaluate import METRICS, EvaluationSums, Evaluator, metrics
from tests.helpers.tiny import tiny_run
from tests.helpers.tiny_models import set_logits

# Two sequences of three tokens over three ids. Answers are all targets but the first.
BATCH = Batch(
    inputs_NT=np.array([[0, 1, 2], [2, 1, 0]]),
    targets_NT=np.array([[1, 2, IGNORED], [1, 2, 1]]),
    answers_NT=np.array([[False, True, False], [True, True, True]]),
    units_N={"words": np.array([1, 3]), "bytes": np.array([4, 6]), "cut": np.array([1, 0])},
)
P = np.array([[[0.5, 0.25, 0.25], [0.2, 0.2, 0.6], [1, 0, 0]], [[0.1, 0.8, 0.1], [0.6, 0.2, 0.2], [0.3, 0.4, 0.3]]])
NATS = -math.log(0.25 * 0.6 * 0.8 * 0.2 * 0.4)


def sums_of(*batches):
    sums = EvaluationSums(3, torch.device("cpu"))
    for batch, p_NTV in batches:
        sums.add_batch(batch)
        if len(batch):
            targets, answers = torch.from_numpy(batch.targets_NT), torch.from_numpy(batch.answers_NT)
            logits_NTV = torch.from_numpy(p_NTV).clamp(min=1e-30).log().float()
            nats = next_token_loss(logits_NTV, targets)
            sums.add_predictions(nats, logits_NTV.argmax(-1), targets, answers)
    return sums


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", NATS / 5),
        ("perplexity", math.exp(NATS / 5)),
        ("word_perplexity", math.exp(NATS / 4)),
        ("bits_per_byte", NATS / math.log(2) / 10),
        ("token_error", 25),  # the second sequence's 0.6 for id 0
        ("majority_baseline_error", 50),  # two answers are 1, two are 2
        ("sequence_error", 50),
        ("cut", 50),
    ],
)
def test_worked_by_hand(name, value):
    assert metrics(sums_of((BATCH, P)).result(), [name]) == {name: pytest.approx(value, rel=1e-6)}


def test_every_metric_that_a_task_names_exists():
    assert {name for task in TASKS.values() for name in task.METRICS} <= set(METRICS)


def test_an_overflow_is_infinite_and_an_empty_metric_is_zero():
    assert metrics({"nats": 1e6, "targets": 1}, ["perplexity"]) == {"perplexity": math.inf}
    assert metrics({}, ["token_error", "majority_baseline_error", "cut", "loss"]) == dict.fromkeys(
        ["token_error", "majority_baseline_error", "cut", "loss"], 0
    )


def text_trainer(text, **overrides):
    return Trainer(tiny_run(**{"task": text, "model.tied": False} | overrides), Runtime())


def cross_entropy(trainer, split, tokens=None):
    """Perplexity under `RISING` of a test set's first tokens, from its ids."""
    ids_L = torch.from_numpy(trainer.spec.task.open_corpus().splits[split].tokens_L[1:].astype(np.int64))
    return (-RISING[ids_L[:tokens]].log().mean()).exp().item()


RISING = torch.arange(1, 281, dtype=torch.float64) / sum(range(1, 281))


@pytest.mark.parametrize("context", [7, 16, 33, 128])
@pytest.mark.parametrize("stride", [None, 5])
def test_windows_of_any_length_give_the_cross_entropy_of_the_text(text, context, stride):
    """Every token of the text is scored once, so the mean over windows is that over the text."""
    trainer = text_trainer(text, **{"evaluate.contexts": [context], "evaluate.stride": stride})
    set_logits(trainer.model, RISING.log())
    measured = trainer.evaluator.evaluate_windows(context, 10_000)
    assert set(measured) == {
        f"{split}/{name}@{context}" for split in ("validation", "test") for name in trainer.spec.task.METRICS
    }
    for split in ("validation", "test"):
        expected = cross_entropy(trainer, split)
        assert measured[f"{split}/perplexity@{context}"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("batch", [1, 64])
def test_windows_cover_as_much_text_as_the_sequences(text, batch):
    """9 sequences of 16 tokens are 144: three windows of 64 tokens, 192 tokens."""
    trainer = text_trainer(text, **{"evaluate.contexts": [64], "train.batch": batch})
    set_logits(trainer.model, RISING.log())
    measured = trainer.evaluator.evaluate_windows(64, 9)
    assert measured["test/perplexity@64"] == pytest.approx(cross_entropy(trainer, "test", 192), rel=1e-6)


@pytest.mark.parametrize("batch", [1, 6, 64])
def test_longer_sequences_are_those_of_the_longer_task(batch):
    """The same weights on the task with 3 times the pairs, whose test set is evaluated as it is."""
    short = {"kind": "flip_flop", "pairs": 4}
    trainer = Trainer(tiny_run(task=short, **{"evaluate.lengths": [3], "train.batch": batch}), Runtime())
    longer = Trainer(tiny_run(task=short | {"pairs": 12}, **{"train.batch": batch}), Runtime())
    longer.model.load_state_dict(trainer.model.state_dict())
    expected = longer.evaluate(20)
    measured = trainer.evaluator.evaluate_longer(3, 20)
    assert set(measured) == {f"in_dist/{name}@3x" for name in ("token_error", "sequence_error", "loss")}
    assert set(measured) <= set(trainer.spec.metrics)
    for name, value in measured.items():
        assert value == pytest.approx(expected[name.removesuffix("@3x")], rel=1e-5)


@pytest.mark.parametrize("batch", [3, 5, 64])
def test_a_short_test_set_is_measured_completely_and_once(text, batch):
    small_batches, one_batch = text_trainer(text, **{"train.batch": batch}), text_trainer(text)
    assert small_batches.evaluate(10_000) == pytest.approx(one_batch.evaluate(10**6), rel=1e-5)


def test_sample_sequences_end_with_their_last_target_and_have_one():
    """A task of a user's may have sequences without a target, which are nothing to measure: the run goes on."""
    inputs = torch.arange(12).reshape(3, 4)
    targets = torch.full((3, 4), IGNORED)
    targets[0, 2] = targets[2, 0] = 1
    evaluator = mock.Mock(spec=Evaluator)
    evaluator._spec = mock.Mock(test_sets=("in_dist",))
    evaluator._test_shares.return_value = iter([("in_dist", [(inputs, targets, None)])])
    found = Evaluator.sample_sequences(evaluator, 3)
    assert [each.tolist() for each in found] == [[0, 1, 2], [8]]
