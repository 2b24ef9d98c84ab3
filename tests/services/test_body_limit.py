"""The limit of request bodies, with and without a declared length."""

from __future__ import annotations

import httpx

from tests.services.sample_store import API


def test_a_body_without_a_declared_length_is_limited(client: httpx.Client) -> None:
    url, headers = f"{API}/perplexity", {"content-type": "application/json"}
    response = client.post(url, content=(b" " * 65_536 for _ in range(32)), headers=headers)
    assert (response.status_code, response.json()["code"]) == (413, "too_large")


def test_a_body_with_a_declared_length_is_limited(client: httpx.Client) -> None:
    url, headers = f"{API}/perplexity", {"content-type": "application/json"}
    response = client.post(url, content=b" " * ((1 << 20) + 1), headers=headers)
    assert (response.status_code, response.json()["code"]) == (413, "too_large")
    assert "larger than 1048576 bytes" in response.json()["detail"]
    assert client.post(url, content=b" " * (1 << 20), headers=headers).status_code != 413
