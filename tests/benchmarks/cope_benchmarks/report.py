"""The goals of all benchmarks, what they return, and how it is shown and kept.

A measurement is a dictionary for JSON: `bench`, `machine`, and `rows`, by name. The columns of a row that are texts, numbers or
times are those of its table; a goal names a row and a column, or a row alone, whose number is then in the column `measured`.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
"""By column: a text, a number or the times of a call (`timing.times`), which the table shows; or a dictionary, for JSON alone."""
Measured = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """A limit of what is measured."""

    sign: str
    limit: float
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.sign} {self.limit:g} {self.unit}".rstrip()

    def reached(self, number: float) -> bool:
        return number <= self.limit if self.sign == "≤" else number >= self.limit


OF_SDPA, MEMORY, OF_OURS = "÷ fastest SDPA", "memory ÷ fastest SDPA's", "÷ ours"
README = Path(__file__).parents[1] / "README.md"


def _read_goals() -> dict[str, dict[str, Goal]]:
    """The goals in the table of README.md: by command (`gpu`: `make gpu STAGE=bench`), and by what is measured."""
    goals: dict[str, dict[str, Goal]] = {}
    lines = re.findall(r"^\| `(\w+)` \| (.+?) \| ([≤≥]) (\S+)(?: (\S+))? \|", README.read_text("utf-8"), re.MULTILINE)
    for bench, what, sign, limit, unit in lines:
        goals.setdefault(bench, {})[what] = Goal(sign, float(limit), unit)
    return goals


GOALS = _read_goals()


class Rows:
    """The rows of a measurement on this machine."""

    def __init__(self, bench: str, rows: Mapping[str, Row] | None = None) -> None:
        self.bench, self.machine = bench, machine()
        self.rows = dict(rows or {})

    def add(self, what: str, number: float, unit: str = "", **more: Any) -> None:
        """Add a row of one number."""
        self.rows[what] = {"measured": round(number, 5), "unit": unit, **more}

    def add_rows(self, of: str, rows: Mapping[str, Row]) -> None:
        """Add the rows of one problem."""
        self.rows |= {f"{of}: {name}": row for name, row in rows.items()}

    def measured(self, **more: Any) -> Measured:
        load = [*self.machine["load"], *machine()["load"]]
        return {"bench": self.bench, **more, "machine": self.machine | {"load": load}, "rows": self.rows}


def add_ratios(rows: Mapping[str, Row], column: str, base: str, ratio: str) -> None:
    """Add to the rows the ratios of a column to that of the row `base`, where both have it."""
    numbers = {
        name: row[column]["median_ms"] if isinstance(row[column], Mapping) else row[column]
        for name, row in rows.items()
        if column in row
    }
    if numbers.get(base):
        for name, number in numbers.items():
            rows[name][ratio] = round(number / numbers[base], 3)


def goals(measured: Measured) -> list[tuple[str, Goal, float]]:
    """The goals that were measured: what, limit, and the number. A dry run on a CPU has measured none of a GPU's."""
    if measured["bench"] == "gpu" and "gpu" not in measured["machine"]:
        return []
    numbers: dict[str, float] = {}
    for name, row in measured["rows"].items():
        for column, value in row.items():
            if isinstance(value, int | float):
                numbers[name if column == "measured" else f"{name}: {column}"] = value
    return [(what, goal, numbers[what]) for what, goal in GOALS.get(measured["bench"], {}).items() if what in numbers]


def failed(measured: Measured) -> bool:
    """Whether a goal is missed, or something was not timed because it is wrong."""
    missed = any(not goal.reached(number) for _, goal, number in goals(measured))
    return missed or any("failed" in row for row in measured["rows"].values())


def table(measured: Measured) -> str:
    """The rows in Markdown, and the goals that were measured."""
    cells = {
        name: {column: text for column, value in row.items() if (text := _text(value)) is not None}
        for name, row in measured["rows"].items()
    }
    columns = dict.fromkeys(column for row in cells.values() for column in row)
    rows = [[name, *(row.get(column, "") for column in columns)] for name, row in cells.items()]
    reached = [
        [what, str(goal), f"{number:.4g} {goal.unit}".rstrip(), "yes" if goal.reached(number) else "no"]
        for what, goal, number in goals(measured)
    ]
    parts = [_markdown(["", *columns], rows)]
    return "\n".join(parts + ([_markdown(["goal", "limit", "measured", "reached"], reached)] if reached else []))


def _markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _text(value: Any) -> str | None:
    """A cell of a table; None: it is for JSON alone."""
    if isinstance(value, Mapping):
        if "median_ms" not in value:
            return None
        # Then it was Python that was measured, and not the GPU.
        host_bound = " (host-bound)" if value.get("host_ms", 0.0) > 0.9 * value["median_ms"] else ""
        return f"{_number(value['median_ms'])} ± {_number(value['spread_ms'])}{host_bound}"
    return _number(value) if isinstance(value, int | float) else str(value)


def _number(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def save(folder: Path, name: str, measured: Measured) -> None:
    """Write a measurement to `<name>.json` and its table to `<name>.md`, each as a whole."""
    for suffix, text in (("json", json.dumps(measured, indent=1) + "\n"), ("md", table(measured))):
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
