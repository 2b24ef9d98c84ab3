"""Benchmark of `cope-sweep sync`: a store of many finished runs, sent to a new MLflow database.

The lower bound is MLflow's own client with the same data, in a process that has imported it and has opened a database
with the same settings: for each run `create_run` with all tags, one `log_batch`, `set_terminated`. A run's data sets
and its model are further requests, which are timed apart.
"""

from __future__ import annotations

import os
import platform
import sqlite3
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from cope_benchmarks.store import Seconds, command_seconds, timed
from cope_benchmarks.synthetic_store import write_ablation, write_store
from cope_sweep.cli.output import grid
from cope_sweep.errors import UserError
from cope_sweep.store import Store
from cope_sweep.store.provenance import versions
from cope_sweep.tracking.mlflow import MlflowTracking
from cope_sweep.tracking.sync import MirrorSession

if TYPE_CHECKING:
    from rich.table import Table

RUNS = 1_000
GOAL_RATIO = 1.25


def measure(runs: int = RUNS) -> dict[str, Any]:
    """Send `runs` runs (a multiple of 100), by the command and in this process, and the same data by MLflow's client.

    Raises:
        UserError: Not a multiple of 100.
    """
    if runs < 100 or runs % 100:
        raise UserError(f"--runs {runs}: a multiple of 100")
    load = psutil.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="cope-sweep-bench-") as name:
        root = Path(name)
        plan = write_ablation(root / "many.yaml", runs)
        stores = [write_store(root / store, plan) for store in ("command", "process")]
        for store in stores:
            store.index.revision()  # it is made now
        command = command_seconds(root, ["sync"], "command")
        tracking = MlflowTracking(f"sqlite:///{root}/process/mlflow.db")
        ours, _ = timed(partial(_send, stores[1], tracking.uri), 1)
        database = root / "process" / "mlflow.db"
        bound = _Client(root / "bound.db", database)
        logged, _ = timed(bound.log_runs, 1)
        models, _ = timed(bound.log_models, 1)
        counts = [_counts(path) for path in (root / "command" / "mlflow.db", database, root / "bound.db")]
    if counts[0] != counts[1] or counts[1] != counts[2]:
        raise RuntimeError(f"MLflow has different data: {counts}")
    whole = Seconds(logged.wall + models.wall, logged.cpu + models.cpu)
    return {
        "runs": runs,
        "command": command.rounded(),
        "ours": ours.rounded(),
        "bound": {"runs": logged.rounded(), "models": models.rounded()},
        "ratio": round(ours.wall / whole.wall, 2),
        "ratio_cpu": round(ours.cpu / whole.cpu, 2),
        "goals": {"ratio": GOAL_RATIO},
        "machine": {
            "host": platform.node(),
            "cpus": len(os.sched_getaffinity(0)),
            "load": [round(load, 1), round(psutil.getloadavg()[0], 1)],
        },
        "versions": versions(),
    }


def _send(store: Store, uri: str) -> None:
    with MirrorSession(store, uri) as session:
        if not session.sync_until(tries=1):
            raise RuntimeError(f"not everything was sent: {session.reasons()}")


class _Client:
    """MLflow's client, with the data of a database that `cope-sweep sync` has filled."""

    def __init__(self, path: Path, source: Path) -> None:
        from mlflow.entities import Metric, Param

        self._client = MlflowTracking(f"sqlite:///{path}")._client
        self._experiment = self._client.create_experiment("bench", path.with_name("artifacts").as_uri())
        self._runs: list[tuple[str, int, int, list[Metric], list[Param], dict[str, str]]] = []
        with sqlite3.connect(source) as database:
            for run_id, *run in database.execute("SELECT run_uuid, name, start_time, end_time FROM runs").fetchall():
                metrics, params, tags = (
                    database.execute(f"SELECT {columns} FROM {table} WHERE run_uuid = ?", (run_id,)).fetchall()
                    for columns, table in (
                        ("key, value, timestamp, step", "metrics"), ("key, value", "params"), ("key, value", "tags"),
                    )
                )  # fmt: skip
                self._runs.append(
                    (*run, [Metric(*row) for row in metrics], [Param(*row) for row in params], dict(tags))
                )
        self._ids: list[str] = []

    def log_runs(self) -> None:
        """Everything but data sets and models."""
        for name, started_ms, ended_ms, metrics, params, tags in self._runs:
            run_id = self._client.create_run(self._experiment, started_ms, tags, run_name=name).info.run_id
            self._client.log_batch(run_id, metrics, params)
            self._client.set_terminated(run_id, "FINISHED", ended_ms)
            self._ids.append(run_id)

    def log_models(self) -> None:
        """The data sets and the model of each run, with the final metrics of the model."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelOutput, Metric

        for run_id, (name, _, _, metrics, params, tags) in zip(self._ids, self._runs, strict=True):
            if "cope_sweep.run_id" not in tags:
                continue
            splits = ("train", *dict.fromkeys(each.key.partition("/")[0] for each in metrics if each.key[0] in "ids"))
            inputs = [
                DatasetInput(
                    Dataset(f"bench/{split}", "0" * 16, "cope_sweep", "{}"), [InputTag("mlflow.data.context", split)]
                )
                for split in splits
                if split != "system"
            ]
            self._client.log_inputs(run_id, inputs)
            final = {each.key: each for each in sorted(metrics, key=lambda each: each.step)}
            logged = self._client.create_logged_model(
                self._experiment, name.partition(" ")[0].translate(str.maketrans("/:.%\"'", "------")),
                source_run_id=run_id, model_type="cope_sweep", tags={"cope_sweep.run_id": tags["cope_sweep.run_id"]},
                params={each.key: each.value for each in params if each.key.startswith("model")},
            )  # fmt: skip
            self._client.log_batch(
                run_id,
                [
                    Metric(each.key, each.value, each.timestamp, each.step, model_id=logged.model_id)
                    for each in final.values()
                ],
            )
            self._client.finalize_logged_model(logged.model_id, "READY")
            self._client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, 50)])


def _counts(path: Path) -> dict[str, int]:
    tables = ("runs", "metrics", "params", "tags", "logged_models", "logged_model_metrics")
    with sqlite3.connect(path) as database:
        return {name: database.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables}


def table(measured: dict[str, Any]) -> Table:
    """The measurement as a table: wall-clock time and, in brackets, CPU time."""

    def text(seconds: dict[str, float]) -> str:
        return f"{seconds['wall_s']:.1f} s ({seconds['cpu_s']:.1f})"

    shown = grid("wall-clock (CPU) time", "measured", "goal")
    shown.add_row(f"`cope-sweep sync` of {measured['runs']:,} runs, with its start", text(measured["command"]), "")
    shown.add_row("the same in a process that has imported MLflow", text(measured["ours"]), "")
    shown.add_row("MLflow's client: runs", text(measured["bound"]["runs"]), "")
    shown.add_row("MLflow's client: data sets and models", text(measured["bound"]["models"]), "")
    ratio = f"{measured['ratio']:.2f} × ({measured['ratio_cpu']:.2f} ×)"
    shown.add_row("the second of the sum of the others", ratio, f"≤ {measured['goals']['ratio']} ×")
    return shown
