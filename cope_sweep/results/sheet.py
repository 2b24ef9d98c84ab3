"""A table as plain values: what every drawing of it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cope_sweep.results.stats import Summary


@dataclass(frozen=True)
class Column:
    """A metric of the table."""

    name: str
    label: str
    title: str
    """The label with its unit."""
    goal: Literal["min", "max"]
    unit: str
    decimals: int


@dataclass(frozen=True)
class Stated:
    """A published number."""

    value: float
    std: float | None
    source: str


@dataclass(frozen=True)
class Measured:
    """A metric of a row, ours and the published one."""

    summary: Summary
    published: Stated | None = None
    best: bool = False
    """The best mean among the rows with all their seeds finished."""


@dataclass(frozen=True)
class Line:
    """A row of the plan."""

    row: str
    labels: Mapping[str, str]
    run_ids: tuple[str, ...]
    """All its runs, finished or not, by seed."""
    counts: Mapping[str, int]
    """Status → runs; every status is there."""
    parameters: int | None
    metrics: Mapping[str, Measured]

    @property
    def seeds(self) -> int:
        """Runs that it has when it is complete."""
        return len(self.run_ids)

    @property
    def complete(self) -> bool:
        return self.counts["finished"] == self.seeds

    @property
    def progress(self) -> str:
        """`2/2`, or `1/2: 1 failed`."""
        rest = [f"{n} {status}" for status, n in self.counts.items() if n and status != "finished"]
        return f"{self.counts['finished']}/{self.seeds}" + (f": {', '.join(rest)}" if rest else "")


@dataclass(frozen=True)
class Sheet:
    """An ablation's table."""

    ablation: str
    title: str
    axes: Mapping[str, str]
    """Axis key → short name."""
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
