"""The files of a run: the truth about it. The index and the tables are made from them. `README.md` lists them.

Files are written to a temporary file in the same folder and renamed, so a reader never sees a partial file. Whether a
run that says `running` is still in training is not in its files: the index has its lease.

An older attempt, whose process was paused, cannot replace a newer one's files. Its temporary files have its number in
their names. It looks for a newer attempt when such a file is complete, and then renames it; a newer attempt first
writes its number to `state.json`, deletes the temporary files of older ones, and begins again with both where an older
number has replaced its own meanwhile. So the older one sees the number, or has renamed its file before the newer
attempt reads any, or finds nothing to rename.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, cast, get_args

from cope_sweep.config import RunSpec, current_metric_name
from cope_sweep.store.errors import DamagedError, FencedError
from cope_sweep.store.event import Status
from cope_sweep.store.files import (
    check_checkpoint,
    check_no_link,
    parse_json,
    read_bytes,
    replacing,
    sha256,
    to_disk,
)
from cope_sweep.store.objects import ObjectFolder

RUN_ID = re.compile(r"[0-9a-f]{16}")
PUBLISH_CURVE_EVERY_S = 5.0
"""Shortest time between two copies of a growing curve to an object store."""
CHECK_FENCE_EVERY_S = 1.0
"""Shortest time between two looks for a newer attempt in an object store."""
SPEC_FILE, STATE_FILE, RESULT_FILE = "spec.json", "state.json", "result.json"
CURVE_FILE, LOG_FILE = "curve.jsonl", "log.txt"
CHECKED = {CURVE_FILE, "checkpoint"}
"""The file and the folder of whose content a result has checksums."""


TIME_KEY = "time_ms"
"""The key of a row that holds the time of day, in milliseconds since 1970. Old rows have none."""
LARGEST = 10**308
"""Greater whole numbers are no floats."""


class CurveMark(TypedDict):
    """The first bytes of a curve."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, to read it, or to write it as one of its attempts."""

    path: Path
    attempt: int | None = None
    """The attempt that writes; None: only for reading."""
    objects: ObjectFolder | None = None
    """The place of the files, if the store is in an object store. `path` is then a folder of this machine in which an
    attempt works, and from which its files are copied."""

    _published_s: dict[str, float] = field(default_factory=dict, repr=False, compare=False)
    """File → when it was last copied to the object store, on the monotonic clock."""

    @property
    def run_id(self) -> str:
        """The id of the run, which is the name of its folder."""
        return self.path.name

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> dict[str, Any] | None:
        """`{"run_id", "spec", "created_ms"}`; None before the run was begun. Raises DamagedError."""
        document = self._document(SPEC_FILE)
        if document is not None and not (
            isinstance(document.get("spec"), dict) and document.get("run_id", self.run_id) == self.run_id
        ):
            raise DamagedError(f"{self.path / SPEC_FILE}: not the spec of run {self.run_id}")
        return document

    @property
    def state(self) -> dict[str, Any]:
        """`{"status", "updated_ms", "worker_id", "attempt", …}`; empty before it was begun. Raises DamagedError."""
        state = self._document(STATE_FILE) or {}
        if "where" in state:  # the former name of the key
            state.setdefault("worker_id", state.pop("where"))
        if state and (state.get("status") not in get_args(Status) or not isinstance(state.get("attempt", 0), int)):
            raise DamagedError(f"{self.path / STATE_FILE}: not the state of a run")
        return state

    @property
    def result(self) -> dict[str, Any] | None:
        """`{"metrics": {name: value}, "facts": {name: value}, "files": {name: checksum}}`; None if not finished.

        Metrics have their current names, whatever they were called when the run was trained. Results of older versions
        have no `files`. Raises DamagedError.
        """
        result = self._document(RESULT_FILE)
        if result is None:
            return None
        metrics, facts, files = result.get("metrics"), result.get("facts"), result.get("files", {})
        if not isinstance(facts, dict) or not isinstance(metrics, dict) or not all(map(is_number, metrics.values())):
            raise DamagedError(f"{self.path / RESULT_FILE}: not the result of a run")
        if not isinstance(files, dict) or {name.partition("/")[0] for name in files} - CHECKED:
            raise DamagedError(f"{self.path / RESULT_FILE}: not the result of a run")
        return result | {"metrics": current_names(metrics)}

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
        """The status by the files alone: `running` means that the last attempt has not ended, or that it died."""
        try:
            if self.result is not None:
                return "finished"
            if self.spec is None:
                return "pending"
            return cast(Status, self.state.get("status", "interrupted"))
        except DamagedError:
            return "damaged"

    def curve(self, *, times: bool = False) -> list[dict[str, float]]:
        """The logged rows, see `parse_curve`. Raises DamagedError if the file cannot be read."""
        return parse_curve(self.content(CURVE_FILE) or b"", times=times)

    def logged_values(self) -> Iterator[tuple[int, str, float, float | None]]:
        """Step, metric, value and time of day in ms (None: not known) of each logged value. Raises DamagedError."""
        for point in self.curve(times=True):
            time_ms = point.get(TIME_KEY)
            for metric, value in point.items():
                if metric not in ("step", TIME_KEY):
                    yield int(point["step"]), metric, float(value), time_ms

    # -- writing -------------------------------------------------------------------------------------------------

    def begin(self, spec: RunSpec, worker_id: str, attempt: int | None = None) -> RunFolder:
        """Begin an attempt: set the status to running. The first one also writes the spec.

        Damaged files are put aside (`repair`), and the run is trained from its last good state.

        Args:
            spec: The run.
            worker_id: Who trains it.
            attempt: The number of the attempt, from its lease; None: the next one.

        Returns:
            The folder, for this attempt to write to.

        Raises:
            FencedError: This or a newer attempt has begun, or an earlier one has finished the run.
        """
        # With its number, temporary files of this attempt, too, are deleted by newer ones only, which it then notices.
        try:
            replace(self, attempt=attempt).repair(spec)
        except FencedError:
            # The number may also be that of an index that has forgotten the run, which then needs the spec to read it.
            with contextlib.suppress(FileNotFoundError):  # a newer attempt has deleted the temporary file
                self.repair(spec)
        earlier = int(self.state.get("attempt", 0))
        own = replace(self, attempt=earlier + 1 if attempt is None else attempt)
        if own.attempt is not None and own.attempt <= earlier:
            # Also the same number: the index forgets a lease without a folder when it is made again.
            raise FencedError(f"run {self.run_id}: attempt {earlier} has begun; attempt {own.attempt} ends")
        # Message and traceback of an earlier attempt are dropped.
        state = {"status": "running", "updated_ms": _now_ms(), "worker_id": worker_id, "attempt": own.attempt}
        # An older attempt that has looked before the number was written may rename its own `state.json` over it, until
        # its temporary files are deleted, and would then see its own number.
        while True:
            own._write(STATE_FILE, state)
            own._delete_older()
            if own.state.get("attempt") == own.attempt:
                break
        if own.result is not None:  # from here on, no older attempt can write one
            raise FencedError(f"run {self.run_id}: an earlier attempt has finished it")
        own._delete_checkpoint()
        own._fetch(CURVE_FILE, "resume.safetensors", LOG_FILE)
        return own

    def _delete_older(self) -> None:
        """Delete temporary files of older attempts."""
        for path in self.path.glob(".*"):
            number = path.name.split(".")[-2]
            if number.isdigit() and int(number) >= (self.attempt or 0):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif number:  # `.nfs…` is a file that NFS keeps for who has it open; former versions wrote no number
                path.unlink(missing_ok=True)

    def _delete_checkpoint(self) -> None:
        """Delete the checkpoint of an older attempt, which is of no use without a result. Raises FencedError.

        A newer attempt may put its own in place at any time: only what was there before the look for it is deleted.
        """
        try:
            folder = os.open(self.checkpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # none, or no folder
            return
        try:
            self.check_fence()
            for name in os.listdir(folder):  # noqa: PTH208 - through the descriptor
                shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)
        with contextlib.suppress(OSError):  # it is gone, or a newer one is in its place
            self.checkpoint.rmdir()

    def repair(self, spec: RunSpec) -> None:
        """Put files that cannot be read aside as `<name>.damaged`, and write the spec if there is none."""
        check_no_link(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        for name, read in ((SPEC_FILE, "spec"), (STATE_FILE, "state"), (RESULT_FILE, "result")):
            try:
                getattr(self, read)
            except DamagedError:
                self.put_aside(name)
        if self.spec is None:
            document = {"run_id": spec.run_id, "spec": spec.model_dump(mode="json"), "created_ms": _now_ms()}
            self._write(SPEC_FILE, document)

    def put_aside(self, name: str) -> None:
        """Rename a damaged file, or whatever is in its place, to `<name>.damaged`."""
        target = self.path / f"{name}.damaged"
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (self.path / name).replace(target)
        if self.objects and (content := self.content(name)) is not None:
            self.objects.write(self._object(f"{name}.damaged"), content)
            self.objects.delete(self._object(name))

    def mark_damaged(self, problems: Mapping[str, str]) -> None:
        """Put damaged files aside, so that the run can be trained again. Raises FencedError.

        `problems` are the files, and what is wrong with each. A finished run without its curve or checkpoint is
        finished no more. Damage of its spec or state alone needs no training: the next attempt writes them.
        """
        check_no_link(self.path)
        for name in sorted({name.partition("/")[0] for name in problems}):
            self.put_aside(name)
        if problems.keys() - {SPEC_FILE, STATE_FILE}:
            self.put_aside(RESULT_FILE)
            if self.spec is not None:  # else it reads as if it had never been begun
                self.path.mkdir(parents=True, exist_ok=True)
                own = replace(self, attempt=int(self.state.get("attempt", 0)))
                own.set_state("damaged", message="; ".join(problems.values()))

    def check_fence(self, *, every_s: float = 0.0) -> None:
        """Raise FencedError if a newer attempt than this one has begun.

        In an object store each check is a request: it is left out within `every_s` of the last one.
        """
        if self.objects and time.monotonic() - self._published_s.get("fence", float("-inf")) < every_s:
            return
        self._published_s["fence"] = time.monotonic()
        with contextlib.suppress(DamagedError):
            newest = int(self.state.get("attempt", 0))
            if self.attempt is not None and newest > self.attempt:
                raise FencedError(f"run {self.run_id}: attempt {newest} has begun; attempt {self.attempt} ends")

    def set_state(self, status: Status, **facts: Any) -> None:
        """Set the status, and any other keys of the state. Raises FencedError."""
        self.check_fence()
        try:
            state = self.state
        except DamagedError:
            state = {"attempt": self.attempt or 1}
        self._publish(CURVE_FILE, LOG_FILE)
        self._write(STATE_FILE, state | {"status": status, "updated_ms": _now_ms()} | facts)

    def curve_mark(self) -> CurveMark:
        """Length and checksum of the curve as it is now, and on the disk. The resume file names its curve by them."""
        with contextlib.suppress(FileNotFoundError):
            to_disk(self.path / CURVE_FILE)
        content = read_bytes(self.path / CURVE_FILE) or b""
        return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def check_curve(self, mark: CurveMark) -> None:
        """Raise DamagedError if the curve does not begin with what it was when `mark` was made."""
        path = self.path / CURVE_FILE
        content = read_bytes(path, mark["bytes"]) or b""
        if hashlib.sha256(content).hexdigest() != mark["sha256"]:
            raise DamagedError(f"{path}: not the curve that belongs to {self.resume.name}")

    def rewind(self, step: int, mark: CurveMark | None = None) -> None:
        """Drop the rows after `step`, which are trained again. Raises FencedError.

        `mark` was made at that step; without it the rows are read. A curve that cannot be read is put aside.
        """
        self.check_fence()
        path = self.path / CURVE_FILE
        if step and mark:
            self._write_curve(read_bytes(path, mark["bytes"]) or b"")
            return
        try:
            rows = [row for row in self.curve(times=True) if row["step"] <= step]
        except DamagedError:
            self.put_aside(path.name)
            rows = []
        self._write_curve("".join(json.dumps(row) + "\n" for row in rows).encode())

    def _write_curve(self, content: bytes) -> None:
        # Always a new file: what an older attempt appends to the one that it has opened is not read.
        with self._replacing(CURVE_FILE) as temporary:
            temporary.write_bytes(content)

    def log(self, row: Mapping[str, float]) -> None:
        """Append one row, which has the key `step`, with the time of day. Raises FencedError."""
        step = {"step": row["step"], TIME_KEY: _now_ms()}
        with (self.path / CURVE_FILE).open("a") as file:
            self.check_fence(every_s=CHECK_FENCE_EVERY_S)  # after the file was opened, see `_write_curve`
            file.write(json.dumps(step | dict(row), allow_nan=False) + "\n")
        if self.objects and time.monotonic() - self._published_s.get(CURVE_FILE, 0.0) > PUBLISH_CURVE_EVERY_S:
            self._publish(CURVE_FILE)

    def note(self, text: str) -> None:
        """Append lines with the time of day to the run's log, for people. Raises FencedError."""
        self.check_fence(every_s=CHECK_FENCE_EVERY_S)
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        with (self.path / LOG_FILE).open("a", encoding="utf-8") as file:
            file.writelines(f"{now}  {line}\n" for line in text.splitlines())

    def log_text(self) -> str:
        """The run's log; empty for runs of versions that wrote none. Raises DamagedError."""
        return (self.content(LOG_FILE) or b"").decode(errors="replace")

    def fail(self, message: str, traceback: str) -> None:
        """Set the status to failed, with the reason in one line and the traceback. Raises FencedError."""
        self.note(traceback or message)
        self.set_state("failed", message=message, traceback=traceback)

    @contextlib.contextmanager
    def writing_resume(self) -> Iterator[Path]:
        """A temporary path that replaces the resume file when the block ends without an error. Raises FencedError."""
        with self._replacing(self.resume.name) as temporary:
            yield temporary
        self._publish(CURVE_FILE, self.resume.name)

    @contextlib.contextmanager
    def _replacing(self, name: str) -> Iterator[Path]:
        """A temporary path that replaces a file of this attempt when the block ends. Raises FencedError."""
        try:
            with replacing(self.path / name, f"{self.attempt or 0}.") as temporary:
                yield temporary
                self.check_fence()
        except FileNotFoundError:
            self.check_fence()  # a newer attempt has deleted it
            raise

    @contextlib.contextmanager
    def writing_checkpoint(self) -> Iterator[Path]:
        """A temporary folder that becomes `checkpoint` when the block ends without an error. Raises FencedError.

        An attempt writes one checkpoint.
        """
        try:
            with self._new_checkpoint() as temporary:
                yield temporary
                self.check_fence()
        except FileNotFoundError:
            self.check_fence()  # a newer attempt has deleted it
            raise
        self._publish(*(f"checkpoint/{file.name}" for file in sorted(self.checkpoint.iterdir())))

    @contextlib.contextmanager
    def _new_checkpoint(self) -> Iterator[Path]:
        self.path.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=self.path, prefix=f".checkpoint.{self.attempt or 0}."))
        try:
            yield temporary
            temporary.chmod(0o755)
            temporary.replace(self.checkpoint)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def finish(self, metrics: Mapping[str, float], facts: Mapping[str, Any]) -> None:
        """Write the result, which makes the run finished, and delete the resume file. Raises FencedError."""
        self.check_fence()
        document = {"metrics": dict(metrics), "facts": dict(facts), "files": self._checksums(), "ended_ms": _now_ms()}
        self._publish(CURVE_FILE, LOG_FILE)
        self._write(RESULT_FILE, document)
        self.resume.unlink(missing_ok=True)
        if self.objects:
            self.objects.delete(self._object(self.resume.name))

    def _checksums(self) -> dict[str, str]:
        """File → SHA-256, of the curve and the checkpoint. They are on the disk before the result that names them."""
        found = [self.path / CURVE_FILE, *self.checkpoint.glob("*")]
        files = [file for file in sorted(found) if file.is_file()]
        for file in files:
            to_disk(file)
        return {str(file.relative_to(self.path)): sha256(file) for file in files}

    def fetch_checkpoint(self) -> Path:
        """The folder of the trained model on this machine. Copied from an object store once. Raises StoreError.

        There is no such folder if the run has no checkpoint. Raises DamagedError for links, which may lead out of the
        store, and for a pipe or a device in place of a file.
        """
        check_checkpoint(self.checkpoint)
        if self.objects and not self.checkpoint.is_dir() and (names := self.objects.names(self._object("checkpoint"))):
            try:
                with self._new_checkpoint() as temporary:
                    for name in names:
                        self.objects.download(self._object(f"checkpoint/{name}"), temporary / name)
            except OSError:
                if not self.checkpoint.is_dir():  # else another process was faster
                    raise
        return self.checkpoint

    # -- where the files are -------------------------------------------------------------------------------------

    def _object(self, name: str) -> str:
        return f"runs/{self.run_id}/{name}"

    def content(self, name: str, size: int = -1) -> bytes | None:
        """The content of a file, or its first `size` bytes; None if there is none. Raises DamagedError."""
        if self.objects:
            return self.objects.read(self._object(name), size)
        check_no_link(self.path)
        return read_bytes(self.path / name, size)

    def _document(self, name: str) -> dict[str, Any] | None:
        """The JSON object in a file; None if there is none. Raises DamagedError."""
        content = self.content(name)
        return None if content is None else parse_json(content, self.path / name)

    def _write(self, name: str, document: Mapping[str, Any]) -> None:
        """Write a JSON object. Raises FencedError, and ValueError where it contains NaN or an infinity."""
        with self._replacing(name) as temporary:
            temporary.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        self._publish(name)

    def _publish(self, *names: str) -> None:
        """Copy local files to the object store, if the store is in one."""
        for name in names if self.objects else ():
            if (self.path / name).is_file():
                cast(ObjectFolder, self.objects).upload(self.path / name, self._object(name))
                self._published_s[name] = time.monotonic()

    def _fetch(self, *names: str) -> None:
        """Copy files from the object store, if the store is in one, so that local files are the same."""
        for name in names if self.objects else ():
            (self.path / name).unlink(missing_ok=True)
            cast(ObjectFolder, self.objects).download(self._object(name), self.path / name)


