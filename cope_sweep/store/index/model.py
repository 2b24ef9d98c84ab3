"""Questions to the index and its answers: plain typed data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from cope_sweep.errors import UserError
from cope_sweep.store.event import Status

Value = bool | int | float | str
Operator = Literal["=", "!=", "<", "<=", ">", ">="]


class QueryError(UserError):
    """A query names something that the index does not have, or compares what cannot be compared."""

    default_code = "invalid_request"


@dataclass(frozen=True)
class RunRecord:
    """One run of the store: a row of the index, made from the run's folder."""

    run_id: str
    status: Status = "pending"
    seed: int = 0
    step: int = 0
    """The last step that is known: of a finished run all of them, of a running one that of the last heartbeat."""
    steps: int = 0
    attempt: int = 0
    worker_id: str | None = None
    message: str | None = None
    """Why the run failed, was stopped or is damaged."""
    sweep_id: str | None = None
    """The sweep that trained it last."""
    created_ms: int | None = None
    updated_ms: int | None = None
    ended_ms: int | None = None
    revision: int = 0
    """Grows with every change of the record; no two changes in a store have the same."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Final metrics of a finished run, under their current names; of a running one those of the last heartbeat."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Parameters, times, device, … of a finished run."""
    spec: Mapping[str, Any] | None = None
    """The run as JSON, where it is written into the index: `RunSpec.model_dump(mode="json")`; None where it is read."""

    @classmethod
    def of(cls, run_id: str, status: Status, spec: Mapping[str, Any], **columns: Any) -> Self:
        """A run as it is written into the index. Seed and steps are those of the spec; 0 where it is damaged."""
        train = spec.get("train")
        seed, steps = (
            value if isinstance(value, int) else 0
            for value in (spec.get("seed"), train.get("steps") if isinstance(train, Mapping) else 0)
        )
        return cls(run_id, status, seed, steps=steps, spec=spec, **columns)

    def value(self, name: str) -> float | None:
        """A metric of the run, or for `facts.<name>` a fact; None if it has none."""
        fact = name.removeprefix("facts.")
        return self.metrics.get(name) if fact == name else self.facts.get(fact)


RECORD_COLUMNS = tuple(name for name in RunRecord.__dataclass_fields__ if name != "spec")
"""The fields that are columns of the table of runs. A spec is stored in parts."""


@dataclass(frozen=True)
class Filter:
    """A condition on a run: `model.layers >= 4`, `test/perplexity < 20`, `status = finished`."""

    key: str
    operator: Operator
    value: Value


Position = tuple[Value | None, ...]
"""A place in the order of a query: the values of the sorted columns, and the run id, of the run that has it.

Two runs never have the same, and it stays valid while other runs arrive or vanish.
"""


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
    words: tuple[str, ...] = ()
    """Each is at the start of the run's id, or in its message, or in the ablation, its title or the row of a sweep."""
    sort: str = "run_id"
    """A key as in `Filter`; runs without a value come last."""
    descending: bool = False
    limit: int = 100
    offset: int = 0
    after: Position | None = None
    """Only runs after this place in the order."""


@dataclass(frozen=True)
class RunPage:
    """A page of the runs that match a query, and how many match."""

    total: int
    """Runs that match, whatever `after` is."""
    runs: list[RunRecord]
    next: Position | None = None
    """The place of the last run of the page; None if no run comes after it."""


@dataclass(frozen=True)
class Lease:
    """The right to train a run, until it expires or is ended."""

    run_id: str
    attempt: int
    """Counts the leases of the run from 1. Files of an older attempt cannot replace those of a newer one."""


@dataclass(frozen=True)
class Refusal:
    """Why a run was not leased."""

    reason: Literal["leased", "finished"]
    sweep_id: str | None = None
    """The sweep that holds the lease, or that finished the run."""
    expires_in_s: float | None = None
    """The time until the lease expires, unless it is renewed."""


@dataclass(frozen=True)
class Renewal:
    """What a sweep learns when it renews its leases."""

    held: frozenset[str]
    """The ids of the runs whose leases it holds."""
    stop_requested: bool


@dataclass(frozen=True)
class Place:
    """A run's place in a sweep."""

    sweep_id: str
    ablation: str
    started_ms: int
    row: str
    seed: int
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Activity:
    """The present state of all runs and sweeps of an index."""

    runs: Mapping[Status, int]
    """Status → number of the runs that were begun."""
    steps: int
    """Training steps of all runs: of a running one, those up to its last heartbeat."""
    shortest_lease_s: float | None
    """Seconds until the first lease of the running runs expires; None if no run is running."""
    sweeps: Mapping[Status, int]
    """Status → number of sweeps. `pending` ones were submitted, and wait for the cluster."""
    waiting: int
    """Runs of the running sweeps that were not begun yet."""
    left_out: int
    """Nodes that the running sweeps have left out because they cannot train."""
