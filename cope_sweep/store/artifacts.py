"""The files of a run: the truth about it. The index and the tables are made from them. `README.md` lists them.

`RunFolder` reads them, and `RunFolder.begin` gives an `AttemptWriter`, which writes them. Files are written to a
temporary file in the same folder and renamed, so a reader never sees a partial file. Whether a run that says `running`
is still in training is not in its files: the index has its lease.

An attempt may be overtaken: its process was paused until its lease expired, and another process started the next
attempt, whose files it must not replace. So each attempt has a number, which it writes to `state.json` when it starts.
Before an attempt replaces a file it reads that number, and ends if it is greater than its own. Reading and renaming are
two operations: a process that is paused between them, for longer than a lease, can still replace one file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

from cope_sweep.config import RunSpec
from cope_sweep.records import STATUSES, Status
from cope_sweep.redaction import redacted
from cope_sweep.store.curve import TIME_KEY, current_names, is_number, is_unicode, parse_curve
from cope_sweep.store.errors import DamagedError, FencedError
from cope_sweep.store.files import (
    check_checkpoint,
    check_no_link,
    parse_json,
    read_bytes,
    remove,
    replacing,
    replacing_folder,
    sha256,
    to_disk,
)
from cope_sweep.store.objects import ObjectFolder

RUN_ID = re.compile(r"[0-9a-f]{16}")
# Objects cannot be appended to: each copy sends the whole curve.
UPLOAD_CURVE_EVERY_S = 5.0
"""Shortest time between two copies of a growing curve to an object store."""
CHECK_FENCE_EVERY_S = 1.0
"""Shortest time between two looks for a newer attempt in an object store, where lines are appended."""
SPEC_FILE, STATE_FILE, RESULT_FILE = "spec.json", "state.json", "result.json"
CURVE_FILE, LOG_FILE = "curve.jsonl", "log.txt"
RESUME_FILE, CHECKPOINT_FOLDER = "resume.safetensors", "checkpoint"
CHECKED = {CURVE_FILE, CHECKPOINT_FOLDER}
"""The file and the folder whose content has checksums in a result."""
MAX_MESSAGE_CHARACTERS = 500


def short_message(text: str) -> str:
    """Why something failed, without secrets. Cut last: the beginning of a secret is one, too."""
    return redacted(text)[:MAX_MESSAGE_CHARACTERS]


class CurveMark(TypedDict):
    """The first bytes of a curve."""

    bytes: int
    sha256: str


class RunFolder:
    """The folder of one run, to read it. It need not exist."""

    def __init__(self, path: Path, objects: ObjectFolder | None = None, sweep_id: str | None = None) -> None:
        """`objects` is the place of the files if the store is in an object store.

        `path` is then a folder of this machine in which an attempt works, and from which its files are copied. The
        files of attempts that `begin` starts name the sweep `sweep_id`.
        """
        self.path, self.objects, self.sweep_id = path, objects, sweep_id

    def of_sweep(self, sweep_id: str) -> RunFolder:
        """The same folder, for a sweep to begin attempts."""
        return RunFolder(self.path, self.objects, sweep_id)

    @property
    def run_id(self) -> str:
        """The id of the run, which is the name of its folder."""
        return self.path.name

    @property
    def spec(self) -> dict[str, Any] | None:
        """`{"run_id", "spec", "created_ms"}`; None before the run has started. Raises DamagedError."""
        document = self._document(SPEC_FILE)
        if document is not None and not (
            isinstance(document.get("spec"), dict) and document.get("run_id", self.run_id) == self.run_id
        ):
            raise DamagedError(
                f"{self.path / SPEC_FILE}: not the spec of run {self.run_id}",
                file=str(self.path / SPEC_FILE),
                run_id=self.run_id,
            )
        return document

    @property
    def state(self) -> dict[str, Any]:
        """`{"status", "updated_ms", "worker_id", "attempt", "sweep_id", …}`; empty before it has started.

        States of older versions have no `sweep_id`. Raises DamagedError.
        """
        state = self._document(STATE_FILE) or {}
        if state.get("status") == "damaged":  # a status of older versions, and folders outlive versions
            state["status"] = "interrupted"
        if state and (state.get("status") not in STATUSES or not isinstance(state.get("attempt", 0), int)):
            raise DamagedError(f"{self.path / STATE_FILE}: not the state of a run", file=str(self.path / STATE_FILE))
        return state

    @property
    def last_attempt(self) -> int:
        """The number of the attempt that started last; 0 before the first. Raises DamagedError."""
        return int(self.state.get("attempt", 0))

    @property
    def result(self) -> dict[str, Any] | None:
        """`{"metrics": {name: value}, "facts": {name: value}, "files": {name: checksum}, …}`; None if not finished.

        Metrics have their current names, whatever they were called when the run was trained. Results of older versions
        have no `files`, and no `sweep_id`. Raises DamagedError.
        """
        result = self._document(RESULT_FILE)
        if result is None:
            return None
        metrics, facts, files = result.get("metrics"), result.get("facts"), result.get("files", {})
        damaged = DamagedError(f"{self.path / RESULT_FILE}: not the result of a run", file=str(self.path / RESULT_FILE))
        if not isinstance(facts, dict) or not isinstance(metrics, dict) or not all(map(is_number, metrics.values())):
            raise damaged
        if not isinstance(files, dict) or not all(map(_is_checked, files)):
            raise damaged
        return result | {"metrics": current_names(metrics)}

    @property
    def checkpoint(self) -> Path:
        """The folder of the trained model."""
        return self.path / CHECKPOINT_FOLDER

    @property
    def resume(self) -> Path:
        """The file from which an unfinished run is resumed."""
        return self.path / RESUME_FILE

    @property
    def status(self) -> Status:
        """The status by the files alone: `running` means that the last attempt has not ended, or that it died.

        A run whose files cannot be read is interrupted: the next attempt puts them aside.
        """
        try:
            if self.result is not None:
                return "finished"
            if self.spec is None:
                return "pending"
            return cast(Status, self.state.get("status", "interrupted"))
        except DamagedError:
            return "interrupted"

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

    def check_curve(self, mark: CurveMark) -> None:
        """Raise DamagedError if the curve does not begin with what it was when `mark` was made."""
        path = self.path / CURVE_FILE
        content = read_bytes(path, mark["bytes"]) or b""
        if hashlib.sha256(content).hexdigest() != mark["sha256"]:
            raise DamagedError(f"{path}: not the curve that belongs to {RESUME_FILE}", file=str(path))

    def log_text(self) -> str:
        """The run's log; empty for runs of versions that wrote none. Raises DamagedError."""
        return redacted((self.content(LOG_FILE) or b"").decode(errors="replace"))

    def fetch_checkpoint(self, ended_ms: int | None = None) -> Path:
        """The folder of the trained model on this machine. Raises StoreError.

        It is copied from an object store once, and again if another machine has trained the run since. `ended_ms` is
        when the run was finished; None: as its result says.

        There is no such folder if the run has no checkpoint. Raises DamagedError for links, which may lead out of the
        store, and for a pipe or a device instead of a file.
        """
        check_checkpoint(self.checkpoint)
        if self.objects:
            ended_ms = ended_ms or (self.result or {}).get("ended_ms")
            if not self._has_copy(ended_ms):
                self._copy_checkpoint(self.objects, ended_ms)
        return self.checkpoint

    def _has_copy(self, ended_ms: int | None) -> bool:
        """Whether this machine has the checkpoint that was finished then; None: any. Its folder has that time."""
        try:
            copied_ms = self.checkpoint.stat().st_mtime_ns // 1_000_000
        except FileNotFoundError:
            return False
        return ended_ms in (None, copied_ms)

    def _copy_checkpoint(self, objects: ObjectFolder, ended_ms: int | None) -> None:
        def remove_other() -> None:
            if not self._has_copy(ended_ms):
                remove(self.checkpoint)

        names = objects.names(self._object(CHECKPOINT_FOLDER))
        if not names:
            remove_other()
            return
        # Services fetch the same checkpoint at the same time: each downloads to a folder of its own, and the first
        # rename wins.
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with replacing_folder(self.checkpoint, remove_other) as temporary:
                for name in names:
                    objects.download(self._object(f"{CHECKPOINT_FOLDER}/{name}"), temporary / name)
                if ended_ms is not None:
                    os.utime(temporary, ns=(ended_ms * 1_000_000,) * 2)
        except OSError:
            if not self._has_copy(ended_ms):  # else another process was faster
                raise

    def fetch_resume(self) -> None:
        """Copy the resume file from an object store to this machine, if the store is in one. Raises StoreError.

        `AttemptWriter.clean_up` has copied it to the machine of rank 0 only. There, other ranks replace it by the same.
        They delete it once all ranks have read it.
        """
        if self.objects:
            self.path.mkdir(parents=True, exist_ok=True)
            with replacing(self.resume) as temporary:
                self.objects.download(self._object(RESUME_FILE), temporary)

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

    def _object(self, name: str) -> str:
        return f"runs/{self.run_id}/{name}"

    # -- beginning, and what is damaged --------------------------------------------------------------------------------

    def begin(self, spec: RunSpec, worker_id: str, attempt: int | None = None) -> AttemptWriter:
        """Begin an attempt: set the status to running. The first one also writes the spec.

        Damaged files are put aside (`repair`), and the run is trained from its last good state. So is the result of a
        finished run that has lost its curve or checkpoint.

        Args:
            spec: The run.
            worker_id: Who trains it.
            attempt: The number of the attempt, from its lease; None: the next one.

        Returns:
            The folder, for this attempt to write to.

        Raises:
            FencedError: This or a newer attempt has started, or an earlier one has finished the run.
        """
        self.repair(spec)
        last = self.last_attempt
        if attempt is not None and attempt <= last:
            # Also the same number: the index forgets a lease without a folder when it is made again.
            raise _overtaken(self.run_id, attempt, last)
        own_files = AttemptWriter(self, last + 1 if attempt is None else attempt)
        # First the number: from here on, older attempts replace nothing. Their message and traceback are dropped.
        own_files.write_document(STATE_FILE, {
            "status": "running", "updated_ms": _now_ms(), "worker_id": worker_id, "attempt": own_files.number,
            "sweep_id": self.sweep_id,
        })  # fmt: skip
        # Only now, and not when the sweep looked at its finished runs: a client of a network file system remembers that
        # a file was missing, also when another machine has written it since. With the number, this machine has written
        # into the folder, and so asks for its content again.
        lost = own_files.lost_files()
        if lost and own_files.result is not None:
            own_files.put_aside(lost)
        elif not lost:
            raise FencedError(
                f"run {self.run_id}: an earlier attempt has finished it", code="already_finished", run_id=self.run_id
            )
        own_files.clean_up()
        return own_files

    def repair(self, spec: RunSpec) -> None:
        """Put documents that cannot be read aside as `<name>.damaged`, and write the spec if there is none."""
        check_no_link(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        for name in self.unreadable():
            self.quarantine_file(name)
        if self.spec is None:
            document = {"run_id": spec.run_id, "spec": spec.model_dump(mode="json"), "created_ms": _now_ms()}
            AttemptWriter(self, self.last_attempt).write_document(SPEC_FILE, document)

    def unreadable(self) -> dict[str, str]:
        """File → why it cannot be read, in one line; of spec, state and result."""
        reads: dict[str, Callable[[], object]] = {
            SPEC_FILE: lambda: self.spec,
            STATE_FILE: lambda: self.state,
            RESULT_FILE: lambda: self.result,
        }
        problems = {}
        for name, read in reads.items():
            try:
                read()
            except DamagedError as error:
                problems[name] = str(error)
        return problems

    def quarantine_file(self, name: str) -> None:
        """Rename a damaged file, or whatever is in its place, to `<name>.damaged`."""
        path, target = self.path / name, self.path / f"{name}.damaged"
        if os.path.lexists(path):  # else it was renamed before, and its copy stays
            # Only the newest damaged file is kept: a name for each would fill a store whose disk is failing.
            remove(target)
            path.replace(target)
        if self.objects and (content := self.content(name)) is not None:
            self.objects.write(self._object(f"{name}.damaged"), content)
            self.objects.delete(self._object(name))

    def put_aside(self, problems: Mapping[str, str]) -> bool:
        """Put damaged files aside, so that the run can be trained again; whether it has to be.

        `problems` are the files, and what is wrong with each. A finished run without its curve or checkpoint is
        finished no more. Damage of its spec or state alone needs no training: the next attempt writes them.
        """
        check_no_link(self.path)
        for name in sorted({name.partition("/")[0] for name in problems}):
            self.quarantine_file(name)
        # Last the result: a process that dies before this line leaves a run whose loss is found again.
        needs_training = bool(problems.keys() - {SPEC_FILE, STATE_FILE})
        if needs_training:
            self.quarantine_file(RESULT_FILE)
        return needs_training

    def interrupt(self, problems: Mapping[str, str]) -> None:
        """`put_aside`, and say in the run's state what is lost. Raises FencedError."""
        if self.put_aside(problems) and self.spec is not None:  # without a spec, it reads as if it had never started
            self.path.mkdir(parents=True, exist_ok=True)
            own_files = AttemptWriter(self, self.last_attempt)
            own_files.catch_up(CURVE_FILE, LOG_FILE)  # `set_state` sends this machine's, which may be older
            own_files.set_state("interrupted", message="; ".join(problems.values()))

    def record_failure(self, run: RunSpec, attempt: int, message: str, details: str, *, keep_recorded: bool) -> None:
        """Record the failure of an attempt instead of its process, which may have died too early to begin it.

        It leaves a result, and the files of a newer attempt, as they are. Call it on the folder of the sweep that has
        leased the run: see `of_sweep`.

        Args:
            run: The run.
            attempt: The number of the attempt, from the run's lease.
            message: The reason, in one line.
            details: The whole reason.
            keep_recorded: A failure that the worker itself recorded stays.
        """
        with contextlib.suppress(FencedError):
            self.repair(run)
            own_files = AttemptWriter(self, attempt)
            own_files.check_fence()
            is_recorded = keep_recorded and self.last_attempt == attempt and self.status == "failed"
            if self.result is None and not is_recorded:
                own_files.catch_up(CURVE_FILE, LOG_FILE)
                nobody = {"worker_id": ""} if self.last_attempt < attempt else {}  # no worker began it
                own_files.fail(message, details, **nobody)

    def lost_files(self, *, checksums: bool = False) -> dict[str, str]:
        """File → what is wrong with it, of the files of a finished run: its result, and those that the result names.

        Each is opened; with `checksums`, also read.
        """
        try:
            result = self.result
        except DamagedError as error:
            return {RESULT_FILE: str(error)}
        if result is None:
            return {RESULT_FILE: f"{self.path / RESULT_FILE}: missing"}
        problems = {}
        for name, digest in {SPEC_FILE: None, **result.get("files", {})}.items():
            try:
                content = self.content(name, -1 if checksums else 0)
            except DamagedError as error:
                problems[name] = str(error)
                continue
            if content is None:
                problems[name] = f"{self.path / name}: missing"
            elif checksums and digest and hashlib.sha256(content).hexdigest() != digest:
                problems[name] = f"{self.path / name}: has changed since the run was finished (SHA-256)"
        return problems


class AttemptWriter(RunFolder):
    """The folder of a run, to write it as one of its attempts.

    Each method that writes raises FencedError, and leaves the files as they are, if a newer attempt has started.
    """

    def __init__(self, folder: RunFolder, number: int) -> None:
        """Write to `folder` as its attempt `number`, which has started: see `RunFolder.begin`."""
        super().__init__(folder.path, folder.objects, folder.sweep_id)
        self.number = number
        self._checked_s = self._curve_uploaded_s = float("-inf")
        """When it last looked for a newer attempt, and copied the curve to an object store, on the monotonic clock."""

    def clean_up(self) -> None:
        """Delete what earlier attempts have left, except what this one continues from, and download that.

        A checkpoint without a result is of no use, and neither is a temporary file.
        """
        self.check_fence()
        # Only after the check: the folder may belong to the attempt that has overtaken this one.
        shutil.rmtree(self.checkpoint, ignore_errors=True)
        for path in self.path.glob(".*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif not path.name.startswith(".nfs"):  # NFS keeps these for processes that have a deleted file open
                path.unlink(missing_ok=True)
        self.download(CURVE_FILE, RESUME_FILE, LOG_FILE)

    def download(self, *names: str) -> None:
        """Replace files of this machine, which may be older, by those of the object store, if the store is in one."""
        if self.objects is None:
            return
        for name in names:
            (self.path / name).unlink(missing_ok=True)
            self.objects.download(self._object(name), self.path / name)

    def catch_up(self, *names: str) -> None:
        """`download` the files that do not continue what the object store has: another machine has written them on."""
        if self.objects is None:
            return
        for name in names:
            if not (read_bytes(self.path / name) or b"").startswith(self.content(name) or b""):
                self.download(name)

    def check_fence(self, *, every_s: float = 0.0) -> None:
        """Raise FencedError if a newer attempt than this one has started.

        In an object store each check is a request: it is left out within `every_s` of the last one.
        """
        now_s = time.monotonic()
        if self.objects and now_s - self._checked_s < every_s:
            return
        self._checked_s = now_s
        with contextlib.suppress(DamagedError):
            last = self.last_attempt
            if last > self.number:
                raise _overtaken(self.run_id, self.number, last)

    def set_state(self, status: Status, **facts: Any) -> None:
        """Set the status, and any other keys of the state."""
        self.check_fence()
        try:
            state = self.state
        except DamagedError:
            state = {}
        self._upload(CURVE_FILE, LOG_FILE)
        # After the curve and the log: who reads the new state finds what belongs to it.
        now = {"status": status, "attempt": self.number or 1, "updated_ms": _now_ms()}
        self.write_document(STATE_FILE, state | now | facts)

    def fail(self, message: str, traceback: str, **facts: Any) -> None:
        """Set the status to failed, with the reason in one line and the traceback, and any other keys of the state."""
        message, traceback = short_message(message), redacted(traceback)
        self.note(traceback or message)
        self.set_state("failed", message=message, traceback=traceback, sweep_id=self.sweep_id, **facts)

    def log(self, row: Mapping[str, float]) -> None:
        """Append one row, which has the key `step`, to the curve, with the time of day."""
        step = {"step": row["step"], TIME_KEY: _now_ms()}
        with (self.path / CURVE_FILE).open("a") as file:
            self.check_fence(every_s=CHECK_FENCE_EVERY_S)  # after the file was opened, see `rewind`
            file.write(json.dumps(step | dict(row), allow_nan=False) + "\n")
        if self.objects and time.monotonic() - self._curve_uploaded_s > UPLOAD_CURVE_EVERY_S:
            self._upload(CURVE_FILE)

    def note(self, text: str) -> None:
        """Append lines with the time of day to the run's log, for people."""
        self.check_fence(every_s=CHECK_FENCE_EVERY_S)
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        path = self.path / LOG_FILE
        if path.is_symlink() or (path.exists() and not path.is_file()):
            self.quarantine_file(LOG_FILE)  # a link may lead out of the store, and a pipe blocks its writer
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{now}  {line}\n" for line in redacted(text).splitlines())

    def mark_curve(self) -> CurveMark:
        """Length and checksum of the curve as it is now, and on the disk. The resume file names its curve by them."""
        with contextlib.suppress(FileNotFoundError):
            to_disk(self.path / CURVE_FILE)
        content = read_bytes(self.path / CURVE_FILE) or b""
        return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def rewind(self, step: int, mark: CurveMark | None = None) -> None:
        """Drop the rows of the curve after `step`, which are trained again.

        `mark` was made at that step; without it the rows are read. A curve that cannot be read is put aside.
        """
        self.check_fence()
        path = self.path / CURVE_FILE
        if step and mark:
            content = read_bytes(path, mark["bytes"]) or b""
        else:
            try:
                rows = [row for row in self.curve(times=True) if row["step"] <= step]
            except DamagedError:
                self.quarantine_file(CURVE_FILE)
                rows = []
            content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        # Always a new file: what an older attempt appends to the one that it has opened is not read.
        with replacing(path, self.check_fence) as temporary:
            temporary.write_bytes(content)

    @contextlib.contextmanager
    def save_resume(self) -> Iterator[Path]:
        """A temporary path that replaces the resume file when the block ends without an error."""
        with replacing(self.resume, self.check_fence) as temporary:
            yield temporary
        self._upload(CURVE_FILE, RESUME_FILE)

    @contextlib.contextmanager
    def save_checkpoint(self) -> Iterator[Path]:
        """A temporary folder that becomes `checkpoint` when the block ends without an error.

        An attempt writes one checkpoint.
        """
        with replacing_folder(self.checkpoint, self.check_fence) as temporary:
            yield temporary
        self._upload(*(f"{CHECKPOINT_FOLDER}/{file.name}" for file in sorted(self.checkpoint.iterdir())))

    def finish(self, metrics: Mapping[str, float], facts: Mapping[str, Any]) -> None:
        """Write the result, which makes the run finished, and delete the resume file."""
        self.check_fence()
        document = {
            "metrics": dict(metrics), "facts": dict(facts), "files": self._checksums(), "ended_ms": _now_ms(),
            "sweep_id": self.sweep_id,
        }  # fmt: skip
        self._upload(CURVE_FILE, LOG_FILE)
        # The result comes after everything that it vouches for, and before the resume file goes: killed at any point,
        # the run is either finished or can be continued.
        self.write_document(RESULT_FILE, document)
        self.resume.unlink(missing_ok=True)
        if self.objects:
            self.objects.delete(self._object(RESUME_FILE))
            shutil.rmtree(self.checkpoint, ignore_errors=True)  # who reads it fetches it, often on another machine

    def write_document(self, name: str, document: Mapping[str, Any]) -> None:
        """Write a JSON object to a file. Raises ValueError where it contains NaN or an infinity."""
        with replacing(self.path / name, self.check_fence) as temporary:
            temporary.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        self._upload(name)

    def _checksums(self) -> dict[str, str]:
        """File → SHA-256, of the curve and the checkpoint. They are on the disk before the result that names them."""
        found = [self.path / CURVE_FILE, *self.checkpoint.glob("*")]
        files = [file for file in sorted(found) if file.is_file()]
        for file in files:
            to_disk(file)
        return {str(file.relative_to(self.path)): sha256(file) for file in files}

    def _upload(self, *names: str) -> None:
        """Copy local files to the object store, if the store is in one."""
        if self.objects is None:
            return
        for name in names:
            if (self.path / name).is_file():
                self.objects.upload(self.path / name, self._object(name))
                if name == CURVE_FILE:
                    self._curve_uploaded_s = time.monotonic()


def _is_checked(name: str) -> bool:
    """A result may name this file. No path can hold a null character or a lone surrogate."""
    return name.partition("/")[0] in CHECKED and "\0" not in name and is_unicode(name)


def _overtaken(run_id: str, attempt: int, newest: int) -> FencedError:
    text = f"run {run_id}: attempt {newest} has started; attempt {attempt} ends"
    return FencedError(text, run_id=run_id, newest=newest, attempt=attempt)


def _now_ms() -> int:
    return int(time.time() * 1000)
