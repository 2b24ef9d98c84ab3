"""Perplexity over REST agrees with the Predictor, has limits, and answers invalid requests with clear errors."""

from __future__ import annotations

import asyncio
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from cope_services.models import predictors as predictors_module
from cope_services.models.checkpoints import Checkpoints
from cope_services.models.predictors import FinishedRuns, Predictors

from cope_sweep.inference import Predictor
from cope_sweep.model import load_model, save_model
from cope_sweep.read.queries import AblationFiles, NotFinishedError, Queries
from cope_sweep.store.reading import read_run
from tests.services.sample_store import API, SampleStore, serving

ONE_MODEL = 7_000
"""Bytes: more than one of the sample's models, less than two."""
SEQUENCES = [[1, 14, 14, 3, 15, 1, 3], [15, 4], [0, 15, 0, 0, 0, 0, 0]]
"""14 is the blank; the data tokens after the marker 15 are the copy, which is scored."""


def ask(client: httpx.Client, run_id: str, tokens: Any, status: int = 200, **more: Any) -> Any:
    response = client.post(f"{API}/perplexity", json={"models": [run_id], "tokens": tokens} | more)
    assert response.status_code == status, response.text
    return response.json()["results"][0] if status == 200 else response.json()


@pytest.mark.parametrize("index", [0, 1])
def test_the_values_are_those_of_the_predictor(client: httpx.Client, sample: SampleStore, index: int) -> None:
    predictor = Predictor.load(sample.store.run(sample.ids[index]).checkpoint, "cpu")
    answer = ask(client, sample.ids[index], SEQUENCES, log_probabilities=True)
    total = predictor.perplexity(SEQUENCES)
    assert answer["run_id"] == sample.ids[index]
    assert answer["total"] == total.__dict__
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


def test_a_sequence_without_an_answer_is_refused(client: httpx.Client, sample: SampleStore) -> None:
    for tokens in ([[1, 15, 3], [14, 3, 15]], [[1, 15, 3], [1, 15, 15]]):
        error = ask(client, sample.ids[0], tokens, 422)
        assert error["code"] == "invalid_tokens"
        assert "sequence 1 has no token that is scored: the task selective_copy trains only the data" in error["detail"]


def test_log_probabilities_are_optional(client: httpx.Client, sample: SampleStore) -> None:
    [sequence] = ask(client, sample.ids[0], [[1, 15, 3]])["sequences"]
    assert set(sequence) == {"nll_sum", "tokens", "positions", "perplexity", "bits_per_token"}


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 99]], "sequence 0, position 1: token id 99 is out of range; this model's vocabulary is 0 … 15 (16 ids)"),
        ([[15, 2], [3, -1]], "sequence 1, position 1: token id -1 is out of range"),
        ([[1, 10**300]], "sequence 0, position 1: token id of more than 60 digits is out of range"),
        ([[]], "sequence 0 has 0 tokens"),
        ([[1]], "sequence 0 has 1 tokens"),
        ([], "body.tokens: list should have at least 1 item"),
        ([[1, 1.5]], "body.tokens[0][1]: input should be a valid integer"),
        ([[1, True]], "body.tokens[0][1]: input should be a valid integer"),
        ([[1, "2"]], "body.tokens[0][1]: input should be a valid integer"),
        ([[1, None]], "body.tokens[0][1]: input should be a valid integer"),
        ([1, 2], "body.tokens[0]: input should be a valid list"),
        ("12", "body.tokens: input should be a valid list"),
        ([[["x"] * 3] * 400], "body.tokens[0][0]: input should be a valid integer"),
    ],
)
def test_invalid_tokens(client: httpx.Client, sample: SampleStore, tokens: Any, message: str) -> None:
    error = ask(client, sample.ids[0], tokens, 422)
    assert message in error["detail"]
    assert len(error["detail"]) < 1000


def test_unknown_keys_are_refused(client: httpx.Client, sample: SampleStore) -> None:
    assert "body.logprobs: extra" in ask(client, sample.ids[0], [[1, 2]], 422, logprobs=True)["detail"]


def test_too_many_tokens_and_too_long_sequences(client: httpx.Client, sample: SampleStore) -> None:
    assert (
        "1001 tokens; a sequence or window may have 1000"
        in ask(client, sample.ids[0], [[15] + [1] * 1000], 413)["detail"]
    )
    assert ask(client, sample.ids[0], [[15] + [1] * 999])["total"]["tokens"] == 999  # CoPE extrapolates
    error = ask(client, sample.ids[1], [[15, 2], [15] + [1] * 39], 422)  # absolute does not
    assert error["code"] == "invalid_tokens"
    assert "sequence 1 of 40 tokens is too long" in error["detail"]


def test_runs_that_cannot_answer(client: httpx.Client, sample: SampleStore) -> None:
    assert ask(client, "0123456789abcdef", [[1, 2]], 404)["code"] == "not_found"
    assert ask(client, "..%2f..", [[1, 2]], 422)["code"] == "invalid_request"
    assert "is failed" in ask(client, sample.ids[2], [[1, 2]], 409)["detail"]
    assert "is pending" in ask(client, sample.ids[3], [[1, 2]], 409)["detail"]


