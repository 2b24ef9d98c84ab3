"""Checkpoints come down whole, in parts, and only they do."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx
import pytest
from house import House, serving

from cope_sweep.model import load_model

API = "/api/v1"


@pytest.fixture
def url(house: House) -> str:
    return f"{API}/runs/{house.ids[0]}/checkpoint"


def test_the_listing_is_true(client: httpx.Client, house: House, url: str) -> None:
    listing = client.get(url).json()
    assert [file["name"] for file in listing["files"]] == ["config.json", "model.safetensors"]
    for file in listing["files"]:
        content = (house.ledger.run(house.ids[0]).checkpoint / file["name"]).read_bytes()
        assert file["size_bytes"] == len(content)
        assert file["sha256"] == hashlib.sha256(content).hexdigest()
        assert client.get(file["url"]).content == content


def test_a_downloaded_checkpoint_loads(client: httpx.Client, house: House, url: str, tmp_path: Path) -> None:
    for file in client.get(url).json()["files"]:
        (tmp_path / file["name"]).write_bytes(client.get(file["url"]).content)
    assert load_model(tmp_path)[1] == house.plan.runs[0]


def test_a_download_goes_on_where_it_broke_off(client: httpx.Client, house: House, url: str) -> None:
    whole = (house.ledger.run(house.ids[0]).checkpoint / "model.safetensors").read_bytes()
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


def test_no_name_leads_elsewhere(own_house: House) -> None:
    folder = own_house.ledger.run(own_house.ids[0]).checkpoint
    (folder / ".hidden").write_text("secret")
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "folder").mkdir()
    names = ["..%2fresult.json", "%2e%2e%2fspec.json", "../spec.json", "%2fetc%2fpasswd", "..%5cspec.json", "%00"]
    names += ["model.safetensors%00", "~", "x" * 5000, "MODEL.safetensors", "model.safetensors%2f..", "%20"]
    names += [".hidden", "link", "folder", "..%2f..%2f..%2fconfig.json", "model.safetensors%0a"]
    with serving(own_house.settings()) as client:
        for name in names:
            response = client.get(f"{API}/runs/{own_house.ids[0]}/checkpoint/{name}")
            assert response.status_code == 404, name
            assert response.json()["error"]["type"] == "not_found"
            assert b"secret" not in response.content
            assert b"root:" not in response.content


@pytest.mark.parametrize(("index", "status"), [(2, "failed"), (3, "pending")])
def test_unfinished_runs_have_none(client: httpx.Client, house: House, index: int, status: str) -> None:
    for path in ("checkpoint", "checkpoint/model.safetensors"):
        response = client.get(f"{API}/runs/{house.ids[index]}/{path}")
        assert response.status_code == 409
        assert f"is {status}; only a finished run has a checkpoint" in response.json()["error"]["message"]


def test_a_checkpoint_that_was_deleted_is_said_to_be_gone(own_house: House) -> None:
    folder = own_house.ledger.run(own_house.ids[0]).checkpoint
    for path in folder.iterdir():
        path.unlink()
    with serving(own_house.settings()) as client:
        for path in ("checkpoint", "checkpoint/config.json"):
            response = client.get(f"{API}/runs/{own_house.ids[0]}/{path}")
            assert response.status_code == 404
            assert "is gone" in response.json()["error"]["message"]
