"""Opens the index's database: SQLite by default, PostgreSQL by URL. Creates its tables, or replaces older ones.

Writing transactions, which take about a millisecond, run one after another. In SQLite each locks the file when it
begins (`BEGIN IMMEDIATE`): writers wait for each other instead of failing when they upgrade from a read lock. In
PostgreSQL each takes one advisory lock, so that they cannot deadlock.

In SQLite on a local disk the write-ahead log lets readers go on while a transaction writes. On a network file system,
which cannot share its memory map, the rollback journal is used.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
from pydantic_core import from_json, to_json
from sqlalchemy import Connection, Engine, Float, MetaData, create_engine, event, func, inspect, literal, select, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import QueuePool
from sqlalchemy.sql import ColumnElement

from cope_sweep.redaction import is_ambiguous, redacted, redacted_url, remember
from cope_sweep.store.errors import StoreError
from cope_sweep.store.files import create_database_file, is_disk_full
from cope_sweep.store.index.model import QueryError
from cope_sweep.store.index.tables import FORMAT, has_expired, metadata, runs, sweeps

BUSY_TIMEOUT_S = 60
"""The time for which a SQLite writer waits for another one."""
NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "fuse", "9p", "afs")
WRITE_LOCK = 0x636F7065
"""The number of PostgreSQL's advisory lock that a writing transaction holds."""
ADDING_LOCK = WRITE_LOCK + 1
"""The one of a transaction that looks for a sweep, writes its files and adds it. It may wait for an object store, so it
takes the other lock only at its end: leases are renewed meanwhile."""
IDLE_TIMEOUT_S = 60
"""PostgreSQL ends a writing transaction that asks nothing for this long: its client may have vanished with the lock."""
CONNECTION_LIMITS = {
    "connect_timeout": "10",
    "tcp_user_timeout": "15000",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "2",
}
"""Of libpq: a network that drops packets is an error after about 20 s, and not after the two hours of the system."""
FORMER_TABLES = {"alembic_version", "mirrored", "locks", "part_values", "run_values", "parts", "keys"}
"""Tables of older formats."""

LASTING_ERRORS = {8, 10, 13, 14}
"""SQLite's codes of errors that do not pass by themselves: READONLY, IOERR, FULL, CANTOPEN."""
DAMAGE_ERRORS = {11, 26}
"""SQLite's codes for a file that is not a database, or no longer one: CORRUPT, NOTADB."""
MEASURED_ROWS = 1000
"""Rows of each index from which SQLite estimates the rest."""
RETRY_INTERVAL_S = 0.5
"""Between two tries to reach a database that does not answer."""

T = TypeVar("T")


class IndexUnavailable(StoreError):
    """The database does not answer now; the same request may succeed later."""

    default_code = "not_ready"


class IndexUnusable(IndexUnavailable):
    """The database's file cannot be used: the disk is full, the file is read-only or damaged."""

    default_code = "unusable_index"


class IndexDamagedError(IndexUnusable):
    """The database's file is damaged. The index can be made again."""

    default_code = "damaged_index"


