"""The store: a store with one folder per run. It is the source of truth; MLflow and tables are made from it.

    store/runs/<run_id>/
        spec.json         the resolved run, its id, and when it was first begun
        lock              locked (flock) by the process that trains the run; the kernel releases it if that process dies
        state.json        running | failed | interrupted, with attempt, worker, message and traceback
        curve.jsonl       one line per logged step
        resume.safetensors    model, optimiser and step, while the run is unfinished
        checkpoint/       model.safetensors, config.json: loaded by services and tools
        result.json       final metrics and facts; a run is finished if and only if this file exists
    store/sweeps/<sweep_id>.json    what a sweep executed, when, and its runs

Files are written to a temporary file in the same folder and renamed, so a reader never sees a partial file.
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
from cope_sweep.spec import RunSpec, current_metric_name
from cope_sweep.store.event import Status

RUN_ID = re.compile(r"[0-9a-f]{16}")


class StoreError(UserError):
    """The store cannot be used; the message says which path, why, and what to do."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder, which replaces `path` when the block ends.

    If the block raises, the temporary file is deleted and `path` is unchanged.
    """
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
    """Write `value` as JSON, atomically.

    Raises:
        ValueError: `value` contains NaN or an infinity.
    """
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any | None:
    """The JSON in `path`, or None if there is no such file.

    Raises:
        StoreError: The file is not valid JSON.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StoreError(f"{path}: not valid JSON ({error}); delete the file; it will be written again") from error


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run. Only the process that holds its lock may write to it."""

    path: Path

    @property
    def run_id(self) -> str:
        """The id of the run, which is the name of its folder."""
        return self.path.name

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> dict[str, Any] | None:
        """`{"run_id", "spec", "created_ms"}`; None before the run was begun."""
        return read_json(self.path / "spec.json")

    @property
    def state(self) -> dict[str, Any]:
        """`{"status", "updated_ms", "worker_id", "attempt", …}`; empty before the run was begun."""
        state: dict[str, Any] = read_json(self.path / "state.json") or {}
        if "where" in state:  # the former name of the key
            state.setdefault("worker_id", state.pop("where"))
        return state

    @property
    def result(self) -> dict[str, Any] | None:
        """`{"metrics": {name: value}, "facts": {name: value}}`; None if the run is not finished.

        Metrics have their current names, whatever they were called when the run was trained.
        """
        result = read_json(self.path / "result.json")
        return result and result | {"metrics": _current_names(result.get("metrics", {}))}

    @property
    def checkpoint(self) -> Path:
        """The folder of the trained model."""
        return self.path / "checkpoint"

    @property
    def resume(self) -> Path:
        """The file from which an unfinished run is resumed."""
        return self.path / "resume.safetensors"

    @property
    def status(self) -> Status:
        """The status, from the files and the lock: a run whose process died is interrupted, not running."""
        result = self.path / "result.json"
        if result.exists():
            return "finished"
        if not (self.path / "spec.json").exists():
            return "pending"
        if self.is_locked():
            return "running"
        if result.exists():  # it may have appeared after the first check, before the lock was released
            return "finished"
        return "failed" if self.state.get("status") == "failed" else "interrupted"

    def curve(self) -> list[dict[str, float]]:
        """The logged rows in order of steps; metrics have their current names.

        A line that was cut off when its process was killed is left out.
        """
        rows: list[dict[str, float]] = []
        with contextlib.suppress(FileNotFoundError):
            for line in (self.path / "curve.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError):
                    rows.append(_current_names(json.loads(line)))
        return rows

    # -- writing -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Lock the run while the block runs. Yields False if another process holds the lock."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def is_locked(self) -> bool:
        """Whether a running process holds the lock."""
        try:
            with (self.path / "lock").open("r") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def begin(self, spec: RunSpec, worker_id: str) -> None:
        """Set the status to running and count the attempt. The first call also writes the spec."""
        if self.spec is None:
            write_json(
                self.path / "spec.json",
                {"run_id": spec.run_id, "spec": spec.model_dump(mode="json"), "created_ms": _now_ms()},
            )
        attempt = self.state.get("attempt", 0) + 1
        # Message and traceback of an earlier attempt are dropped.
        state = {"status": "running", "updated_ms": _now_ms(), "worker_id": worker_id, "attempt": attempt}
        write_json(self.path / "state.json", state)

    def set_state(self, status: Status, **facts: Any) -> None:
        """Set the status, and any other keys of the state."""
        write_json(self.path / "state.json", self.state | {"status": status, "updated_ms": _now_ms()} | facts)

    def rewind(self, step: int) -> None:
        """Drop the rows after `step`. The steps after it are trained again."""
        rows = [row for row in self.curve() if row["step"] <= step]
        with replacing(self.path / "curve.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def log(self, row: Mapping[str, float]) -> None:
        """Append one row. It has the key `step`."""
        with (self.path / "curve.jsonl").open("a") as file:
            file.write(json.dumps(dict(row), allow_nan=False) + "\n")

    def fail(self, message: str, traceback: str) -> None:
        """Set the status to failed, with the reason in one line and the traceback."""
        self.set_state("failed", message=message, traceback=traceback)

    @contextlib.contextmanager
    def writing_checkpoint(self) -> Iterator[Path]:
        """A temporary folder that replaces `checkpoint` when the block ends without an error."""
        temporary = Path(tempfile.mkdtemp(dir=self.path, prefix=".checkpoint."))
        try:
            yield temporary
            shutil.rmtree(self.checkpoint, ignore_errors=True)
            temporary.chmod(0o755)
            temporary.replace(self.checkpoint)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def finish(self, metrics: Mapping[str, float], facts: Mapping[str, Any]) -> None:
        """Write the result, which makes the run finished, and delete the file for resuming."""
        write_json(self.path / "result.json", {"metrics": dict(metrics), "facts": dict(facts)})
        self.resume.unlink(missing_ok=True)


class Store:
    """A store of runs."""

    def __init__(self, root: Path | str, *, create: bool = False) -> None:
        """Open the store in the folder `root`; with `create`, make the folder and check that it can be written.

        Raises:
            StoreError: With `create`, if the folder cannot be made or written.
        """
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
        """The folder of a run; it need not exist.

        Raises:
            StoreError: `run_id` is not 16 hexadecimal digits.
        """
        if not RUN_ID.fullmatch(run_id):
            raise StoreError(f"{run_id!r} is not a run id: 16 hexadecimal digits, as `cope-sweep status` lists them")
        return RunFolder(self.root / "runs" / run_id)

    def runs(self) -> list[RunFolder]:
        """All runs that were begun in this store, ordered by id."""
        try:
            names = sorted(entry.name for entry in os.scandir(self.root / "runs") if RUN_ID.fullmatch(entry.name))
        except FileNotFoundError:
            return []
        return [RunFolder(self.root / "runs" / name) for name in names]

    def write_sweep(self, sweep_id: str, record: Mapping[str, Any]) -> None:
        """Write the record of a sweep, atomically."""
        write_json(self.root / "sweeps" / f"{sweep_id}.json", dict(record))

    def sweeps(self) -> list[dict[str, Any]]:
        """The records of all sweeps of this store, oldest first."""
        paths = sorted((self.root / "sweeps").glob("[0-9]*.json"))
        return [record for path in paths if (record := read_json(path)) is not None]


def _current_names(metrics: Mapping[str, float]) -> dict[str, float]:
    return {current_metric_name(name): value for name, value in metrics.items()}


def _now_ms() -> int:
    return int(time.time() * 1000)
