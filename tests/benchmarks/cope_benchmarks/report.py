"""The goals of all benchmarks, and what the benchmarks share: tables, files, the machine, and timing in turns.

Needs torch only: `make gpu` runs where little else is installed.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class AtMost:
    limit: float
    unit: str = ""
    sign: ClassVar[str] = "≤"

    def __str__(self) -> str:
        return f"{self.sign} {self.limit:g}{self.unit}"

    def reached(self, number: float) -> bool:
        return number <= self.limit


class AtLeast(AtMost):
    sign = "≥"

    def reached(self, number: float) -> bool:
        return number >= self.limit


OF_SDPA, MEMORY = "time ÷ fastest SDPA", "memory ÷ fastest SDPA"
RATIOS = {"forward": 3.3, "backward_rows": 4, "backward_keys": 4}
GOALS: dict[str, dict[str, AtMost]] = {
    "step": {
        "4 layers × 256, T 511: CoPE, native ÷ SDPA": AtMost(1),
        "a layer of GPT-2's, T 1023: CoPE, native ÷ SDPA": AtMost(1),
    },
    "instructions": {
        **{f"{kernel}, sm_90, head dim {dim}: general ÷ plain": AtMost(limit) for kernel, limit in RATIOS.items() for dim in (64, 128)},
        **{f"{kernel}, sm_90, head dim {dim}: spilled": AtMost(limit, " B") for dim, limit in {64: 0, 128: 64}.items() for kernel in RATIOS},
    },
    "gpu": {
        f"T 4096: {OF_SDPA}": AtMost(1.25),
        f"T 4096: {MEMORY}": AtMost(1.2),
        f"T 1024: {OF_SDPA}": AtMost(2),
        f"T 1024: {MEMORY}": AtMost(1.2),
        f"T 16384: {OF_SDPA}": AtMost(1.1),
        f"T 16384: {MEMORY}": AtMost(1.2),
        f"T 4096, never saturating: {OF_SDPA}": AtMost(3),
        "T 4096, one sequence: time of the paper's listing ÷ ours": AtLeast(10),
        "T 4096, one sequence: time of the listing, torch.compile ÷ ours": AtLeast(4),
    },
    "sweep": {
        "runs of 1 step": AtLeast(25, " runs/s"),
        "runs of 1 step, ÷ a bare Tune trainable": AtLeast(0.8, " ×"),
        "growth of the driver": AtMost(50, " KB/run"),
        "between two runs, of runs of 30 s": AtMost(1, "%"),
        "runs of 50 steps, ÷ a Ray task each": AtLeast(3, " ×"),
        "runs of 50 steps, ÷ a TorchTrainer each": AtLeast(20, " ×"),
        "a training process is killed: until the next step": AtMost(20, " s"),
    },
    "store": {
        "rebuild the index": AtLeast(2000, " runs/s"),
        "list of ablations": AtMost(0.2, " s"),
        "status of sweeps": AtMost(0.2, " s"),
        "page, filtered by model": AtMost(0.2, " s"),
        "page, filtered by metric": AtMost(0.2, " s"),
        "page, sorted by metric": AtMost(0.2, " s"),
        "table of 1,000 runs": AtMost(0.5, " s"),
        "plan of 10,000 runs: expand, hash, compare": AtMost(2, " s"),
        "plan of all runs: expand, hash, compare": AtMost(20, " s"),
        "report of 1,000 runs, beyond its start": AtMost(1, " s"),
        "report of all runs, beyond its start": AtMost(10, " s"),
    },
    "serve": {
        "32 clients ÷ offline": AtLeast(0.9, " ×"),
        "32 clients ÷ one at a time": AtLeast(3, " ×"),
        "added to one request when idle": AtMost(5, " ms"),
        "from the start to ready": AtMost(5, " s"),
        "table of 100 runs ÷ constant route": AtLeast(0.5, " ×"),
        "table of 100 runs, unchanged (304) ÷ constant route": AtLeast(0.8, " ×"),
        "filtered page of runs ÷ constant route": AtLeast(0.3, " ×"),
        "filtered page of runs, computed": AtMost(500, " ms"),
        "table after the end of a run, at most": AtMost(2, " s"),
    },
    "prefill": {},
    "data": {"sequences generated per sequence trained on, the least": AtLeast(10)},
}  # fmt: skip
"""By command (`gpu`: `make gpu STAGE=bench`) and what is measured. tests/benchmarks/README.md shows this table."""


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table in Markdown, whose first `left` columns are left-aligned."""
    lines = [list(heads), ["---"] * left + ["---:"] * (len(heads) - left), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def goals_table(bench: str, numbers: Mapping[str, float]) -> str:
    """The goals of a benchmark as far as they were measured; empty where none was."""
    rows = [
        [what, str(goal), f"{numbers[what]:.4g}{goal.unit}", "yes" if goal.reached(numbers[what]) else "no"]
        for what, goal in GOALS[bench].items()
        if what in numbers
    ]
    return markdown(("goal", "limit", "measured", "reached"), rows) if rows else ""


class Rows:
    """A measurement as rows of a name, a number, and a unit or a text; most benchmarks are one."""

    def __init__(self, bench: str) -> None:
        self.bench = bench
        self.load = [round(os.getloadavg()[0], 1)]
        self.rows: dict[str, dict[str, Any]] = {}

    def add(self, what: str, number: float, unit: str = "", more: str = "") -> None:
        text = f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"
        self.rows[what] = {"number": round(number, 5), "text": text + unit + more}

    def measured(self, **more: Any) -> dict[str, Any]:
        load = [*self.load, round(os.getloadavg()[0], 1)]
        return {"bench": self.bench, **more, "rows": self.rows, "machine": machine() | {"load": load}}


def table_of_rows(measured: Mapping[str, Any]) -> str:
    """The table of a measurement that `Rows` has made: what, measured, goal."""
    goals = GOALS[measured["bench"]]
    rows = [[what, row["text"], str(goals.get(what, ""))] for what, row in measured["rows"].items()]
    return markdown(("what", "measured", "goal"), rows, left=3)


def save(folder: Path, name: str, measured: Mapping[str, Any], table: str) -> None:
    """Write a measurement to `<name>.json` and `<name>.md`."""
    (folder / f"{name}.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(table, encoding="utf-8")


def machine() -> dict[str, Any]:
    """Processor, threads, load and versions, which times depend on."""
    with open("/proc/cpuinfo") as lines:
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "clock": "CPU time" if torch.get_num_threads() == 1 else "wall clock",
        "load": [round(load, 1) for load in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def interleaved(
    steps: Mapping[str, Sequence[Callable[[], Any]]], repetitions: int
) -> dict[str, list[dict[str, float]]]:
    """Time each alternative's phases in ms: median, and spread of the middle half.

    The alternatives take turns, so that a slow moment affects all of them; the first turn is not measured. With one torch
    thread, CPU time is measured.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def ms(phase: Callable[[], Any]) -> float:
        start = clock()
        phase()
        return 1e3 * (clock() - start)

    ways = {(name, n): partial(ms, phase) for name, phases in steps.items() for n, phase in enumerate(phases)}
    taken = in_turns(ways, repetitions)
    return {name: [_summary(taken[name, n]) for n in range(len(phases))] for name, phases in steps.items()}


def in_turns(ways: Mapping[T, Callable[[], float]], turns: int) -> dict[T, list[float]]:
    """What each way returns in so many turns, after one that compiles and starts threads."""
    found: dict[T, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            value = way()
            if turn:
                found[name].append(value)
    return found


def _summary(times: Sequence[float]) -> dict[str, float]:
    quarters = statistics.quantiles(times, n=4)
    return {"median_ms": round(statistics.median(times), 3), "spread_ms": round(quarters[2] - quarters[0], 3)}
