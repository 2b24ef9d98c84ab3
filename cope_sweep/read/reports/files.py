"""Writes the runs of an ablation to the files of a folder of results, which `store.results_file` describes and reads.

Names of hosts and processes, messages of failed runs, and options that may name folders are left out.
"""

from __future__ import annotations

import fcntl
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from cope_sweep.config import Plan
from cope_sweep.errors import NotFinishedError
from cope_sweep.frozen import learning_parts, metric_parts
from cope_sweep.read.reports.heads import claimed_figures_by_run, measured_heads
from cope_sweep.read.tables import Results
from cope_sweep.read.tables.declared import plan_declarations
from cope_sweep.read.tables.frames import plan_frame
from cope_sweep.records import RunRecord
from cope_sweep.store import ParquetStore, Store, SweepRecord
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.files import overwriting
from cope_sweep.store.results_file import CURVES, DECLARED, HEADS, LABEL, SET, file_name

CURVE_COLUMNS = ["run_id", "row", "seed", "step", "metric", "value", "time_s"]
LEFT_OUT = ("message", "facts.host", "facts.worker_id")
TIMES = ("created_ms", "ended_ms")
PRIVATE_OPTIONS = ("--store", "--index", "--mlflow", "--address", "--ablations")
"""Options that name folders, hosts or passwords. They do not change a result, so a report leaves them out."""


def run_frame(plan: Plan, records: Mapping[str, RunRecord], *stores: Store) -> pd.DataFrame:
    """The frame of the file of runs, described in `store.results_file`. The stores have the records of the sweeps."""
    frame = plan_frame(plan, records, LABEL)
    # Means and changes of metrics, and what depends on whether a task is learned, whoever wants them computes.
    frame = frame.drop(columns=[name for name in frame if metric_parts(name) or learning_parts(str(name))[0]])
    ordered = [records[run.run_id] for row in plan.rows for run in row.runs]
    sweep_ids = {record.sweep_id for record in ordered if record.sweep_id}
    sweeps = {sweep_id: _sweep(stores, sweep_id) for sweep_id in sweep_ids}
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
    frame.attrs = {SET: list(plan.ablation.assignments)} if plan.ablation.assignments else {}
    declarations = plan_declarations(plan, *stores)
    if declarations is not None:
        frame.attrs[DECLARED] = {claim: list(declarations[claim]) for claim in sorted(declarations)}
    return frame


def _sweep(stores: Iterable[Store], sweep_id: str) -> SweepRecord | None:
    for store in stores:
        with suppress(DamagedError):
            if sweep := store.sweep(sweep_id):
                return sweep
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


def result_files(plan: Plan, runs: pd.DataFrame, curves: pd.DataFrame, heads: pd.DataFrame) -> dict[str, bytes]:
    """Name → content of the Parquet files of a plan's runs."""
    path = Path(file_name(plan))
    files = {path.name: _to_parquet(runs)}
    if not curves.empty:
        files[path.with_suffix(CURVES).name] = _to_parquet(curves[CURVE_COLUMNS])
    if not heads.empty:
        files[path.with_suffix(HEADS).name] = _to_parquet(heads)
    return files


