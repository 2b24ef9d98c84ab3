"""A folder of results (`results_file`) as a store that is only read: `ablations/results`, for example.

There are no checkpoints, logs and records of sweeps; what is known about a sweep is in the lines of its runs. A file is
read when it is asked for, and again when the folder has changed: a table of one ablation reads one file. The index,
which reads all of them, is made in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar

from sqlalchemy import Connection

from cope_sweep.config import Plan
from cope_sweep.config.source import composed
from cope_sweep.errors import NotFinishedError, NotFoundError
from cope_sweep.records import RunRecord
from cope_sweep.store.artifacts import CURVE_FILE, RESULT_FILE, SPEC_FILE, RunFolder
from cope_sweep.store.curve import TIME_KEY
from cope_sweep.store.errors import StoreError
from cope_sweep.store.index import Index
from cope_sweep.store.index.rows import write_runs, write_sweep
from cope_sweep.store.indexing import OnProgress
from cope_sweep.store.objects import is_object_url
from cope_sweep.store.results_file import LoggedValue, ResultsFile, file_name, is_results, run_files
from cope_sweep.store.store import MEMORY, Store
from cope_sweep.store.sweeps import SweepRecord, sweep_members


def open_store(
    location: Path | str,
    *,
    index: str | None = None,
    create: bool = False,
    on_indexing: OnProgress = lambda done, total: None,
) -> Store:
    """The store at a place: run folders, or a folder of results, which is only read. For the arguments, see `Store`.

    Raises StoreError, with the code `read_only` for `create` of a folder of results.
    """
    if is_object_url(str(location)) or not is_results(Path(location).expanduser()):
        return Store(location, index=index, create=create, on_indexing=on_indexing)
    store = ParquetStore(location)
    if create:
        raise store.refusal
    return store


class KeptRun(RunFolder):
    """A run of a folder of results. Its files are made from its lines; it has no log and no checkpoint."""

    def __init__(self, store: ParquetStore, run_id: str, file: ResultsFile | None) -> None:
        """`file` is a file that has the run; None: it has not started."""
        super().__init__(store.root / "runs" / run_id)
        self._store, self._file = store, file

    def content(self, name: str, size: int = -1) -> bytes | None:
        """The content of a file, or its first `size` bytes; None if there is none."""
        content = self._content(name)
        return content if content is None or size < 0 else content[:size]

    def _content(self, name: str) -> bytes | None:
        if self._file is None:
            return None
        if name == CURVE_FILE:
            return "".join(f"{json.dumps(point)}\n" for point in self.curve(times=True)).encode()
        record, documents = self._file.records[self.run_id], dict[str, Any]()
        documents[SPEC_FILE] = {"spec": self._file.specs[self.run_id], "created_ms": record.created_ms}
        if record.status == "finished":
            documents[RESULT_FILE] = {"metrics": record.metrics, "facts": record.facts, "ended_ms": record.ended_ms}
        return json.dumps(documents[name]).encode() if name in documents else None

    def curve(self, *, times: bool = False) -> list[dict[str, float]]:
        """The logged rows, as `RunFolder.curve` has them."""
        points: dict[int, dict[str, float]] = {}
        for step, metric, value, time_ms in self.logged_values():
            known_time = {TIME_KEY: time_ms} if times and time_ms is not None else {}
            points.setdefault(step, {"step": step, **known_time})[metric] = value
        return list(points.values())

    def logged_values(self) -> Iterator[LoggedValue]:
        """Step, metric, value and time of day in ms (None: not known) of each logged value."""
        if self._file is None:
            return
        started_ms = self._file.records[self.run_id].created_ms
        for step, metric, value, time_s in self._file.curve(self.run_id):
            time_ms = None
            if time_s is not None and started_ms is not None:
                # The time was written as whole milliseconds / 1000: rounding gives back exactly what was logged.
                time_ms = started_ms + round(time_s * 1000)
            yield step, metric, value, time_ms

    def fetch_checkpoint(self, ended_ms: int | None = None) -> Path:
        """Raises NotFinishedError: there are no checkpoints in a folder of results."""
        raise NotFinishedError(
            f"a folder of results has no checkpoints; name the store that has trained run {self.run_id} with --store, "
            "or train it with `cope-sweep run`",
            code="no_checkpoint",
            run_id=self.run_id,
            store=self._store.location,
        )


class ParquetStore(Store):
    """A folder of results as a store. It is only read. Thread-safe."""

    read_only: ClassVar[bool] = True

    def __init__(self, location: Path | str) -> None:
        """Name the folder; nothing is read. One that does not exist is a store without results."""
        super().__init__(location)
        self._known: tuple[object, list[ResultsFile]] = None, []
        """The state of the folder in which the files were found, and the files."""
        self._indexed: tuple[object, Index, dict[str, SweepRecord]] | None = None
        """The state of the folder in which the index was made, the index, and its sweeps."""
        self._lock = RLock()

    @property
    def refusal(self) -> StoreError:
        """The error about writing to it."""
        return StoreError(
            f"{self.location} has results (Parquet), which are only read; name a store of runs with --store",
            code="read_only",
            store=self.location,
        )

    @property
    def option(self) -> list[str]:
        """None: a command that trains runs names another store."""
        return []

    @property
    def index(self) -> Index:
        """An index in memory over all files, made again when one has changed. Raises NotFinishedError, StoreError."""
        with self._lock:
            state = self.state()
            if self._indexed is None or self._indexed[0] != state:
                sweeps: dict[str, SweepRecord] = {}
                self._indexed = state, self._make_index(sweeps), sweeps
            return self._indexed[1]

    def _make_index(self, sweeps: dict[str, SweepRecord]) -> Index:
        """An index over all files, which also fills in their `sweeps`."""

        def fill(connection: Connection, *, replaces: bool) -> None:
            runs: dict[str, RunRecord] = {}
            for file in self._files():
                specs = file.specs
                for run_id, record in file.started.items():
                    if run_id not in runs or runs[run_id].status != "finished":
                        runs[run_id] = record.model_copy(update={"spec": specs[run_id]})
                for sweep in file.sweeps.values():
                    # Files may share runs: a sweep belongs to the ablation with most of its runs.
                    if sweep.sweep_id not in sweeps or len(sweep.runs) > len(sweeps[sweep.sweep_id].runs):
                        sweeps[sweep.sweep_id] = sweep
            for sweep in sweeps.values():
                write_sweep(connection, sweep.summary, sweep_members(sweep))
            write_runs(connection, list(runs.values()))

        index = Index(MEMORY, fill)
        index.database.refusal = str(self.refusal)
        return index

    def state(self) -> tuple[object, ...]:
        """A value that changes when a file of the folder changes. Costs a `stat` call for each."""
        try:
            with os.scandir(self.root) as entries:
                stats = [(entry.name, entry.stat()) for entry in entries]
        except FileNotFoundError:
            return ()
        return tuple(sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats))

    # -- what belongs to a plan ----------------------------------------------------------------------------------------

    def _files(self) -> list[ResultsFile]:
        """The files of runs. What was read of them is kept until the folder changes."""
        state = self.state()
        if self._known[0] != state:
            self._known = state, [ResultsFile(path) for path in run_files(self.root)]
        return self._known[1]

    def _files_read_first(self) -> list[ResultsFile]:
        """The files as the last question has found them, those in memory first: they are likely to have what it wants.

        A figure asks for the curves of hundreds of runs: the folder is not looked at again for each of them.
        """
        return sorted(self._known[1] or self._files(), key=lambda file: not file.is_read)

    def kept(self, plan: Plan) -> ResultsFile | None:
        """The file of an ablation at a scale, whatever its runs; None if there is none."""
        name = composed(file_name(plan))
        return next((file for file in self._files() if composed(file.path.name) == name), None)

    def only_scale(self, ablation: str) -> str | None:
        """The scale of an ablation's results, if there is one, and no results without a scale."""
        scales = [file.scale for file in self._files() if composed(file.ablation) == composed(ablation)]
        return scales[0] if len(scales) == 1 else None

    def records(self, plan: Plan) -> dict[str, RunRecord]:
        """The records of a plan's runs. Reads its file, and not the index.

        Raises NotFoundError if there is no file of its ablation at its scale, NotFinishedError if that is stale: has
        other runs than the plan.
        """
        name, scale = plan.name, plan.ablation.scale
        file = self.kept(plan)
        if file is None:
            scales = [file.scale for file in self._files() if composed(file.ablation) == composed(name)]
            others = ", ".join(f"--scale {other}" if other else "without --scale" for other in scales)
            hint = f"; choose one of its results: {others}" if scales else ""
            raise NotFoundError(
                f"{self.root.name} has no results of {name}{f' --scale {scale}' if scale else ''}{hint}",
                ablation=name,
                scale=scale,
                allowed=[other or "" for other in scales],
            )
        planned = {run.run_id for run in plan.runs}
        removed, added = file.records.keys() - planned, planned - file.records.keys()
        if removed or added:
            cli_args = plan.ablation.cli_args
            raise NotFinishedError(
                f"{file.path.name} is stale: the ablation file has changed since ({len(removed)} of its runs are not "
                f"in the plan, {len(added)} runs of the plan are not in it); train with `cope-sweep run {cli_args}`, "
                f"then write it again with `cope-sweep report {cli_args} --out {self.root.name}`",
                code="stale_report",
                file=file.path.name,
                ablation=name,
            )
        return file.records

    # -- runs and sweeps -----------------------------------------------------------------------------------------------

    def run(self, run_id: str) -> RunFolder:
        """A run, which need not exist. Raises StoreError for what is not a run id, NotFinishedError."""
        super().run(run_id)
        first: ResultsFile | None = None
        for file in self._files_read_first():
            if run_id in file.started:
                if file.started[run_id].status == "finished":
                    return KeptRun(self, run_id, file)
                first = first or file
        return KeptRun(self, run_id, first)

    def sweep(self, sweep_id: str) -> SweepRecord | None:
        """What the files say about a sweep, or None.

        Of files that share its runs, the index takes the one with most of them, and this does if there is an index.
        Else it is any of them: they agree but for the ablation and the runs.
        """
        with self._lock:
            if self._indexed is not None and self._indexed[0] == self.state():
                return self._indexed[2].get(sweep_id)
        return next((file.sweeps[sweep_id] for file in self._files_read_first() if sweep_id in file.sweeps), None)

    def write(self, name: str, content: bytes) -> None:
        """Raises StoreError: nothing is written."""
        raise self.refusal
