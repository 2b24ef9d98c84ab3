"""Benchmark of the read side: a synthetic store of many finished runs is indexed, asked, compared and checked.

Commands are measured in processes of their own, against the same command on an empty store: the difference is what the
store's size costs. Questions in the process are the least of three times.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from cope_benchmarks.synthetic_store import write_ablation, write_store
from cope_sweep.cli.output import grid
from cope_sweep.errors import UserError
from cope_sweep.plan import expand
from cope_sweep.queries import AblationFiles, Queries, parse_filter, plan_cost
from cope_sweep.results import table as result_table
from cope_sweep.spec import load_ablation
from cope_sweep.store import RunQuery, Store
from cope_sweep.store.index import Index
from cope_sweep.store.provenance import versions
from cope_sweep.store.rebuild import check, rebuild

if TYPE_CHECKING:
    from rich.table import Table

RUNS = 100_000
SMALL, MEDIUM = 1_000, 10_000
"""Runs of the ablation whose table is made, and of the smaller plan that is compared."""
REPETITIONS = 3
QUICK_S = 0.2
"""What a question may take beyond the start of a process."""
GOALS = {
    "list": QUICK_S, "status": QUICK_S, "page, filtered by model": QUICK_S, "page, filtered by metric": QUICK_S,
    "page, sorted by metric": QUICK_S, "table of 1,000 runs, json": 0.5, "table of 1,000 runs, csv": 0.5,
    "table of 1,000 runs, markdown": 0.5, "table of 1,000 runs, latex": 0.5, "table of 1,000 runs, html": 0.5,
}  # fmt: skip
PLAN_GOALS_S = {MEDIUM: 2.0, RUNS: 20.0}
"""Runs of a plan → seconds in which it is expanded, hashed and compared."""
REBUILT_PER_S = 2_000

T = TypeVar("T")


def measure(runs: int = RUNS, folder: Path | None = None) -> dict[str, Any]:
    """Write a store of `runs` runs (a multiple of 100, at least 10,000) and measure it: about five minutes for 100,000.

    `folder` is used and kept, with the store in it; None: a temporary one.
    """
    if runs < MEDIUM or runs % 100:
        raise UserError(f"--runs {runs}: a multiple of 100, and at least {MEDIUM:,}")
    load = psutil.getloadavg()[0]
    root = folder or Path(tempfile.mkdtemp(prefix="cope-sweep-bench-"))
    try:
        _write(root, runs)
        measured = {
            "runs": runs,
            "rebuild": _rebuild(root),
            "questions_s": _questions(root),
            "plans": [_plan(root, number) for number in (MEDIUM, runs)],
            "commands_s": _commands(root),
            "check": _check(root),
        }
    finally:
        if folder is None:
            shutil.rmtree(root)
    return measured | {
        "goals_s": GOALS | {f"plan of {runs:,} runs": goal for runs, goal in PLAN_GOALS_S.items()},
        "machine": {
            "host": platform.node(),
            "cpus": len(os.sched_getaffinity(0)),
            "load": [round(load, 1), round(psutil.getloadavg()[0], 1)],
        },
        "versions": versions(),
    }


def _write(root: Path, runs: int) -> None:
    """The ablation `small` and the store, unless it is there."""
    (root / "ablations").mkdir(parents=True, exist_ok=True)
    (root / "plans").mkdir(exist_ok=True)
    write_ablation(root / "ablations" / "small.yaml", SMALL)
    if not (root / "store").exists():
        write_store(root / "store", write_ablation(root / "plans" / "all.yaml", runs))


def _rebuild(root: Path) -> dict[str, float]:
    (root / "store" / "index.db").unlink(missing_ok=True)
    store = Store(root / "store")
    index = Index(store.index_url)
    cpu_s = time.process_time()
    seconds, report = _timed(lambda: rebuild(store.files, index), 1)
    cpu_s = time.process_time() - cpu_s
    index.close()
    return {
        "seconds": round(seconds, 2),
        "runs_per_s": round(report.runs / seconds),
        "runs_per_cpu_s": round(report.runs / cpu_s),
        "index_bytes": (root / "store" / "index.db").stat().st_size,
    }


def _questions(root: Path) -> dict[str, float]:
    """What the queries take in this process, in seconds. The plan of the small ablation was expanded before."""
    store = Store(root / "store")
    queries = Queries(store, AblationFiles(root / "ablations"))
    plan = queries.files.load("small").plan
    by_model = RunQuery(filters=(parse_filter("model.layers>=3"), parse_filter("model.position=cope")))
    by_metric = RunQuery(filters=(parse_filter("in_dist/token_error<10"),))
    asked: dict[str, Callable[[], object]] = {
        "list": queries.ablations,
        "status": queries.sweeps,
        "status of a sweep": lambda: queries.sweep(queries.sweeps().sweeps[0].sweep_id),
        "page, filtered by model": lambda: queries.runs(by_model),
        "page, filtered by metric": lambda: queries.runs(by_metric),
        "page, sorted by metric": lambda: queries.runs(RunQuery(sort="in_dist/token_error")),
    }
    for name in ("json", "csv", "markdown", "latex", "html"):
        asked[f"table of 1,000 runs, {name}"] = lambda name=name: getattr(result_table(plan, store), f"to_{name}")()  # type: ignore[misc]
    return {name: round(_timed(ask)[0], 4) for name, ask in asked.items()}


def _plan(root: Path, runs: int) -> dict[str, float]:
    """Expand and hash a plan, compare it with the store, and estimate what is left: seconds each."""
    path = root / "plans" / f"plan{runs}.yaml"
    write_ablation(path, runs)
    index = Store(root / "store").index
    expanded_s, plan = _timed(lambda: expand(load_ablation(path)), 1)
    hashed_s, ids = _timed(lambda: [run.run_id for run in plan.runs], 1)
    compared_s, statuses = _timed(lambda: index.statuses(ids), 1)
    estimated_s, _ = _timed(lambda: plan_cost(plan, Store(root / "store")), 1)
    return {
        "runs": len(ids),
        "finished": sum(status == "finished" for status in statuses.values()),
        "expanded_s": round(expanded_s, 2),
        "hashed_s": round(hashed_s, 2),
        "compared_s": round(compared_s, 3),
        "estimated_s": round(estimated_s, 2),
        "peak_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def _commands(root: Path) -> dict[str, dict[str, float]]:
    """Whole commands on the store and on an empty one, in seconds: the least of three, in turns."""
    commands = {
        "list": ["list"],
        "status": ["status"],
        "page, filtered by model": ["runs", "--filter", "model.layers>=3", "--filter", "model.position=cope"],
        "page, sorted by metric": ["runs", "--sort", "in_dist/token_error"],
        "table of 1,000 runs, markdown": ["report", "small", "--format", "markdown"],
        "table of 1,000 runs, csv": ["report", "small", "--format", "csv"],
    }
    Store(root / "empty", create=True).index.close()
    return {
        name: {
            store: round(min(_command(root, words, store) for _ in range(REPETITIONS)), 3)
            for store in ("store", "empty")
        }
        for name, words in commands.items()
    }


def _command(root: Path, words: list[str], store: str) -> float:
    if store == "empty" and words[0] == "runs":
        words = words[:1]  # no run of an empty store has these keys
    command = [sys.executable, "-m", "cope_sweep.cli", *words, "--store", str(root / store)]
    environment = os.environ | {"COPE_SWEEP_ABLATIONS": str(root / "ablations")}
    start_s = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.perf_counter() - start_s


def _check(root: Path) -> dict[str, float]:
    store = Store(root / "store")
    plain_s, found = _timed(lambda: list(check(store.files, store.index)), 1)
    return {"seconds": round(plain_s, 2), "differences": len(found)}


def _timed(call: Callable[[], T], repetitions: int = REPETITIONS) -> tuple[float, T]:
    """The least time of a call in seconds, and its last result."""
    least_s = float("inf")
    for _ in range(repetitions):
        start_s = time.perf_counter()
        result = call()
        least_s = min(least_s, time.perf_counter() - start_s)
    return least_s, result


def table(measured: dict[str, Any]) -> Table:
    """The measurement as a table: each question in the process, as a command, and its goal."""
    shown = grid("", "in the process", "as a command", "on an empty store", "goal")
    rebuilt = measured["rebuild"]
    shown.add_row("rebuild the index", f"{rebuilt['runs_per_s']:,} runs/s", "", "", f"≥ {REBUILT_PER_S:,} runs/s")
    for name, seconds in measured["questions_s"].items():
        command = measured["commands_s"].get(name, {})
        goal = f"≤ {GOALS[name]} s" if name in GOALS else ""
        times = (f"{command[store]:.2f} s" if command else "" for store in ("store", "empty"))
        shown.add_row(name, f"{seconds:.3f} s", *times, goal)
    for plan in measured["plans"]:
        seconds = plan["expanded_s"] + plan["hashed_s"] + plan["compared_s"]
        goal = f"≤ {PLAN_GOALS_S[plan['runs']]:g} s" if plan["runs"] in PLAN_GOALS_S else ""
        shown.add_row(f"plan of {plan['runs']:,} runs: expand, hash, compare", f"{seconds:.2f} s", "", "", goal)
        shown.add_row("– of it, compare", f"{plan['compared_s']:.3f} s", "", "", "")
        shown.add_row("– with estimates of time and memory", f"{seconds + plan['estimated_s']:.2f} s", "", "", "")
    shown.add_row("check of all runs", f"{measured['check']['seconds']:.1f} s", "", "", "")
    return shown
