"""Reads a run's folder: the row that the index keeps of it, and what is damaged."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from cope_sweep.store.artifacts import RunFolder
from cope_sweep.store.curve import parse_curve
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.event import Status
from cope_sweep.store.index import RunRow
from cope_sweep.store.values import check_sections, checked_row, printable

CURVE = "curve.jsonl"


def read_run(folder: RunFolder, sweep_id: str | None = None) -> RunRow | None:
    """The row of a run that nobody trains, from its files; None if it was never begun."""
    return RunContents(folder).row(sweep_id)


class RunContents:
    """Content of the files of a run. Each is read once, when it is first asked for."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._found: dict[str, Any] = {}
        """Name → what was read, or the DamagedError."""

    def row(self, sweep_id: str | None = None) -> RunRow | None:
        """The row of a run that nobody trains; None if it was never begun.

        A run whose last attempt died is interrupted. One whose files cannot be read is damaged, and its message says
        why.
        """
        try:
            row = self._row(sweep_id)
            return None if row is None else checked_row(row, self.folder.path)
        except DamagedError as error:
            damaged = RunRow(self.folder.run_id, "damaged", {}, message=printable(str(error)), sweep_id=sweep_id)
            with contextlib.suppress(DamagedError):
                damaged = checked_row(replace(damaged, spec=self._spec()), self.folder.path)
            with contextlib.suppress(DamagedError):
                damaged = checked_row(replace(damaged, attempt=self._attempt()), self.folder.path)
            return damaged

    def _spec(self) -> Mapping[str, Any]:
        return cast(Mapping[str, Any], (self._read("spec") or {}).get("spec", {}))

    def _attempt(self) -> Any:
        return self._read("state").get("attempt", 0)

    def damage(self, *, checksums: bool = False) -> dict[str, str]:
        """File → what is wrong with it, in one line; with `checksums`, the content of curve and checkpoint, too."""
        problems = {}
        for name, file in (("spec", "spec.json"), ("state", "state.json"), ("result", "result.json"), ("curve", CURVE)):
            try:
                self._read(name)
            except DamagedError as error:
                problems[file] = str(error)
        if "result.json" in problems or self._read("result") is None:
            return problems
        return self.lost(checksums=checksums) | problems

    def lost(self, *, checksums: bool = False) -> dict[str, str]:
        """File → what is wrong with it, of those that a finished run has to have: its result, and what that names.

        Each is opened; with `checksums`, also read.
        """
        try:
            result = self._read("result")
        except DamagedError as error:
            return {"result.json": str(error)}
        if result is None:
            return {"result.json": f"{self.folder.path / 'result.json'}: missing"}
        problems = {}
        for name, digest in {"spec.json": None, **result.get("files", {})}.items():
            try:
                content = self.folder.content(name, -1 if checksums else 0)
            except DamagedError as error:
                problems[name] = str(error)
                continue
            if content is None:
                problems[name] = f"{self.folder.path / name}: missing"
            elif checksums and digest and hashlib.sha256(content).hexdigest() != digest:
                problems[name] = f"{self.folder.path / name}: has changed since the run was finished (SHA-256)"
        return problems

    def _read(self, name: str) -> Any:
        """`spec`, `state`, `result`, the rows of the `curve`, or the bytes of its file. Raises DamagedError."""
        if name not in self._found:
            try:
                if name == CURVE:
                    self._found[name] = self.folder.content(name)
                elif name == "curve":
                    self._found[name] = parse_curve(self._read(CURVE) or b"")
                else:
                    self._found[name] = getattr(self.folder, name)
            except DamagedError as error:
                self._found[name] = error
        found = self._found[name]
        if isinstance(found, DamagedError):
            raise found
        return found

    def _row(self, sweep_id: str | None) -> RunRow | None:
        folder, result, document = self.folder, self._read("result"), self._read("spec")
        if document is None:
            if result is not None:
                raise DamagedError(f"{folder.path / 'spec.json'}: missing")
            return None
        spec: Mapping[str, Any] = document["spec"]
        check_sections(spec, folder.path)
        created_ms = document.get("created_ms")
        if result is not None:
            state: dict[str, Any] = {}
            with contextlib.suppress(DamagedError):  # what it says has no influence any more
                state = self._read("state")
            facts = result["facts"]
            steps = facts.get("steps")
            return RunRow(
                folder.run_id,
                "finished",
                spec,
                attempt=state.get("attempt", 1),
                step=steps if isinstance(steps, int) else spec.get("train", {}).get("steps", 0),
                worker_id=facts.get("worker_id") or state.get("worker_id"),
                sweep_id=sweep_id,
                parent_id=facts.get("parent_id"),
                created_ms=created_ms,
                updated_ms=state.get("updated_ms"),
                ended_ms=result.get("ended_ms") or _mtime_ms(folder, "result.json"),  # older results have no time
                metrics=result["metrics"],
                facts=facts,
            )
        state, curve = self._read("state"), self._read("curve")
        status: Status = state.get("status", "interrupted")
        return RunRow(
            folder.run_id,
            "interrupted" if status in ("running", "finished", "pending") else status,
            spec,
            attempt=state.get("attempt", 0),
            step=_last_step(folder, curve),
            worker_id=state.get("worker_id"),
            message=state.get("message"),
            sweep_id=sweep_id,
            created_ms=created_ms,
            updated_ms=state.get("updated_ms"),
            ended_ms=_ended_ms(folder, state),
        )


def _last_step(folder: RunFolder, curve: Sequence[Mapping[str, float]]) -> int:
    """The step of the last row; 0 without one. Raises DamagedError."""
    try:
        return int(curve[-1]["step"]) if curve else 0
    except (ValueError, OverflowError) as error:
        raise DamagedError(f"{folder.path / CURVE}: step: {curve[-1]['step']} is no number of steps") from error


def _ended_ms(folder: RunFolder, state: Mapping[str, Any]) -> int | None:
    """When an unfinished attempt ended: by its last state, or, where it died, its last logged row."""
    updated_ms = state.get("updated_ms")
    if state.get("status") != "running":
        return updated_ms
    known_ms = updated_ms if isinstance(updated_ms, int) else 0
    return max(known_ms, _mtime_ms(folder, CURVE) or 0) or None


def _mtime_ms(folder: RunFolder, name: str) -> int | None:
    with contextlib.suppress(OSError):
        return int((folder.path / name).stat().st_mtime * 1000)
    return None