def _now_ms() -> int:
    return int(time.time() * 1000)


def parse_curve(content: bytes, *, times: bool = False) -> list[dict[str, float]]:
    """The rows of a curve's file in order of steps; metrics have their current names. `times` keeps the key `time_ms`.

    A line that was cut off when its process was killed, or is not a row, is left out; of two rows of a step that
    hold the same metric, the first counts.
    """
    rows: list[dict[str, float]] = []
    seen: set[tuple[float, str]] = set()
    for line in content.splitlines():
        row = _row(line)
        if row is None:
            continue
        time_ms = row.pop(TIME_KEY, None)
        step = row["step"]
        fresh = {key: value for key, value in row.items() if key == "step" or (step, key) not in seen}
        if len(fresh) == 1 and len(row) > 1:
            continue
        seen |= {(step, key) for key in fresh}
        rows.append(fresh | ({TIME_KEY: time_ms} if times and time_ms is not None else {}))
    return rows


def _row(line: bytes) -> dict[str, float] | None:
    """A line of a curve; None if it is not a row."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not all(map(is_number, row.values())) or "step" not in row:
        return None
    if not math.isfinite(row["step"]) or not all(map(is_unicode, row)):
        return None
    return current_names(row)


def is_unicode(text: str) -> bool:
    """Whether a text is Unicode: JSON can have halves of surrogate pairs, which no answer can hold."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def is_number(value: object) -> bool:
    """Whether a value of a JSON document is a number that a float can hold."""
    if isinstance(value, float):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST


def current_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics under their current names, whatever they were called when they were written."""
    return {current_metric_name(name): value for name, value in metrics.items()}
