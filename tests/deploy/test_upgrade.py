"""The documented upgrade of an index: a store of one version is opened by the next, and by no older one again."""

import pytest
from sqlalchemy import text

from cope_sweep.store import Store, StoreError
from cope_sweep.store.index.migrations import MIGRATIONS
from tests.store.databases import index_url, postgres  # noqa: F401 - fixtures
from tests.store.sweeps import finish
from tests.tiny import tiny_run


def add_tomorrow(connection):
    """A migration of tomorrow."""
    connection.execute(text("ALTER TABLE runs ADD COLUMN added_tomorrow INTEGER"))


def test_an_index_is_migrated_one_version_up(tmp_path, index_url, monkeypatch):  # noqa: F811
    run = tiny_run()
    old = Store(tmp_path / "store", index=index_url, create=True)
    finish(old, run, {"in_dist/token_error": 12.5})
    before = old.index.records([run.run_id])

    monkeypatch.setitem(MIGRATIONS, "9999", add_tomorrow)  # a version whose index has one migration more
    new = Store(tmp_path / "store", index=index_url)
    assert new.index.records([run.run_id]) == before
    assert before[run.run_id].status == "finished"

    with new.index.database.reading() as connection:
        assert connection.execute(text("SELECT added_tomorrow FROM runs")).scalars().all() == [None]

    monkeypatch.delitem(MIGRATIONS, "9999")
    with pytest.raises(StoreError, match="has version 9999, and this cope_sweep knows"):
        Store(tmp_path / "store", index=index_url).index.records([run.run_id])
