"""Writes the runs of a report to a Parquet file, and reads reports, such as those in `ablations/results`.

One line per run of the plan, finished or not, in the plan's order:

    run_id, status, row, seed, label.<axis key>, …, <key of the spec>, …, <metric>, …, facts.<name>, …: `tables.frames`
    sweep_id, created_ms, ended_ms
    commit, versions, cpu, cores, system, command    the Git commit, packages, processor, its cores, system, and command
                                                     of the last sweep that trained the run

The file's attributes (`DataFrame.attrs`) have the `--set` with which the report was written, if any. Names of hosts and
processes, messages of failed runs, and options that may name folders are left out. Reports of old versions lack the
last columns. `extend_report` adds runs of other machines to a report.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from cope_sweep.config import Plan, expand, load_ablation, with_overrides
from cope_sweep.errors import NotFinishedError, NotFoundError, UserError
from cope_sweep.read.tables import Results
from cope_sweep.read.tables.frames import CURVE_TYPES, plan_frame
from cope_sweep.store import RunRecord, Store, SweepRecord
from cope_sweep.store.errors import DamagedError

CURVES = ".curves.parquet"
"""Suffix of the file with the learning curves: one line per logged value, with its time if it is known."""
HEADS = ".heads.parquet"
"""Suffix of the file with measures of heads (`figures.marks`), if a figure claims something about heads."""
CURVE_COLUMNS = ["run_id", "row", "seed", "step", "metric", "value", "time_s"]
HEAD_COLUMNS = [
    "figure", "run_id", "seed", "layer", "head", "chosen", "auc", "on", "off", "with_label", "without",
    "initial_chosen", "initial_auc",
]  # fmt: skip
LEFT_OUT = ("message", "facts.host", "facts.worker_id")
LABEL, FACT = "label.", "facts."
SET = "set"
"""The attribute of the file of runs that has the values of `--set`."""
FIGURE_NAME = re.compile(r"[a-z]+(-[0-9]+)?")
"""Names of figures: a kind, or a kind with a number."""
TIMES = ("created_ms", "ended_ms")
PRIVATE_OPTIONS = ("--store", "--index", "--mlflow", "--address", "--ablations")
"""Options that name folders, hosts or passwords. They do not change a result, so a report leaves them out."""


def run_frame(results: Results) -> pd.DataFrame:
    """The frame of a report's runs, described in the module docstring."""
    if isinstance(results, ReportResults):
        return results.file
    plan, records = results.plan, results.records
    frame = plan_frame(plan, records, LABEL)
    ordered = [records[run.run_id] for row in plan.rows for run in row.runs]
    sweep_ids = {record.sweep_id for record in ordered if record.sweep_id}
    sweeps = {sweep_id: _sweep(results.store, sweep_id) for sweep_id in sweep_ids}
    sweeps_of_runs = [sweeps.get(record.sweep_id or "") for record in ordered]
    origins: dict[str, Any] = {"sweep_id": pd.Series([record.sweep_id for record in ordered], dtype="str")}
    origins |= {name: pd.Series([getattr(record, name) for record in ordered], dtype="Int64") for name in TIMES}
    origins |= {
        "commit": pd.Series([sweep and sweep.git_commit for sweep in sweeps_of_runs], dtype="str"),
        "versions": pd.Series([sweep and _versions(sweep) for sweep in sweeps_of_runs], dtype="str"),
        "cpu": pd.Series([sweep and sweep.machine.get("cpu") for sweep in sweeps_of_runs], dtype="str"),
        "cores": pd.Series([sweep and sweep.machine.get("cpus") for sweep in sweeps_of_runs], dtype="Int64"),
        "system": pd.Series([sweep and sweep.machine.get("system") for sweep in sweeps_of_runs], dtype="str"),
        "command": pd.Series([sweep and public_command(sweep.command) for sweep in sweeps_of_runs], dtype="str"),
    }
    frame = frame.drop(columns=[name for name in LEFT_OUT if name in frame])
    frame = pd.concat([frame, pd.DataFrame(origins)], axis=1)
    if isinstance(results, ExtendedResults):
        report_file = results.report.file
        frame = pd.concat([frame[~results.is_from_report(frame)], report_file[results.is_from_report(report_file)]])
        frame = frame.set_index("run_id").loc[[run.run_id for row in plan.rows for run in row.runs]].reset_index()
    frame.attrs = {SET: list(plan.ablation.assignments)} if plan.ablation.assignments else {}
    return frame


def _sweep(store: Store | None, sweep_id: str) -> SweepRecord | None:
    try:
        return store.sweep(sweep_id) if store else None
    except DamagedError:
        return None