def waiting(call: Callable[[], T], gives_up: Callable[[float], bool]) -> T:
    """The result of `call`, which is tried until the database answers.

    Args:
        call: Asks the database.
        gives_up: Called with the seconds for which it has not answered. If it returns True, the error is raised.

    Raises:
        IndexUnusable: At once.
        IndexUnavailable: `gives_up` says so.
    """
    began_s = time.monotonic()
    while True:
        try:
            return call()
        except IndexUnusable:
            raise
        except IndexUnavailable:
            if gives_up(time.monotonic() - began_s):
                raise
        time.sleep(RETRY_INTERVAL_S)


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file: characters such as `%` and `?`, which mean something in a URL, are escaped."""
    return URL.create("sqlite", database=str(path)).render_as_string()


def sqlite_file(url: str) -> Path | None:
    """The absolute path in `sqlite:///PATH`; None for other URLs, and for a database in memory."""
    if not url.startswith("sqlite:///"):
        return None
    database = make_url(url).database
    return Path(database).absolute() if database not in (None, "", ":memory:") else None


class Database:
    """A connection pool, with the transactions of the index and the errors of its database."""

    def __init__(self, url: str) -> None:
        """Name the database; it is opened when it is used first.

        Args:
            url: `sqlite:///PATH`, `sqlite://` (in memory) or `postgresql://USER@HOST/NAME`.

        Raises:
            StoreError: The URL is not valid.
        """
        remember(url)
        self.url = url
        self.engine = _engine(url)
        self.is_sqlite = self.engine.dialect.name == "sqlite"
        self.refusal: str | None = None
        """Why nothing can be written; None if writing is possible."""

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that only reads. Raises StoreError, IndexUnavailable."""
        with self.errors(), self.engine.connect() as connection, connection.begin():
            yield connection

    @contextlib.contextmanager
    def writing(self, *, lock: int = WRITE_LOCK, idle_s: int = IDLE_TIMEOUT_S) -> Iterator[Connection]:
        """A transaction that writes; it is rolled back where the block raises. Raises StoreError, IndexUnavailable.

        PostgreSQL ends it if the block asks nothing for `idle_s`; 0: never. A block with another `lock` than WRITE_LOCK
        calls `lock` before it writes.
        """
        if self.refusal is not None:
            raise StoreError(self.refusal, code="not_writable")
        with self.errors(), self.engine.connect().execution_options(writes=True) as connection, connection.begin():
            self.lock(connection, lock, idle_s=idle_s)
            yield connection

    def lock(self, connection: Connection, number: int = WRITE_LOCK, *, idle_s: int = IDLE_TIMEOUT_S) -> None:
        """Take one of PostgreSQL's locks until the transaction ends; SQLite has locked its file."""
        if not self.is_sqlite:
            # Rows locked in different orders by two writers would be a deadlock, which one of them pays with an error.
            limit = "set_config('idle_in_transaction_session_timeout', :limit, true)"
            values = {"number": number, "limit": f"{idle_s}s"}
            connection.execute(text(f"SELECT {limit}, pg_advisory_xact_lock(:number)"), values)

    def now_s(self) -> ColumnElement[float]:
        """The present time in seconds since 1970: by the server's clock, which all machines share, if there is one."""
        if self.is_sqlite:
            return literal(time.time(), Float)
        return func.extract("epoch", func.clock_timestamp()).cast(Float)

    def measure_tables(self, connection: Connection) -> None:
        """Let SQLite count what its tables hold, for its choice of indexes; a server does so by itself."""
        if self.is_sqlite:
            # Without counts it looks a status up in the wide rows, although a narrow index has it. The limit bounds
            # the rows that are read, so this takes milliseconds for any store.
            connection.exec_driver_sql(f"PRAGMA analysis_limit = {MEASURED_ROWS}")
            connection.exec_driver_sql("ANALYZE")

    def check_file(self) -> None:
        """Raise IndexDamagedError where a page of SQLite's file is damaged. Reads the whole file."""
        if self.is_sqlite:
            with self.reading() as connection:
                answer = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
            if answer != "ok":
                raise self._damage(" ".join(answer.split()))

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turn the errors of the database into StoreError and IndexUnavailable."""
        try:
            yield
        except DataError as error:  # the database is well: a request has a number or a text that it cannot hold
            reason = " ".join(str(error.orig).split())
            raise QueryError(
                f"a value cannot be searched for: {reason}", code="invalid_value", reason=reason
            ) from error
        except DBAPIError as error:
            reason = redacted(" ".join(str(error.orig).split())) or type(error.orig).__name__
            if is_ambiguous(self.url):
                reason = "write characters such as / and @ in its password as %2F and %40"
            code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
            if code in LASTING_ERRORS and (path := sqlite_file(self.url)) and is_disk_full(path.parent):
                reason = f"the disk of {path.parent} is full, or your quota on it"
            if code in DAMAGE_ERRORS:
                raise self._damage(reason) from error
            if code in LASTING_ERRORS:
                raise IndexUnusable(
                    f"the index {redacted_url(self.url)} cannot be used: {reason}; fix that, or name another folder "
                    "with --store or another database with --index, and run the same command again",
                    index=redacted_url(self.url),
                    reason=reason,
                ) from error
            raise IndexUnavailable(
                f"the index {redacted_url(self.url)} does not answer: {reason}",
                index=redacted_url(self.url),
                reason=reason,
            ) from error
        except SQLAlchemyError as error:
            raise StoreError(f"the index {redacted_url(self.url)}: {error}", index=redacted_url(self.url)) from error

    def _damage(self, reason: str) -> IndexDamagedError:
        return IndexDamagedError(
            f"the index {redacted_url(self.url)} cannot be used: {reason}; `cope-sweep store check --repair` "
            "makes it again from the run folders",
            index=redacted_url(self.url),
            reason=reason,
        )


def _engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # ValueError: a port that is no number, which may be a part of a password
        parsed = None
    if parsed is None or parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise StoreError(
            f"{redacted_url(url)!r} is not an index; accepted: sqlite:///PATH and postgresql://HOST:PORT/NAME; in a "
            "password, write characters such as / and @ as %2F and %40",
            code="unsupported_index",
            index=redacted_url(url),
        )
    if parsed.get_backend_name() == "postgresql":
        try:
            # A server that was started again has closed the connections that the pool still holds: they are tried
            # first.
            parsed = parsed.set(drivername="postgresql+psycopg", query=CONNECTION_LIMITS | dict(parsed.query))
            return create_engine(parsed, pool_pre_ping=True)
        except (ImportError, NoSuchModuleError) as error:
            raise StoreError(
                "an index in PostgreSQL needs the package psycopg; in a checkout: pip install -e '.[postgresql]'",
                code="missing_package",
                package="psycopg",
            ) from error
    # A table of 100,000 runs decodes 200,000 short texts; this decoder takes a third of the time of the json module's.
    # Written without escapes: SQLite finds a key like `größe` only where it is written as it is.
    arguments: dict[str, Any] = {
        "connect_args": {"timeout": BUSY_TIMEOUT_S},
        "json_deserializer": from_json,
        "json_serializer": lambda value: to_json(value).decode(),
    }
    if parsed.database in (None, "", ":memory:"):
        # One connection, which threads take in turns: each new one would be an empty database.
        arguments |= {"pool_size": 1, "max_overflow": 0, "connect_args": {"check_same_thread": False}}
        arguments["poolclass"] = QueuePool
    engine = create_engine(parsed, **arguments)
    journal = "DELETE" if parsed.database and on_network(Path(parsed.database)) else "WAL"

    @event.listens_for(engine, "do_connect")
    def create(*_: object) -> None:
        if parsed.database not in (None, "", ":memory:"):
            create_database_file(Path(parsed.database))

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: object) -> None:
        connection.isolation_level = None  # transactions begin where `begin` below says
        connection.execute(f"PRAGMA journal_mode = {journal}")
        # A power failure may cost the last transactions, which the run folders can restore.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def on_network(path: Path) -> bool:
    """The path is on a network file system, by the machine's table of mounts."""
    folder, best, kind = Path(os.path.realpath(path.parent)), Path("/"), ""
    with contextlib.suppress(OSError):
        # Mounts lie within mounts: the innermost one that contains the folder holds the file.
        for mounted in psutil.disk_partitions(all=True):
            mount = Path(mounted.mountpoint)
            if folder.is_relative_to(mount) and mount.is_relative_to(best):
                best, kind = mount, mounted.fstype
    return kind.startswith(NETWORK_FILE_SYSTEMS)


