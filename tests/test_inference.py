"""Predictor: known distributions, independence of padding, windows and batches, and invalid input."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from cope_sweep.config import RunSpec
from cope_sweep.errors import JsonValue
from cope_sweep.inference import Perplexity, Predictor, scoring
from cope_sweep.model import Transformer
from tests.helpers.errors import raises
from tests.helpers.tiny_models import random_predictor, set_logits

RNG = np.random.default_rng(0)


def run_spec(*position: str, vocabulary: int = 14, **model: object) -> RunSpec:
    task = {"kind": "selective_copy", "tokens": 3, "blanks": 4, "dense_blanks": 2, "sparse_blanks": 6}
    data = {
        "task": task | {"vocabulary": vocabulary},
        "model": {"dim": 16, "heads": 2, "layers": 2, "position": position} | model,
    }
    return RunSpec.model_validate_json(json.dumps(data))


def predictor(*position: str, **model: object) -> Predictor:
    """A model with random weights, large enough that every token changes the output."""
    return random_predictor(run_spec(*position, **model), 0.4, dtype=torch.float32)


def sequences(*lengths: int) -> list[list[int]]:
    return [RNG.integers(0, 14, length).tolist() for length in lengths]


def with_logits(logits: torch.Tensor) -> Predictor:
    """A model whose every next-token distribution is softmax(logits)."""
    spec = run_spec(vocabulary=len(logits), tied=False)
    net = Transformer(spec).eval()
    set_logits(net, logits)
    return Predictor(net, spec)


def test_a_known_distribution() -> None:
    p = [0.5, 0.25, 0.125, 0.125]
    model = with_logits(torch.tensor(p).log())
    first, second = model.log_probabilities([[3, 0, 1, 2], [0, 0]])
    assert np.isnan([first[0], second[0]]).all()
    np.testing.assert_allclose(first[1:], np.log([0.5, 0.25, 0.125]), rtol=1e-7)
    np.testing.assert_allclose(second[1:], np.log([0.5]), rtol=1e-7)
    result = Perplexity.of([first, second])
    # Every token has the same weight: 1 + 2 + 3 + 1 bits over 4 tokens, not the mean of the means of the sequences.
    assert result.bits_per_token == pytest.approx(7 / 4, rel=1e-7)
    assert result.perplexity == pytest.approx(2 ** (7 / 4), rel=1e-7)
    assert result.nll_sum == pytest.approx(7 * math.log(2), rel=1e-7)


@pytest.mark.parametrize("position", [(), ("cope",), ("rope",), ("absolute",), ("cope", "rope")])
def test_entries_are_the_log_softmax_given_the_previous_tokens(position: tuple[str, ...]) -> None:
    model = predictor(*position)
    [ids] = sequences(12)
    [scores] = model.log_probabilities([ids])
    assert (scores.dtype, len(scores)) == (np.float64, 12)
    for t in range(1, 12):
        with torch.no_grad():
            logits = model.model(torch.tensor([ids[:t]]))[0, -1].double()
        assert scores[t] == pytest.approx(logits.log_softmax(-1)[ids[t]].item(), abs=1e-5)


@pytest.mark.parametrize("position", [(), ("cope",), ("rope",), ("absolute",)])
def test_other_sequences_and_padding_do_not_matter(position: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    model = predictor(*position)
    ids = sequences(2, 12, 5, 7, 12, 3)
    together = model.log_probabilities(ids)
    for one, scores in zip(ids, together, strict=True):
        np.testing.assert_allclose(model.log_probabilities([one])[0], scores, atol=1e-5)
    monkeypatch.setattr(scoring, "BATCH_TOKENS", {"cpu": 13})
    for scores, packed in zip(together, model.log_probabilities(ids), strict=True):
        np.testing.assert_allclose(packed, scores, atol=1e-5)


@pytest.mark.parametrize("position", [(), ("cope",), ("rope",), ("absolute",), ("cope", "rope"), ("stick_breaking",)])
@pytest.mark.parametrize("scratch", [1, 6_000, 8_000])
def test_windows_do_not_matter(position: tuple[str, ...], scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = predictor(*position)
    ids = sequences(12, 9)
    whole = model.log_probabilities(ids)
    monkeypatch.setattr(scoring, "SCRATCH_BYTES", scratch)
    windows: list[int] = []
    rows: list[int] = []
    logits = model.model.logits
    monkeypatch.setattr(model.model, "logits", lambda x_ND: rows.append(len(x_ND)) or logits(x_ND))
    model.model.embedding.register_forward_pre_hook(lambda _, arguments: windows.append(arguments[0].shape[1]))
    for scores, windowed in zip(whole, model.log_probabilities(ids), strict=True):
        np.testing.assert_allclose(windowed, scores, atol=1e-5)
    assert sum(rows) == 11 + 8
    assert max(rows) == min(19, max(1, scratch // (24 * model.vocabulary_size)))
    assert sum(windows) == 11  # the model reads all tokens but the last, a window at a time
    if {"cope", "stick_breaking"} & {*position}:  # torch's softmax attention needs no array of all pairs of tokens
        assert max(windows) < 11


@pytest.mark.parametrize("position", [(), ("cope",), ("rope",)])
def test_encodings_that_extrapolate_accept_more_than_the_context(position: tuple[str, ...]) -> None:
    [scores] = predictor(*position).log_probabilities(sequences(40))
    assert np.isfinite(scores[1:]).all()


def test_absolute_positions_refuse_more_than_the_context() -> None:
    model = predictor("absolute")  # context 12: the model reads all but the last token, so it scores 13
    assert len(model.log_probabilities(sequences(13))[0]) == 13
    with raises("too_long", sequence="sequence 1 of 14 tokens"):
        model.log_probabilities(sequences(3, 14))


@pytest.mark.parametrize(
    ("ids", "code", "data"),
    [
        ([], "no_sequence", {}),
        ([[1, 2], []], "too_short", {"sequence": "sequence 1", "tokens": 0}),
        ([[1]], "too_short", {"sequence": "sequence 0", "tokens": 1}),
        ([[1, 2, 14]], "token_out_of_range", {"sequence": "sequence 0", "position": 2, "value": "14", "largest": 13}),
        ([[1, -1]], "token_out_of_range", {"position": 1, "value": "-1"}),
        ([[1, 10**400]], "token_out_of_range", {"position": 1}),
        ([[1, 2.0]], "invalid_tokens", {"position": 1, "value": "2.0"}),
        ([[1, math.nan]], "invalid_tokens", {"value": "nan"}),
        ([[1, True]], "invalid_tokens", {"value": "True"}),
        ([[1, "2"]], "invalid_tokens", {"value": "'2'"}),
        (["12"], "invalid_tokens", {"value": "'1'"}),
        ([[1, [2]]], "invalid_tokens", {"value": "[2]"}),
        ([3], "invalid_tokens", {"sequence": "sequence 0"}),
        ([np.array([[1, 2], [3, 4]])], "invalid_tokens", {"position": 0}),
        (np.array([[1.0, 2.0]]), "invalid_tokens", {"value": "1.0"}),
    ],
)
def test_invalid_tokens_are_named(ids: list[list[int]], code: str, data: dict[str, JsonValue]) -> None:
    with raises(code, **data):
        predictor("cope").log_probabilities(ids)


def test_damaged_weights_are_reported() -> None:
    model = predictor()
    with torch.no_grad():
        model.model.embedding.weight[3] = math.nan
    with raises("not_finite", run_id=model.run.run_id):
        model.log_probabilities([[3, 3]])


def test_a_perplexity_beyond_float_is_infinite() -> None:
    assert Perplexity.of([np.array([math.nan, -1e6])]).perplexity == math.inf
