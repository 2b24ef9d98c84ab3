"""Any JSON in the fields of inference requests is answered with a documented status, never with a server error."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.services.prose_store import ProseStore
from tests.services.sample_store import API

STATUSES = {200, 400, 404, 409, 413, 422, 429}
NUMBERS = st.sampled_from([0, 1, 2, 16, 299, 300, -1, 2**31, 2**63, 10**30, 0.5, 1e308, -1e308, float("nan")])
TEXTS = st.one_of(
    st.text(max_size=20), st.sampled_from(["the cat", "w 0 r", "\ud800", "\x00", "<|endoftext|>", "../x"])
)
LEAVES = st.one_of(NUMBERS, TEXTS, st.booleans(), st.none(), st.lists(st.integers(-1, 301), max_size=20))
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6)  # fmt: skip
PROMPTS = st.one_of(VALUES, st.lists(st.integers(0, 299), min_size=1, max_size=18), st.just("the cat is a"))
COMPLETION = st.fixed_dictionaries(
    {"prompt": PROMPTS},
    optional={
        name: st.one_of(VALUES, usual)
        for name, usual in {
            "max_tokens": st.integers(0, 20), "temperature": st.floats(0, 2), "top_p": st.floats(0.01, 1),
            "top_k": st.integers(-1, 5), "n": st.integers(1, 3), "best_of": st.just(1), "stream": st.booleans(),
            "logprobs": st.integers(0, 5), "echo": st.booleans(), "stop": st.just(" "), "seed": st.integers(),
            "user": st.text(max_size=3), "suffix": st.none(), "unknown": st.none(),
        }.items()
    },
)  # fmt: skip
PERPLEXITY = st.fixed_dictionaries(
    {},
    optional={
        name: st.one_of(VALUES, usual)
        for name, usual in {
            "tokens": st.lists(st.lists(st.integers(0, 299), min_size=2, max_size=30), min_size=1, max_size=3),
            "text": st.just("the cat"), "context": st.integers(1, 20), "stride": st.integers(1, 20),
            "log_probabilities": st.booleans(), "token_labels": st.booleans(), "top": st.integers(0, 5),
            "models": st.just([{"ablation": "prose", "row": "CoPE"}]),
        }.items()
    },
)  # fmt: skip
SETTINGS = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    response = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code in STATUSES, (body, response.text)
    if response.status_code == 200 and body.get("stream") is True:
        assert response.text.endswith("data: [DONE]\n\n")
    elif response.status_code != 200:
        error = response.json()
        assert error["detail"] if path.startswith(API) else error["error"]["message"]


@pytest.mark.parametrize("row", ["cope", "absolute", "flip_flop"])
@given(body=COMPLETION)
@example(body={"prompt": [5], "echo": True, "logprobs": 1, "max_tokens": 0})
@example(body={"prompt": "", "max_tokens": 1, "temperature": 5e-324})
@SETTINGS
def test_completions(prose_client: httpx.Client, prose: ProseStore, row: str, body: dict[str, Any]) -> None:
    run_id = prose.flip_flop if row == "flip_flop" else getattr(prose, row)[0]
    check(prose_client, f"/openai/{run_id}/v1/completions", body)


@given(body=PERPLEXITY)
@SETTINGS
def test_perplexity(prose_client: httpx.Client, prose: ProseStore, body: dict[str, Any]) -> None:
    check(prose_client, f"{API}/perplexity", {"models": [prose.cope[0], prose.flip_flop]} | body)
    check(prose_client, f"{API}/perplexity", body | {"models": [prose.absolute[0]]})


@given(prompt=VALUES, tokens=VALUES)
@SETTINGS
def test_tokens(prose_client: httpx.Client, prose: ProseStore, prompt: Any, tokens: Any) -> None:
    for run_id in (prose.cope[0], prose.flip_flop):
        check(prose_client, f"/openai/{run_id}/tokenize", {"prompt": prompt})
        check(prose_client, "/detokenize", {"model": run_id, "tokens": tokens})
