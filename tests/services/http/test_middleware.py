"""Compression of text and JSON, and of nothing else; the limits of request bodies."""

from __future__ import annotations

import gzip

import httpx
from cope_services.http.middleware import MAX_BRACKETS

from tests.helpers.sample_store import API, SampleStore

GZIP = {"accept-encoding": "gzip"}


def raw(client: httpx.Client, path: str, **headers: str) -> httpx.Response:
    """A response whose `content` is as it was sent."""
    with client.stream(
        "GET", path, headers=GZIP | {name.replace("_", "-"): v for name, v in headers.items()}
    ) as answer:
        answer._content = b"".join(answer.iter_raw())
    return answer


def test_a_body_is_the_same_with_and_without_compression(client: httpx.Client) -> None:
    for path in (
        f"{API}/ablations/tiny",
        f"{API}/ablations/tiny/table",
        "/static/style.css",
        "/docs/swagger-ui-bundle.js",
    ):
        plain, packed = raw(client, path, accept_encoding="identity"), raw(client, path)
        assert "content-encoding" not in plain.headers
        assert packed.headers["content-encoding"] == "gzip"
        assert gzip.decompress(packed.content) == plain.content
        assert len(packed.content) < len(plain.content)
        assert packed.headers["etag"] == plain.headers["etag"]
        for each in (plain, packed):
            assert "Accept-Encoding" in each.headers["vary"]
            if "content-length" in each.headers:
                assert int(each.headers["content-length"]) == len(each.content)


def test_small_bodies_downloads_and_ranges_are_sent_as_they_are(client: httpx.Client, sample: SampleStore) -> None:
    checkpoint = f"{API}/runs/{sample.ids[0]}/checkpoint/model.safetensors"
    for response in (
        raw(client, "/health/live"),
        raw(client, "/none"),
        raw(client, checkpoint),
        raw(client, checkpoint, range="bytes=5-"),
        raw(client, "/static/style.css", range="bytes=5-"),
        raw(client, f"{API}/ablations/tiny/table?format=parquet"),
    ):
        assert "content-encoding" not in response.headers
        assert int(response.headers["content-length"]) == len(response.content)
    assert raw(client, checkpoint).headers["accept-ranges"] == "bytes"


# -- the limits of request bodies --------------------------------------------------------------------------------------


def test_a_body_without_a_declared_length_is_limited(client: httpx.Client) -> None:
    url, headers = f"{API}/perplexity", {"content-type": "application/json"}
    response = client.post(url, content=(b" " * 65_536 for _ in range(32)), headers=headers)
    assert (response.status_code, response.json()["code"]) == (413, "too_large")


def test_a_body_with_a_declared_length_is_limited(client: httpx.Client) -> None:
    url, headers = f"{API}/perplexity", {"content-type": "application/json"}
    response = client.post(url, content=b" " * ((1 << 20) + 1), headers=headers)
    assert (response.status_code, response.json()["code"]) == (413, "too_large")
    assert response.json()["data"] == {"limit": 1 << 20}
    assert client.post(url, content=b" " * (1 << 20), headers=headers).status_code != 413


def test_a_body_of_too_many_lists_is_refused_before_it_is_parsed(client: httpx.Client, sample: SampleStore) -> None:
    """350,000 lists fit into a body. To make them took the event loop half a second."""
    for path in (f"{API}/perplexity", f"{API}/sweeps/preview", "/v1/completions", f"{API}/runs/{sample.ids[0]}/probe"):
        for inner in ("[],", "[" * 900 + "]" * 900 + ",", '{"a":1},'):
            content = '{"tokens":[' + (inner * (1_000_000 // len(inner) + 1))[:1_000_000]  # no valid JSON
            response = client.post(path, content=content, headers={"content-type": "application/json"})
            error = response.json().get("error") or response.json()
            assert (response.status_code, error["code"]) == (413, "too_large")
            assert str(MAX_BRACKETS) in (error.get("detail") or error["message"])
    text = "[" * (MAX_BRACKETS - 10)
    response = client.post(f"{API}/perplexity", json={"models": [sample.ids[0]], "text": text})
    assert response.json()["code"] == "unknown_label"
