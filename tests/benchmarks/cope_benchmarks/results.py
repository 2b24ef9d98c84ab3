"""Benchmark of results: tables of a synthetic store as commands, the table of all runs, and MLflow's `search_runs`.

A command is measured in a process of its own, against the same command for one row of the same store: the difference is
what the table's size costs. Runs as one frame are compared with `mlflow.search_runs` of the same runs, with the same
configurations, metrics and facts, from an SQLite database beside a store of those runs alone.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from cope_benchmarks.store import command_seconds, least, timed
from cope_benchmarks.synthetic_store import write_ablation, write_store
from cope_sweep.cli.output import grid
from cope_sweep.errors import UserError
from cope_sweep.results.runs import run_batches
from cope_sweep.store import RunQuery, Store
from cope_sweep.store.index import Index
from cope_sweep.store.provenance import versions
from cope_sweep.store.rebuild import rebuild

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.table import Table

RUNS, SMALL = 100_000, 1_000
"""Runs of the store, and of the smaller table."""
MLFLOW_RUNS = 1_000
"""Runs that MLflow is filled with, at 20 to 40 ms each."""
FORMATS = ("markdown", "json")
GOALS_S = {SMALL: 1.0, RUNS: 10.0}
"""Runs of a table → seconds beyond the start of the same command."""
GOAL_RATIO = 20
REPETITIONS = 3


def measure(runs: int = RUNS, mlflow_runs: int = MLFLOW_RUNS, folder: Path | None = None) -> dict[str, Any]:
    """Write a store of `runs` runs (a multiple of 100, at least 1,000) and measure it: about ten minutes for 100,000.

    `folder` is used and kept, with the store in it; None: a temporary one. Raises UserError.
    """
    if runs < SMALL or runs % 100 or not 0 < mlflow_runs <= runs or mlflow_runs % 100:
        raise UserError(f"--runs {runs} --mlflow-runs {mlflow_runs}: multiples of 100, the first at least {SMALL:,}")
    load = psutil.getloadavg()[0]
    root = folder or Path(tempfile.mkdtemp(prefix="cope-sweep-bench-"))
    try:
        _write(root, runs)
        measured = {
            "runs": runs,
            "reports": [_report(root, number) for number in (SMALL, runs)],
            "frame": _frame(root, runs),
            "mlflow": _mlflow(mlflow_runs),
        }
    finally:
        if folder is None:
            shutil.rmtree(root)
    return measured | {
        "goals": {"report_s": GOALS_S, "times_mlflow": GOAL_RATIO},
        "machine": {
            "host": platform.node(),
            "cpus": len(os.sched_getaffinity(0)),
            "load": [round(load, 1), round(psutil.getloadavg()[0], 1)],
        },
        "versions": versions(),
    }


def _write(root: Path, runs: int) -> None:
    """The store and its ablations, unless they are there."""
    folder = root / "ablations"
    folder.mkdir(parents=True, exist_ok=True)
    plan = write_ablation(folder / f"runs{runs}.yaml", runs)
    write_ablation(folder / f"runs{SMALL}.yaml", SMALL)
    one = (folder / f"runs{SMALL}.yaml").read_text()
    (folder / "one.yaml").write_text(one.partition("grid:")[0] + "seeds: [0]\n" + one[one.index("metrics:") :])
    if not (root / "store").exists():
        store = write_store(root / "store", plan)
        index = Index(store.index_url)
        rebuild(store.files, index)
        index.close()


def _report(root: Path, runs: int) -> dict[str, Any]:
    """`cope-sweep report` of so many runs, and of one run that is not in the store."""
    measured: dict[str, Any] = {"runs": runs}
    for name in FORMATS:
        for key, ablation in (("whole", f"runs{runs}"), ("start", "one")):
            words = ["report", ablation, "--format", name]
            seconds = least(partial(command_seconds, root, words, "store"), REPETITIONS)
            measured.setdefault(name, {})[key] = seconds.rounded()
    return measured


def _frame(root: Path, runs: int) -> dict[str, Any]:
    """All runs as one Arrow table, and as a pandas frame."""
    read, table = timed(lambda: _read(Store(root / "store")), 1)
    converted, frame = timed(table.to_pandas, 1)
    return {
        "runs": runs, "columns": table.num_columns, "read": read.rounded(), "to_pandas": converted.rounded(),
        "memory_bytes": int(table.nbytes), "frame_shape": list(frame.shape),
    }  # fmt: skip


def _read(store: Store) -> pa.Table:
    """All runs of a store as one Arrow table."""
    import pyarrow as pa

    schema, found = run_batches(store, RunQuery())
    return pa.Table.from_batches(found, schema)


def _mlflow(runs: int) -> dict[str, Any]:
    """All runs of a store as a pandas frame, and from MLflow with the same runs."""
    import mlflow
    from mlflow.entities import Metric, Param

    with tempfile.TemporaryDirectory(prefix="cope-sweep-bench-") as folder:
        root = Path(folder)
        _write(root, runs)
        ours, frame = timed(lambda: _read(Store(root / "store")).to_pandas(), REPETITIONS)
        uri = f"sqlite:///{folder}/mlflow.db"
        client = mlflow.MlflowClient(uri)
        experiment = client.create_experiment("runs", artifact_location=folder)
        metrics = [name for name in frame.columns if "/" in name]
        others = [name for name in frame.columns if name not in metrics and name not in ("run_id", "status", "sweeps")]
        for line in frame.to_dict("records"):
            run_id = client.create_run(experiment, run_name=line["run_id"]).info.run_id
            values = [Metric(name, line[name], 0, 0) for name in metrics]
            client.log_batch(run_id, values, [Param(name, str(line[name])[:500]) for name in others])
        before: Any = os.environ.get("MLFLOW_TRACKING_URI")
        mlflow.set_tracking_uri(uri)  # sets the variable, too, which would lead later commands to a deleted database
        try:
            theirs, found = timed(lambda: mlflow.search_runs([experiment], max_results=runs), REPETITIONS)
        finally:
            mlflow.set_tracking_uri(before)
    if len(found) != len(frame) or found[[f"metrics.{metrics[0]}"]].isna().any().any():
        raise RuntimeError("MLflow returned other runs than were written")
    return {
        "runs": runs, "columns": [len(frame.columns), len(found.columns)], "ours": ours.rounded(),
        "mlflow": theirs.rounded(),
        "times_faster": round(theirs.wall / ours.wall, 1), "times_faster_cpu": round(theirs.cpu / ours.cpu, 1),
    }  # fmt: skip


def table(measured: dict[str, Any]) -> Table:
    """The measurement as a table: wall-clock time and, in brackets, CPU time."""
    shown = grid("wall-clock (CPU) time", "measured", "start of the command", "beyond the start", "goal")
    for report in measured["reports"]:
        for name in FORMATS:
            whole, start = report[name]["whole"], report[name]["start"]
            beyond = {key: max(0.0, whole[key] - start[key]) for key in whole}
            goal = f"≤ {GOALS_S[report['runs']]:g} s" if report["runs"] in GOALS_S else ""
            shown.add_row(f"report of {report['runs']:,} runs, {name}", _text(whole), _text(start), _text(beyond), goal)
    frame = measured["frame"]
    shown.add_row(
        f"{frame['runs']:,} runs as an Arrow table of {frame['columns']} columns", _text(frame["read"]), "", "", ""
    )
    shown.add_row("– as a pandas frame", _text(frame["to_pandas"]), "", "", "")
    both = measured["mlflow"]
    shown.add_row(f"{both['runs']:,} runs as a pandas frame", _text(both["ours"]), "", "", "")
    ratio = f"{both['times_faster']:g} × ({both['times_faster_cpu']:g} ×) slower"
    shown.add_row("– with mlflow.search_runs", _text(both["mlflow"]), "", ratio, f"≥ {GOAL_RATIO} ×")
    return shown


def _text(seconds: dict[str, float]) -> str:
    return f"{seconds['wall_s']:.2f} s ({seconds['cpu_s']:.2f})"
