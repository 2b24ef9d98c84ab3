"""Benchmark of the read side: a synthetic store of many finished runs is indexed, asked, compared and tabulated.

The store has the files that training leaves, with random metrics and a checkpoint of 1 kB. Times are the least of three,
wall clock; CPU time is in brackets: on a machine that runs other work, trust it. A report is a command in a process of its
own; what it takes to report one run of the same store is subtracted.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from cope_benchmarks.report import Measured, Rows
from cope_sweep.api.questions import ListAblations, ListRuns, ListSweeps
from cope_sweep.config import Plan, RunSpec, expand, load_ablation
from cope_sweep.errors import UserError
from cope_sweep.read.queries import AblationFiles, Queries
from cope_sweep.read.tables import table as result_table
from cope_sweep.store import Store, SweepRecord, SweepRun
from cope_sweep.store.index import Index, RunRecord
from cope_sweep.store.rebuild import check, rebuild

ABLATION = """\
title: Many short runs
base:
  task: {kind: selective_copy, tokens: 4, blanks: 12, dense_blanks: 6, sparse_blanks: 24}
  model: {dim: 32, heads: 2}
  train: {steps: 50, batch: 16}
  evaluate: {every: 50, sequences: 32, final_sequences: 32}
grid:
  model.layers: [1, 2, 3, 4]
  model.position: {none: [], absolute: [absolute], RoPE: [rope], CoPE: [cope], CoPE and RoPE: [cope, rope]}
  train.lr: RATES
seeds: [0, 1, 2, 3, 4]
metrics:
  - {name: in_dist/token_error, label: In-dist., unit: "%"}
  - {name: dense/token_error, label: OOD dense, unit: "%"}
  - {name: sparse/token_error, label: OOD sparse, unit: "%"}