def test_a_truncated_checkpoint_is_reported(own_sample: SampleStore) -> None:
    path = own_sample.store.run(own_sample.ids[0]).checkpoint / "model.safetensors"
    with serving(own_sample.settings()) as client:
        whole, before = path.read_bytes(), ask(client, own_sample.ids[0], [[1, 15, 3]])
        path.write_bytes(whole[:-10])
        error = ask(client, own_sample.ids[0], [[1, 15, 3]], 409)
        assert error["code"] == "damaged_checkpoint"
        assert "was it cut short?" in error["detail"]
        path.write_bytes(whole)
        assert ask(client, own_sample.ids[0], [[1, 15, 3]]) == before


def test_a_changed_checkpoint_is_loaded_again(own_sample: SampleStore) -> None:
    folder = own_sample.store.run(own_sample.ids[0])
    with serving(own_sample.settings()) as client:
        before = ask(client, own_sample.ids[0], [[1, 15, 3]])["total"]
        model, spec = load_model(folder.checkpoint)
        model.norm.weight.mul_(2)
        shutil.rmtree(folder.checkpoint)
        with folder.writing_checkpoint() as temporary:
            save_model(temporary, model, spec)
        assert ask(client, own_sample.ids[0], [[1, 15, 3]])["total"] != before


def test_the_files_of_a_model_are_asked_for_once_within_a_moment(
    own_sample: SampleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictors_module, "FRESH_S", 3600)
    with serving(own_sample.settings()) as client:
        before = ask(client, own_sample.ids[0], [[1, 15, 3]])
        monkeypatch.setattr(Predictors, "_find", lambda self, find: pytest.fail("looked up again"))
        assert ask(client, own_sample.ids[0], [[1, 15, 3]]) == before


def test_many_simultaneous_requests(sample: SampleStore) -> None:
    with serving(sample.settings(max_inferences=2, max_model_bytes=ONE_MODEL)) as client:
        expected = [ask(client, run_id, SEQUENCES) for run_id in sample.ids[:2]]
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda i: ask(client, sample.ids[i % 2], SEQUENCES), range(32)))
        assert answers == [expected[i % 2] for i in range(32)]


@pytest.fixture
def loaded_models(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the runs whose models are loaded, in order. Each takes 50 ms longer than usual."""
    ids: list[str] = []
    load = Predictor.load

    def counted(folder: Path, device: str) -> Predictor:
        predictor = load(folder, device)
        ids.append(predictor.run.run_id)
        time.sleep(0.05)
        return predictor

    monkeypatch.setattr(Predictor, "load", counted)
    return ids


def test_simultaneous_requests_share_one_model(sample: SampleStore, loaded_models: list[str]) -> None:
    with serving(sample.settings(max_inferences=8)) as client, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: ask(client, sample.ids[0], SEQUENCES), range(8)))
    assert loaded_models == sample.ids[:1]


@pytest.mark.parametrize(("models", "expected"), [(1, [0, 1, 0]), (2, [0, 1])])
def test_the_most_recently_used_models_stay_in_memory(
    sample: SampleStore, loaded_models: list[str], models: int, expected: list[int]
) -> None:
    with serving(sample.settings(max_model_bytes=models * ONE_MODEL)) as client:
        for index in (0, 0, 1, 1, 0):
            ask(client, sample.ids[index], SEQUENCES)
    assert loaded_models == [sample.ids[index] for index in expected]


def test_what_is_counted(sample: SampleStore) -> None:
    settings = sample.settings(max_model_bytes=ONE_MODEL)
    predictors = Predictors(Checkpoints(), settings)

    async def work() -> None:
        for index in (0, 0, 1, 0):
            folder = sample.store.run(sample.ids[index])
            await predictors.get(folder.run_id, lambda folder=folder: folder)

    asyncio.run(work())
    stats = predictors.stats()
    assert (stats.models, stats.lookups, stats.loads, stats.hits) == (1, 4, 3, 1)
    assert 0 < stats.model_bytes <= stats.max_model_bytes == ONE_MODEL


def test_a_run_is_looked_up_again_when_the_index_has_changed(
    own_sample: SampleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    finished = Queries.finished
    monkeypatch.setattr(Queries, "finished", lambda self, run_id: asked.append(run_id) or finished(self, run_id))
    store = own_sample.store
    runs = FinishedRuns(Queries(store, AblationFiles(own_sample.ablations)))
    first, other = own_sample.ids[:2]
    assert [runs.find(run_id).run_id for run_id in (first, first, other, first)] == [first, first, other, first]
    assert asked == [first, other]
    row = read_run(store.run(first))
    assert row is not None
    store.index.write([replace(row, status="failed")])
    with pytest.raises(NotFinishedError, match="is failed"):
        runs.find(first)
    assert runs.find(other).run_id == other
    assert asked == [first, other, first, other]
