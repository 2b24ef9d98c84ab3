"""Perplexity over REST is the Predictor's, within limits, and whatever else is sent is answered clearly."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from house import House, serving

from cope_sweep.inference import Predictor
from cope_sweep.model import load_model, save_model

API = "/api/v1"
SEQUENCES = [[1, 2, 14, 3, 15], [4, 14], [0, 0, 0, 0, 0, 0, 0]]


def ask(client: httpx.Client, run_id: str, tokens: Any, status: int = 200, **more: Any) -> Any:
    response = client.post(f"{API}/runs/{run_id}/perplexity", json={"tokens": tokens} | more)
    assert response.status_code == status, response.text
    return response.json() if status == 200 else response.json()["error"]


@pytest.mark.parametrize("index", [0, 1])
def test_it_says_what_the_predictor_says(client: httpx.Client, house: House, index: int) -> None:
    predictor = Predictor.load(house.ledger.run(house.ids[index]).checkpoint, "cpu")
    answer = ask(client, house.ids[index], SEQUENCES, log_probabilities=True)
    total = predictor.perplexity(SEQUENCES)
    assert answer["run_id"] == house.ids[index]
    assert answer["total"] == total.__dict__
    for said, scores in zip(answer["sequences"], predictor.log_probabilities(SEQUENCES), strict=True):
        assert said["log_probabilities"][0] is None
        assert said["log_probabilities"][1:] == scores[1:].tolist()
        assert said["nll_sum"] == pytest.approx(-np.nansum(scores))
        assert said["tokens"] == len(scores) - 1


def test_log_probabilities_come_only_when_asked_for(client: httpx.Client, house: House) -> None:
    [sequence] = ask(client, house.ids[0], [[1, 2, 3]])["sequences"]
    assert set(sequence) == {"nll_sum", "tokens", "perplexity", "bits_per_token"}


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 99]], "sequence 0, position 1: token id 99 is out of range; this model's vocabulary is 0 … 15 (16 ids)"),
        ([[1, 2], [3, -1]], "sequence 1, position 1: token id -1 is out of range"),
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
def test_bad_tokens(client: httpx.Client, house: House, tokens: Any, message: str) -> None:
    error = ask(client, house.ids[0], tokens, 422)
    assert message in error["message"]
    assert len(error["message"]) < 1000


def test_unknown_keys_are_refused(client: httpx.Client, house: House) -> None:
    assert "body.logprobs: extra" in ask(client, house.ids[0], [[1, 2]], 422, logprobs=True)["message"]


@pytest.mark.parametrize(
    ("content", "status", "kind"),
    [
        (b"", 422, "invalid_request"),
        (b"{", 400, "invalid_json"),
        (b"null", 422, "invalid_request"),
        (b"[" * 100_000, 400, "invalid_json"),
        (b'{"tokens": [[1, NaN]]}', 422, "invalid_request"),
        (b'{"tokens": [[1, Infinity]]}', 422, "invalid_request"),
        (b'{"tokens": [[1, 1e400]]}', 422, "invalid_request"),
        (b'{"tokens": [[1, ' + b"9" * 10_000 + b"]]}", 400, "invalid_json"),
        (b'{"tokens": [[1, \xff]]}', 400, "invalid_json"),
        (b" " * (1 << 21), 413, "too_large"),
    ],
)
def test_bad_bodies(client: httpx.Client, house: House, content: bytes, status: int, kind: str) -> None:
    url, headers = f"{API}/runs/{house.ids[0]}/perplexity", {"content-type": "application/json"}
    response = client.post(url, content=content, headers=headers)
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind), response.text


def test_a_body_without_a_length_is_bounded_too(client: httpx.Client, house: House) -> None:
    url, headers = f"{API}/runs/{house.ids[0]}/perplexity", {"content-type": "application/json"}
    response = client.post(url, content=(b" " * 65_536 for _ in range(32)), headers=headers)
    assert (response.status_code, response.json()["error"]["type"]) == (413, "too_large")


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_only_json_is_taken(client: httpx.Client, house: House, media: str) -> None:
    content = json.dumps({"tokens": [[1, 2]]}).encode()
    url = f"{API}/runs/{house.ids[0]}/perplexity"
    response = client.post(url, content=content, headers={"content-type": media} if media else {})
    assert (response.status_code, response.json()["error"]["type"]) == (415, "unsupported_media_type")


def test_too_many_tokens_and_too_long_sequences(client: httpx.Client, house: House) -> None:
    assert "1001 tokens came; one request may have 1000" in ask(client, house.ids[0], [[1] * 1001], 413)["message"]
    assert ask(client, house.ids[0], [[1] * 1000])["total"]["tokens"] == 999  # CoPE extrapolates
    error = ask(client, house.ids[1], [[1, 2], [1] * 40], 422)  # absolute does not
    assert error["type"] == "invalid_tokens"
    assert "sequence 1 of 40 tokens is too long" in error["message"]


def test_runs_that_cannot_answer(client: httpx.Client, house: House) -> None:
    assert ask(client, "0123456789abcdef", [[1, 2]], 404)["type"] == "not_found"
    assert ask(client, "..%2f..", [[1, 2]], 404)["type"] == "not_found"
    assert "is failed" in ask(client, house.ids[2], [[1, 2]], 409)["message"]
    assert "is pending" in ask(client, house.ids[3], [[1, 2]], 409)["message"]


def test_a_checkpoint_cut_short_is_said_to_be(own_house: House) -> None:
    path = own_house.ledger.run(own_house.ids[0]).checkpoint / "model.safetensors"
    with serving(own_house.settings()) as client:
        whole, before = path.read_bytes(), ask(client, own_house.ids[0], [[1, 2, 3]])
        path.write_bytes(whole[:-10])
        error = ask(client, own_house.ids[0], [[1, 2, 3]], 500)
        assert error["type"] == "damaged_checkpoint"
        assert "was it cut short?" in error["message"]
        path.write_bytes(whole)
        assert ask(client, own_house.ids[0], [[1, 2, 3]]) == before


def test_a_run_trained_again_is_loaded_again(own_house: House) -> None:
    folder = own_house.ledger.run(own_house.ids[0])
    with serving(own_house.settings(max_models=1)) as client:
        before = ask(client, own_house.ids[0], [[1, 2, 3]])["total"]
        model, spec = load_model(folder.checkpoint)
        model.norm.weight.mul_(2)
        with folder.writing_checkpoint() as temporary:
            save_model(temporary, model, spec)
        assert ask(client, own_house.ids[0], [[1, 2, 3]])["total"] != before


def test_many_at_once(house: House) -> None:
    with serving(house.settings(max_inferences=2, max_models=1)) as client:
        wanted = [ask(client, run_id, SEQUENCES) for run_id in house.ids[:2]]
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda i: ask(client, house.ids[i % 2], SEQUENCES), range(32)))
        assert answers == [wanted[i % 2] for i in range(32)]


def test_every_error_is_a_problem(client: httpx.Client) -> None:
    for method, path, status, kind in [
        ("GET", "/nope", 404, "not_found"),
        ("GET", f"{API}/nope", 404, "not_found"),
        ("POST", f"{API}/ablations", 405, "method_not_allowed"),
        ("DELETE", f"{API}/runs/0123456789abcdef", 405, "method_not_allowed"),
        ("GET", f"{API}/ablations/%2e%2e%2fstore", 404, "not_found"),
        ("GET", f"{API}/ablations/tiny/table?format=exe", 422, "invalid_request"),
        ("GET", "/static/none.js", 404, "not_found"),
    ]:
        response = client.request(method, path)
        assert response.status_code == status
        assert set(response.json()) == {"error"}
        assert set(response.json()["error"]) == {"type", "message"}
        assert response.json()["error"]["type"] == kind
    assert client.request("POST", f"{API}/ablations").headers["allow"] == "GET"
