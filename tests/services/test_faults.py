"""Faults of checkpoints and of the store: each has a documented answer, and others are answered meanwhile."""

from __future__ import annotations

import io
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from cope_services.models import predictors as predictors_module
from safetensors.torch import load_file, save_file

from cope_sweep.inference import Predictor
from cope_sweep.model import checkpoint
from tests.services.sample_store import API, SampleStore, serving

PATIENCE_S = 60


def ask(client: httpx.Client, run_id: str, status: int = 200) -> Any:
    response = client.post(f"{API}/perplexity", json={"models": [run_id], "tokens": [[1, 15, 3]]})
    assert response.status_code == status, response.text
    return response.json()["results"][0] if status == 200 else response.json()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# -- checkpoints


class Marker:
    """What a pickle would call."""

    called: list[str] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Marker.called.append, ("code of the pickle",)


def a_pickle(folder: Path) -> None:
    stream = io.BytesIO()
    torch.save(Marker(), stream)
    (folder / "model.safetensors").write_bytes(stream.getvalue())


def other_shapes(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["embedding.weight"] = torch.zeros(3, 8)
    save_file(tensors, folder / "model.safetensors")


def infinite_weights(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    next(iter(tensors.values())).fill_(float("inf"))
    save_file(tensors, folder / "model.safetensors")


def a_huge_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


def many_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["run"]["model"]["layers"] = 10**6
    (folder / "config.json").write_text(json.dumps(config))


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def a_pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def a_pipe_as_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def a_pipe_as_tokenizer(folder: Path) -> None:
    os.mkfifo(folder / "tokenizer.json")


def no_files(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("damage", "status", "code", "detail"),
    [
        (a_pickle, 409, "damaged_checkpoint", "not a complete safetensors file"),
        (other_shapes, 409, "damaged_checkpoint", "embedding.weight is [3, 8], expected [16, 8]"),
        (infinite_weights, 409, "not_finite", "contain NaN or infinite values"),
        (a_huge_header, 409, "damaged_checkpoint", "not a complete safetensors file"),
        (many_layers, 409, "damaged_checkpoint", "config.json"),
        (no_weights, 409, "damaged_checkpoint", "model.safetensors: no such file"),
        (a_pipe, 409, "damaged_checkpoint", "model.safetensors: not a regular file"),
        (a_pipe_as_config, 409, "damaged_checkpoint", "config.json: not a regular file"),
        (no_files, 404, "not_found", "the checkpoint of run"),
        (shutil.rmtree, 404, "not_found", "the checkpoint of run"),
    ],
)
def test_damaged_checkpoints_have_a_documented_status(
    own_sample: SampleStore, damage: Callable[[Path], object], status: int, code: str, detail: str
) -> None:
    damage(own_sample.store.run(own_sample.ids[0]).checkpoint)
    with serving(own_sample.settings(max_seconds=PATIENCE_S)) as client:
        error = ask(client, own_sample.ids[0], status)
        assert (error["code"], detail in error["detail"]) == (code, True), error
        assert str(status) in client.get("/openapi.json").json()["paths"][f"{API}/perplexity"]["post"]["responses"]  # fmt: skip
        assert ask(client, own_sample.ids[1])["total"]["tokens"] == 1
    assert not Marker.called


def test_a_pipe_as_tokenizer_does_not_stop_what_needs_none(own_sample: SampleStore) -> None:
    folder = own_sample.store.run(own_sample.ids[0]).checkpoint
    a_pipe_as_tokenizer(folder)
    with serving(own_sample.settings(max_seconds=PATIENCE_S)) as client:
        assert ask(client, own_sample.ids[0])["total"]["tokens"] == 1
        response = client.post(f"{API}/perplexity", json={"models": [own_sample.ids[0]], "text": "1 2"})
        assert (response.status_code, response.json()["code"]) == (409, "damaged_checkpoint")


# -- a store that does not answer


class Stall:
    """Makes the weights of one run take until they are released, as on a disk that does not answer."""

    def __init__(self, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released = threading.Event()
        self.waiting = 0
        read = checkpoint.safe_open

        def stalling(path: Path, **options: Any) -> Any:
            if run_id in str(path):
                self.waiting += 1
                assert self.released.wait(PATIENCE_S)
                self.waiting -= 1
            return read(path, **options)

        monkeypatch.setattr(checkpoint, "safe_open", stalling)


@pytest.fixture
def stall(sample: SampleStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stall]:
    stall = Stall(sample.ids[0], monkeypatch)
    yield stall
    stall.released.set()


def test_a_checkpoint_that_does_not_answer_delays_no_other(sample: SampleStore, stall: Stall) -> None:
    """More requests wait for it than there are threads."""
    Predictor.load(sample.store.run(sample.ids[1]).checkpoint)  # what is imported now does not count
    with serving(sample.settings(max_seconds=5)) as client, ThreadPoolExecutor(60) as threads:
        stalled = [threads.submit(ask, client, sample.ids[0], 504) for _ in range(60)]
        wait_for(lambda: stall.waiting)
        assert ask(client, sample.ids[1])["total"]["tokens"] == 1
        assert client.get(f"{API}/ablations/tiny/table").status_code == 200
        assert client.get("/health/live").status_code == 200
        assert stall.waiting == 1  # they share one look-up
        assert {answer.result()["code"] for answer in stalled} == {"time_limit"}
        assert ask(client, sample.ids[1])["total"]["tokens"] == 1
        stall.released.set()
        assert ask(client, sample.ids[0])["total"]["tokens"] == 1


def test_a_model_in_memory_does_not_need_its_files(sample: SampleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictors_module, "CHECK_S", 0.1)
    released, stalled = threading.Event(), threading.Event()
    with serving(sample.settings(max_seconds=PATIENCE_S)) as client:
        before = ask(client, sample.ids[0])
        find = predictors_module.Predictors._predictor

        def stalling(self: Any, folder: Any) -> Any:
            stalled.set()
            assert released.wait(PATIENCE_S)
            return find(self, folder)

        monkeypatch.setattr(predictors_module.Predictors, "_predictor", stalling)
        try:
            assert ask(client, sample.ids[0]) == before
            assert stalled.is_set()
        finally:
            released.set()