"""
RUNS_PER_RATE = 100
CURVE_ROWS = 20
CREATED_MS = 1_790_000_000_000
RUN_MS = 2_000
SWEEP_RUNS = 5_000
"""Runs of one sweep."""
WEIGHTS = bytes(1024)
RUNS, SMALL, MEDIUM = 100_000, 1_000, 10_000
"""Runs of the store, of the smaller table, and of the smaller plan."""
REPETITIONS = 3
T = TypeVar("T")


def measure(runs: int = RUNS) -> Measured:
    """Write a store of `runs` runs (a multiple of 100, at least 10,000) and measure it: about eight minutes for 100,000."""
    if runs < MEDIUM or runs % RUNS_PER_RATE:
        raise UserError(f"--runs {runs}: a multiple of {RUNS_PER_RATE}, and at least {MEDIUM:,}")
    rows = Rows("store")
    with tempfile.TemporaryDirectory(prefix="cope-sweep-bench-") as name:
        root = Path(name)
        (root / "ablations").mkdir()
        plans = {number: write_ablation(_file(root, number), number) for number in (SMALL, MEDIUM, runs)}
        one = _file(root, SMALL).read_text()
        _file(root, 1).write_text(one.partition("grid:")[0] + "seeds: [0]\n" + one[one.index("metrics:") :])
        store = write_store(root / "store", plans[runs])
        rebuilt, _ = timed(lambda: rebuild(Store(store.location, index=Index(store.index_url))), 1)
        rows.add("rebuild the index", runs / rebuilt[0], " runs/s", f", {runs:,} runs")
        _questions(rows, root, plans[SMALL])
        for number in (MEDIUM, runs):
            taken, _ = timed(lambda number=number: _compare(_file(root, number), store), 1)  # type: ignore[misc]
            what = "all" if number == runs else f"{MEDIUM:,}"
            _add(rows, f"plan of {what} runs: expand, hash, compare", taken)
        _reports(rows, root, runs)
        taken, differences = timed(lambda: list(check(store)), 1)
        if differences:
            raise RuntimeError(f"the store is not what its index says: {differences[0]}")
        _add(rows, "check of all runs", taken)
    return rows.measured(runs=runs)


def _file(root: Path, runs: int) -> Path:
    return root / "ablations" / f"runs{runs}.yaml"


def _add(rows: Rows, what: str, taken: tuple[float, float]) -> None:
    rows.add(what, taken[0], " s", f" ({taken[1]:.3g})")


def _questions(rows: Rows, root: Path, plan: Plan) -> None:
    """What the queries of commands and of the service take, in this process."""
    store = Store(root / "store")
    queries = Queries(store, AblationFiles(root / "ablations"))
    by_model = ListRuns(filter=("model.layers>=3", "model.position=cope"))
    by_metric = ListRuns(filter=("in_dist/token_error<10",))
    asked: dict[str, Callable[[], object]] = {
        "list of ablations": lambda: queries.ask(ListAblations()),
        "status of sweeps": lambda: queries.ask(ListSweeps()),
        "page, filtered by model": lambda: queries.ask(by_model),
        "page, filtered by metric": lambda: queries.ask(by_metric),
        "page, sorted by metric": lambda: queries.ask(ListRuns(sort="in_dist/token_error")),
        f"table of {SMALL:,} runs": lambda: result_table(plan, store).to_markdown(),
    }
    for name, ask in asked.items():
        _add(rows, name, timed(ask)[0])


def _compare(path: Path, store: Store) -> None:
    store.index.statuses([run.run_id for run in expand(load_ablation(path)).runs])


def _reports(rows: Rows, root: Path, runs: int) -> None:
    """`cope-sweep table`, beyond the same command for one run that is not in the store."""
    start = least(lambda: command_seconds(root, ["table", "runs1"]))
    for number in (SMALL, runs):
        whole = least(lambda number=number: command_seconds(root, ["table", f"runs{number}"]))  # type: ignore[misc]
        what = "all" if number == runs else f"{SMALL:,}"
        _add(rows, f"report of {what} runs, beyond its start", (whole[0] - start[0], whole[1] - start[1]))
    _add(rows, "start of a report", start)


def command_seconds(root: Path, words: list[str]) -> tuple[float, float]:
    """Wall-clock and CPU time of a command on the store in `root`, in a process of its own."""
    command = [sys.executable, "-m", "cope_sweep.cli", *words, "--store", str(root / "store")]
    environment = os.environ | {"COPE_SWEEP_ABLATIONS": str(root / "ablations")}
    start_s, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start_s, cpu_s


def least(measure_once: Callable[[], tuple[float, float]], repetitions: int = REPETITIONS) -> tuple[float, float]:
    """The least wall-clock time and the least CPU time of several measurements."""
    wall, cpu = zip(*(measure_once() for _ in range(repetitions)), strict=True)
    return min(wall), min(cpu)


def timed(call: Callable[[], T], repetitions: int = REPETITIONS) -> tuple[tuple[float, float], T]:
    """The least times of a call in this process, and its last result."""
    results: list[T] = []

    def once() -> tuple[float, float]:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        results.append(call())
        return time.perf_counter() - start_s, time.process_time() - start_cpu_s

    return least(once, repetitions), results[-1]


# The synthetic store --------------------------------------------------------------------------------------------------


def write_ablation(path: Path, runs: int) -> Plan:
    """Write an ablation of `runs` runs, a multiple of 100, and return its plan; that of fewer runs is a part of it."""
    rates = [round(1e-5 * (index + 1), 5) for index in range(runs // RUNS_PER_RATE)]
    path.write_text(ABLATION.replace("RATES", json.dumps(rates)))
    return expand(load_ablation(path))


def write_store(root: Path, plan: Plan) -> Store:
    """Write the folders of all runs of a plan, each finished, and the records of the sweeps that trained them.

    The index is not written: see `cope_sweep.store.rebuild`.
    """
    store = Store(root, create=True)
    metrics = random.Random(0)
    for number, run in enumerate(plan.runs):
        _write_run(os.path.join(root, "runs", run.run_id), run, number, metrics)
    for record in _sweeps(plan):
        text = json.dumps(record.model_dump(mode="json"), indent=1)
        (root / "sweeps" / f"{record.sweep_id}.json").write_text(text)
    return store


def write_index(root: Path, plan: Plan) -> Store:
    """A store whose index has all runs of a plan, each finished, and their sweeps, without any run folder."""
    store = Store(root, create=True)
    store.index.mark_built()
    source = random.Random(0)
    rows = [_row(run, number, _metrics(source)) for number, run in enumerate(plan.runs)]
    for start in range(0, len(rows), SWEEP_RUNS):
        store.index.write(rows[start : start + SWEEP_RUNS])
    for record in _sweeps(plan):
        store.write_sweep(record)
    return store


def indexed_row(run: RunSpec, number: int, seed: int) -> RunRecord:
    """The row of a finished run with metrics of its own."""
    return _row(run, number, _metrics(random.Random(seed)))


def _row(run: RunSpec, number: int, metrics: dict[str, float]) -> RunRecord:
    created_ms = CREATED_MS + number * RUN_MS
    return RunRecord.of(
        run.run_id, "finished", run.model_dump(mode="json"), attempt=1, step=50, worker_id="node-1:4711",
        created_ms=created_ms, updated_ms=created_ms, ended_ms=created_ms + RUN_MS, metrics=metrics,
        facts=_facts(run),
    )  # fmt: skip


def _metrics(source: random.Random) -> dict[str, float]:
    return {
        f"{split}/{name}": 100 * source.random()
        for split in ("in_dist", "dense", "sparse")
        for name in ("token_error", "sequence_error", "loss")
    }


def _write_run(folder: str, run: RunSpec, number: int, source: random.Random) -> None:
    created_ms = CREATED_MS + number * RUN_MS
    values = _metrics(source)
    contents = {
        "checkpoint/config.json": json.dumps({"model": run.model.model_dump(mode="json")}).encode(),
        "checkpoint/model.safetensors": WEIGHTS,
        "curve.jsonl": _curve(created_ms, values).encode(),
    }
    files = {name: _digest(content) for name, content in contents.items()}
    spec = {"run_id": run.run_id, "spec": run.model_dump(mode="json"), "created_ms": created_ms}
    state = {"status": "running", "updated_ms": created_ms, "worker_id": "node-1:4711", "attempt": 1}
    metrics = {"train/loss": 1.5, "train/lr": 1e-3, **values}
    result = {"metrics": metrics, "facts": _facts(run), "files": files, "ended_ms": created_ms + RUN_MS}
    for name, content in (("spec", spec), ("state", state), ("result", result)):
        contents[f"{name}.json"] = json.dumps(content, indent=1).encode()
    os.makedirs(f"{folder}/checkpoint")
    for name, written in contents.items():
        with open(f"{folder}/{name}", "wb") as file:
            file.write(written)


def _curve(created_ms: int, final: dict[str, float]) -> str:
    rows = [
        {"step": step, "time_ms": created_ms + step, "train/loss": 3.0 / step, "train/lr": 1e-3}
        for step in range(1, CURVE_ROWS)
    ]
    return "".join(json.dumps(row) + "\n" for row in [*rows, {"step": 50, "time_ms": created_ms + 50, **final}])


def _facts(run: RunSpec) -> dict[str, Any]:
    return {
        "steps": 50, "resumed_from_step": 0, "tokens_per_s": 86553.2, "train_s": 0.198, "wall_s": 1.497,
        "parameters": 13_280 * run.model.layers, "peak_memory_bytes": 775_409_664, "device": "cpu",
        "precision": "fp32", "threads": 1, "workers": 1, "micro_batch": 16, "checkpoint_activations": False,
        "worker_id": "node-1:4711", "host": "node-1", "python": "3.11.7", "torch": "2.15.0",
    }  # fmt: skip


def _sweeps(plan: Plan) -> Iterator[SweepRecord]:
    """Sweeps of SWEEP_RUNS runs each, one after another."""
    for number, start in enumerate(range(0, len(plan.runs), SWEEP_RUNS)):
        started_ms = CREATED_MS + start * RUN_MS
        yield SweepRecord(
            sweep_id=f"20260730-12{number // 60:02}{number % 60:02}-abcd", ablation=plan.name,
            title=plan.ablation.content.title, hypothesis="", executor="ray", command=["cope-sweep", "run", plan.name],
            status="finished", started_ms=started_ms, ended_ms=started_ms + SWEEP_RUNS * RUN_MS,
            versions={"torch": "2.15.0"}, machine={}, metrics=[], reused=[],
            runs=[_member(plan, run) for run in plan.runs[start : start + SWEEP_RUNS]],
        )  # fmt: skip


def _member(plan: Plan, run: RunSpec) -> SweepRun:
    row = plan.row_of(run.run_id)
    assert row is not None
    return SweepRun(run_id=run.run_id, row=row.name, labels=row.labels, seed=run.seed)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
