"""Compression of text and JSON, and of nothing else."""

from __future__ import annotations

import gzip

import httpx
import pytest
from cope_services.http.middleware import Compression, accepts_gzip
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from tests.services.sample_store import API, SampleStore

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


def test_the_etag_of_a_compressed_body_is_weak_and_revalidates(client: httpx.Client) -> None:
    for path in (f"{API}/ablations/tiny/table", "/static/style.css"):
        plain, packed = raw(client, path, accept_encoding="identity"), raw(client, path)
        assert packed.headers["etag"] == f"W/{plain.headers['etag']}"
        assert "accept-ranges" not in packed.headers
        for etag in (plain.headers["etag"], packed.headers["etag"]):
            assert raw(client, path, if_none_match=etag).status_code == 304


@given(st.lists(st.binary(max_size=3000), max_size=6), st.sampled_from([b"text/plain", b"text/event-stream"]))
def test_a_stream_arrives_as_it_was_sent(pieces: list[bytes], media: bytes) -> None:
    sent: list[bytes] = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", media)]})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            sent.append(piece)
        await send({"type": "http.response.body"})

    response = TestClient(Compression(app)).get("/", headers=GZIP)
    assert response.content == b"".join(pieces)
    assert ("content-encoding" in response.headers) == (media == b"text/plain" and bool(pieces))


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("", False), ("gzip", True), ("deflate, gzip", True), ("GZIP;q=0.5", True), ("gzip;q=0", False), ("gzip; q=0.0", False),
        ("br", False), ("x-gzip", False), ("gzip;q=x", False), ("deflate;q=1, gzip;q=0", False), ("*", False),
    ],
)  # fmt: skip
def test_who_accepts_gzip(header: str, accepted: bool) -> None:
    assert accepts_gzip(header) == accepted


# -- the limit of request bodies, with and without a declared length ---------------------------------------------------


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
