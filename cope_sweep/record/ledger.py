"""The ledger: a folder per run, written atomically. It is the truth for resuming; everything else can be made from it.

    store/runs/<run_id>/
        spec.json         the resolved run, its id, when it was first begun
        lock              held (flock) by the process that trains the run; the kernel frees it when that process dies
        state.json        running | failed | interrupted, with step, attempt, place, message and traceback
        curve.jsonl       a line for each logged step
        resume.safetensors    model, optimiser and step, while the run is unfinished
        checkpoint/       model.safetensors, config.json: what services load
        result.json       final metrics and facts: the run is finished if, and only if, this exists
    store/sweeps/<sweep_id>.json    which ablation ran when, and its runs

A file appears whole or not at all: it is written beside its place and renamed into it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cope_sweep.errors import UserError
from cope_sweep.record.event import Status
from cope_sweep.spec import RunSpec

RUN_ID = re.compile(r"[0-9a-f]{16}")


class StoreError(UserError):
    """The store cannot be used; the message says which path, why, and the way out."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; it becomes `path` when the block ends well, and vanishes when not."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, atomically. Raises ValueError for NaN and infinities."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any | None:
    """The JSON in `path`, or None where there is no such file. Raises StoreError where it is not JSON."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StoreError(f"{path}: not valid JSON ({error}); delete the file to have it made again") from error


@dataclass(frozen=True)
class RunFolder:
    """One run's folder. Writing is for the holder of its lock."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> dict[str, Any] | None:
        """`{"run_id", "spec", "created_ms"}`, or None before the run was begun."""
        return read_json(self.path / "spec.json")

    @property
    def state(self) -> dict[str, Any]:
        return read_json(self.path / "state.json") or {}

    @property
    def result(self) -> dict[str, Any] | None:
        """`{"metrics": {name: value}, "facts": {name: value}}` of a finished run, else None."""
        return read_json(self.path / "result.json")

    @property
    def checkpoint(self) -> Path:
        """The folder of the finished model."""
        return self.path / "checkpoint"

    @property
    def resume(self) -> Path:
        """The file that an unfinished run goes on from."""
        return self.path / "resume.safetensors"

    @property
    def status(self) -> Status:
        result = self.path / "result.json"
        if result.exists():
            return "finished"
        if not (self.path / "spec.json").exists():
            return "pending"
        if self.is_locked():
            return "running"
        if result.exists():  # between the first look and the lock's release
            return "finished"
        return "failed" if self.state.get("status") == "failed" else "interrupted"

    def curve(self) -> list[dict[str, float]]:
        """The logged rows, by step; a line cut short by a kill is left out."""
        rows = []
        with contextlib.suppress(FileNotFoundError):
            for line in (self.path / "curve.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError):
                    rows.append(json.loads(line))
        return rows

    # -- writing -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Hold the run; False where another process holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def is_locked(self) -> bool:
        """Whether a living process holds the run."""
        try:
            with (self.path / "lock").open("r") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def begin(self, spec: RunSpec, worker_id: str) -> None:
        """Enter the run as running: first begun now, or once more."""
        if self.spec is None:
            write_json(
                self.path / "spec.json",
                {"run_id": spec.run_id, "spec": spec.model_dump(mode="json"), "created_ms": _now_ms()},
            )
        attempt = self.state.get("attempt", 0) + 1
        # What an earlier attempt died of is forgotten.
        state = {"status": "running", "updated_ms": _now_ms(), "worker_id": worker_id, "attempt": attempt}
        write_json(self.path / "state.json", state)

    def set_state(self, status: Status, **facts: Any) -> None:
        """Change the state, and what is told of it."""
        write_json(self.path / "state.json", self.state | {"status": status, "updated_ms": _now_ms()} | facts)

    def rewind(self, step: int) -> None:
        """Drop the rows after `step`, which are about to be trained again."""
        rows = [row for row in self.curve() if row["step"] <= step]
        with replacing(self.path / "curve.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def log(self, row: Mapping[str, float]) -> None:
        """Append one row; `step` is among its keys."""
        with (self.path / "curve.jsonl").open("a") as file:
            file.write(json.dumps(dict(row), allow_nan=False) + "\n")

    def fail(self, message: str, traceback: str) -> None:
        """Enter the run as failed, and why."""
        self.set_state("failed", message=message, traceback=traceback)

    @contextlib.contextmanager
    def writing_checkpoint(self) -> Iterator[Path]:
        """A temporary folder that becomes `checkpoint` when the block ends well."""
        temporary = Path(tempfile.mkdtemp(dir=self.path, prefix=".checkpoint."))
        try:
            yield temporary
            shutil.rmtree(self.checkpoint, ignore_errors=True)
            temporary.chmod(0o755)
            temporary.replace(self.checkpoint)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def finish(self, metrics: Mapping[str, float], facts: Mapping[str, Any]) -> None:
        """The run is done: its result stands, and what resuming needed goes."""
        write_json(self.path / "result.json", {"metrics": dict(metrics), "facts": dict(facts)})
        self.resume.unlink(missing_ok=True)


class Ledger:
    """A store of runs.

    Raises StoreError where its folder cannot be made or written, when opened with `create`.
    """

    def __init__(self, root: Path | str, *, create: bool = False) -> None:
        self.root = Path(root).expanduser().absolute()
        if create:
            try:
                for name in ("runs", "sweeps"):
                    (self.root / name).mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self.root):
                    pass
            except OSError as error:
                raise StoreError(
                    f"the store {self.root} cannot be written ({error.strerror}); "
                    "choose another with --store, or set COPE_SWEEP_STORE"
                ) from error

    def run(self, run_id: str) -> RunFolder:
        """The folder of a run, which need not exist. Raises StoreError for what is not a run id."""
        if not RUN_ID.fullmatch(run_id):
            raise StoreError(f"{run_id!r} is not a run id: 16 hexadecimal digits, as `cope-sweep status` lists them")
        return RunFolder(self.root / "runs" / run_id)

    def runs(self) -> list[RunFolder]:
        """Every run that was ever begun here, by id."""
        try:
            names = sorted(entry.name for entry in os.scandir(self.root / "runs") if RUN_ID.fullmatch(entry.name))
        except FileNotFoundError:
            return []
        return [RunFolder(self.root / "runs" / name) for name in names]

    def write_sweep(self, sweep_id: str, record: Mapping[str, Any]) -> None:
        write_json(self.root / "sweeps" / f"{sweep_id}.json", dict(record))

    def sweeps(self) -> list[dict[str, Any]]:
        """The sweeps executed on this store, oldest first."""
        paths = sorted((self.root / "sweeps").glob("[0-9]*.json"))
        return [record for path in paths if (record := read_json(path)) is not None]


def _now_ms() -> int:
    return int(time.time() * 1000)
