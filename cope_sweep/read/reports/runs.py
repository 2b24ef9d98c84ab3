"""The runs of a report as a Parquet file, and back; reports that are kept with the code (`ablations/results`).

One line per run of the plan, finished or not, in the plan's order:

    run_id, status, row, seed, label.<axis key>, …, <key of the spec>, …, <metric>, …, facts.<name>, …: as `tables.runs`
    sweep_id, created_ms, ended_ms
    commit, versions, cpu, cores, system, command    of the sweep that trained it last: the Git commit, the packages,
                                                     the processor, its cores, the system, and the command

Names of hosts and processes are left out, and so are the messages of failed runs and the options of commands that may
name folders. Reports of older versions lack the last columns. Runs of other machines are added to a report by
`extend_report`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
"""Suffix of a second file, with the learning curves: a line for each logged value, and where it is known its time."""
CURVE_COLUMNS = ["run_id", "row", "seed", "step", "metric", "value", "time_s"]
LEFT_OUT = ("message", "facts.host", "facts.worker_id")
LABEL, FACT = "label.", "facts."
FIGURE_NAME = re.compile(r"[a-z]+(-[0-9]+)?")
"""Names of figures: a kind, or a kind with a number."""
TIMES = ("created_ms", "ended_ms")
PRIVATE_OPTIONS = ("--store", "--index", "--mlflow", "--address", "--ablations")
"""Options that name folders, hosts or passwords. They do not change a result, so a report leaves them out."""


def run_frame(results: Results) -> pd.DataFrame:
    """The frame; the module describes it. That of a report is its file."""
    if isinstance(results, Committed):
        return results.file
    plan, records = results.plan, results.records
    frame = plan_frame(plan, records, LABEL)
    own = [records[run.run_id] for row in plan.rows for run in row.runs]
    sweep_ids = {each.sweep_id for each in own if each.sweep_id}
    sweeps = {each: _sweep(results.store, each) for each in sweep_ids}
    trained = [sweeps.get(each.sweep_id or "") for each in own]
    places: dict[str, Any] = {"sweep_id": pd.Series([each.sweep_id for each in own], dtype="str")}
    places |= {name: pd.Series([getattr(each, name) for each in own], dtype="Int64") for name in TIMES}
    places |= {
        "commit": pd.Series([each and each.git_commit for each in trained], dtype="str"),
        "versions": pd.Series([each and _versions(each) for each in trained], dtype="str"),
        "cpu": pd.Series([each and each.machine.get("cpu") for each in trained], dtype="str"),
        "cores": pd.Series([each and each.machine.get("cpus") for each in trained], dtype="Int64"),
        "system": pd.Series([each and each.machine.get("system") for each in trained], dtype="str"),
        "command": pd.Series([each and public_command(each.command) for each in trained], dtype="str"),
    }
    frame = frame.drop(columns=[name for name in LEFT_OUT if name in frame])
    frame = pd.concat([frame, pd.DataFrame(places)], axis=1)
    if isinstance(results, Extended):
        frame = pd.concat([frame[~results.is_kept(frame)], results.report.file[results.is_kept(results.report.file)]])
        frame = frame.set_index("run_id").loc[[run.run_id for row in plan.rows for run in row.runs]].reset_index()
    return frame


def _sweep(store: Store | None, sweep_id: str) -> SweepRecord | None:
    try:
        return store.sweep(sweep_id) if store else None
    except DamagedError:
        return None


def _versions(sweep: SweepRecord) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(sweep.versions.items()))


def public_command(words: Sequence[str]) -> str:
    """A command without the options that name folders, hosts or passwords."""
    kept = ["cope-sweep"]
    rest = iter(words[1:])
    for word in rest:
        if word in PRIVATE_OPTIONS:
            next(rest, None)
        elif not word.startswith(tuple(f"{option}=" for option in PRIVATE_OPTIONS)):
            kept.append(Path(word).stem if word.endswith((".yaml", ".yml")) else word)
    return " ".join(kept)


def to_parquet(frame: pd.DataFrame) -> bytes:
    """The content of a Parquet file."""
    content: bytes = frame.to_parquet(None, engine="pyarrow", index=False, compression="zstd")
    return content


def runs_file(folder: Path, plan: Plan) -> Path:
    """The file of the runs of a plan in a folder of reports: `<ablation>.<scale>.parquet`."""
    scale = plan.ablation.scale
    return folder / (f"{plan.name}.{scale}.parquet" if scale else f"{plan.name}.parquet")


def run_files(folder: Path, pattern: str = "*") -> list[Path]:
    """The files of runs in a folder of reports, by name."""
    return [path for path in sorted(folder.glob(f"{pattern}.parquet")) if not path.name.endswith(CURVES)]


@dataclass(frozen=True)
class Committed(Results):
    """The results in the files of a report, with today's plan of its ablation at its scale."""

    path: Path = Path()
    """The file of its runs: `<ablation>.<scale>.parquet`."""

    @property
    def place(self) -> str:
        """The file, for messages."""
        return f"the report {self.path.name}"

    @cached_property
    def file(self) -> pd.DataFrame:
        """The content of its file; the module describes the columns."""
        return pd.read_parquet(self.path)

    @cached_property
    def curves(self) -> pd.DataFrame:
        """The learning curves; empty in a report without them."""
        path = self.path.with_suffix(CURVES)
        found = pd.read_parquet(path) if path.exists() else pd.DataFrame()
        found = found.reindex(columns=CURVE_COLUMNS)  # files of older versions have no times
        statuses = {run_id: record.status for run_id, record in self.records.items()}
        return found.assign(status=found["run_id"].map(statuses)).astype(CURVE_TYPES)

    def picture(self, name: str) -> bytes | None:
        """The SVG of a figure in the report, whatever the name is; None without it."""
        if not FIGURE_NAME.fullmatch(name):
            return None
        path = self.path.with_suffix(f".{name}.svg")
        return path.read_bytes() if path.exists() else None

    @property
    def stale(self) -> str:
        """The reason why the results are not those of today's ablation file; empty if they are."""
        planned = {run.run_id for run in self.plan.runs}
        gone, new = self.records.keys() - planned, planned - self.records.keys()
        if not gone and not new:
            return ""
        words = self.plan.ablation.cli_args
        return (
            f"{self.path.name} is stale: {len(gone)} of its runs are not in the plan of {words} today, and {len(new)} "
            f"of the plan are missing; train them with `cope-sweep run {words}`, then "
            f"`cope-sweep report {words} --out {self.path.parent.name}`"
        )

    def check(self) -> None:
        """Raises NotFinishedError where the results are stale."""
        if self.stale:
            raise NotFinishedError(self.stale, code="stale_report", file=self.path.name, ablation=self.plan.name)


