"""Benchmark of the read side: a synthetic store of many finished runs is indexed, asked, compared and checked.

Commands are measured in processes of their own, against the same command on an empty store: the difference is what the
store's size costs. Wall-clock and CPU time are the least of three; on a machine that runs other work, trust the latter.
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import psutil

from cope_benchmarks.synthetic_store import write_ablation, write_store
from cope_sweep.api.questions import GetSweep, ListAblations, ListRuns, ListSweeps
from cope_sweep.cli.output import grid
from cope_sweep.config import expand, load_ablation
from cope_sweep.errors import UserError
from cope_sweep.queries import AblationFiles, Queries, plan_cost
from cope_sweep.results import table as result_table
from cope_sweep.store import Store
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


class Seconds(NamedTuple):
    """How long something took."""

    wall: float
    cpu: float

    def rounded(self) -> dict[str, float]:
        return {"wall_s": round(self.wall, 4), "cpu_s": round(self.cpu, 4)}

    def __str__(self) -> str:
        return f"{self.wall:.2f} s ({self.cpu:.2f})" if self.cpu > 1 else f"{self.wall:.3f} s ({self.cpu:.3f})"


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
            "questions": _questions(root),
            "plans": [_plan(root, number) for number in (MEDIUM, runs)],
            "commands": _commands(root),
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


def _rebuild(root: Path) -> dict[str, Any]:
    (root / "store" / "index.db").unlink(missing_ok=True)
    store = Store(root / "store")
    index = Index(store.index_url)
    seconds, report = timed(lambda: rebuild(store.files, index), 1)
    index.close()
    return {
        **seconds.rounded(),
        "runs_per_s": round(report.runs / seconds.wall),
        "runs_per_cpu_s": round(report.runs / seconds.cpu),
        "index_bytes": (root / "store" / "index.db").stat().st_size,
    }


def _questions(root: Path) -> dict[str, dict[str, float]]:
    """What the queries take in this process. The plan of the small ablation was expanded before."""
    store = Store(root / "store")
    queries = Queries(store, AblationFiles(root / "ablations"))
    plan = queries.files.load("small").plan
    by_model = ListRuns(filter=("model.layers>=3", "model.position=cope"))
    by_metric = ListRuns(filter=("in_dist/token_error<10",))
    newest = queries.ask(ListSweeps(limit=1)).sweeps[0]
    asked: dict[str, Callable[[], object]] = {
        "list": lambda: queries.ask(ListAblations()),
        "status": lambda: queries.ask(ListSweeps()),
        "status of a sweep": lambda: queries.ask(GetSweep(newest.sweep_id)),
        "page, filtered by model": lambda: queries.ask(by_model),
        "page, filtered by metric": lambda: queries.ask(by_metric),
        "page, sorted by metric": lambda: queries.ask(ListRuns(sort="in_dist/token_error")),
    }
    for name in ("json", "csv", "markdown", "latex", "html"):
        asked[f"table of 1,000 runs, {name}"] = lambda name=name: getattr(result_table(plan, store), f"to_{name}")()  # type: ignore[misc]
    return {name: timed(ask)[0].rounded() for name, ask in asked.items()}


def _plan(root: Path, runs: int) -> dict[str, Any]:
    """Expand and hash a plan, compare it with the store, and estimate what is left."""
    path = root / "plans" / f"plan{runs}.yaml"
    write_ablation(path, runs)
    index = Store(root / "store").index
    expanded, plan = timed(lambda: expand(load_ablation(path)), 1)
    hashed, ids = timed(lambda: [run.run_id for run in plan.runs], 1)
    compared, statuses = timed(lambda: index.statuses(ids), 1)
    estimated, _ = timed(lambda: plan_cost(plan, Store(root / "store")), 1)
    return {
        "runs": len(ids),
        "finished": sum(status == "finished" for status in statuses.values()),
        "expanded": expanded.rounded(),
        "hashed": hashed.rounded(),
        "compared": compared.rounded(),
        "estimated": estimated.rounded(),
        "peak_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def _commands(root: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Whole commands on the store and on an empty one."""
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
        name: {store: least(partial(command_seconds, root, words, store)).rounded() for store in ("store", "empty")}
        for name, words in commands.items()
    }


def least(measure_once: Callable[[], Seconds], repetitions: int | None = None) -> Seconds:
    """The least wall-clock time and the least CPU time of several measurements."""
    taken = [measure_once() for _ in range(repetitions or REPETITIONS)]
    return Seconds(min(each.wall for each in taken), min(each.cpu for each in taken))


def command_seconds(root: Path, words: list[str], store: str) -> Seconds:
    """A command on the store of this name in `root`, with the ablations there, in a process of its own."""
    if store == "empty" and words[0] == "runs":
        words = words[:1]  # no run of an empty store has these keys
    command = [sys.executable, "-m", "cope_sweep.cli", *words, "--store", str(root / store)]
    environment = os.environ | {"COPE_SWEEP_ABLATIONS": str(root / "ablations")}
    start_s, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Seconds(time.perf_counter() - start_s, cpu_s)


def _check(root: Path) -> dict[str, Any]:
    store = Store(root / "store")
    seconds, found = timed(lambda: list(check(store.files, store.index)), 1)
    return {**seconds.rounded(), "differences": len(found)}


def timed(call: Callable[[], T], repetitions: int | None = None) -> tuple[Seconds, T]:
    """The least times of a call in this process, and its last result."""
    taken = []
    for _ in range(repetitions or REPETITIONS):
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        result = call()
        taken.append(Seconds(time.perf_counter() - start_s, time.process_time() - start_cpu_s))
    return Seconds(min(each.wall for each in taken), min(each.cpu for each in taken)), result


def table(measured: dict[str, Any]) -> Table:
    """The measurement as a table: wall-clock time and, in brackets, CPU time of each question, and its goal."""
    shown = grid("wall-clock (CPU) time", "in the process", "as a command", "on an empty store", "goal")
    rebuilt = measured["rebuild"]
    rate = f"{rebuilt['runs_per_s']:,} ({rebuilt['runs_per_cpu_s']:,}) runs/s"
    shown.add_row(f"rebuild the index of {measured['runs']:,} runs", rate, "", "", f"≥ {REBUILT_PER_S:,} runs/s")
    for name, seconds in measured["questions"].items():
        command = measured["commands"].get(name, {})
        goal = f"≤ {GOALS[name]} s" if name in GOALS else ""
        shown.add_row(name, _text(seconds), *(_text(command.get(store)) for store in ("store", "empty")), goal)
    for plan in measured["plans"]:
        goal = f"≤ {PLAN_GOALS_S[plan['runs']]:g} s" if plan["runs"] in PLAN_GOALS_S else ""
        compared = _text(plan["expanded"], plan["hashed"], plan["compared"])
        shown.add_row(f"plan of {plan['runs']:,} runs: expand, hash, compare", compared, "", "", goal)
        shown.add_row("– of it, compare", _text(plan["compared"]), "", "", "")
        shown.add_row("– estimates of time and memory", _text(plan["estimated"]), "", "", "")
    shown.add_row("check of all runs", _text(measured["check"]), "", "", "")
    return shown


def _text(*taken: dict[str, float] | None) -> str:
    """The sum of measurements; empty where there is none."""
    known = [each for each in taken if each]
    total = Seconds(sum(each["wall_s"] for each in known), sum(each["cpu_s"] for each in known))
    return str(total) if known else ""
