"""The documented upgrade of an index: a store of one version is opened by the next, and by no older one again."""

import shutil
from pathlib import Path

import pytest

from cope_sweep.store import Store, StoreError
from cope_sweep.store.index import database
from tests.read.tables.ablations import finish
from tests.store.databases import index_url, postgres  # noqa: F401 - fixtures
from tests.tiny import tiny_run

NEXT = '''\
"""A version of tomorrow."""

import sqlalchemy as sa
from alembic import op

revision = "9999"
down_revision = "{head}"


def upgrade() -> None:
    op.add_column("runs", sa.Column("added_tomorrow", sa.Integer(), nullable=True))
'''


@pytest.fixture
def next_version(tmp_path, monkeypatch):
    """Calling it makes this process one of a version whose index has one migration more."""
    package = Path(database.__file__).parent

    def install():
        shutil.copytree(package / "migrations", tmp_path / "next" / "migrations")
        migration = NEXT.format(head=database.HEAD)
        (tmp_path / "next" / "migrations" / "versions" / "v9999_next.py").write_text(migration)
        monkeypatch.setattr(database, "__file__", str(tmp_path / "next" / "database.py"))
        monkeypatch.setattr(database, "HEAD", "9999")

    return install


def test_an_index_is_migrated_one_version_up(tmp_path, index_url, next_version, monkeypatch):  # noqa: F811
    run = tiny_run()
    old = Store(tmp_path / "store", index=index_url, create=True)
    finish(old, run, {"in_dist/token_error": 12.5})
    before = old.index.records([run.run_id])

    next_version()
    new = Store(tmp_path / "store", index=index_url)
    assert new.index.records([run.run_id]) == before
    assert before[run.run_id].status == "finished"

    monkeypatch.undo()
    with pytest.raises(StoreError, match="has version 9999, and this cope_sweep knows"):
        Store(tmp_path / "store", index=index_url).index.records([run.run_id])
