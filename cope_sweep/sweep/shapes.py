"""The shapes of a sweep's worker groups: the kinds of resources that its runs ask for, numbered."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from cope_sweep.spec import Resources


class Shapes:
    """The kinds of resources of a sweep, in the order in which they are met. Number 0 is that of most runs."""

    def __init__(self, common: Resources, own: Mapping[str, Resources] | None = None) -> None:
        """Create the list.

        Args:
            common: The resources of the runs that have none of their own.
            own: Run id → resources. It may grow while a search suggests runs.
        """
        self.resources = [common]
        self._own = {} if own is None else own
        self._numbers: dict[Resources, int] = {common: 0}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.resources)

    def of(self, run_id: str) -> int:
        """The number of the shape of a run. From any thread."""
        resources = self._own.get(run_id)
        if resources is None:
            return 0
        resources = resources.model_copy(update={"groups": self.resources[0].groups})
        with self._lock:
            if resources not in self._numbers:
                self._numbers[resources] = len(self.resources)
                self.resources.append(resources)
            return self._numbers[resources]
