"""What runs put into each part: `python -m tests.deploy.costs 1000`.

One run of the quick start is trained, with a tenth of its steps and as many evaluations. Its folder is copied under as
many seeds as asked for, indexed in PostgreSQL, and sent to an MLflow server with PostgreSQL and an object store, all of
them started as deploy/compose.yaml starts them. Sizes are those that PostgreSQL and the object store report.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from cope_sweep.config import Row, RunSpec, expand, load_ablation
from cope_sweep.store import Store, SweepRecord, SweepRun
from cope_sweep.train import Runtime, train_run
from tests.deploy.composition import BUCKET, ROOT, Composition

SHORTER = 10
"""The run is trained with this part of its steps."""


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    folder = Path(tempfile.mkdtemp(prefix="co", dir="/tmp"))
    composition = Composition(folder, ROOT / "ablations")
    try:
        composition.start_stores()
        composition.wait_for_mlflow()
        for line in measure(composition, folder / "store", count):
            print(line, flush=True)  # noqa: T201
    finally:
        composition.remove()


def measure(composition: Composition, root: Path, count: int):
    store = Store(root, index=composition.postgres_url("cope_sweep"), create=True)
    [row, *_] = expand(load_ablation(ROOT / "ablations" / "quickstart.yaml")).rows
    run = shorter(row.runs[0])
    assert train_run(run, store, Runtime()) == "finished"
    store.index.revision()  # its tables exist now
    before = {name: database_bytes(composition, name) for name in ("cope_sweep", "mlflow")}
    source = root / "runs" / run.run_id
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        yield f"run folder: {path.relative_to(source)}: {path.stat().st_size:,} bytes"
    yield f"run folder: {folder_bytes(source):,} bytes; lines of the curve: {len((source / 'curve.jsonl').read_text().splitlines())}"
    started_s = time.monotonic()
    runs = [copy(source, run, seed) for seed in range(1000, 1000 + count)]
    shutil.rmtree(source)
    write_sweep(store, row, runs)
    composition.run("service", ["cope-sweep", "store", "rebuild", "--store", str(root)])
    yield f"{count} runs indexed after {time.monotonic() - started_s:.0f} s"
    composition.run("service", ["cope-sweep", "sync", "--store", str(root)], limit_s=7200)
    yield f"{count} runs sent to MLflow after {time.monotonic() - started_s:.0f} s"
    for name, size_bytes in before.items():
        grown = database_bytes(composition, name) - size_bytes
        yield f"database {name}: {size_bytes:,} bytes when empty, {grown / count:,.0f} bytes per run"
    objects = [
        each["Size"]
        for page in composition.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="mlflow/")
        for each in page.get("Contents", [])
    ]
    yield f"MLflow's artifacts: {sum(objects) / count:,.0f} bytes per run in {len(objects) / count:.1f} objects"
    yield f"record of the sweep: {folder_bytes(root / 'sweeps') / count:,.0f} bytes per run"


def shorter(run: RunSpec) -> RunSpec:
    """The run with fewer steps and as many evaluations."""
    fields = run.model_dump()
    fields["train"]["steps"] //= SHORTER
    fields["evaluate"]["every"] //= SHORTER
    return RunSpec.model_validate(fields)


def copy(source: Path, run: RunSpec, seed: int) -> RunSpec:
    """The folder of a finished run under another seed."""
    other = RunSpec.model_validate(run.model_dump() | {"seed": seed})
    target = source.parent / other.run_id
    shutil.copytree(source, target)
    spec = json.loads((source / "spec.json").read_text())
    spec |= {"run_id": other.run_id, "spec": other.model_dump(mode="json")}
    (target / "spec.json").write_text(json.dumps(spec, indent=1))
    return other


def write_sweep(store: Store, row: Row, runs: list[RunSpec]) -> None:
    members = [SweepRun(run_id=run.run_id, row=row.name, labels=row.labels, seed=run.seed) for run in runs]
    now_ms = int(time.time() * 1000)
    record = SweepRecord(
        sweep_id="20260101-000000-abcd", ablation="quickstart", title="Costs", hypothesis="", executor="ray",
        command=["cope-sweep", "run", "quickstart"], status="finished", started_ms=now_ms, ended_ms=now_ms,
        versions={}, machine={}, metrics=[], runs=members, reused=[],
    )  # fmt: skip
    store.write_sweep(record)


def database_bytes(composition: Composition, name: str) -> int:
    composition.psql("psql", composition.postgres_url(name), "-q", "-c", "VACUUM")
    query = f"SELECT pg_database_size('{name}')"
    return int(composition.psql("psql", composition.postgres_url("postgres"), "-A", "-t", "-c", query))


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
