"""The tables of the index.

    runs          one row per run that has started: status, lease, times, final metrics and facts
    parts         the sections of specs (task, model, train, evaluate), each distinct one once, as values by dotted key
                  (`model.layers`); a run names its four. Fields of encodings are there by kind, and by place
    keys          the keys of all parts, final metrics and facts
    sweeps        one row per sweep; the whole record is in `<store>/sweeps/<sweep_id>.json`
    sweep_runs    the runs of a sweep, in order, with row and labels
    counters      the format of these tables, the revision of the last change, and when the index was made

A run that is running has a lease, and so has a sweep: `expires_s` is its end. The sweep that holds the lease of a run
is its `sweep_id`. Runs are filtered and sorted by expressions on the JSON of parts, metrics and facts, see `filters`.
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
    false,
)

FORMAT = 5
"""The number of these tables, kept in `counters`. Increase it with each change: an older index is then made again."""

metadata = MetaData()

Serial = BigInteger().with_variant(Integer, "sqlite")
"""SQLite numbers the rows of a table by itself only where the key is an INTEGER."""

SECTIONS = ("task", "model", "train", "evaluate")
"""The parts of a spec. What is left of it is the seed."""

parts = Table(
    "parts",
    metadata,
    Column("id", Serial, primary_key=True),
    Column("section", String(16), nullable=False),
    Column("digest", String(32), nullable=False, unique=True),
    Column("content", JSON, nullable=False),
)

runs = Table(
    "runs",
    metadata,
    Column("id", Serial, primary_key=True),
    Column("run_id", String(16), nullable=False, unique=True),
    Column("status", String(16), nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("steps", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("worker_id", Text),
    Column("message", Text),
    Column("sweep_id", String(64)),
    Column("created_ms", BigInteger),
    Column("updated_ms", BigInteger),
    Column("ended_ms", BigInteger),
    Column("revision", BigInteger, nullable=False),
    Column("expires_s", Float),
    *(Column(f"{section}_part", Serial, ForeignKey("parts.id")) for section in SECTIONS),
    Column("metrics", JSON, nullable=False),
    Column("facts", JSON, nullable=False),
    Index("runs_by_status", "status"),
    Index("runs_by_id_and_status", "run_id", "status", "expires_s"),
    Index("runs_by_sweep", "sweep_id"),
    Index("runs_by_revision", "revision"),
    *(Index(f"runs_by_{section}", f"{section}_part") for section in SECTIONS),
)

keys = Table(
    "keys",
    metadata,
    Column("id", Serial, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
)

sweeps = Table(
    "sweeps",
    metadata,
    Column("sweep_id", String(64), primary_key=True),
    Column("ablation", Text, nullable=False),
    Column("title", Text, nullable=False),
    Column("status", String(16), nullable=False),
    Column("executor", String(16), nullable=False),
    Column("started_ms", BigInteger, nullable=False),
    Column("ended_ms", BigInteger),
    Column("runs", Integer, nullable=False),
    Column("reused", Integer, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("expires_s", Float),
    Column("stop_requested", Boolean, nullable=False, server_default=false()),
    Column("request_key", String(64), unique=True),
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
