import math
from unittest import mock

import numpy as np
import pytest
import torch

from cope_sweep.model import Transformer, next_token_loss
from cope_sweep.tasks import IGNORED, TASKS, Batch
from cope_sweep.tasks.flip_flop import FlipFlop
from cope_sweep.train import Runtime, Trainer
from cope_sweep.train.evaluate import METRICS, EvaluatedPart, EvaluationSums, Evaluator, Predictions, f1_sums, metrics
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
LIKES_3 = torch.tensor([0.4, 0.3, 0.05, 0.2, 0.05])
NATS = -math.log(0.25 * 0.6 * 0.8 * 0.2 * 0.4)


def sums_of(*batches):
    sums = EvaluationSums(3, torch.device("cpu"))
    for batch, p_NTV in batches:
        sums.add_batch(batch)
        if len(batch):
            logits_NTV = torch.from_numpy(p_NTV).clamp(min=1e-30).log().float()
            nats = next_token_loss(logits_NTV, torch.from_numpy(batch.targets_NT))
            sums.add_predictions(part_of(batch), Predictions(nats, logits_NTV.argmax(-1)))
    return sums


def part_of(batch, counted_GNT=None):
    arrays = (batch.inputs_NT, batch.targets_NT, batch.answers_NT)
    return EvaluatedPart(*map(torch.from_numpy, arrays), counted_GNT, None)


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


def test_partial_errors_by_hand():
    """Two of a task's partial errors: one counts the first column, the other nothing."""
    sums = EvaluationSums(3, torch.device("cpu"), ["first_error", "last_error@2"])
    sums.add_batch(BATCH)
    counted = torch.zeros(2, 2, 3, dtype=torch.bool)
    counted[0, :, 0] = True
    predicted = torch.from_numpy(P).argmax(-1)
    sums.add_predictions(part_of(BATCH, counted), Predictions(torch.tensor(1.0), predicted))
    result = sums.result()
    # The first sequence's 0.5 for id 0 is wrong, though no answer; the second's 0.8 for id 1 is right.
    assert metrics(result, ["first_error", "last_error@2", "token_error"]) == {
        "first_error": 50, "token_error": 25,
    }  # fmt: skip
    assert result["majority_answers"] == 2


def test_f1_by_hand():
    """Valid: ids 0 and 1 at all places. P_val is their mass; a token beats the others where it is above the rest."""
    valid = torch.zeros(2, 3, 3, dtype=torch.bool)
    valid[..., :2] = True
    logits = torch.from_numpy(P).clamp(min=1e-30).log()
    targets = torch.from_numpy(BATCH.targets_NT)
    mass, beats = f1_sums(logits, targets, valid)
    assert mass.item() == pytest.approx(0.75 + 0.4 + 0.9 + 0.8 + 0.7)
    assert beats.item() == pytest.approx(0.5 + 0 + 0.5 + 0.5 + 0.5)
    sums = {"valid_mass": mass.item(), "beats": beats.item(), "targets": 5}
    precision, recall = 3.55 / 5, 2 / 5
    f1 = 2 * precision * recall / (precision + recall)
    assert metrics(sums, ["f1_error"]) == {"f1_error": pytest.approx(100 * (1 - f1))}
    assert metrics({"valid_mass": 0, "beats": 0, "targets": 5}, ["f1_error"]) == {"f1_error": 100}


def test_closing_brackets_are_compared_with_each_other():
    """A model that finds opening brackets most probable is judged by the closing one that it prefers."""
    task = {"kind": "dyck", "brackets": 12, "longer_brackets": 16, "depth": 2, "deeper_depth": 3}
    trainer = Trainer(tiny_run(task=task), Runtime())
    batch = trainer.spec.task.sequences("in_dist", 0, 0, 40)
    share = (batch.targets_NT[batch.answers_NT] == 3).mean()
    with mock.patch.object(Transformer, "forward", lambda self, tokens: torch.log(LIKES_3).expand(*tokens.shape, 5)):
        measured = trainer.evaluate(40)
    assert measured["in_dist/token_error"] == pytest.approx(100 * (1 - share))
    assert measured["in_dist/loss"] == pytest.approx(-np.log(LIKES_3.numpy())[batch.targets_NT].mean(), rel=1e-5)
    of_ranges = [measured[f"in_dist/{name}"] for name in trainer.spec.task.partial_errors("in_dist")]
    assert len(of_ranges) == 5
    inner_NT = trainer.spec.task.counted(batch, "in_dist")["inner_error"]
    assert of_ranges[0] == pytest.approx(100 * (batch.targets_NT[inner_NT] != 3).mean())


