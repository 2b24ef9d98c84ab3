"""A small store with real runs, and a real server for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import uvicorn
from cope_services.http.app import create_app
from cope_services.http.server import configuration, listen
from cope_services.http.settings import Settings

from cope_sweep.config import Plan, RunSpec, expand, load_ablation
from cope_sweep.store import Store
from cope_sweep.train import Runtime, train_run
from tests.helpers.sweeps import end

ROOT = Path(__file__).parents[2]
API = "/api/v1"

TINY = """\
title: Selective copy, tiny
hypothesis: CoPE counts data tokens.
reproduces: Table 1, far smaller
base:
  task: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4}
  model: {layers: 1, dim: 8, heads: 2}
  train: {steps: 12, batch: 4, lr: 1e-2}
  evaluate: {every: 5, sequences: 8, final_sequences: 16}
grid:
  model.position: {CoPE: [cope], Absolute: [absolute]}
seeds: [0, 1]
metrics:
  - {name: in_dist/token_error, label: In-dist., unit: "%"}
  - {name: dense/token_error, label: OOD dense, unit: "%"}
scales:
  longer: {set: {train.steps: 20}}
"""


SEARCHED = (
    TINY.partition("grid:")[0]
    + """\
search: {kind: optuna, samples: 2, metric: in_dist/token_error, space: {train.lr: {log_uniform: [1e-4, 1e-2]}}}
seeds: [0]
metrics: [{name: in_dist/token_error}]
"""
)


CLAIM = """\
claims:
  - {text: CoPE copies better, source: Table 2, better: {model.position: CoPE}, than: {model.position: Absolute}}
"""
"""A claim of `TINY`."""


@dataclass(frozen=True)
class ServedFolders:
    """The folders of a service, below one."""

    root: Path

    @property
    def ablations(self) -> Path:
        return self.root / "ablations"

    @property
    def store_folder(self) -> Path:
        return self.root / "store"

    @property
    def store(self) -> Store:
        return Store(self.store_folder)

    def settings(self, **changes: object) -> Settings:
        folders = {"ablations": self.ablations, "store": self.store_folder, "keys_file": self.root / "keys.txt"}
        return Settings.model_validate(folders | {"device": "cpu"} | changes)

    def environment(self, **changes: str) -> dict[str, str]:
        """The environment of a process with these settings, which finds the packages of this checkout."""
        return os.environ | {
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "services"))),
            "COPE_SWEEP_ABLATIONS": str(self.ablations),
            "COPE_SWEEP_STORE": str(self.store_folder),
            "COPE_SWEEP_KEYS_FILE": str(self.root / "keys.txt"),
            "COPE_SWEEP_PORT": "0",
            **changes,
        }


@dataclass(frozen=True)
class SampleStore(ServedFolders):
    """Two ablation files, one of them invalid, and a store with two finished runs and a failed one."""

    plan: Plan

    @property
    def ids(self) -> list[str]:
        """CoPE 0 (finished), Absolute 0 (finished), CoPE 1 (failed), Absolute 1 (pending)."""
        return [run.run_id for run in self.plan.runs]

    def copy_to(self, root: Path) -> SampleStore:
        shutil.copytree(self.root, root)
        return SampleStore(root, self.plan)


def train(store: Store, run: RunSpec) -> None:
    """Train a run to its end."""
    assert train_run(run, store.run(run.run_id), Runtime()) == "finished"
    end(store, store.run(run.run_id))


def build(root: Path) -> SampleStore:
    ablations = root / "ablations"
    ablations.mkdir()
    (ablations / "tiny.yaml").write_text(TINY)
    (ablations / "broken.yaml").write_text("title: broken\nbase: {}\nmetricz: []\n")
    (ablations / "notes.txt").write_text("no ablation")
    store = Store(root / "store", create=True)
    plan = expand(load_ablation(ablations / "tiny.yaml"))
    for run in plan.runs[:2]:
        train(store, run)
    failed = store.run(plan.runs[2].run_id).begin(plan.runs[2], "local")
    failed.log({"step": 3, "train/loss": 9.0})
    failed.fail("Diverged: the training loss is nan at step 3", "Traceback …")
    end(store, failed)
    return SampleStore(root, plan)


@contextmanager
def serving(settings: Settings) -> Iterator[httpx.Client]:
    """A client of the application, over HTTP."""
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(configuration(create_app(settings)))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=120) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextmanager
def server_process(
    environment: dict[str, str], stderr: int | IO[str] = subprocess.PIPE
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server as a process of its own, and its address."""
    command = [sys.executable, "-m", "cope_services"]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert server.stdout is not None
        yield server, server.stdout.readline().split()[0]
    finally:
        server.kill()
        server.communicate()