def _versions(sweep: SweepRecord) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(sweep.versions.items()))


def public_command(arguments: Sequence[str]) -> str:
    """A command without the options that name folders, hosts or passwords."""
    public = ["cope-sweep"]
    rest = iter(arguments[1:])
    for argument in rest:
        if argument in PRIVATE_OPTIONS:
            next(rest, None)
        elif not argument.startswith(tuple(f"{option}=" for option in PRIVATE_OPTIONS)):
            public.append(Path(argument).stem if argument.endswith((".yaml", ".yml")) else argument)
    return " ".join(public)


def to_parquet(frame: pd.DataFrame) -> bytes:
    """The bytes of a Parquet file."""
    content: bytes = frame.to_parquet(None, engine="pyarrow", index=False, compression="zstd")
    return content


def runs_file(folder: Path, plan: Plan) -> Path:
    """The file of the runs of a plan in a folder of reports: `<ablation>.<scale>.parquet`."""
    scale = plan.ablation.scale
    return folder / (f"{plan.name}.{scale}.parquet" if scale else f"{plan.name}.parquet")


def run_files(folder: Path, pattern: str = "*") -> list[Path]:
    """The files of runs in a folder of reports, sorted by name."""
    return [path for path in sorted(folder.glob(f"{pattern}.parquet")) if not path.name.endswith((CURVES, HEADS))]


@dataclass(frozen=True)
class ReportResults(Results):
    """The results in the files of a report, with the current plan of its ablation at its scale."""

    path: Path = Path()
    """The file of runs: `<ablation>.<scale>.parquet`."""

    @property
    def place(self) -> str:
        """The file, for messages."""
        return f"the report {self.path.name}"

    @cached_property
    def file(self) -> pd.DataFrame:
        """The content of the file of runs; the module docstring describes the columns."""
        return pd.read_parquet(self.path)

    @cached_property
    def curves(self) -> pd.DataFrame:
        """The learning curves; empty in a report without them."""
        path = self.path.with_suffix(CURVES)
        curves = pd.read_parquet(path) if path.exists() else pd.DataFrame()
        curves = curves.reindex(columns=CURVE_COLUMNS)  # files of old versions have no times
        statuses = {run_id: record.status for run_id, record in self.records.items()}
        return curves.assign(status=curves["run_id"].map(statuses)).astype(CURVE_TYPES)

    @cached_property
    def heads(self) -> pd.DataFrame:
        """The measures of heads: the frame of `figures.marks.measure_run`; empty in a report without them."""
        path = self.path.with_suffix(HEADS)
        return pd.read_parquet(path) if path.exists() else pd.DataFrame(columns=HEAD_COLUMNS)

    def picture(self, name: str) -> bytes | None:
        """The SVG of a figure in the report; None if it has no such figure."""
        if not FIGURE_NAME.fullmatch(name):
            return None
        path = self.path.with_suffix(f".{name}.svg")
        return path.read_bytes() if path.exists() else None

    @property
    def stale(self) -> str:
        """Why the results do not match the current ablation file; empty if they do."""
        planned = {run.run_id for run in self.plan.runs}
        removed, added = self.records.keys() - planned, planned - self.records.keys()
        if not removed and not added:
            return ""
        cli_args = self.plan.ablation.cli_args
        return (
            f"{self.path.name} is stale: the ablation file has changed since ({len(removed)} runs of the report are "
            f"not in the plan, {len(added)} runs of the plan are not in the report); train with `cope-sweep run "
            f"{cli_args}`, then write the report with `cope-sweep report {cli_args} --out {self.path.parent.name}`"
        )

    def check(self) -> None:
        """Raise NotFinishedError if the results are stale."""
        if self.stale:
            raise NotFinishedError(self.stale, code="stale_report", file=self.path.name, ablation=self.plan.name)


@dataclass(frozen=True)
class ExtendedResults(Results):
    """The finished runs of a store, and the runs of a report that the store has not finished."""

    report: ReportResults = field(kw_only=True)
    from_report: frozenset[str] = field(kw_only=True)
    """Ids of the runs that come from the report."""

    def is_from_report(self, frame: pd.DataFrame) -> pd.Series[bool]:
        """Whether the run of each line comes from the report."""
        return frame["run_id"].isin(self.from_report)

    @cached_property
    def curves(self) -> pd.DataFrame:
        """The learning curves of both, in the plan's order."""
        of_store, of_report = super().curves, self.report.curves
        curves = pd.concat([of_store[~self.is_from_report(of_store)], of_report[self.is_from_report(of_report)]])
        order = {run.run_id: index for index, run in enumerate(run for row in self.plan.rows for run in row.runs)}
        return curves.sort_values("run_id", key=lambda ids: ids.map(order), kind="stable", ignore_index=True)

    def picture(self, name: str) -> bytes | None:
        """The SVG of a figure in the report; None if it has no such figure."""
        return self.report.picture(name)


