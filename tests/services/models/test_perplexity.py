"""Perplexity of texts and ids: against direct evaluation, by run and by row, for several models, with limits."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.inference import Predictor
from tests.helpers.sample_store import API, SampleStore, serving
from tests.services.prose_store import ProseStore

TEXT = "the cat is a species of European lobster , naïve 日本 \n the cat is a species . \n"
SEQUENCES = [[1, 14, 14, 3, 15, 1, 3], [15, 4], [0, 15, 0, 0, 0, 0, 0]]
"""Of selective copy: 14 is the blank; the data tokens after the marker 15 are the copy, which is scored."""


def ask(client: httpx.Client, status: int = 200, **body: Any) -> Any:
    response = client.post(f"{API}/perplexity", json=body)
    assert response.status_code == status, response.text
    return response.json()["results"] if status == 200 else response.json()


def direct(predictor: Predictor, tokens: list[int], context: int, stride: int) -> list[float]:
    """log p of each token but the first, one pass per token: it is scored in the first window that contains it."""
    scores = []
    for t in range(1, len(tokens)):
        window = 0 if t <= context else -(-(t - context) // stride)
        with torch.no_grad():
            logits_V = predictor.model(torch.tensor([tokens[window * stride : t]]))[0, -1].double()
        scores.append(logits_V.log_softmax(-1)[tokens[t]].item())
    return scores


@pytest.fixture(scope="module")
def predictors(prose: ProseStore) -> dict[str, Predictor]:
    return {run_id: prose.predictor(run_id) for run_id in (prose.cope[0], prose.absolute[0])}


@given(data=st.data())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_windows_of_any_batch_agree_with_direct_evaluation(
    prose_client: httpx.Client, predictors: dict[str, Predictor], data: st.DataObject
) -> None:
    context = data.draw(st.integers(1, 16))
    stride = data.draw(st.integers(1, context))
    lengths = data.draw(st.lists(st.integers(2, 30), min_size=1, max_size=4))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    sequences = [rng.integers(0, 300, length).tolist() for length in lengths]
    models = data.draw(st.permutations(list(predictors)))
    results = ask(prose_client, models=models, tokens=sequences, context=context, stride=stride, log_probabilities=True)
    assert [result["run_id"] for result in results] == models
    for result in results:
        expected = [direct(predictors[result["run_id"]], ids, context, stride) for ids in sequences]
        for sequence, scores in zip(result["sequences"], expected, strict=True):
            assert sequence["log_probabilities"][0] is None
            np.testing.assert_allclose(sequence["log_probabilities"][1:], scores, atol=1e-5)
        total = math.fsum(score for scores in expected for score in scores)
        assert result["total"]["nll_sum"] == pytest.approx(-total, rel=1e-5)
        assert result["total"]["tokens"] == sum(lengths) - len(lengths)


@pytest.mark.parametrize("index", [0, 1])
def test_only_the_copied_tokens_of_selective_copy_are_scored(
    client: httpx.Client, sample: SampleStore, index: int
) -> None:
    predictor = Predictor.load(sample.store.run(sample.ids[index]).checkpoint, "cpu")
    [answer] = ask(client, models=[sample.ids[index]], tokens=SEQUENCES, log_probabilities=True)
    assert answer["run_id"] == sample.ids[index]
    assert answer["total"] == predictor.perplexity(SEQUENCES).__dict__
    read = [[1, 14, 14, 3, 15, 15, 15], [15, 15], [0, 15, 15, 15, 15, 15, 15]]  # markers in the places of the copy
    for sequence, ids, inputs in zip(answer["sequences"], SEQUENCES, read, strict=True):
        copied = ids.index(15) + 1
        with torch.no_grad():
            logits_TV = predictor.model(torch.tensor([inputs]))[0].double()
        scores = logits_TV.log_softmax(-1)[range(copied - 1, len(ids) - 1), ids[copied:]].tolist()
        assert sequence["log_probabilities"][:copied] == [None] * copied
        assert sequence["log_probabilities"][copied:] == pytest.approx(scores, rel=1e-5)
        assert sequence["nll_sum"] == pytest.approx(-sum(scores), rel=1e-5)
        assert (sequence["tokens"], sequence["positions"]) == (len(scores), len(ids) - 1)
    [without] = ask(client, models=[sample.ids[index]], tokens=SEQUENCES)
    assert set(without["sequences"][0]) == {"nll_sum", "tokens", "positions", "perplexity", "bits_per_token"}


def test_a_text_has_labels_and_the_most_probable_tokens(prose_client: httpx.Client, prose: ProseStore) -> None:
    [result] = ask(prose_client, models=[prose.cope[0]], text=TEXT, log_probabilities=True, token_labels=True, top=3)
    assert (result["context"], result["stride"]) == (16, 16)
    [sequence] = result["sequences"]
    assert sequence["labels"][0] == "<|endoftext|>"
    assert len(sequence["labels"]) == len(sequence["top"]) == len(sequence["log_probabilities"])
    for score, top, token in zip(
        sequence["log_probabilities"][1:], sequence["top"][1:], sequence["token_ids"][1:], strict=True
    ):
        values = [p for _, p in top]
        assert values == sorted(values, reverse=True)
        assert dict(top).get(token, score) == score <= values[0]


def test_the_best_run_of_a_row(prose_client: httpx.Client, prose: ProseStore) -> None:
    records = prose.store.index.records(prose.absolute)
    best = min(prose.absolute, key=lambda run_id: records[run_id].metrics["test/perplexity"])
    row = {"ablation": "prose", "row": "Absolute"}
    results = ask(prose_client, models=[row, best, prose.cope[0]], text=[TEXT, "a"])
    assert [result["run_id"] for result in results] == [best, best, prose.cope[0]]
    assert results[0] == results[1] != results[2]
    assert ask(prose_client, models=[prose.cope[0][:8]], text=[TEXT, "a"]) == results[2:], "its first digits"
    error = ask(prose_client, 404, models=[row | {"row": "x"}], text="a")
    assert (error["code"], error["data"]["row"]) == ("not_found", "x")
    assert ask(prose_client, 404, models=[row | {"ablation": "x"}], text="a")["code"] == "not_found"


def test_the_best_run_has_the_greatest_value_of_a_metric_to_maximise(prose: ProseStore, tmp_path: Path) -> None:
    text = (prose.root / "ablations/prose.yaml").read_text()
    (tmp_path / "prose.yaml").write_text(text.replace("label: Perplexity", "goal: max"))
    records = prose.store.index.records(prose.absolute)
    best = max(prose.absolute, key=lambda run_id: records[run_id].metrics["test/perplexity"])
    with serving(prose.settings(ablations=tmp_path)) as client:
        [result] = ask(client, models=[{"ablation": "prose", "row": "Absolute"}], tokens=[[1, 2]])
    assert result["run_id"] == best


@pytest.mark.parametrize(
    ("body", "status", "code", "data"),
    [
        ({}, 422, "invalid_request", {"keys": ["body"]}),
        ({"tokens": [[1, 2]], "text": "a"}, 422, "invalid_request", {"keys": ["body"]}),
        ({"text": "\ud800"}, 422, "invalid_request", {}),
        ({"text": "a", "context": 0}, 422, "invalid_request", {"keys": ["body.context"]}),
        ({"tokens": [[5, 2], [3, -1]]}, 422, "token_out_of_range", {"sequence": "sequence 1", "position": 1}),
        ({"tokens": [[["x"] * 3] * 400]}, 422, "invalid_request", {}),
        ({"tokens": [[1] * 401]}, 413, "too_large", {"sequence": 0, "tokens": 401, "limit": 400}),
        ({"tokens": [[1] * 400] * 11}, 413, "too_large", {"limit": 4000}),
        ({"tokens": [[1] * 3000], "context": 16, "stride": 1}, 413, "too_large", {"limit": 4000}),
        ({"tokens": [[1, 2]], "models": ["../../etc"]}, 422, "invalid_request", {}),
        ({"tokens": [[1, 2]], "models": ["0123456789abcdef"]}, 404, "not_found", {"run_id": "0123456789abcdef"}),
    ],
)
def test_errors_name_what_is_wrong(
    prose_client: httpx.Client,
    prose: ProseStore,
    body: dict[str, Any],
    status: int,
    code: str,
    data: dict[str, Any],
) -> None:
    content = json.dumps({"models": prose.cope[:1]} | body)
    response = prose_client.post(f"{API}/perplexity", content=content, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    error = response.json()
    assert (error["code"], error["data"] | data) == (code, error["data"])
    assert len(error["detail"]) < 1000


def test_an_answer_has_limited_values_of_tokens_and_measures_equal_models_once(prose: ProseStore) -> None:
    cope, absolute = prose.cope[0], prose.absolute[0]
    body = {"tokens": [[5] * 10, [6] * 6], "top": 2, "log_probabilities": True, "token_labels": True}  # 64 values
    with serving(prose.settings(max_scored_values=3 * 64)) as client:
        results = ask(client, models=[cope, absolute, cope], **body)
        assert [result["run_id"] for result in results] == [cope, absolute, cope]
        assert results[0] == results[2]
        scored = re.search(r"^cope_inference_scored_tokens_total (\S+)", client.get("/metrics").text, re.MULTILINE)
        assert scored is not None
        assert float(scored[1]) == 2 * 14
        error = ask(client, 413, models=[cope] * 4, **body)
        assert (error["code"], error["data"]) == ("too_large", {"values": 64, "limit": 48})
        assert len(ask(client, models=[cope] * 32, tokens=body["tokens"])) == 32  # totals have no limit


def test_runs_that_are_not_finished_have_no_model(client: httpx.Client, sample: SampleStore) -> None:
    for run_id, status in ((sample.ids[2], "failed"), (sample.ids[3], "pending")):
        error = ask(client, 409, models=[run_id], tokens=[[1, 2]])
        assert (error["code"], error["data"]["status"]) == ("not_finished", status)


def test_a_context_that_an_encoding_does_not_reach(prose_client: httpx.Client, prose: ProseStore) -> None:
    assert ask(prose_client, models=prose.cope[:1], text=TEXT, context=64)
    assert ask(prose_client, 422, models=prose.absolute[:1], text=TEXT, context=64)["code"] == "too_long"
    assert ask(prose_client, models=prose.cope[:1], tokens=[[5] * 40])
    error = ask(prose_client, 422, models=prose.absolute[:1], tokens=[[5, 2], [5] * 40])
    assert (error["code"], error["data"]["sequence"]) == ("too_long", "sequence 1 of 40 tokens")