def test_objects_of_a_grid_are_compared_with_each_other():
    """A model that finds a blank most probable everywhere is wrong at all answers, but it prefers one object."""
    task = {"kind": "grid_navigation", "steps": 20, "dense_steps": 20, "sparse_steps": 20, "objects": 2}
    trainer = Trainer(tiny_run(task=task), Runtime())  # ids: 2 objects, a blank, 2 actions
    likes_blank = torch.tensor([0.1, 0.2, 0.4, 0.15, 0.15]).log()
    with mock.patch.object(Transformer, "forward", lambda self, tokens: likes_blank.expand(*tokens.shape, 5)):
        measured = trainer.evaluate(40)
    batch = trainer.spec.task.sequences("in_dist", 0, 0, 40)
    answers = batch.targets_NT[batch.answers_NT]
    revisits = batch.targets_NT[trainer.spec.task.counted(batch, "in_dist")["revisit_error"]]
    unmirrored = batch.targets_NT[trainer.spec.task.counted(batch, "in_dist")["map_error"]]
    assert measured["in_dist/token_error"] == 100
    assert measured["in_dist/map_error"] == pytest.approx(100 * (unmirrored != 1).mean())
    assert measured["in_dist/object_error"] == pytest.approx(100 * (answers != 1).mean())
    assert measured["in_dist/revisit_error"] == pytest.approx(100 * (revisits != 2).mean())


def test_partial_errors_of_longer_sequences_have_no_ranges():
    """`last_error@2x` would be the place 2 × N; ranges are measured at the trained length only."""
    task = {"kind": "word_problem", "group": "S3", "elements": 4, "longer_elements": 6}
    run = tiny_run(task=task, **{"evaluate.lengths": [2]})
    measured = Evaluator(run, Runtime(), Trainer(run, Runtime()).model).evaluate_longer(2, 8)
    assert set(measured) == {f"in_dist/{name}@2x" for name in (*run.task.METRICS, "last_error")}
    assert set(measured) | {"longer/position_error@6", "in_dist/position_error@4"} <= set(run.metrics)
    assert not [name for name in run.metrics if name.count("@") > 1]


def test_an_overflow_is_infinite_and_a_metric_that_counts_nothing_is_left_out():
    assert metrics({"nats": 1e6, "targets": 1}, ["perplexity"]) == {"perplexity": math.inf}
    assert metrics({}, [*METRICS, "last_error"]) == {}
    assert metrics({"nats": 2.0, "targets": 1, "answers": 0}, ["token_error", "loss"]) == {"loss": 2}
    # A text without spaces: few words, in training that does not diverge.
    assert metrics({"nats": 7000.0, "targets": 1000, "words": 7}, ["word_perplexity", "loss"]) == {"loss": 7}


@pytest.mark.parametrize(
    "task",
    [
        {"kind": "dyck", "brackets": 16, "longer_brackets": 64, "depth": 2, "deeper_depth": 3},
        {"kind": "grid_navigation", "p_empty": 1.0, "steps": 8},
    ],
)
def test_a_test_set_without_something_to_count_has_no_error_of_it(task):
    run = tiny_run(task=task)
    measured = Evaluator(run, Runtime(), Trainer(run, Runtime()).model).evaluate(16)
    names, uncounted = set(), set()
    for split in run.task.TESTS:
        batch = run.task.sequences(split, 0, 0, 16)
        counted = run.task.counted(batch, split) | dict.fromkeys(("token_error", "sequence_error"), batch.answers_NT)
        names |= {f"{split}/{name}" for name in run.task.metrics(split)}
        uncounted |= {f"{split}/{name}" for name, counted_NT in counted.items() if not counted_NT.any()}
    assert uncounted
    assert set(measured) == names - uncounted


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


def test_windows_cover_what_overlapping_sequences_do(text):
    """17 sequences of 16 tokens, 4 apart, are 80 tokens: two windows of 64."""
    trainer = text_trainer(text, **{"task.stride": 4, "evaluate.contexts": [64]})
    set_logits(trainer.model, RISING.log())
    assert trainer.evaluate(17)["test/perplexity"] == pytest.approx(cross_entropy(trainer, "test", 80), rel=1e-6)
    measured = trainer.evaluator.evaluate_windows(64, 17)
    assert measured["test/perplexity@64"] == pytest.approx(cross_entropy(trainer, "test", 128), rel=1e-6)


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


def test_longer_sequences_are_generated_once(monkeypatch):
    generated = []

    def generate(task, split, generator, count):
        generated.append(count)
        return original(task, split, generator, count)

    original = FlipFlop.generate
    monkeypatch.setattr(FlipFlop, "generate", generate)
    run = tiny_run(task={"kind": "flip_flop", "pairs": 4}, **{"evaluate.lengths": [2], "train.batch": 4})
    Trainer(run, Runtime()).evaluator.evaluate_longer(2, 96)
    assert generated == [64, 64]


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
    for size in (1, 2, 3):  # of a part
        parts = [(inputs[start : start + size], targets[start : start + size], None) for start in range(0, 3, size)]
        evaluator._test_shares.side_effect = lambda *asked, parts=parts: iter([("in_dist", parts)])
        assert [each.tolist() for each in Evaluator.sample_sequences(evaluator, 3)] == [[0, 1, 2], [8]]
        assert [each.tolist() for each in Evaluator.sample_sequences(evaluator, 2)] == [[0, 1, 2]]
