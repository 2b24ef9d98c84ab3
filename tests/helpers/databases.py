"""Databases for tests of the index: SQLite files, and a real PostgreSQL server."""

import shutil
import subprocess
import tempfile
import time
import uuid
import warnings
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # XDG_RUNTIME_DIR is not set in containers
    import pgserver


class Postgres:
    """A PostgreSQL server of its own in a temporary folder. It can be stopped and started again."""

    def __init__(self):
        memory = Path("/dev/shm")  # a disk that is slow to synchronise would make every commit slow
        self.folder = Path(tempfile.mkdtemp(prefix="pg-", dir=memory if memory.is_dir() else None))
        self.server = pgserver.get_server(self.folder, cleanup_mode="stop")

    def start(self):
        until = time.monotonic() + 60
        while True:
            try:
                return self.server.ensure_postgres_running()
            except (subprocess.TimeoutExpired, AssertionError):  # it waits for 10 s, and the server goes on to start
                if time.monotonic() > until:
                    raise
                time.sleep(0.5)

    def stop(self):
        """End the server at once, as a crash does."""
        pgserver.pg_ctl(["-w", "-m", "immediate", "stop"], pgdata=self.folder, user=self.server.system_user)

    def new_database(self):
        """The URL of a new, empty database."""
        name = f"test_{uuid.uuid4().hex[:12]}"
        engine = create_engine(self._url("postgres", "postgresql+psycopg"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        engine.dispose()
        return self._url(name)

    def _url(self, name, scheme="postgresql"):
        return self.server.get_uri(database=name).replace("postgresql", scheme, 1)

    def remove(self):
        self.server.cleanup()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def index_url(request, tmp_path):
    """The URL of an empty database, of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'index.db'}"
    return request.getfixturevalue("postgres").new_database()
