"""Activity in a store at the moment, in a few numbers, and the nodes that sweeps have left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import func, select, update

from cope_sweep.store.event import Status
from cope_sweep.store.index.index import Index
from cope_sweep.store.index.owners import is_gone
from cope_sweep.store.index.summaries import sweep_counts
from cope_sweep.store.index.tables import runs, sweeps


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


def activity(index: Index) -> Activity:
    """The present state: two queries with groups, and one over the runs of running sweeps. Raises StoreError."""
    with index.database.reading() as connection:
        status = index.status_column(connection)
        left_s = func.min(runs.c.expires_s) - index.database.now_s()
        grouped = select(status, func.count(), func.sum(runs.c.step), left_s).group_by(status)
        of_runs = connection.execute(grouped).all()
        of_sweeps = connection.execute(select(sweeps.c.status, func.count()).group_by(sweeps.c.status)).all()
        query = select(sweeps.c.sweep_id, sweeps.c.owner, sweeps.c.left_out).where(sweeps.c.status == "running")
        running = connection.execute(query).all()
    dead = [each for each in running if each.owner and is_gone(each.owner)]
    by_status: Counter[Status] = Counter({row[0]: int(row[1]) for row in of_sweeps})
    if dead:
        by_status.update({"running": -len(dead), "interrupted": len(dead)})
    alive = [each for each in running if each not in dead]
    counts = sweep_counts(index, [each.sweep_id for each in alive]) if alive else {}
    return Activity(
        runs={row[0]: int(row[1]) for row in of_runs},
        steps=sum(int(row[2] or 0) for row in of_runs),
        shortest_lease_s=next((float(row[3]) for row in of_runs if row[0] == "running"), None),
        sweeps={name: number for name, number in by_status.items() if number > 0},
        waiting=sum(each.get("pending", 0) for each in counts.values()),
        left_out=sum(int(each.left_out) for each in alive),
    )


def note_left_out(index: Index, sweep_id: str, nodes: int) -> None:
    """Note how many nodes a sweep has left out. Raises StoreError."""
    with index.database.writing() as connection:
        connection.execute(update(sweeps).where(sweeps.c.sweep_id == sweep_id).values(left_out=nodes))
