"""Requests of the driver that runs end: the actor that holds them, and the line by which a run asks it.

The actor is a separate process, so this module imports neither Tune nor torch.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cope_sweep.train import StopRequest


@dataclass(frozen=True)
class StopOrder:
    """A request of the driver that a run ends."""

    request: StopRequest
    reason: str = ""
    """Why a scheduler ended the run."""


class StopRequests:
    """An actor of the driver: which runs have to end. It ends with the driver."""

    def __init__(self) -> None:
        self._all = False
        self._reasons: dict[str, str] = {}

    def stop_all(self) -> None:
        """Interrupt every run."""
        self._all = True

    def stop_run(self, run_id: str, reason: str) -> None:
        """End a run early, as a scheduler wants it."""
        self._reasons[run_id] = reason

    def order(self, run_id: str) -> StopOrder | None:
        """What a run was asked to do; None: to go on."""
        if self._all:
            return StopOrder("interrupted")
        reason = self._reasons.get(run_id)
        return None if reason is None else StopOrder("stopped", reason)


class StopLine:
    """Asks the driver, without waiting for the answer, whether a run has to end."""

    def __init__(self, actor: Any, run_id: str) -> None:
        self.order: StopOrder | None = None
        """The order, once it has arrived."""
        self._actor, self._run_id = actor, run_id
        self._asked_s = float("-inf")
        self._answer: Future[StopOrder | None] | None = None

    def ask(self, *, every_s: float = 0.0) -> None:
        """Ask, unless the last question was not answered yet, or asked less than `every_s` ago."""
        if self._answer is not None or time.monotonic() - self._asked_s < every_s:
            return
        self._asked_s = time.monotonic()
        self._answer = self._actor.order.remote(self._run_id).future()
        self._answer.add_done_callback(self._receive)

    def _receive(self, answer: Future[StopOrder | None]) -> None:
        self._answer = None
        try:
            self.order = answer.result() or self.order
        except Exception:  # the actor has died, and so has the driver
            self.order = StopOrder("interrupted")
