"""Opens the index's database: SQLite by default, PostgreSQL by URL. Creates and migrates its tables.

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
from urllib.parse import urlsplit, urlunsplit

from pydantic_core import from_json
from sqlalchemy import Connection, Engine, Float, create_engine, event, func, insert, inspect, literal, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import QueuePool
from sqlalchemy.sql import ColumnElement

from cope_sweep.store.errors import StoreError
from cope_sweep.store.index.tables import counters, metadata

HEAD = "0003"
"""The newest migration. A database at this version, or an empty one, needs no alembic, whose import takes 0.2 s."""
BUSY_TIMEOUT_S = 60
"""The time for which a SQLite writer waits for another one."""
NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "fuse", "9p", "afs")
WRITE_LOCK = 0x636F7065
"""The number of PostgreSQL's advisory lock that a writing transaction holds."""


LASTING_ERRORS = {8, 10, 11, 13, 14, 26}
"""SQLite's codes of errors that do not pass by themselves: READONLY, IOERR, CORRUPT, FULL, CANTOPEN, NOTADB."""
RETRY_INTERVAL_S = 0.5
"""Between two tries to reach a database that does not answer."""

T = TypeVar("T")


class IndexUnavailable(StoreError):
    """The database does not answer now; the same request may succeed later."""


class IndexUnusable(IndexUnavailable):
    """The database's file cannot be used: the disk is full, the file is read-only or damaged."""


def waiting(call: Callable[[], T], gives_up: Callable[[float], bool]) -> T:
    """The result of `call`, which is tried until the database answers.

    Args:
        call: Asks the database.
        gives_up: Called with the seconds for which it has not answered; whether to raise the error.

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


def redacted(url: str) -> str:
    """`url` with its password replaced by `***`."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return urlunsplit(parts._replace(netloc=f"{parts.username}:***@{parts.netloc.rpartition('@')[2]}"))


class Database:
    """A connection pool with the tables of the index, at the newest version."""

    def __init__(self, url: str) -> None:
        """Open the database and create or migrate its tables.

        Args:
            url: `sqlite:///PATH`, `sqlite://` (in memory) or `postgresql://USER:PASSWORD@HOST/NAME`.

        Raises:
            StoreError: The URL is not valid, or the database is newer than this version of cope_sweep.
            IndexUnavailable: The database cannot be reached or opened, or its file cannot be used.
        """
        self.url = url
        self.engine = _engine(url)
        self.is_sqlite = self.engine.dialect.name == "sqlite"
        with self.errors():
            self._migrate()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that only reads. Raises StoreError, IndexUnavailable."""
        with self.errors(), self.engine.connect() as connection, connection.begin():
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that writes; it is rolled back where the block raises. Raises StoreError, IndexUnavailable."""
        with self.errors(), self.engine.connect().execution_options(writes=True) as connection, connection.begin():
            if not self.is_sqlite:
                connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": WRITE_LOCK})
            yield connection

    def now_s(self) -> ColumnElement[float]:
        """The present time in seconds since 1970: by the server's clock, which all machines share, if there is one."""
        if self.is_sqlite:
            return literal(time.time(), Float)
        return func.extract("epoch", func.clock_timestamp()).cast(Float)

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turn the errors of the database into StoreError and IndexUnavailable."""
        try:
            yield
        except DBAPIError as error:
            reason = " ".join(str(error.orig).split()) or type(error.orig).__name__
            if getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in LASTING_ERRORS:
                raise IndexUnusable(
                    f"the index {redacted(self.url)} cannot be used: {reason}; mend that, or name another folder "
                    "with --store or another database with --index, and run the same command again"
                ) from error
            raise IndexUnavailable(f"the index {redacted(self.url)} does not answer: {reason}") from error
        except SQLAlchemyError as error:
            raise StoreError(f"the index {redacted(self.url)}: {error}") from error

    def _migrate(self) -> None:
        with self.engine.connect() as connection:
            if _version(connection) == HEAD:
                return
        with self.writing() as connection:
            version = _version(connection)
            if version == HEAD:  # another process was faster
                return
            if version is not None and version > HEAD:
                raise StoreError(
                    f"the index {redacted(self.url)} has version {version}, and this cope_sweep knows {HEAD} at most; "
                    "install the newer version"
                )
            if version is None:
                _create(connection)
            else:
                _upgrade(connection)


def _engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
    except ArgumentError:
        parsed = None
    if parsed is None or parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise StoreError(
            f"{redacted(url)!r} is no index; accepted: sqlite:///PATH and postgresql://USER:PASSWORD@HOST:PORT/NAME"
        )
    if parsed.get_backend_name() == "postgresql":
        try:
            return create_engine(parsed.set(drivername="postgresql+psycopg"), pool_pre_ping=True)
        except (ImportError, NoSuchModuleError) as error:
            raise StoreError(
                "an index in PostgreSQL needs the package psycopg: pip install 'cope-sweep[postgresql]'"
            ) from error
    # A table of 100,000 runs decodes 200,000 short texts; this decoder takes a third of the time of the json module's.
    arguments: dict[str, Any] = {"connect_args": {"timeout": BUSY_TIMEOUT_S}, "json_deserializer": from_json}
    if parsed.database in (None, "", ":memory:"):
        # One connection, which threads take in turns: each new one would be an empty database.
        arguments |= {"pool_size": 1, "max_overflow": 0, "connect_args": {"check_same_thread": False}}
        arguments["poolclass"] = QueuePool
    engine = create_engine(parsed, **arguments)
    journal = "DELETE" if parsed.database and on_network(Path(parsed.database)) else "WAL"

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: object) -> None:
        connection.isolation_level = None  # transactions begin where `begin` below says
        connection.execute(f"PRAGMA journal_mode = {journal}")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def on_network(path: Path) -> bool:
    """Whether a path is on a network file system, by Linux's table of mounts."""
    folder = os.path.realpath(path.parent)
    best, kind = "", ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, mount, file_system, *_ = line.split(" ")
            inside = folder == mount or folder.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, file_system
    return kind.startswith(NETWORK_FILE_SYSTEMS)


def _version(connection: Connection) -> str | None:
    """The migration at which the database is; None for an empty database."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def _create(connection: Connection) -> None:
    """Make the tables of an empty database, as the newest migration has them."""
    metadata.create_all(connection)
    connection.execute(insert(counters).values(name="revision", value=0))
    connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
    connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": HEAD})


def _upgrade(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    command.upgrade(config, HEAD)
