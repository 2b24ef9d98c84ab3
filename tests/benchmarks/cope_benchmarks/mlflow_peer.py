"""MLflow with the runs of a store, in a SQLite file: its rows are inserted as MLflow itself writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cope_sweep.config import RunSpec
from cope_sweep.store import RunRecord, Store
from cope_sweep.store.index.flatten import flatten

CHUNK = 5_000


class MlflowRuns:
    """An experiment of MLflow with finished runs of a store: metrics, configuration and run ids as there."""

    def __init__(self, path: Path, runs: Sequence[RunSpec], store: Store) -> None:
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        untyped: Any = SqlAlchemyStore
        self._store = untyped(f"sqlite:///{path}", str(path.parent / "artifacts"))
        self._experiment = self._store.create_experiment("bench")
        records = store.index.records(run.run_id for run in runs)
        with self._store.engine.begin() as connection:
            for start in range(0, len(runs), CHUNK):
                rows: dict[str, list[dict[str, Any]]] = {}
                for run in runs[start : start + CHUNK]:
                    for table, row in self._rows(run, records[run.run_id]):
                        rows.setdefault(table, []).append(row)
                for table, values in rows.items():
                    names = ", ".join(values[0])
                    places = ", ".join("?" * len(values[0]))
                    connection.exec_driver_sql(
                        f"INSERT INTO {table} ({names}) VALUES ({places})",
                        [tuple(value.values()) for value in values],
                    )

    def _rows(self, run: RunSpec, record: RunRecord) -> Iterator[tuple[str, dict[str, Any]]]:
        run_id = run.run_id
        yield "runs", {
            "run_uuid": run_id, "name": run_id, "source_type": "LOCAL", "source_name": "", "entry_point_name": "",
            "user_id": "bench", "status": "FINISHED", "start_time": record.created_ms, "end_time": record.ended_ms,
            "source_version": "", "lifecycle_stage": "active", "artifact_uri": "", "experiment_id": self._experiment,
        }  # fmt: skip
        for key, value in record.metrics.items():
            metric: dict[str, Any] = {"key": key, "value": value, "timestamp": record.ended_ms, "run_uuid": run_id}
            yield "latest_metrics", {**metric, "step": 50, "is_nan": False}
            yield "metrics", {**metric, "step": 50, "is_nan": False}
        for name, setting in flatten(run.model_dump(mode="json")):
            yield "params", {"key": name, "value": str(setting)[:500], "run_uuid": run_id}

    def search(self, conditions: Sequence[str], sort: str, limit: int) -> list[str]:
        """The ids of the runs for which conditions as `model.layers=4` hold, by a metric."""
        pairs = [condition.split("=", 1) for condition in conditions]
        text = " and ".join(f"params.`{key}` = '{value}'" for key, value in pairs)
        found = self._store.search_runs(
            [self._experiment], text, 1, max_results=limit, order_by=[f"metrics.`{sort}` ASC"]
        )
        return [run.info.run_id for run in found]
