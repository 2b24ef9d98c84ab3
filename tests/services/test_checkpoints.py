"""Checkpoint downloads: whole files, byte ranges, and no other files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx
import pytest

from cope_sweep.model import load_model
from tests.services.sample_store import API, SampleStore, serving


@pytest.fixture
def url(sample: SampleStore) -> str:
    return f"{API}/runs/{sample.ids[0]}/checkpoint"


def test_the_listing_agrees_with_the_files(client: httpx.Client, sample: SampleStore, url: str) -> None:
    listing = client.get(url).json()
    assert [file["name"] for file in listing["files"]] == ["config.json", "model.safetensors"]
    for file in listing["files"]:
        content = (sample.store.run(sample.ids[0]).checkpoint / file["name"]).read_bytes()
        assert file["size_bytes"] == len(content)
        assert file["sha256"] == hashlib.sha256(content).hexdigest()
        assert client.get(file["url"]).content == content


def test_a_downloaded_checkpoint_loads(client: httpx.Client, sample: SampleStore, url: str, tmp_path: Path) -> None:
    for file in client.get(url).json()["files"]:
        (tmp_path / file["name"]).write_bytes(client.get(file["url"]).content)
    assert load_model(tmp_path)[1] == sample.plan.runs[0]


def test_an_interrupted_download_is_resumed(client: httpx.Client, sample: SampleStore, url: str) -> None:
    whole = (sample.store.run(sample.ids[0]).checkpoint / "model.safetensors").read_bytes()
    first = client.get(f"{url}/model.safetensors", headers={"range": "bytes=0-999"})
    assert (first.status_code, first.headers["content-range"]) == (206, f"bytes 0-999/{len(whole)}")
    rest = client.get(f"{url}/model.safetensors", headers={"range": "bytes=1000-", "if-range": first.headers["etag"]})
    assert rest.status_code == 206
    assert first.content + rest.content == whole
    changed = client.get(f"{url}/model.safetensors", headers={"range": "bytes=1000-", "if-range": '"another"'})
    assert (changed.status_code, changed.content) == (200, whole)
    tail = client.get(f"{url}/model.safetensors", headers={"range": "bytes=-5"})
    assert tail.content == whole[-5:]
    beyond = client.get(f"{url}/model.safetensors", headers={"range": f"bytes={len(whole)}-"})
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{len(whole)}")


def test_head_and_304(client: httpx.Client, url: str) -> None:
    head = client.head(f"{url}/model.safetensors")
    assert head.headers["accept-ranges"] == "bytes"
    assert int(head.headers["content-length"]) > 0
    assert head.content == b""
    same = client.get(f"{url}/model.safetensors", headers={"if-none-match": head.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")


def test_no_name_gives_another_file(own_sample: SampleStore) -> None:
    folder = own_sample.store.run(own_sample.ids[0]).checkpoint
    (folder / ".hidden").write_text("secret")
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "folder").mkdir()
    names = ["..%2fresult.json", "%2e%2e%2fspec.json", "../spec.json", "%2fetc%2fpasswd", "..%5cspec.json", "%00"]
    names += ["model.safetensors%00", "~", "x" * 5000, "MODEL.safetensors", "model.safetensors%2f..", "%20"]
    names += [".hidden", "link", "folder", "..%2f..%2f..%2fconfig.json", "model.safetensors%0a"]
    with serving(own_sample.settings()) as client:
        for name in names:
            response = client.get(f"{API}/runs/{own_sample.ids[0]}/checkpoint/{name}")
            assert response.status_code == 404, name
            assert response.json()["code"] == "not_found"
            assert b"secret" not in response.content
            assert b"root:" not in response.content


@pytest.mark.parametrize(("index", "status"), [(2, "failed"), (3, "pending")])
def test_unfinished_runs_have_no_checkpoint(client: httpx.Client, sample: SampleStore, index: int, status: str) -> None:
    for path in ("checkpoint", "checkpoint/model.safetensors"):
        response = client.get(f"{API}/runs/{sample.ids[index]}/{path}")
        assert response.status_code == 409
        assert f"is {status}; only a finished run has a checkpoint" in response.json()["detail"]


def test_a_deleted_checkpoint_is_reported(own_sample: SampleStore) -> None:
    folder = own_sample.store.run(own_sample.ids[0]).checkpoint
    for path in folder.iterdir():
        path.unlink()
    with serving(own_sample.settings()) as client:
        for path in ("checkpoint", "checkpoint/config.json"):
            response = client.get(f"{API}/runs/{own_sample.ids[0]}/{path}")
            assert response.status_code == 404
            assert "was deleted" in response.json()["detail"]
