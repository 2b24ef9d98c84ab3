"""Provenance of the finished runs of a report: commits, versions, machines, commands, dates and time.

It is read from the results of the runs and from the records of the sweeps that trained them last.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cope_sweep.store import RunRecord, Store, SweepRecord
from cope_sweep.store.errors import DamagedError

PRIVATE_OPTIONS = ("--store", "--index", "--mlflow", "--address", "--ablations")
"""Options that name folders, hosts or passwords. They do not change a result, so a report leaves them out."""
UNKNOWN = "not recorded"


@dataclass(frozen=True)
class Provenance:
    """Provenance of some finished runs. Lists are in the order of their number of runs."""

    runs: int
    commits: tuple[str, ...]
    """Git commits of the working tree; `-dirty`: with changes that were not committed."""
    versions: tuple[str, ...]
    """Each like `torch 2.15.0`."""
    machines: tuple[str, ...]
    """Each like `cpu, 2 threads; AMD EPYC 9B14, 2 cores; Linux`."""
    commands: tuple[str, ...]
    """The commands of the sweeps, without options that name folders or hosts."""
    first: str
    """UTC date of the first start of a run, as 2026-07-30."""
    last: str
    """UTC date of the last end of a run."""
    compute_s: float
    """Sum of the wall times of the runs, in seconds."""

    @property
    def lines(self) -> tuple[tuple[str, str], ...]:
        """Name and text of each item."""
        return (
            ("Commit", ", ".join(self.commits) or UNKNOWN),
            ("Versions", ", ".join(self.versions) or UNKNOWN),
            ("Machine", " / ".join(self.machines) or UNKNOWN),
            ("Runs", f"{self.runs} finished, {self.first} to {self.last}"),
            ("Compute", f"{duration(self.compute_s)} (sum of the wall times of the runs)"),
            ("Command", " / ".join(f"`{each}`" for each in self.commands) or UNKNOWN),
        )


def provenance(records: Iterable[RunRecord], store: Store) -> Provenance:
    """Provenance of the finished runs among `records`. Raises StoreError."""
    finished = sorted({each.run_id: each for each in records if each.status == "finished"}.values(), key=_run_id)
    sweeps = sweeps_of(finished, store)
    own = [sweeps.get(each.sweep_id or "") for each in finished]
    return Provenance(
        len(finished),
        _ordered(each.git_commit for each in own if each and each.git_commit),
        _ordered(text for record, sweep in zip(finished, own, strict=True) for text in _versions(record, sweep)),
        _ordered(_machine(record, sweep) for record, sweep in zip(finished, own, strict=True)),
        _ordered(public_command(each.command) for each in own if each),
        _date(min((each.created_ms for each in finished if each.created_ms is not None), default=None)),
        _date(max((each.ended_ms for each in finished if each.ended_ms is not None), default=None)),
        float(sum(each.facts.get("wall_s") or 0.0 for each in finished)),
    )


def sweeps_of(records: Iterable[RunRecord], store: Store) -> dict[str, SweepRecord]:
    """Sweep id → record, of the sweeps that trained these runs last and whose records can be read."""
    ids = sorted({each.sweep_id for each in records if each.sweep_id})
    return {sweep_id: sweep for sweep_id in ids if (sweep := _sweep(store, sweep_id)) is not None}


def public_command(words: Sequence[str]) -> str:
    """A command without the options that name folders, hosts or passwords."""
    kept = ["cope-sweep"]
    rest = iter(words[1:])
    for word in rest:
        if word in PRIVATE_OPTIONS:
            next(rest, None)
        elif not word.startswith(tuple(f"{option}=" for option in PRIVATE_OPTIONS)):
            kept.append(Path(word).stem if word.endswith((".yaml", ".yml")) else word)
    return " ".join(kept)


def duration(seconds: float) -> str:
    """`45 s`, `12 min` or `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def _run_id(record: RunRecord) -> str:
    return record.run_id


def _sweep(store: Store, sweep_id: str) -> SweepRecord | None:
    try:
        return store.sweep(sweep_id)
    except DamagedError:
        return None


def _versions(record: RunRecord, sweep: SweepRecord | None) -> Iterable[str]:
    known = {name: record.facts.get(name) for name in ("python", "torch")}
    known = {**(sweep.versions if sweep else {}), **{name: text for name, text in known.items() if text}}
    return (f"{name} {known[name]}" for name in sorted(known))


def _machine(record: RunRecord, sweep: SweepRecord | None) -> str:
    """The device of a run, and processor, cores and system of the machine that its sweep was started on."""
    facts, found = record.facts, sweep.machine if sweep else {}
    threads = facts.get("threads")
    parts = [str(facts.get("device", "")) + (f", {threads} threads" if threads else "")]
    if found.get("cpus"):
        parts.append(", ".join([*([str(found["cpu"])] if found.get("cpu") else []), f"{found['cpus']} cores"]))
    if found.get("system"):
        parts.append(str(found["system"]))
    return "; ".join(part for part in parts if part)


def _ordered(texts: Iterable[Any]) -> tuple[str, ...]:
    """Distinct texts, the most frequent ones first."""
    counts = Counter(text for text in texts if text)
    return tuple(sorted(counts, key=lambda text: (-counts[text], text)))


def _date(time_ms: int | None) -> str:
    return UNKNOWN if time_ms is None else time.strftime("%Y-%m-%d", time.gmtime(time_ms / 1000))
