"""Generation: a cached step equals the full pass for every encoding; sampling, stop texts and ends."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from cope_sweep.config import RunSpec
from cope_sweep.inference import (
    Generation,
    LabelVocabulary,
    NotFiniteError,
    Predictor,
    Sampling,
    decode,
    generate,
    scoring,
)
from cope_sweep.inference.generation import sample
from cope_sweep.inference.vocabulary import TextVocabulary
from cope_sweep.positions import ENCODINGS
from cope_sweep.text import TextTokenizer
from tests.helpers.errors import raises
from tests.helpers.tiny import tiny_run
from tests.helpers.tiny_models import random_predictor
from tests.text.test_tokenizer import sentencepiece

COMBINATIONS = [
    *([{"kind": kind}] for kind in ENCODINGS),
    [],
    ["cope", "rope"],
    ["cope", "relative"],
    [{"kind": "cope", "gate": "separate"}, "rope", "alibi"],
    [{"kind": "cope", "p_max": 3}, "absolute"],
]
CONTEXT = 24


def predictor(*position: object, copy_from: str = "outputs", **model: object) -> Predictor:
    """A float64 model with random weights; vocabulary 16."""
    task = {"kind": "selective_copy", "tokens": 4, "blanks": 16, "dense_blanks": 2, "sparse_blanks": 16}
    task["copy_from"] = copy_from
    fields = {"layers": 2, "dim": 16, "heads": 2, "position": list(position)} | model
    run = RunSpec.model_validate(tiny_run(task=task).model_dump() | {"task": task, "model": fields})
    return random_predictor(run, 0.5)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 16, length)


def greedy_loop(model: Predictor, tokens: list[int], steps: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities, each from a full pass."""
    tokens, scores = list(tokens), []
    for _ in range(steps):
        logits_V = model.model(torch.tensor([tokens]))[0, -1]
        tokens.append(int(logits_V.argmax()))
        scores.append(logits_V.log_softmax(-1)[tokens[-1]].item())
    return tokens[-steps:], scores