class OtherFormatError(StoreError):
    """The tables are of another version of cope_sweep, which may use them at the moment."""

    default_code = "other_format"


def is_current(connection: Connection) -> bool:
    """The database has the tables of this version, with what was in the store when they were made."""
    return _format(connection) == FORMAT


def replace_tables(connection: Connection, url: str, now_s: ColumnElement[float]) -> bool:
    """Drop the tables of an older version, and create this version's. Returns whether there were any.

    Raises OtherFormatError.

    A newer version's tables are left alone: its programs may be using them. So are an older version's, while one of its
    sweeps holds a lease.
    """
    old_format = _format(connection)
    if old_format is not None and old_format > FORMAT:
        raise OtherFormatError(
            f"the index {redacted_url(url)} has format {old_format}, of a newer cope_sweep; this one knows {FORMAT}. "
            "Install the newer version, or name another database with --index: it is filled from the run folders",
            code="newer_format",
            index=redacted_url(url),
            format=old_format,
            known=FORMAT,
        )
    if old_format is not None and _is_leased(connection, old_format, now_s):
        raise OtherFormatError(
            f"the index {redacted_url(url)} was made by an older cope_sweep, and one of its sweeps is running; stop "
            "that sweep, or wait for its end, and repeat the command",
            code="older_format_in_use",
            index=redacted_url(url),
        )
    former = MetaData()
    former.reflect(connection, only=lambda name, _: name in FORMER_TABLES or name in metadata.tables)
    former.drop_all(connection)
    metadata.create_all(connection)
    return old_format is not None


def _format(connection: Connection) -> int | None:
    """The format of the tables; 0 of one before formats had numbers; None for an empty database."""
    if not inspect(connection).has_table("counters"):
        return None
    number = connection.execute(text("SELECT value FROM counters WHERE name = 'format'")).scalar()
    return 0 if number is None else int(number)


def _is_leased(connection: Connection, table_format: int, now_s: ColumnElement[float]) -> bool:
    """A run, or a sweep, has a lease in the tables of a format. Runs have one in every format."""
    for table in (runs, sweeps) if table_format else (runs,):
        leased = select(literal(1)).select_from(table).where(table.c.status == "running", ~has_expired(table, now_s))
        if connection.execute(leased.limit(1)).scalar() is not None:
            return True
    return False
