"""Language modelling: every token is scored once, every context is visited once per epoch, and metrics are exact."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.tasks import IGNORED, WikiText
from cope_sweep.train import Runtime, Trainer
from tests.helpers.errors import raises
from tests.helpers.texts import write_corpus
from tests.helpers.tiny import tiny_run
from tests.helpers.tiny_models import set_logits

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def task(folder, cache):
    """A task with some thousand tokens per split."""
    task = WikiText(corpus="small", folder=str(folder), tokens=16, vocabulary=300)
    task.prepare()
    return task


def stream(task, split):
    return np.array(task.open_corpus().splits[split].tokens_L, dtype=np.int64)


# -- test sets


@given(split=st.sampled_from(["train", "validation", "test"]), context=st.integers(1, 400), data=st.data())
@settings(max_examples=40, deadline=None)
def test_windows_score_every_token_once_with_enough_context(task, split, context, data):
    stride = data.draw(st.integers(1, context))
    windows, tokens = task.windows(split, context, stride), stream(task, split)
    scored = []
    for index in range(len(windows)):
        batch = windows[index : index + 1]
        begin = index * stride
        input_T, target_T = batch.inputs_NT[0], batch.targets_NT[0]
        places = np.flatnonzero(target_T != IGNORED)
        scored += (begin + 1 + places).tolist()
        # A target is the token after its input, and the inputs are the text.
        assert (target_T[places] == tokens[begin + 1 + places]).all()
        assert (input_T[: places[-1] + 1] == tokens[begin : begin + places[-1] + 1]).all()
        assert index == 0 or places[0] >= context - stride
        assert np.array_equal(batch.answers_NT[0], target_T != IGNORED)
    assert scored == list(range(1, len(tokens)))


@given(context=st.integers(1, 300), data=st.data())
@settings(max_examples=60, deadline=None)
def test_windows_count_every_word_and_byte_once(task, folder, context, data):
    stride = data.draw(st.integers(max(1, context // 8), context))
    windows = task.windows("test", context, stride)
    cut = data.draw(st.integers(0, len(windows)))
    text = (folder / "wiki.test.tokens").read_bytes()
    words, size = 0, 0
    for batch in (windows[:cut], windows[cut : len(windows)]):  # any slices, also empty ones
        assert batch.inputs_NT.shape == batch.targets_NT.shape == (len(batch), context)
        assert batch.units_N["words"].dtype == batch.units_N["bytes"].dtype == np.int64
        words += batch.units_N["words"].sum()
        size += batch.units_N["bytes"].sum()
    assert (words, size) == (len(text.split()) + text.count(b"\n"), len(text))


@pytest.mark.parametrize("stride", [None, 5])
def test_a_test_set_ends(task, stride):
    """Past its end there are no sequences; it does not start again."""
    task = task.model_copy(update={"stride": stride})
    windows = task.windows("test", 16, stride or 16)
    total = len(windows)
    assert (total - 1) * (stride or 16) + 16 >= len(stream(task, "test")) - 1
    whole = task.sequences("test", 0, 0, total)
    assert len(task.sequences("test", 0, 0, total + 100)) == total
    last = task.sequences("test", 7, total - 2, 64)
    assert len(last) == 2
    assert np.array_equal(last.inputs_NT, whole.inputs_NT[-2:])
    beyond = task.sequences("test", 0, total + 5, 8)
    assert beyond.inputs_NT.shape == beyond.targets_NT.shape == beyond.answers_NT.shape == (0, 16)
    assert beyond.units_N["words"].shape == (0,)
    assert (whole.targets_NT != IGNORED).sum() == len(stream(task, "test")) - 1


# -- training


def test_each_epoch_visits_every_context_once_in_another_order(task):
    tokens = stream(task, "train")
    contexts = (len(tokens) - 1) // 16
    expected = {tuple(tokens[i * 16 : i * 16 + 17]) for i in range(contexts)}
    assert contexts > 100
    orders = []
    for epoch in range(3):
        batch = task.sequences("train", 0, epoch * contexts, contexts)
        seen = [
            (*row, target[-1]) for row, target in zip(batch.inputs_NT.tolist(), batch.targets_NT.tolist(), strict=True)
        ]
        assert sorted(seen) == sorted(tuple(tokens[i * 16 : i * 16 + 17]) for i in range(contexts))
        assert set(seen) == expected
        assert (batch.targets_NT[:, :-1] == batch.inputs_NT[:, 1:]).all()
        orders.append(seen)
    orders.append([(*row,) for row in task.sequences("train", 1, 0, contexts).inputs_NT.tolist()])
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


@pytest.fixture(scope="module")
def whole(task):
    """Several epochs of training sequences."""
    return task.sequences("train", 3, 0, 2700)


@given(start=st.integers(0, 2000), count=st.integers(1, 700))
@settings(max_examples=40, deadline=None)
def test_any_range_is_a_slice_of_the_whole(task, whole, start, count):
    """Also a range that contains the end of an epoch."""
    part = task.sequences("train", 3, start, count)
    assert np.array_equal(part.inputs_NT, whole.inputs_NT[start : start + count])
    assert np.array_equal(part.targets_NT, whole.targets_NT[start : start + count])
    assert np.array_equal(part.units_N["words"], whole.units_N["words"][start : start + count])


# -- metrics


def test_a_unigram_model_has_the_perplexity_of_the_unigrams(task, folder):
    """The expected values are computed from the tokens."""
    counts = np.bincount(stream(task, "train")[1:], minlength=300) + 1
    p = counts / counts.sum()
    run = tiny_run(task=task.model_dump(mode="json"), **{"model.tied": False, "train.batch": 64})
    trainer = Trainer(run, Runtime())
    set_logits(trainer.model, torch.from_numpy(np.log(p)))
    metrics, text = trainer.evaluate(10**6), (folder / "wiki.test.tokens").read_bytes()
    nats = -np.log(p)[stream(task, "test")[1:]]
    assert metrics["test/loss"] == pytest.approx(nats.mean(), rel=1e-6)
    assert metrics["test/perplexity"] == pytest.approx(np.exp(nats.mean()), rel=1e-5)
    assert metrics["test/bits_per_byte"] == pytest.approx(nats.sum() / math.log(2) / len(text), rel=1e-6)
    # Windows of any length, overlapping or not, give the same values.
    sliding = trainer.spec.evaluate.model_copy(update={"stride": 15})
    trainer.spec = trainer.spec.model_copy(update={"evaluate": sliding})
    for name, value in trainer.evaluator.evaluate_windows(50, 10**6).items():
        assert value == pytest.approx(metrics[name.removesuffix("@50")], rel=1e-5)


def test_perplexity_by_position_adds_up_to_that_of_the_windows(task):
    run = tiny_run(task=task.model_dump(mode="json"), **{"evaluate.positions": 50, "model.position": ["cope"]})
    trainer = Trainer(run, Runtime())
    by_position = trainer.evaluator.evaluate_positions(50, 10**6)
    assert set(by_position) == {name for name in run.metrics if "position_perplexity" in name}
    assert run.evaluate.position_ends == (16, 32, 50)
    tokens = len(stream(task, "test")) - 1
    whole, rest = divmod(tokens, 50)
    counts = [width * whole + min(width, max(0, rest - first)) for first, width in ((0, 16), (16, 16), (32, 18))]
    nats = [math.log(by_position[f"test/position_perplexity@{end}"]) for end in (16, 32, 50)]
    expected = trainer.evaluator.evaluate_windows(50, 10**6)["test/loss@50"]
    assert np.dot(counts, nats) / tokens == pytest.approx(expected, rel=1e-6)


# -- errors


def test_a_text_shorter_than_a_context_is_an_error(folder):
    task = WikiText(corpus="small", folder=str(folder), tokens=100_000, vocabulary=300)
    with raises("text_too_short", corpus="small", split="train", context=100_000):
        task.prepare()


def test_impossible_windows_are_errors(task):
    with raises("unknown_split", split="valid", allowed=["train", "validation", "test"]):
        task.windows("valid", 16, 16)
    with raises("unknown_split", split="in_dist"):
        task.sequences("in_dist", 0, 0, 1)
    for stride in (0, 17):
        with raises("invalid_value", key="stride", value=stride, largest=16):
            task.windows("test", 16, stride)
    with raises("text_too_short", split="test"):
        task.windows("test", 10**6, 10**6)


@pytest.mark.parametrize(
    ("fields", "code", "data"),
    [
        ({"corpus": "../mine"}, "invalid_corpus_name", {"value": "../mine"}),
        ({"tokens": 16, "stride": 17}, "invalid_value", {"key": "task.stride", "value": 17, "largest": 16}),
        (
            {"tokenizer": "gpt2", "vocabulary": 5000},
            "invalid_value",
            {"key": "task.vocabulary", "value": 5000, "smallest": 50257},
        ),
        ({"vocabulary": 256}, "greater_than_equal", {"key": "vocabulary", "ge": 257}),
    ],
)
def test_impossible_specs_are_errors(fields, code, data):
    with raises(code, **data):
        WikiText(**fields)


# -- identity


def test_the_folder_is_not_part_of_a_run_s_identity(task, folder, tmp_path):
    here = tiny_run(task=task.model_dump(mode="json"))
    there = tiny_run(task=task.model_dump(mode="json") | {"folder": str(tmp_path)})
    assert here.run_id == there.run_id
    assert here.run_id != tiny_run(task=task.model_dump(mode="json") | {"corpus": "other"}).run_id


def test_a_fingerprint_depends_on_text_and_tokenizer_only(task, folder, tmp_path):
    copy = write_corpus(tmp_path / "copy")
    assert task.model_copy(update={"folder": str(copy)}).fingerprint() == task.fingerprint()
    assert task.model_copy(update={"tokens": 32}).fingerprint() == task.fingerprint()
    assert task.model_copy(update={"vocabulary": 299}).fingerprint() != task.fingerprint()
    other = write_corpus(tmp_path / "other", test=61)
    assert task.model_copy(update={"folder": str(other)}).fingerprint() != task.fingerprint()


def test_the_data_folder_is_found_by_name(task, folder, tmp_path, monkeypatch):
    (tmp_path / "small").symlink_to(folder)
    monkeypatch.setenv("COPE_SWEEP_DATA", str(tmp_path))
    assert task.model_copy(update={"folder": None}).fingerprint() == task.fingerprint()
    task.save_tokenizer(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