def write_files(folder: Path, files: dict[str, bytes]) -> tuple[Path, ...]:
    """Write files, each as a whole, to a folder, which is created if it is missing. Raises OSError.

    An interrupted call leaves no partial file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in reversed(files.items()):  # the file of runs last: who finds a run finds its curve
        with overwriting(folder / name) as file:
            file.write(content)
    return tuple(folder / name for name in files)


def _to_parquet(frame: pd.DataFrame) -> bytes:
    content: bytes = frame.to_parquet(None, engine="pyarrow", index=False, compression="zstd")
    return content


@dataclass(frozen=True)
class Copied:
    """What `copy_runs` has done."""

    files: tuple[Path, ...]
    """The files that were written; none if nothing was missing."""
    copied: int
    """Runs that were copied."""
    finished: int
    """Finished runs that the folder of results has now."""
    planned: int
    """Runs of the plan."""


def results_anywhere(plan: Plan, store: Store) -> Results:
    """The results of a plan in a store; of a folder of results, also the runs in the files of other ablations.

    Raises StoreError, and NotFinishedError for a damaged file.
    """
    started = store.index.records(run.run_id for run in plan.runs)
    return Results(
        plan, {run.run_id: started.get(run.run_id) or RunRecord(run_id=run.run_id) for run in plan.runs}, store
    )


def copy_runs(results: Results, target: ParquetStore) -> Copied:
    """Copy the finished runs that a folder of results lacks: with curves, measures of heads and provenance.

    The finished runs that it has stay as they are, so a second call changes nothing.

    Raises NotFinishedError if there is no finished run, and if a finished run of the folder is not in the plan: it
    would be lost. Raises OSError.
    """
    with locked(target.root):
        return _copy_runs(results, target)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder, which is made if it is missing. It goes again if the block raises and has written nothing."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    # The folder itself is locked: a lock file would stand among results that people commit.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Two commands that copy at once would each write what they had read: one would drop the other's runs.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    except BaseException:
        if is_new:
            with suppress(OSError):  # it is not empty
                folder.rmdir()
        raise
    finally:
        os.close(descriptor)


def check_keeps(folder: ParquetStore, results: Results, heads: pd.DataFrame) -> None:
    """Raise NotFinishedError if files of these results and measures of heads would lose some that a folder has.

    These are finished runs of the plan that the results lack, and measures of heads that are claimed, but cannot be
    measured again: the checkpoints of their runs were pruned. A damaged file is replaced.
    """
    plan, there = results.plan, folder.kept(results.plan)
    finished = {run_id for run_id, record in results.records.items() if record.status == "finished"}
    lost: set[str] = set()
    if there:
        with suppress(NotFinishedError):
            kept = {run_id for run_id, record in there.records.items() if record.status == "finished"}
            lost |= (kept & results.records.keys()) - finished
            measured = set() if there.heads is None else set(there.heads["run_id"].to_pylist())
            lost |= (measured & claimed_figures_by_run(results).keys()) - set(heads["run_id"])
    if lost:
        arguments, name = plan.ablation.cli_args, shlex.quote(str(folder.root))
        raise NotFinishedError(
            f"{file_name(plan)} has {len(lost)} finished runs of {arguments}, or measures of their heads, that "
            f"{results.place} lacks, and that would be lost; bring them together with `cope-sweep store copy "
            f"{arguments} --to {name}`, then write the report with `cope-sweep report {arguments} --store {name} "
            f"--out {name}`",
            code="lost_runs",
            file=file_name(plan),
            ablation=plan.name,
            runs=len(lost),
        )


def _copy_runs(results: Results, target: ParquetStore) -> Copied:
    plan, records, there = results.plan, results.records, target.kept(results.plan)
    kept = {run_id: record for run_id, record in there.records.items() if record.status == "finished"} if there else {}
    if lost := kept.keys() - records.keys():
        raise NotFinishedError(
            f"{file_name(plan)} has {len(lost)} finished runs that are not in the current plan of "
            f"{plan.ablation.cli_args}, and would be lost; `cope-sweep report {plan.ablation.cli_args} --out "
            f"{target.root.name}` replaces the file",
            code="stale_report",
            file=file_name(plan),
            ablation=plan.name,
        )
    new = {run_id: record for run_id, record in records.items() if run_id not in kept}
    copied = sum(record.status == "finished" for record in new.values())
    if not copied and not kept:
        raise NotFinishedError(
            f"{results.place} has no finished run of {plan.ablation.cli_args}; train them with: {results.training}",
            ablation=plan.name,
        )
    if not copied:
        return Copied((), 0, len(kept), len(records))
    pending = {run_id: RunRecord(run_id=run_id) for run_id in records}
    sides = Results(plan, pending | kept, target), Results(plan, pending | new, results.store)
    order = {run.run_id: place for place, run in enumerate(run for row in plan.rows for run in row.runs)}
    curves, heads = (
        pd.concat(frames).sort_values("run_id", key=lambda ids: ids.map(order), kind="stable", ignore_index=True)
        for frames in ([side.curves for side in sides], [measured_heads(side) for side in sides])
    )
    runs = run_frame(plan, kept | new, results.store, target)
    files = write_files(target.root, result_files(plan, runs, curves, heads))
    return Copied(files, copied, len(kept) + copied, len(records))