@dataclass(frozen=True)
class Extended(Results):
    """The runs of a store, and of a report those that the store has not finished."""

    report: Committed = field(kw_only=True)
    kept: frozenset[str] = field(kw_only=True)
    """Ids of the runs that are the report's."""

    def is_kept(self, frame: pd.DataFrame) -> pd.Series[bool]:
        """Whether the run of each line is the report's."""
        return frame["run_id"].isin(self.kept)

    @cached_property
    def curves(self) -> pd.DataFrame:
        """The learning curves of both, in the plan's order."""
        own, theirs = super().curves, self.report.curves
        found = pd.concat([own[~self.is_kept(own)], theirs[self.is_kept(theirs)]])
        order = {run.run_id: index for index, run in enumerate(run for row in self.plan.rows for run in row.runs)}
        return found.sort_values("run_id", key=lambda ids: ids.map(order), kind="stable", ignore_index=True)

    def picture(self, name: str) -> bytes | None:
        """The SVG of a figure in the report; None without it."""
        return self.report.picture(name)


def extend_report(results: Results, report: Committed) -> Extended:
    """The results of a store with the finished runs of a report that the store has not finished.

    Raises NotFinishedError where a finished run of the report is not in the plan: it would be lost.
    """
    finished = {run_id for run_id, each in report.records.items() if each.status == "finished"}
    if lost := finished - results.records.keys():
        raise NotFinishedError(
            f"{report.path.name} has {len(lost)} finished runs that are not in the plan of "
            f"{results.plan.ablation.cli_args} today; leave out --add to replace the report"
        )
    kept = frozenset(run_id for run_id in finished if results.records[run_id].status != "finished")
    records = {run_id: report.records[run_id] if run_id in kept else each for run_id, each in results.records.items()}
    return Extended(results.plan, records, results.store, report=report, kept=kept)


def _record(line: Mapping[Any, Any]) -> RunRecord:
    known = {str(name): value for name, value in line.items() if not pd.isna(value)}
    return RunRecord(
        run_id=known["run_id"],
        status=known["status"],
        seed=int(known["seed"]),
        sweep_id=known.get("sweep_id"),
        metrics={name: float(value) for name, value in known.items() if "/" in name},
        facts={name.removeprefix(FACT): value for name, value in known.items() if name.startswith(FACT)},
        created_ms=known.get("created_ms"),
        ended_ms=known.get("ended_ms"),
    )


def read_report(plan: Plan, path: Path) -> Committed:
    """The results in a file of runs, with the plan of its ablation and scale.

    Raises NotFinishedError for a damaged file.
    """
    try:
        lines = pd.read_parquet(path).to_dict("records")
        return Committed(plan, {line["run_id"]: _record(line) for line in lines}, None, path)
    except (ValueError, KeyError) as error:  # pyarrow's errors are ValueErrors
        raise NotFinishedError(
            f"{path}: not the runs of a report ({str(error).splitlines()[0]})", code="damaged_report", file=str(path)
        ) from error


def find_committed(folder: Path, ablations: Path, name: str, scale: str | None) -> Committed:
    """One report of a folder. Without `scale`, that of the ablation's own size, or else its only one.

    Raises NotFoundError where there is no such report, NotFinishedError where it is stale or damaged.
    """
    known = {path.stem.partition(".")[2]: path for path in (*run_files(folder, name), *run_files(folder, f"{name}.*"))}
    wanted = scale or ("" if "" in known or len(known) != 1 else next(iter(known)))
    if wanted not in known:
        others = ", ".join(f"--scale {each}" if each else "its own size" for each in known)
        hint = f"; it has reports at: {others}" if known else ""
        option = f" --scale {wanted}" if wanted else ""
        raise NotFoundError(
            f"{folder.name} has no report of {name}{option}{hint}",
            ablation=name,
            scale=scale,
            allowed=list(known),
        )
    found = read_committed(known[wanted], ablations)
    found.check()
    return found


def read_committed(path: Path, ablations: Path) -> Committed:
    """One report, by the path of its runs. Raises UserError for one without ablation file, or without its scale."""
    name, _, scale = path.stem.partition(".")
    file = ablations / f"{name}.yaml"
    if not file.exists():
        raise UserError(
            f"{path}: there is no ablation {name!r} in {ablations}; delete the report",
            code="report_of_no_ablation",
            file=str(path),
            ablation=name,
        )
    plan = expand(with_overrides(load_ablation(file), scale=scale or None))
    return read_report(plan, path)
