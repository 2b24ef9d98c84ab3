"""Where the runs of a report come from: commits, versions, machines, commands, dates, seeds and training time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

UNKNOWN = "not recorded"
PROVENANCE_COLUMNS = [
    "status", "seed", "commit", "versions", "cpu", "cores", "system", "command", "created_ms", "ended_ms",
    "facts.wall_s", "facts.device", "facts.threads", "facts.python", "facts.torch",
]  # fmt: skip
"""Columns of a frame of `reports.files` about provenance."""
TIME_TO_LOOK_MS = 10 * 60_000
"""Seeds were added if all earlier runs had ended this long before: somebody may have looked at them."""


@dataclass(frozen=True)
class SeedGroup:
    """Seeds that were trained together."""

    seeds: tuple[int, ...]
    started_ms: int
    """The start of their first run."""


@dataclass(frozen=True)
class Provenance:
    """Where finished runs come from. Lists are sorted by their number of runs."""

    runs: int
    commits: tuple[str, ...]
    """Git commits of the working tree; `-dirty`: with uncommitted changes."""
    versions: tuple[str, ...]
    """`torch 2.15.0`, …"""
    machines: tuple[str, ...]
    """`cpu, 2 threads; AMD EPYC 9B14, 2 cores; Linux`, …"""
    commands: tuple[str, ...]
    """The commands of the sweeps, without options that name folders or hosts."""
    first: str
    """UTC date of the first start of a run: 2026-07-30."""
    last: str
    """UTC date of the last end of a run."""
    compute_s: float
    """Sum of the wall times of the runs, in seconds."""
    seeds: tuple[SeedGroup, ...] = ()
    """The seeds in the order in which they were trained: those after the first group were added."""

    @property
    def lines(self) -> tuple[tuple[str, str], ...]:
        """(name, text) of each item."""
        return (
            ("Commit", ", ".join(self.commits) or UNKNOWN),
            ("Versions", ", ".join(self.versions) or UNKNOWN),
            ("Machine", " / ".join(self.machines) or UNKNOWN),
            ("Runs", f"{self.runs} finished, {self.first} to {self.last}"),
            ("Seeds", seeds_text(self.seeds) or UNKNOWN),
            ("Compute", f"{duration(self.compute_s)} (sum of the wall times of the runs)"),
        )


def provenance(frame: pd.DataFrame) -> Provenance:
    """Provenance of the finished runs in a frame of `reports.files`."""
    runs = frame.reindex(columns=PROVENANCE_COLUMNS).astype(object)
    finished = runs[runs["status"] == "finished"]
    lines = finished.where(finished.notna(), None).to_dict("records")
    return Provenance(
        len(lines),
        _most_frequent_first(line["commit"] for line in lines),
        _most_frequent_first(text for line in lines for text in _versions(line)),
        _most_frequent_first(map(_machine, lines)),
        _most_frequent_first(line["command"] for line in lines),
        _date(min((line["created_ms"] for line in lines if line["created_ms"] is not None), default=None)),
        _date(max((line["ended_ms"] for line in lines if line["ended_ms"] is not None), default=None)),
        float(sum(line["facts.wall_s"] or 0.0 for line in lines)),
        seed_groups(lines),
    )


def seed_groups(lines: Iterable[Mapping[Any, Any]]) -> tuple[SeedGroup, ...]:
    """The seeds of finished runs by when they were trained; runs without times are left out.

    A seed is in a later group if all runs that had started before its first one had ended `TIME_TO_LOOK_MS` earlier.
    """
    times = [(line["created_ms"], line["ended_ms"], line["seed"]) for line in lines]
    groups: list[SeedGroup] = []
    known: set[int] = set()
    last_ms = 0
    for started_ms, ended_ms, seed in sorted(each for each in times if None not in each):
        if seed not in known:
            if not groups or started_ms - last_ms > TIME_TO_LOOK_MS:
                groups.append(SeedGroup((), started_ms))
            groups[-1] = replace(groups[-1], seeds=(*groups[-1].seeds, seed))
        known.add(seed)
        last_ms = max(last_ms, ended_ms)
    return tuple(groups)


def seeds_text(groups: Sequence[SeedGroup]) -> str:
    """`8 (10–17): 5 on 2026-11-24, 3 added on 2026-11-26`; empty without groups."""
    texts: list[str] = []
    day = ""
    for group in groups:
        date = _date(group.started_ms)
        at = time.strftime(" at %H:%M UTC", time.gmtime(group.started_ms / 1000)) if date == day else ""
        texts.append(f"{len(group.seeds)} {'added ' if texts else ''}on {date}{at}")
        day = date
    seeds = sorted(seed for group in groups for seed in group.seeds)
    return f"{len(seeds)} ({_ranges(seeds)}): {', '.join(texts)}" if seeds else ""


def _ranges(numbers: Sequence[int]) -> str:
    """`0, 3–5` for 0, 3, 4, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def duration(seconds: float) -> str:
    """`45 s`, `12 min` or `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def _versions(line: Mapping[Any, Any]) -> Iterable[str]:
    """`torch 2.15.0`, …: versions recorded with the run, or else with the sweep that trained it."""
    versions = dict(text.split(" ", 1) for text in (line["versions"] or "").split(", ") if text)
    for name in ("python", "torch"):
        if line[f"facts.{name}"]:
            versions[name] = line[f"facts.{name}"]
    return (f"{name} {versions[name]}" for name in sorted(versions))


def _machine(line: Mapping[Any, Any]) -> str:
    """The device of a run; processor, cores and system of the machine on which its sweep was started."""
    device, processor = str(line["facts.device"] or ""), ""
    if line["facts.threads"]:
        device += f", {line['facts.threads']} threads"
    if line["cores"]:
        processor = ", ".join(filter(None, (line["cpu"], f"{line['cores']} cores")))
    return "; ".join(filter(None, (device, processor, line["system"])))


def _most_frequent_first(texts: Iterable[Any]) -> tuple[str, ...]:
    counts = Counter(text for text in texts if text)
    return tuple(sorted(counts, key=lambda text: (-counts[text], text)))


def _date(time_ms: int | None) -> str:
    return UNKNOWN if time_ms is None else time.strftime("%Y-%m-%d", time.gmtime(time_ms / 1000))
