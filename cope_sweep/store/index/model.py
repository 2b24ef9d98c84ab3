"""Questions to the index and its answers: plain typed data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cope_sweep.config.filters import Filter
from cope_sweep.errors import UserError
from cope_sweep.records import Progress, RunRecord, Status


class QueryError(UserError):
    """A query names something that the index does not have, or compares what cannot be compared."""

    default_code = "invalid_request"


RECORD_COLUMNS = tuple(name for name in RunRecord.model_fields if name not in ("ablations", "row", "values", "spec"))
"""The fields of a record that are columns of the table of runs as they are; a spec is stored by dotted keys."""
REPORTED_COLUMNS = tuple(name for name in Progress.model_fields if name not in ("run_id", "status", "steps", "message"))
"""What a run in training reports. Its status and message are the lease's, and its steps do not change."""


@dataclass(frozen=True)
class RunQuery:
    """A selection of runs, and their order."""

    statuses: tuple[Status, ...] = ()
    """Empty: all."""
    run_ids: tuple[str, ...] | None = None
    """None: all."""
    sweep_id: str | None = None
    filters: tuple[Filter, ...] = ()
    """All have to hold. A run that lacks the key does not match."""
    search_words: tuple[str, ...] = ()
    """Each is at the start of the run's id, or in its message, or in the ablation, its title or the row of a sweep."""
    sort: str | None = None
    """A key as in `Filter`; runs without a value come last. None: in the order of `run_ids`, or of all run ids."""
    descending: bool = False
    limit: int = 100
    offset: int = 0

    @property
    def keeps_order(self) -> bool:
        """It selects by run ids, and statuses at most: its runs are in the order of the ids, or the reverse."""
        selects = self.sweep_id is not None or self.filters or self.search_words
        return self.run_ids is not None and not selects and self.sort is None


@dataclass(frozen=True)
class Lease:
    """The right to train a run, until it expires or is ended."""

    run_id: str
    attempt: int
    """Counts the leases of the run from 1. An older attempt cannot replace files of a newer one."""


Refusal = Literal["leased", "finished"]
"""Why a run was not leased: another sweep trains it, or it is finished."""


@dataclass(frozen=True)
class Renewal:
    """What a sweep learns when it renews its leases."""

    held: frozenset[str]
    """The ids of the runs whose leases it holds."""
    stop_requested: bool


@dataclass(frozen=True)
class SweepPlace:
    """A run's place in a sweep."""

    sweep_id: str
    ablation: str
    started_ms: int
    row: str
    seed: int
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Variant:
    """The runs that sweeps of an ablation had with the same values of `--set`."""

    ablation: str
    scale: str | None
    sets: tuple[str, ...]
    counts: Mapping[Status, int]
    """The present number of its runs by status, each once, in however many sweeps it is."""
    newest_ms: int | None
    """The time of the last change of one of them; None if none has started."""


@dataclass(frozen=True)
class Activity:
    """The present state of all runs and sweeps of an index."""

    runs: Mapping[Status, int]
    """Status → number of runs; a leased one that waits for its worker is pending."""
    steps: int
    """Training steps of all runs: of a running one, those up to its last heartbeat."""
    shortest_lease_s: float | None
    """Seconds until the first lease of a run expires; None if none is leased."""
    sweeps: Mapping[Status, int]
    """Status → number of sweeps. `pending` ones were submitted, and wait for the cluster."""
    waiting: int
    """Runs of the running sweeps that have not started yet."""
    left_out: int
    """Nodes that the running sweeps have left out because they cannot train."""
