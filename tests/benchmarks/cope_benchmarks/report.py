"""The goals of all benchmarks, and what they return: a dictionary for JSON, of which tables are made.

Each benchmark has a function `measure`, whose result has the keys `bench`, `machine` and `rows`. The rows of most are those
of `Rows`; modules whose tables have other columns have functions `table` and `numbers` like those here.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

Measured = dict[str, Any]


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
        for what, goal in GOALS.get(bench, {}).items()
        if what in numbers
    ]
    return markdown(("goal", "limit", "measured", "reached"), rows) if rows else ""


class Rows:
    """A measurement as rows of a name, a number, and a unit or a text."""

    def __init__(self, bench: str) -> None:
        self.bench, self.machine = bench, machine()
        self.rows: dict[str, dict[str, Any]] = {}

    def add(self, what: str, number: float, unit: str = "", more: str = "") -> None:
        text = f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"
        self.rows[what] = {"number": round(number, 5), "text": text + unit + more}

    def measured(self, **more: Any) -> Measured:
        load = [*self.machine["load"], *machine()["load"]]
        return {"bench": self.bench, **more, "rows": self.rows, "machine": self.machine | {"load": load}}


def table(measured: Measured) -> str:
    """The table of a measurement that `Rows` has made: what, measured, goal."""
    goals = GOALS[measured["bench"]]
    rows = [[what, row["text"], str(goals.get(what, ""))] for what, row in measured["rows"].items()]
    return markdown(("what", "measured", "goal"), rows, left=3)


def numbers(measured: Measured) -> dict[str, float]:
    """What was measured, by the names of the goals."""
    return {what: row["number"] for what, row in measured["rows"].items()}


def save(folder: Path, name: str, measured: Measured, table: str) -> None:
    """Write a measurement to `<name>.json` and `<name>.md`, each as a whole."""
    for suffix, text in (("json", json.dumps(measured, indent=1) + "\n"), ("md", table)):
        (folder / f"{name}.{suffix}.new").write_text(text, encoding="utf-8")
        (folder / f"{name}.{suffix}.new").replace(folder / f"{name}.{suffix}")


def machine(device: str = "cpu") -> dict[str, Any]:
    """The processor or the GPU, threads, load and versions, which times depend on."""
    with open("/proc/cpuinfo") as lines:
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    found: dict[str, Any] = {
        "processor": names[0] if names else platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "clock": "CPU time" if torch.get_num_threads() == 1 else "wall clock",
        "load": [round(os.getloadavg()[0], 1)],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device == "cuda":
        import triton  # type: ignore[import-untyped]

        gpu = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "memory_gib": round(gpu.total_memory / 2**30, 1),
            "cuda": torch.version.cuda, "triton": triton.__version__,
        }  # fmt: skip
    return found
