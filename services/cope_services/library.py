"""Reads ablation files and run folders, and returns them as schemas. It has no state of its own."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cope_services.catalogue import Catalogue, LoadedPlan, PlanEntry
from cope_services.errors import ConflictError, NotFoundError, NotReadyError
from cope_services.schemas import (
    AblationDetail,
    AblationSummary,
    Counts,
    Curves,
    MetricInfo,
    PlannedRow,
    PlannedRun,
    RowCurves,
    RunDetail,
    RunPage,
    RunSummary,
    Series,
)
from cope_sweep.spec import RunSpec, SpecError
from cope_sweep.store import RunFolder, Status, Store, StoreError
from cope_sweep.store.artifacts import RUN_ID

MAX_POINTS = 200
"""Points of one learning curve."""


class Library:
    """Ablations, runs and learning curves. Methods raise ServiceError, SpecError and StoreError; see `errors`."""

    def __init__(self, catalogue: Catalogue, store: Store) -> None:
        self.catalogue = catalogue
        self.store = store

    def check(self) -> None:
        """Raise NotReadyError if a folder cannot be read. A missing store counts as an empty one."""
        try:
            self.catalogue.files()
            self.store.runs()
        except OSError as error:
            raise NotReadyError(f"{error.filename}: {error.strerror}") from error

    # -- ablations -----------------------------------------------------------------------------------------------

    def ablations(self) -> list[AblationSummary]:
        """All ablations by name. An invalid file gives an entry with its error."""
        statuses = self.statuses()
        return [self._summary(name, statuses) for name in self.catalogue.files()]

    def _summary(self, name: str, statuses: Mapping[str, Status]) -> AblationSummary:
        try:
            loaded = self.catalogue.load(name)
        except SpecError as error:
            return AblationSummary(name=name, error=str(error))
        return AblationSummary(**_summary_of(loaded, statuses))

    def ablation(self, name: str, scale: str | None) -> AblationDetail:
        """One ablation with its plan at a scale, and its file."""
        text = self.catalogue.file(name).read_text(errors="replace")
        try:
            loaded = self.catalogue.load(name, scale)
        except SpecError as error:
            return AblationDetail(name=name, error=str(error), text=text)
        statuses = self.statuses()
        metrics = loaded.plan.ablation.content.metrics
        return AblationDetail(
            **_summary_of(loaded, statuses),
            axes=loaded.plan.axes,
            metrics=[
                MetricInfo(name=m.name, title=m.title, goal=m.goal, unit=m.unit, decimals=m.decimals) for m in metrics
            ],
            plan=[
                PlannedRow(
                    row=row.name,
                    labels=row.labels,
                    runs=[
                        PlannedRun(run_id=r.run_id, seed=r.seed, status=statuses.get(r.run_id, "pending"))
                        for r in row.runs
                    ],
                )
                for row in loaded.plan.rows
            ],
            text=text,
        )

    # -- runs ----------------------------------------------------------------------------------------------------

    def statuses(self) -> dict[str, Status]:
        """Run id → status, of every run that has a folder."""
        return {folder.run_id: folder.status for folder in self.store.runs()}

    def runs(
        self,
        *,
        status: Status | None = None,
        ablation: str | None = None,
        scale: str | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> RunPage:
        """The runs of an ablation in plan order, including pending ones; without an ablation, all run folders by id."""
        statuses = self.statuses()
        ids: Sequence[str] = list(statuses)
        if ablation is not None:
            ids = list(self.catalogue.load(ablation, scale).runs)
        if status is not None:
            ids = [run_id for run_id in ids if statuses.get(run_id, "pending") == status]
        entries = self.catalogue.entries()
        page = [RunSummary(**self._summary_fields(run_id, entries)) for run_id in ids[offset : offset + limit]]
        return RunPage(total=len(ids), limit=limit, offset=offset, runs=page)

    def run(self, run_id: str, *, with_curve: bool = True) -> RunDetail:
        """A run that has a folder or is in the plan of an ablation. Raises NotFoundError."""
        entries = self.catalogue.entries()
        folder = self.folder(run_id, entries)
        known = self._summary_fields(run_id, entries)
        spec = folder.spec["spec"] if folder.spec else entries[run_id][0].spec.model_dump(mode="json")
        result = folder.result or {}
        return RunDetail(
            **known,
            spec=spec,
            state={key: value for key, value in folder.state.items() if key != "status"},
            facts=result.get("facts", {}),
            curve=folder.curve() if with_curve else [],
        )

    def curve(self, run_id: str) -> list[dict[str, float]]:
        """The logged rows of a run, by step."""
        return self.folder(run_id).curve()

    def folder(self, run_id: str, entries: Mapping[str, list[PlanEntry]] | None = None) -> RunFolder:
        """The folder of a run that has one or is in the plan of an ablation. Raises NotFoundError."""
        if not RUN_ID.fullmatch(run_id):
            raise NotFoundError(f"{run_id[:40]!r} is no run id: a run id has 16 hexadecimal digits")
        folder = self.store.run(run_id)
        if not folder.path.is_dir() and run_id not in (entries or self.catalogue.entries()):
            raise NotFoundError(f"no run {run_id}: it has no folder in the store, and it is in no ablation")
        return folder

    def finished(self, run_id: str) -> RunFolder:
        """The folder of a finished run. Raises NotFoundError, ConflictError."""
        folder = self.folder(run_id)
        if folder.status != "finished":
            raise ConflictError(f"run {run_id} is {folder.status}; only a finished run has a checkpoint")
        return folder

    def _summary_fields(self, run_id: str, entries: Mapping[str, list[PlanEntry]]) -> dict[str, Any]:
        """The fields of a RunSummary. The error of a damaged file becomes its message: other runs stay visible."""
        folder, planned = self.store.run(run_id), entries.get(run_id, [])
        facts: dict[str, Any] = {"run_id": run_id, "status": folder.status}
        if planned:
            facts |= {"ablations": list(dict.fromkeys(entry.ablation for entry in planned)), "row": planned[0].row}
            facts |= {"seed": planned[0].spec.seed, "steps": planned[0].spec.train.steps}
        try:
            spec, state, result = folder.spec, folder.state, folder.result
        except StoreError as error:
            return facts | {"message": str(error)}
        if spec is not None:
            facts |= {"created_ms": spec["created_ms"], "seed": spec["spec"]["seed"]}
            facts |= {"steps": spec["spec"]["train"]["steps"]}
        facts |= {"worker_id": state.get("worker_id"), "updated_ms": _updated_ms(folder, state)}
        if facts["status"] == "finished":
            facts |= {"step": facts.get("steps") or 0, "metrics": result["metrics"] if result else {}}
        else:
            facts |= {"step": _last_step(folder), "message": state.get("message")}
        return facts

    # -- curves --------------------------------------------------------------------------------------------------

    def curves(self, loaded: LoadedPlan, metric: str | None) -> Curves:
        """A metric (None: the first of the table) of every run, reduced to about MAX_POINTS points each."""
        metric = metric or loaded.plan.ablation.content.metrics[0].name
        logged: dict[str, None] = {each.name: None for each in loaded.plan.ablation.content.metrics}
        rows = []
        for row in loaded.plan.rows:
            series = []
            for run in row.runs:
                folder = self.store.run(run.run_id)
                curve = folder.curve()
                for point in curve[-10:]:
                    logged |= dict.fromkeys(key for key in point if key != "step")
                points = [(int(point["step"]), point[metric]) for point in curve if metric in point]
                series.append(
                    Series(run_id=run.run_id, seed=run.seed, status=folder.status, points=_thin(points, MAX_POINTS))
                )
            rows.append(RowCurves(row=row.name, series=series))
        return Curves(metric=metric, metrics=list(logged), rows=rows)

    def fingerprint(self, loaded: LoadedPlan, *, curves: bool = False) -> tuple[object, ...]:
        """A value that changes when the results (or curves) of the plan change. It needs a few `stat` calls per run."""
        existing = {folder.run_id for folder in self.store.runs()}
        return loaded.stamp, loaded.scale, tuple(self._run_stamps(loaded.runs, existing, curves=curves))

    def _run_stamps(self, runs: Mapping[str, RunSpec], existing: set[str], *, curves: bool) -> Iterator[object]:
        root = os.path.join(self.store.root, "runs")  # noqa: PTH118 - a Path for each of thousands of files is slow
        for run_id in runs:
            if run_id not in existing:
                yield None
                continue
            folder = os.path.join(root, run_id)  # noqa: PTH118
            result = _stamp(os.path.join(folder, "result.json"))  # noqa: PTH118
            yield result or (self.store.run(run_id).status, _stamp(os.path.join(folder, "state.json")))  # noqa: PTH118
            if curves and not result:
                yield _stamp(os.path.join(folder, "curve.jsonl"))  # noqa: PTH118


def _summary_of(loaded: LoadedPlan, statuses: Mapping[str, Status]) -> dict[str, Any]:
    content = loaded.plan.ablation.content
    counts: Counts = dict(Counter(statuses.get(run_id, "pending") for run_id in loaded.runs))
    return {
        "name": loaded.plan.name,
        "title": content.title,
        "hypothesis": content.hypothesis.strip(),
        "reproduces": content.reproduces,
        "scales": list(content.scales),
        "rows": len(loaded.plan.rows),
        "runs": len(loaded.runs),
        "counts": counts,
    }


def _stamp(path: str) -> tuple[int, int, int] | None:
    with suppress(FileNotFoundError, NotADirectoryError):
        stat = os.stat(path)  # noqa: PTH116
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
    return None


def _updated_ms(folder: RunFolder, state: Mapping[str, Any]) -> int | None:
    """Time of the last change of the run's files."""
    stamps = [_stamp(str(folder.path / name)) for name in ("result.json", "curve.jsonl")]
    times = [stamp[0] // 1_000_000 for stamp in stamps if stamp]
    return max([*times, *([state["updated_ms"]] if "updated_ms" in state else [])], default=None)


def _last_step(folder: RunFolder) -> int:
    """The step of the last logged row, from the end of the file; 0 without one."""
    with suppress(OSError, ValueError, IndexError):
        return int(_tail_row(folder.path / "curve.jsonl")["step"])
    return 0


def _tail_row(path: Path, size: int = 4096) -> dict[str, float]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        lines = file.read().split(b"\n")
    # The last element is empty, or an incomplete line that is being written.
    row: dict[str, float] = json.loads(lines[-2])
    return row


def _thin(points: list[tuple[int, float]], maximum: int) -> list[tuple[int, float]]:
    """Every 2ⁿ-th point, and the last one. Curves of different lengths keep common steps, which their mean needs."""
    stride = 1
    while len(points) > maximum * stride:
        stride *= 2
    kept = points[::stride]
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]
