"""Errors about unknown runs and sweeps. They suggest ids that start with the same characters."""

from collections.abc import Callable, Sequence

from cope_sweep.errors import NotFoundError
from cope_sweep.store import Store

MAX_SHOWN = 40
"""Maximum number of characters of an unknown id in a message."""
SHORTEST_PREFIX, DAY = 4, 8
"""Minimum number of equal first characters for a suggestion: of a run id, and of a sweep id (its day)."""
MAX_SUGGESTIONS = 3


def no_run(store: Store, name: str) -> NotFoundError:
    """The error about an unknown run."""
    near = _near(store.index.ids_that_begin, name, SHORTEST_PREFIX)
    return NotFoundError(
        f"no run {name[:MAX_SHOWN]!r} in the store {store.location}{_suggestion(near)}; `cope-sweep runs` lists them",
        run_id=name[:MAX_SHOWN],
        near=near,
    )


def no_sweep(store: Store, name: str) -> NotFoundError:
    """The error about an unknown sweep. It suggests sweeps of the same day."""
    near = _near(store.index.sweep_ids_that_begin, name, DAY)
    return NotFoundError(
        f"no sweep {name[:MAX_SHOWN]!r} in the store {store.location}{_suggestion(near)}; `cope-sweep status` lists "
        f"them",
        sweep_id=name[:MAX_SHOWN],
        near=near,
    )


def _near(ids_that_begin: Callable[[str, int], list[str]], name: str, shortest: int) -> list[str]:
    """The ids that share the longest prefix with a name, at least `shortest` characters long."""
    for length in range(min(len(name), MAX_SHOWN), shortest - 1, -1):
        ids = ids_that_begin(name[:length], MAX_SUGGESTIONS)
        if ids:
            return ids
    return []


def _suggestion(near: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(near)}?" if near else ""
