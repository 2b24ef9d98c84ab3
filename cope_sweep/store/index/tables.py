"""The tables of the index.

    runs          one row per run that has started: status, lease, times; final metrics, facts and spec as JSON
    sweeps        one row per sweep; the whole record is in `<store>/sweeps/<sweep_id>.json`
    sweep_runs    the runs of a sweep, in order, with row and labels
    counters      the format of these tables, the revision of the last change, and when the index was made

A run that is running has a lease, and so has a sweep: `expires_s` is its end. The sweep that holds the lease of a run
is its `sweep_id`. A spec is kept as values by dotted key (`model.layers`); fields of encodings are there by kind, and
by place. Runs are filtered and sorted by the database's functions for JSON, see `filters`: that reads every run, which
takes 0.3 s of CPU for 100,000.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    and_,
    case,
    false,
    literal,
    or_,
)
from sqlalchemy.sql import ColumnElement

FORMAT = 9
"""The number of these tables, kept in `counters`. Increase it with each change: an older index is then made again."""

MAX_INTEGER = 2**63 - 1
"""The largest integer of both databases."""

metadata = MetaData()

SECTIONS = ("task", "model", "train", "evaluate")
"""The sections of a spec. What is left of it is the seed."""

runs = Table(
    "runs",
    metadata,
    # SQLite numbers the rows of a table by itself only where the key is an INTEGER.
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("run_id", String(16), nullable=False, unique=True),
    Column("status", String(16), nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("steps", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("worker_id", Text),
    Column("message", Text),
    Column("tokens_per_s", Float),
    Column("sweep_id", String(64)),
    Column("created_ms", BigInteger),
    Column("updated_ms", BigInteger),
    Column("ended_ms", BigInteger),
    Column("revision", BigInteger, nullable=False),
    Column("expires_s", Float),
    # The wide columns are last: SQLite reads a row up to the column that it needs.
    Column("metrics", JSON, nullable=False),
    Column("facts", JSON, nullable=False),
    Column("spec", JSON, nullable=False),
    # All that `activity` reads: the wide rows of 100,000 runs are 300 MB.
    Index("runs_by_status", "status", "expires_s", "step"),
    # The statuses of many ids, likewise: 20,000 take a third of the time.
    Index("runs_by_id", "run_id", "status", "expires_s"),
    Index("runs_by_sweep", "sweep_id"),
    Index("runs_by_revision", "revision"),
)

sweeps = Table(
    "sweeps",
    metadata,
    Column("sweep_id", String(64), primary_key=True),
    Column("ablation", Text, nullable=False),
    Column("title", Text, nullable=False),
    Column("scale", Text),
    Column("sets", JSON, nullable=False),
    Column("status", String(16), nullable=False),
    Column("executor", String(16), nullable=False),
    Column("started_ms", BigInteger, nullable=False),
    Column("ended_ms", BigInteger),
    Column("runs", Integer, nullable=False),
    Column("reused", Integer, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("expires_s", Float),
    Column("stop_requested", Boolean, nullable=False, server_default=false()),
    # Nodes that cannot train, of a sweep that is executed.
    Column("left_out", Integer, nullable=False, server_default="0"),
    Index("sweeps_by_ablation", "ablation", "started_ms"),
)

sweep_runs = Table(
    "sweep_runs",
    metadata,
    Column("sweep_id", String(64), ForeignKey("sweeps.sweep_id"), primary_key=True),
    Column("ordinal", Integer, primary_key=True),
    Column("run_id", String(16), nullable=False),
    Column("row", Text, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("labels", JSON, nullable=False),
    Column("reused", Boolean, nullable=False),
    Index("sweep_runs_by_run", "run_id", "sweep_id"),
    sqlite_with_rowid=False,  # its rows are small: in the order of their key, without a second copy of it
)

counters = Table(
    "counters",
    metadata,
    Column("name", String(16), primary_key=True),
    Column("value", BigInteger, nullable=False),
)


LONGEST_LEASE_S = 120.0
"""A lease that ends later than this from now is not believed. Sweeps take leases of 20 s."""


def has_expired(table: Table, now_s: ColumnElement[float]) -> ColumnElement[bool]:
    """The run or sweep is running by its row, and its lease has ended: whoever held it has died."""
    # A clock that was a day ahead, and was set right, has left a lease of a day. Who still trains renews it within
    # seconds; the difference to 20 s is for SQLite on a network file system, whose machines' clocks differ a little.
    is_too_long = table.c.expires_s > now_s + LONGEST_LEASE_S
    ended = or_(table.c.expires_s.is_(None), table.c.expires_s <= now_s, is_too_long)
    return and_(table.c.status == "running", ended)


def status_of(table: Table, now_s: ColumnElement[float]) -> ColumnElement[str]:
    """The status of runs or sweeps: one that is running, and whose lease has ended, reads as interrupted.

    Nobody has to write it for that: it is so on every machine at the moment at which the lease ends.
    """
    return case((has_expired(table, now_s), literal("interrupted", String)), else_=table.c.status).label("status")