@pytest.mark.parametrize("position", COMBINATIONS, ids=str)
def test_cached_steps_equal_full_passes(position: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a prompt is read in one pass or token by token."""
    model = predictor(*position)
    prompts = [prompt(5, 1), prompt(9, 2), prompt(5, 3)]
    full_passes = [greedy_loop(model, ids.tolist(), 8) for ids in prompts]
    for scratch in (1 << 28, 1):
        monkeypatch.setattr(scoring, "SCRATCH_BYTES", scratch)
        generations = [Generation(model, each, Sampling(max_tokens=8, temperature=0, top=3)) for each in prompts]
        generate(generations)
        for each, (expected, scores) in zip(generations, full_passes, strict=True):
            assert [token.id for token in each.tokens] == expected
            np.testing.assert_allclose([token.log_probability for token in each.tokens], scores, rtol=1e-10)
            assert each.finish_reason == "length"
            for token in each.tokens:
                assert token.top[0] == (token.id, token.log_probability)
                assert [p for _, p in token.top] == sorted((p for _, p in token.top), reverse=True)


def test_company_does_not_change_samples() -> None:
    model = predictor("cope")
    alone = Generation(model, prompt(6), Sampling(max_tokens=9), seed=(5, 0))
    generate([alone])
    again = Generation(model, prompt(6), Sampling(max_tokens=9), seed=(5, 0))
    others = [Generation(model, prompt(n, n), Sampling(max_tokens=n), seed=n) for n in (3, 6, 12)]
    generate([others[0], again, *others[1:]])
    assert [token.id for token in again.tokens] == [token.id for token in alone.tokens]
    other_seed = Generation(model, prompt(6), Sampling(max_tokens=9), seed=(5, 1))
    generate([other_seed])
    assert [token.id for token in other_seed.tokens] != [token.id for token in alone.tokens]


@pytest.mark.parametrize(("position", "longest"), [("cope", CONTEXT + 1), ("absolute", CONTEXT)])
def test_generation_ends_at_the_context(position: str, longest: int) -> None:
    model = predictor(position)
    assert (model.context, model.longest_read) == (CONTEXT, longest)
    generation = Generation(model, prompt(20), Sampling(max_tokens=100))
    generate([generation])
    assert (len(generation.ids), generation.finish_reason) == (longest + 1, "length")
    whole_window = Generation(model, prompt(CONTEXT + 1), Sampling(max_tokens=5, temperature=0))
    generate([whole_window])
    expected, _ = greedy_loop(model, prompt(CONTEXT + 1)[-longest:].tolist(), 1)
    assert [token.id for token in whole_window.tokens] == expected
    for length in (0, CONTEXT + 2):
        with raises("prompt_length", tokens=length, largest=CONTEXT + 1):
            Generation(model, prompt(length), Sampling())


@pytest.mark.parametrize("position", [["cope"], []])
def test_outputs_that_are_not_numbers_are_an_error(position: list[str]) -> None:
    model = predictor(*position)
    model.model.embedding.weight[3] = math.nan
    generation = Generation(model, np.array([3, 3]), Sampling())
    with pytest.raises(NotFiniteError):
        generate([generation])


def test_sampling_by_hand() -> None:
    rng = np.random.default_rng(0)
    logits_V = np.log([0.5, 0.2, 0.3])

    def share(temperature: float) -> list[float]:
        counts = np.bincount([sample(logits_V, temperature, rng) for _ in range(4000)], minlength=3)
        return (counts / 4000).tolist()

    assert share(temperature=0) == [1, 0, 0]
    assert share(temperature=1) == pytest.approx([0.5, 0.2, 0.3], abs=0.04)
    flat_V = np.sqrt([0.5, 0.2, 0.3])  # probabilities to the power 1/temperature
    assert share(temperature=2) == pytest.approx((flat_V / flat_V.sum()).tolist(), abs=0.04)
    assert share(temperature=1e-300) == [1, 0, 0]


def test_text_ends_before_a_stop_text() -> None:
    model = predictor("cope")
    whole = Generation(model, prompt(6), Sampling(max_tokens=9), seed=5)
    generate([whole])
    labels = whole.text.split()  # a text of labels with a blank before each
    stop = f"{labels[2]} {labels[3]}"  # over two tokens
    stopped = Generation(model, prompt(6), Sampling(max_tokens=9, stop=("no label", stop)), seed=5)
    generate([stopped])
    assert (stopped.text, stopped.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    assert [token.id for token in stopped.tokens] == [token.id for token in whole.tokens][: len(stopped.tokens)]


def test_a_cancelled_generation_ends_early() -> None:
    generation = Generation(predictor("cope"), prompt(6), Sampling(max_tokens=9))
    generate([generation], lambda: len(generation.tokens) == 2)
    assert (len(generation.tokens), generation.finish_reason) == (2, None)


def test_labels_are_read_and_written() -> None:
    run = RunSpec.model_validate(tiny_run().model_dump() | {"task": {"kind": "flip_flop", "pairs": 4}})
    labels = LabelVocabulary(run)
    assert labels.encode(" w 0 i 1 r").tolist() == [2, 0, 3, 1, 4]
    assert decode(labels, [2, 0, 3, 1, 4]) == " w 0 i 1 r"
    assert [labels.label(token) for token in (2, 0)] == [" w", " 0"]
    with raises("unknown_label", label="hello", task="flip_flop", allowed=["0", "1", "w", "i", "r"]):
        labels.encode("w hello")


def test_every_token_of_a_tokenizer_of_sentencepiece_s_kind_has_a_label_of_its_own(tmp_path: Path) -> None:
    sentencepiece([]).save(str(tmp_path / "tokenizer.json"))
    vocabulary = TextVocabulary(TextTokenizer.load(tmp_path / "tokenizer.json"))
    labels = [vocabulary.label(token) for token in range(vocabulary.tokenizer.ids + 2)]
    assert len(set(labels)) == len(labels)
    assert labels[3 + ord("a")] == f"<{3 + ord('a')}>"
    assert labels[259:263] == [" ", "a", "c", "t"]


def test_a_task_whose_inputs_depend_on_the_answers_generates_nothing() -> None:
    run = RunSpec.model_validate(tiny_run().model_dump() | {"task": {"kind": "word_problem", "group": "S3"}})
    model = random_predictor(run, 0.5)
    with raises("no_generation", task="word_problem"):
        Generation(model, np.array([6, 6, 4]), Sampling())
    assert Generation(model, np.array([6, 6, 4]), Sampling(max_tokens=0)).finish_reason == "length"
    assert math.isfinite(model.perplexity([[6, 6, 4]]).perplexity)


def test_a_model_that_was_trained_on_markers_reads_them_in_the_places_of_its_answers() -> None:
    model = predictor("cope", copy_from="markers")
    generation = Generation(model, np.array([3, 14, 7, 15]), Sampling(max_tokens=3, temperature=0))
    generate([generation])
    with torch.no_grad():
        logits_TV = model.model(torch.tensor([[3, 14, 7, 15, 15, 15]]))[0, 3:]
    assert generation.ids == [3, 14, 7, 15, *logits_TV.argmax(-1).tolist()]
