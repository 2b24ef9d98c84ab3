"""Finds the finished, shorter runs that runs can continue."""

from __future__ import annotations

import time

from cope_sweep.plan.extend import parent_ids
from cope_sweep.spec import RunSpec
from cope_sweep.store import Store

STEPS_ARE_FRESH_S = 10.0
"""How long the numbers of steps that occur in the store are remembered."""


class Parents:
    """The parents of runs in a store. Raises StoreError."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._steps: list[int] = []
        self._read_s = float("-inf")

    def of(self, run: RunSpec) -> str | None:
        """The id of the longest finished run that `run` can continue and that has kept its state; None without one."""
        if time.monotonic() - self._read_s > STEPS_ARE_FRESH_S:
            self._steps, self._read_s = self.store.index.finished_steps(), time.monotonic()
        candidates = parent_ids(run, self._steps)
        statuses = self.store.index.statuses(candidates) if candidates else {}
        finished = (run_id for run_id in candidates if statuses.get(run_id) == "finished")
        return next((run_id for run_id in finished if self.store.run(run_id).has_final_state()), None)
