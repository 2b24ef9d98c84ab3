"""The read side: ablation files and the ledger, as schemas. It holds nothing that the files do not."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cope_services.catalogue import Catalogue, Place, Planned
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
from cope_sweep.record import Ledger, RunFolder, Status, StoreError
from cope_sweep.record.ledger import RUN_ID
from cope_sweep.spec import RunSpec, SpecError

MAX_POINTS = 200
"""Points of one series of a plot."""


class Library:
    """Ablations, runs and curves. Raises ServiceErrors, SpecError and StoreError, which the app maps to statuses."""

    def __init__(self, catalogue: Catalogue, ledger: Ledger) -> None:
        self.catalogue = catalogue
        self.ledger = ledger

    def check(self) -> None:
        """Raises NotReadyError where a folder cannot be read. A store that is not there yet holds no runs."""
        try:
            self.catalogue.files()
            self.ledger.runs()
        except OSError as error:
            raise NotReadyError(f"{error.filename}: {error.strerror}") from error

    # -- ablations -----------------------------------------------------------------------------------------------

    def ablations(self) -> list[AblationSummary]:
        """All, by name; one whose file cannot be used says why."""
        statuses = self.statuses()
        return [self._summary(name, statuses) for name in self.catalogue.files()]

    def _summary(self, name: str, statuses: Mapping[str, Status]) -> AblationSummary:
        try:
            planned = self.catalogue.planned(name)
        except SpecError as error:
            return AblationSummary(name=name, error=str(error))
        return AblationSummary(**_described(planned, statuses))

    def ablation(self, name: str, scale: str | None) -> AblationDetail:
        text = self.catalogue.file(name).read_text(errors="replace")
        try:
            planned = self.catalogue.planned(name, scale)
        except SpecError as error:
            return AblationDetail(name=name, error=str(error), text=text)
        statuses = self.statuses()
        metrics = planned.plan.ablation.content.metrics
        return AblationDetail(
            **_described(planned, statuses),
            axes=planned.plan.axes,
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
                for row in planned.plan.rows
            ],
            text=text,
        )

    # -- runs ----------------------------------------------------------------------------------------------------

    def statuses(self) -> dict[str, Status]:
        """Of every run that was ever begun."""
        return {folder.run_id: folder.status for folder in self.ledger.runs()}

    def runs(
        self,
        *,
        status: Status | None = None,
        ablation: str | None = None,
        scale: str | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> RunPage:
        """Runs in the order of an ablation's plan, pending ones too; or all that were ever begun, by id."""
        statuses = self.statuses()
        ids: Sequence[str] = list(statuses)
        if ablation is not None:
            ids = list(self.catalogue.planned(ablation, scale).runs)
        if status is not None:
            ids = [run_id for run_id in ids if statuses.get(run_id, "pending") == status]
        places = self.catalogue.places()
        page = [RunSummary(**self._run(run_id, places)) for run_id in ids[offset : offset + limit]]
        return RunPage(total=len(ids), limit=limit, offset=offset, runs=page)

    def run(self, run_id: str, *, with_curve: bool = True) -> RunDetail:
        """A run that was begun, or that an ablation plans."""
        places = self.catalogue.places()
        folder = self.folder(run_id, places)
        known = self._run(run_id, places)
        spec = folder.spec["spec"] if folder.spec else places[run_id][0].spec.model_dump(mode="json")
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

    def folder(self, run_id: str, places: Mapping[str, list[Place]] | None = None) -> RunFolder:
        """The folder of a run that is known here. Raises NotFoundError."""
        if not RUN_ID.fullmatch(run_id):
            raise NotFoundError(f"{run_id[:40]!r} is no run id: those are 16 hexadecimal digits")
        folder = self.ledger.run(run_id)
        if not folder.path.is_dir() and run_id not in (places or self.catalogue.places()):
            raise NotFoundError(f"no run {run_id}: it was never begun, and no ablation plans it")
        return folder

    def finished(self, run_id: str) -> RunFolder:
        """The folder of a finished run. Raises NotFoundError, ConflictError."""
        folder = self.folder(run_id)
        if folder.status != "finished":
            raise ConflictError(f"run {run_id} is {folder.status}; only a finished run has a checkpoint")
        return folder

    def _run(self, run_id: str, places: Mapping[str, list[Place]]) -> dict[str, Any]:
        """The fields of a RunSummary. A damaged file shows as the run's message: it does not hide the other runs."""
        folder, here = self.ledger.run(run_id), places.get(run_id, [])
        facts: dict[str, Any] = {"run_id": run_id, "status": folder.status}
        if here:
            facts |= {"ablations": list(dict.fromkeys(place.ablation for place in here)), "row": here[0].row}
            facts |= {"seed": here[0].spec.seed, "steps": here[0].spec.train.steps}
        try:
            begun, state, result = folder.spec, folder.state, folder.result
        except StoreError as error:
            return facts | {"message": str(error)}
        if begun is not None:
            facts |= {"created_ms": begun["created_ms"], "seed": begun["spec"]["seed"]}
            facts |= {"steps": begun["spec"]["train"]["steps"]}
        facts |= {"worker_id": state.get("worker_id"), "updated_ms": _updated_ms(folder, state)}
        if facts["status"] == "finished":
            facts |= {"step": facts.get("steps") or 0, "metrics": result["metrics"] if result else {}}
        else:
            facts |= {"step": _last_step(folder), "message": state.get("message")}
        return facts

    # -- curves --------------------------------------------------------------------------------------------------

    def curves(self, planned: Planned, metric: str | None) -> Curves:
        """A metric (None: the one that the ablation is judged by) of every run, thinned to MAX_POINTS each."""
        metric = metric or planned.plan.ablation.content.metrics[0].name
        logged: dict[str, None] = {each.name: None for each in planned.plan.ablation.content.metrics}
        rows = []
        for row in planned.plan.rows:
            series = []
            for run in row.runs:
                folder = self.ledger.run(run.run_id)
                curve = folder.curve()
                for point in curve[-10:]:
                    logged |= dict.fromkeys(key for key in point if key != "step")
                points = [(int(point["step"]), point[metric]) for point in curve if metric in point]
                series.append(
                    Series(run_id=run.run_id, seed=run.seed, status=folder.status, points=_thinned(points, MAX_POINTS))
                )
            rows.append(RowCurves(row=row.name, series=series))
        return Curves(metric=metric, metrics=list(logged), rows=rows)

    def fingerprint(self, planned: Planned, *, curves: bool = False) -> tuple[object, ...]:
        """What differs whenever the plan's results (or curves) do. A few system calls for each run, and no reading."""
        begun = {folder.run_id for folder in self.ledger.runs()}
        return planned.stamp, planned.scale, tuple(self._stamps(planned.runs, begun, curves=curves))

    def _stamps(self, runs: Mapping[str, RunSpec], begun: set[str], *, curves: bool) -> Iterator[object]:
        root = os.path.join(self.ledger.root, "runs")  # noqa: PTH118 - a Path for each of thousands of files is slow
        for run_id in runs:
            if run_id not in begun:
                yield None
                continue
            folder = os.path.join(root, run_id)  # noqa: PTH118
            done = _stamp(os.path.join(folder, "result.json"))  # noqa: PTH118
            yield done or (self.ledger.run(run_id).status, _stamp(os.path.join(folder, "state.json")))  # noqa: PTH118
            if curves and not done:
                yield _stamp(os.path.join(folder, "curve.jsonl"))  # noqa: PTH118


