"""Tokens of sweeps on Ray: each is a file in the store by which a sweep's processes recognise that they see it.

A sweep that is killed cannot delete its token. The next one does: it is unlocked then, and of no sweep that is running.
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
from collections.abc import Iterator

from cope_sweep.store.errors import StoreError
from cope_sweep.store.store import Store

FOLDER = "ray"
CONTENT = b"A sweep is running. Its workers check for this file to know that they see the store.\n"


@contextlib.contextmanager
def token(store: Store, sweep_id: str) -> Iterator[str]:
    """The name of a token, which exists during the block. Deletes those that killed sweeps left. Raises StoreError."""
    with contextlib.suppress(StoreError):  # a sweep waits for its index
        for left in left_tokens(store):
            _delete(store, left)
    name = f"{FOLDER}/{sweep_id}.{secrets.token_hex(8)}"
    store.write(name, CONTENT)
    try:
        with _locked(store, name):
            yield name
    finally:
        _delete(store, name)
        with contextlib.suppress(OSError):
            (store.root / FOLDER).rmdir()


def _delete(store: Store, name: str) -> None:
    with contextlib.suppress(StoreError, OSError):
        store.delete(name)


def left_tokens(store: Store) -> list[str]:
    """The names of the tokens of sweeps that were killed. Raises StoreError."""
    running = {sweep.sweep_id for sweep in store.index.sweeps({"running"})}
    names = [f"{FOLDER}/{name}" for name in store.names(FOLDER)]
    return [name for name in names if not _may_be_used(store, name, running)]


def _may_be_used(store: Store, name: str, running: set[str]) -> bool:
    if name.removeprefix(f"{FOLDER}/").rpartition(".")[0] in running:
        return True
    # A sweep that was suspended, or that waits for its index, may have no lease and go on later.
    return _is_locked(store, name)


@contextlib.contextmanager
def _locked(store: Store, name: str) -> Iterator[None]:
    """Lock a token, which the kernel unlocks when the process dies. Does nothing where files cannot be locked."""
    if store.objects:
        yield
        return
    with (store.root / name).open("rb") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _is_locked(store: Store, name: str) -> bool:
    if store.objects:
        return False
    try:
        with (store.root / name).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
