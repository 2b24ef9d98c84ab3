"""Models in memory, damaged checkpoints, and a store that does not answer."""

from __future__ import annotations

import io
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
from cope_services.models.predictors import Predictors
from safetensors.torch import load_file, save_file

from cope_sweep.inference import Predictor
from cope_sweep.model import checkpoint, load_model, save_model
from cope_sweep.store.artifacts import AttemptWriter
from tests.helpers.processes import until
from tests.helpers.sample_store import API, SampleStore, serving

ONE_MODEL = 7_000
"""Bytes: more than one of the sample's models, less than two."""
PATIENCE_S = 60


def ask(client: httpx.Client, run_id: str, status: int = 200) -> Any:
    response = client.post(f"{API}/perplexity", json={"models": [run_id], "tokens": [[1, 15, 3]]})
    assert response.status_code == status, response.text
    return response.json()["results"][0] if status == 200 else response.json()


def test_a_changed_checkpoint_is_loaded_again(own_sample: SampleStore) -> None:
    folder = own_sample.store.run(own_sample.ids[0])
    with serving(own_sample.settings()) as client:
        before = ask(client, own_sample.ids[0])["total"]
        model, spec = load_model(folder.checkpoint)
        model.norm.weight.mul_(2)
        shutil.rmtree(folder.checkpoint)
        with AttemptWriter(folder, folder.last_attempt).save_checkpoint() as temporary:
            save_model(temporary, model, spec)
        assert ask(client, own_sample.ids[0])["total"] != before


def test_the_files_of_a_model_are_asked_for_once_within_a_moment(
    own_sample: SampleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictors_module, "FRESH_S", 3600)
    with serving(own_sample.settings()) as client:
        before = ask(client, own_sample.ids[0])
        monkeypatch.setattr(Predictors, "_predictor", lambda self, folder: pytest.fail("looked up again"))
        assert ask(client, own_sample.ids[0]) == before


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
        list(threads.map(lambda _: ask(client, sample.ids[0]), range(8)))
    assert loaded_models == sample.ids[:1]


@pytest.mark.parametrize(("models", "expected"), [(1, [0, 1, 0]), (2, [0, 1])])
def test_the_most_recently_used_models_stay_in_memory(
    sample: SampleStore, loaded_models: list[str], models: int, expected: list[int]
) -> None:
    with serving(sample.settings(max_model_bytes=models * ONE_MODEL)) as client:
        for index in (0, 0, 1, 1, 0):
            ask(client, sample.ids[index])
    assert loaded_models == [sample.ids[index] for index in expected]


# -- damaged checkpoints ----------------------------------------------------------------------------------------------


class Marker:
    """What a pickle would call."""

    called: list[str] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Marker.called.append, ("code of the pickle",)


def a_pickle(folder: Path) -> None:
    stream = io.BytesIO()
    torch.save(Marker(), stream)
    (folder / "model.safetensors").write_bytes(stream.getvalue())


def infinite_weights(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    next(iter(tensors.values())).fill_(float("inf"))
    save_file(tensors, folder / "model.safetensors")


def a_pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def a_pipe_as_tokenizer(folder: Path) -> None:
    os.mkfifo(folder / "tokenizer.json")


def no_files(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("damage", "status", "code"),
    [
        (a_pickle, 409, "damaged_checkpoint"),
        (infinite_weights, 409, "not_finite"),
        (a_pipe, 409, "not_a_file"),
        (no_files, 404, "deleted_checkpoint"),
        (shutil.rmtree, 404, "deleted_checkpoint"),
    ],
)
def test_damaged_checkpoints_have_a_documented_status(
    client: httpx.Client, own_sample: SampleStore, damage: Callable[[Path], object], status: int, code: str
) -> None:
    documented = client.get("/openapi.json").json()["paths"][f"{API}/perplexity"]["post"]["responses"]
    assert str(status) in documented
    run_id = own_sample.ids[0]
    damage(own_sample.store.run(run_id).checkpoint)
    with serving(own_sample.settings(max_seconds=PATIENCE_S)) as damaged:
        error = ask(damaged, run_id, status)
        assert error["code"] == code, error
        probed = damaged.post(f"{API}/runs/{run_id}/probe", json={"tokens": [1, 15, 3]})
        assert (probed.status_code, probed.json()) == (status, error)
        completed = damaged.post("/v1/completions", json={"model": run_id, "prompt": [1]})
        assert (completed.status_code, completed.json()["error"]["code"]) == (status, code)
        assert ask(damaged, own_sample.ids[1])["total"]["tokens"] == 1
    assert not Marker.called


def test_a_pipe_as_tokenizer_does_not_stop_what_needs_none(own_sample: SampleStore) -> None:
    folder = own_sample.store.run(own_sample.ids[0]).checkpoint
    a_pipe_as_tokenizer(folder)
    with serving(own_sample.settings(max_seconds=PATIENCE_S)) as client:
        assert ask(client, own_sample.ids[0])["total"]["tokens"] == 1
        response = client.post(f"{API}/perplexity", json={"models": [own_sample.ids[0]], "text": "1 2"})
        assert (response.status_code, response.json()["code"]) == (409, "no_such_file")


# -- a store that does not answer --------------------------------------------------------------------------------------


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
        until(lambda: stall.waiting)
        assert ask(client, sample.ids[1])["total"]["tokens"] == 1
        assert client.get(f"{API}/ablations/tiny/table").status_code == 200
        assert client.get("/health/live").status_code == 200
        assert stall.waiting == 1  # they share one look-up
        assert {answer.result()["code"] for answer in stalled} == {"time_limit"}
        assert ask(client, sample.ids[1])["total"]["tokens"] == 1
        stall.released.set()
        assert ask(client, sample.ids[0])["total"]["tokens"] == 1