def _described(planned: Planned, statuses: Mapping[str, Status]) -> dict[str, Any]:
    content = planned.plan.ablation.content
    counts: Counts = dict(Counter(statuses.get(run_id, "pending") for run_id in planned.runs))
    return {
        "name": planned.plan.name,
        "title": content.title,
        "hypothesis": content.hypothesis.strip(),
        "reproduces": content.reproduces,
        "scales": list(content.scales),
        "rows": len(planned.plan.rows),
        "runs": len(planned.runs),
        "counts": counts,
    }


def _stamp(path: str) -> tuple[int, int, int] | None:
    with suppress(FileNotFoundError, NotADirectoryError):
        stat = os.stat(path)  # noqa: PTH116
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
    return None


def _updated_ms(folder: RunFolder, state: Mapping[str, Any]) -> int | None:
    """When anything of the run was written last."""
    stamps = [_stamp(str(folder.path / name)) for name in ("result.json", "curve.jsonl")]
    times = [stamp[0] // 1_000_000 for stamp in stamps if stamp]
    return max([*times, *([state["updated_ms"]] if "updated_ms" in state else [])], default=None)


def _last_step(folder: RunFolder) -> int:
    """The step of the last row that was logged, from the end of the file."""
    with suppress(OSError, ValueError, IndexError):
        return int(_tail_row(folder.path / "curve.jsonl")["step"])
    return 0


def _tail_row(path: Path, size: int = 4096) -> dict[str, float]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        lines = file.read().split(b"\n")
    # The last part is empty, or a line that is being written.
    row: dict[str, float] = json.loads(lines[-2])
    return row


def _thinned(points: list[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Every 2ⁿ-th point, and the last: series of unlike lengths keep common steps, so a mean over them can be drawn."""
    stride = 1
    while len(points) > most * stride:
        stride *= 2
    kept = points[::stride]
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]
