"""Errors about runs and sweeps that a store does not have, which propose ids that begin alike."""

from collections.abc import Callable, Sequence

from cope_sweep.errors import NotFoundError
from cope_sweep.store import Store

SHOWN = 40
"""Characters of an unknown id that a message shows."""
SHORTEST_PREFIX, DAY = 4, 8
"""Characters of ids of runs and of sweeps that have to be equal for a proposal."""
PROPOSED = 3


def no_run(store: Store, name: str) -> NotFoundError:
    """The error about an unknown run."""
    near = _near(store.index.ids_that_begin, name, SHORTEST_PREFIX)
    return NotFoundError(
        f"no run {name[:SHOWN]!r} in the store {store.location}{_proposal(near)}; `cope-sweep runs` lists them",
        run_id=name[:SHOWN],
        near=near,
    )


def no_sweep(store: Store, name: str) -> NotFoundError:
    """The error about an unknown sweep, which proposes those of the same day."""
    near = _near(store.index.sweep_ids_that_begin, name, DAY)
    return NotFoundError(
        f"no sweep {name[:SHOWN]!r} in the store {store.location}{_proposal(near)}; `cope-sweep status` lists them",
        sweep_id=name[:SHOWN],
        near=near,
    )


def _near(ids_that_begin: Callable[[str, int], list[str]], name: str, shortest: int) -> list[str]:
    """The ids that share the longest beginning with a name, of at least `shortest` characters."""
    for length in range(min(len(name), SHOWN), shortest - 1, -1):
        if found := ids_that_begin(name[:length], PROPOSED):
            return found
    return []


def _proposal(near: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(near)}?" if near else ""
