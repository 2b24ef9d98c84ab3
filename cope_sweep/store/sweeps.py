"""The records of sweeps and submissions in a store.

Its record: what it executed, on which code and machine, and its final table. Of a sweep that a job executes, also its
submission, the ablation and the options: a job on any node finds it in the store by the id of its sweep.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shlex
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

import cope_sweep
from cope_sweep.errors import NotFoundError
from cope_sweep.frozen import Frozen
from cope_sweep.store.budget import Budget
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.event import Status
from cope_sweep.store.files import parse_json
from cope_sweep.store.index import SweepSummary

if TYPE_CHECKING:
    from cope_sweep.store.store import Store

SWEEP_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]+")
"""The ids of sweeps: time of the start, and random digits."""


class SweepRun(Frozen):
    """A run of a sweep, and its place in the ablation's table."""

    run_id: str
    row: str
    labels: dict[str, str]
    seed: int


class SweepRecord(Frozen):
    """One sweep. It is the content of `<store>/sweeps/<sweep_id>.json`."""

    sweep_id: str
    ablation: str
    title: str
    hypothesis: str
    file_text: str = ""
    """The ablation file."""
    executor: str
    command: list[str]
    status: Status
    started_ms: int
    ended_ms: int | None = None
    git_commit: str | None = None
    versions: dict[str, str]
    machine: dict[str, Any]
    metrics: list[dict[str, Any]]
    """The columns of the table, as the ablation file declares them."""
    runs: list[SweepRun]
    reused: list[str]
    """Ids of the runs that were finished before the sweep."""
    table: dict[str, Any] | None = None
    """`markdown`, `csv` and `json` of the table at the end."""
    notes: list[str] = Field(default=[])
    """Notes for the user: nodes that were left out, a budget that was used up."""

    @property
    def summary(self) -> SweepSummary:
        """Its summary in the index."""
        return SweepSummary(
            self.sweep_id, self.ablation, self.title, self.status, self.executor, self.started_ms, self.ended_ms,
            runs=len(self.runs), reused=len(self.reused),
        )  # fmt: skip


def parse_sweep(content: bytes, name: str) -> SweepRecord:
    """The record in `content`, which is that of the file `name`. Raises DamagedError."""
    try:
        return SweepRecord.model_validate(parse_json(content, name))
    except ValidationError as error:
        reason = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:3])
        raise DamagedError(f"{name}: not the record of a sweep ({reason})") from error


def sweep_members(record: SweepRecord) -> list[dict[str, Any]]:
    """The runs of a sweep as the index keeps them, in order."""
    reused = set(record.reused)
    return [{**run.model_dump(), "reused": run.run_id in reused} for run in record.runs]


class Submission(Budget):
    """A submitted sweep."""

    sweep_id: str
    ablation: str
    """Its name."""
    data: dict[str, Any]
    """The content of the ablation file with what it inherits, before scale and `sets`."""
    file_text: str
    """The file as it was written, for the record of the sweep."""
    scale: str | None = None
    sets: list[str] = Field(default=[])
    """`KEY=VALUE`, as after `--set`."""
    leave_out: list[Status] = Field(default=[])
    """Runs with these statuses are not trained."""
    mlflow: str | None = None
    """MLflow's address as the cluster sees it; null: the database in the store."""
    no_mlflow: bool = False
    retry_of: str | None = None
    """The sweep whose runs it trains again."""
    submitted_ms: int
    request: str = ""
    """A digest of the request that submitted it, to recognise the same request; empty: none is repeated."""

    @property
    def command(self) -> list[str]:
        """The command that trains the same runs, for the record of the sweep."""
        words = ["cope-sweep", "run", self.ablation, *(["--scale", self.scale] if self.scale else [])]
        return [*words, *(word for each in self.sets for word in ("--set", each))]

    def __str__(self) -> str:
        return shlex.join(self.command)


def write_submission(store: Store, submission: Submission) -> None:
    """Write a submission to the store, atomically. Raises StoreError."""
    document = json.dumps(submission.model_dump(mode="json"), indent=1, allow_nan=False) + "\n"
    store.write(_name(submission.sweep_id), document.encode())


def read_submission(store: Store, sweep_id: str) -> Submission:
    """The submission of a sweep.

    Raises:
        NotFoundError: There is none.
        StoreError: It cannot be read.
    """
    content = store.read(_name(sweep_id)) if SWEEP_ID.fullmatch(sweep_id) else None
    if content is None:
        raise NotFoundError(
            f"no submission of a sweep {sweep_id[:40]!r} in the store {store.location}; a job needs the very store "
            "that the sweep was submitted with"
        )
    name = f"{store.location}/{_name(sweep_id)}"
    try:
        return Submission.model_validate(parse_json(content, name))
    except ValidationError as error:
        raise DamagedError(f"{name}: not a submission ({error.errors()[0]['msg']})") from error


def _name(sweep_id: str) -> str:
    return f"submissions/{sweep_id}.json"


def versions() -> dict[str, str]:
    """Version by name: this package, Python, and the libraries that influence results, if they are installed."""
    found = {"cope_sweep": cope_sweep.__version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "ray", "mlflow"):
        with suppress(importlib.metadata.PackageNotFoundError):  # `run --local --no-mlflow` needs no Ray or MLflow
            found[name] = importlib.metadata.version(name)
    return found


def git_commit() -> str | None:
    """The commit of the working tree, with the suffix `-dirty` if there are uncommitted changes.

    None where this package is not in a Git working tree.
    """
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def processor() -> str | None:
    """The model of the processor, as `AMD EPYC 7B13`; None where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(names, None) or platform.processor() or None
