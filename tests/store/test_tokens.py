"""Tokens of sweeps: those of killed sweeps are deleted, and none that may be in use."""

import subprocess
import sys

import pytest

from cope_sweep.store import Store
from cope_sweep.store.tokens import left_tokens, token
from tests.store.index.rows import summary

HOLDS = """
import sys
from cope_sweep.store import Store
from cope_sweep.store.tokens import token

with token(Store(sys.argv[1], create=True), "20260101-000000-aa") as name:
    print(name, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store", create=True)


@pytest.fixture
def other(store):
    """Another process with a token of its sweep."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(store.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def names(store):
    return list(store.names("ray"))


def test_a_token_exists_while_the_sweep_runs(store):
    with token(store, "20260101-000000-bb") as name:
        assert store.read(name)
        assert name.startswith("ray/20260101-000000-bb.")
    assert not (store.root / "ray").exists()


def test_the_next_sweep_deletes_the_token_of_a_killed_one(store, other):
    left = other.stdout.readline().strip()
    other.kill()
    other.wait()
    assert store.read(left)
    with token(store, "20260101-000000-bb") as name:
        assert [f"ray/{each}" for each in names(store)] == [name]
    assert not (store.root / "ray").exists()


def test_a_token_in_use_stays_without_a_lease(store, other):
    """The sweep was suspended, say, and its lease has expired."""
    used = other.stdout.readline().strip()
    with token(store, "20260101-000000-bb"):
        assert store.read(used)
    assert left_tokens(store) == []
    other.communicate("")
    assert not (store.root / "ray").exists()


def test_the_token_of_a_running_sweep_stays_without_a_lock(store):
    """It is locked on another machine, and this one does not see it."""
    store.index.write_sweep(summary("20260101-000000-aa", "running"), [], ttl_s=60)
    for sweep in ("aa", "cc"):
        store.write(f"ray/20260101-000000-{sweep}.0123456789abcdef", b"")
    with token(store, "20260101-000000-bb"):
        assert len(names(store)) == 2
    assert names(store) == ["20260101-000000-aa.0123456789abcdef"]
