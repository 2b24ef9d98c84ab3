"""A real app on a real ledger: a few tiny trainings, one failed run, one pending, one broken ablation file."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn
from cope_services.app import create_app
from cope_services.server import bind
from cope_services.settings import Settings

from cope_sweep.plan import Plan, expand
from cope_sweep.record import Ledger
from cope_sweep.spec import load_ablation
from cope_sweep.train import Runtime, train_run

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


@dataclass(frozen=True)
class House:
    """What the service reads, and what is true of it: two finished runs, a failed one, a pending one."""

    ablations: Path
    store: Path
    plan: Plan

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.store)

    @property
    def ids(self) -> list[str]:
        """CoPE 0 (finished), Absolute 0 (finished), CoPE 1 (failed), Absolute 1 (pending)."""
        return [run.run_id for run in self.plan.runs]

    def settings(self, **changes: object) -> Settings:
        return Settings.model_validate({"ablations": self.ablations, "store": self.store, "device": "cpu"} | changes)


def build(root: Path) -> House:
    ablations = root / "ablations"
    ablations.mkdir()
    (ablations / "tiny.yaml").write_text(TINY)
    (ablations / "broken.yaml").write_text("title: broken\nbase: {}\nmetricz: []\n")
    (ablations / "notes.txt").write_text("no ablation")
    ledger = Ledger(root / "store", create=True)
    plan = expand(load_ablation(ablations / "tiny.yaml"))
    for run in plan.runs[:2]:
        assert train_run(run, ledger, Runtime()) == "finished"
    failed = ledger.run(plan.runs[2].run_id)
    with failed.lock():
        failed.begin(plan.runs[2], "local")
        failed.log({"step": 3, "train/loss": 9.0})
        failed.fail("Diverged: the training loss is nan at step 3", "Traceback …")
    return House(ablations, root / "store", plan)


@contextmanager
def serving(settings: Settings) -> Iterator[httpx.Client]:
    """A client of the app, over real HTTP."""
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(settings), log_level="critical"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=60) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