def extend_report(results: Results, report: ReportResults) -> ExtendedResults:
    """The results of a store with the finished runs of a report that the store has not finished.

    Raises NotFinishedError if a finished run of the report is not in the plan: it would be lost.
    """
    finished = {run_id for run_id, record in report.records.items() if record.status == "finished"}
    lost = finished - results.records.keys()
    if lost:
        raise NotFinishedError(
            f"{report.path.name} has {len(lost)} finished runs that are not in the current plan of "
            f"{results.plan.ablation.cli_args}; leave out --add to replace the report"
        )
    from_report = frozenset(run_id for run_id in finished if results.records[run_id].status != "finished")
    records = dict(results.records) | {run_id: report.records[run_id] for run_id in from_report}
    return ExtendedResults(results.plan, records, results.store, report=report, from_report=from_report)


def _record(line: Mapping[Any, Any]) -> RunRecord:
    fields = {str(name): value for name, value in line.items() if not pd.isna(value)}
    return RunRecord(
        run_id=fields["run_id"],
        status=fields["status"],
        seed=int(fields["seed"]),
        sweep_id=fields.get("sweep_id"),
        metrics={name: float(value) for name, value in fields.items() if "/" in name},
        facts={name.removeprefix(FACT): value for name, value in fields.items() if name.startswith(FACT)},
        created_ms=fields.get("created_ms"),
        ended_ms=fields.get("ended_ms"),
    )


def read_report(plan: Plan, path: Path) -> ReportResults:
    """The results in a file of runs.

    Args:
        plan: The plan of its ablation at its scale. The values of `--set` of the report are applied to it.
        path: The file.

    Raises NotFinishedError for a damaged file.
    """
    try:
        file = pd.read_parquet(path)
        assignments = file.attrs.get(SET, [])
        if not isinstance(assignments, list) or not all(isinstance(text, str) for text in assignments):
            raise ValueError(f"its attribute {SET!r} is not a list of texts")
        if assignments and not plan.ablation.assignments:
            with suppress(UserError):  # a key that the ablation has no longer: the report is stale
                plan = expand(with_overrides(plan.ablation, assignments=assignments))
        lines = file.to_dict("records")
        return ReportResults(plan, {line["run_id"]: _record(line) for line in lines}, None, path)
    except (ValueError, KeyError) as error:  # pyarrow's errors are ValueErrors
        raise NotFinishedError(
            f"{path}: not a file of a report's runs ({str(error).splitlines()[0]}); write the report again with "
            "`cope-sweep report ABLATION --out DIR`",
            code="damaged_report",
            file=str(path),
        ) from error


def find_committed(folder: Path, ablations: Path, name: str, scale: str | None) -> ReportResults:
    """A report in a folder. If `scale` is None, the report without a scale, or else the only report.

    Raises NotFoundError if there is no such report, NotFinishedError if it is stale or damaged.
    """
    paths = (*run_files(folder, name), *run_files(folder, f"{name}.*"))
    reports = {path.stem.partition(".")[2]: path for path in paths}
    wanted = scale or ""
    if not scale and "" not in reports and len(reports) == 1:
        wanted = next(iter(reports))
    if wanted not in reports:
        others = ", ".join(f"--scale {other}" if other else "without --scale" for other in reports)
        hint = f"; choose one of its reports: {others}" if reports else ""
        option = f" --scale {wanted}" if wanted else ""
        raise NotFoundError(
            f"{folder.name} has no report of {name}{option}{hint}",
            ablation=name,
            scale=scale,
            allowed=list(reports),
        )
    report = read_committed(reports[wanted], ablations)
    report.check()
    return report


def read_committed(path: Path, ablations: Path) -> ReportResults:
    """The report with this file of runs. Raises UserError if its ablation file or its scale does not exist."""
    name, _, scale = path.stem.partition(".")
    file = ablations / f"{name}.yaml"
    if not file.exists():
        raise UserError(
            f"{path}: {ablations} has no ablation {name!r}; delete this report",
            code="report_of_no_ablation",
            file=str(path),
            ablation=name,
        )
    plan = expand(with_overrides(load_ablation(file), scale=scale or None))
    return read_report(plan, path)
