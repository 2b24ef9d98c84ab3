"""What a tracker has to do. `MLflowLogger` is the only one; another one would implement the same five methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from cope_sweep.store import RunRecord, StoreError
from cope_sweep.store.index import IndexUnavailable
from cope_sweep.tracking.uri import TrackingError

MAX_FAILURES = 2
"""After a tracker has refused this many runs in a row, it counts as down."""
IN_TRASH = "in the trash"
"""The state of a run that somebody has deleted in the tracker: it stays deleted there."""


class Tracker(Protocol):
    """A copy of a store's runs and sweeps, for browsing.

    Every method may be called again, also after it has failed or its process was killed: nothing is there twice. Each
    raises TrackingError if the tracker does not answer or refuses a request, and StoreError.
    """

    def log_run(self, run_id: str) -> None:
        """Bring the tracker up to date with the folder of a run, which is in training or has ended."""

    def log_sweep(self, sweep_id: str) -> None:
        """Bring the tracker up to date with the record of a sweep, without its runs."""

    def logged(self) -> Mapping[str, str]:
        """Id → the `run_state` of each run, and the status of each sweep, that is there completely and once."""

    def delete_run(self, run_id: str) -> None:
        """Delete a run there. It is another one there when it is trained again."""

    def close(self) -> None:
        """End the connection."""


def run_state(record: RunRecord) -> str:
    """What changes whenever a run ends: its status and the number of its attempt."""
    return f"{record.status} {record.attempt}"


def log_each(
    items: Iterable[str],
    log: Callable[[str], None],
    *,
    stop: Callable[[], bool] = lambda: False,
    on_logged: Callable[[str], None],
) -> dict[str, str]:
    """Call `log` for each run or sweep until `stop`, and return the reasons why some were not logged.

    One that is refused, or whose folder is damaged, keeps no other from being logged. If the tracker is down, the rest
    is left: each try may take as long as a request may.
    """
    errors: dict[str, str] = {}
    failures = 0
    for item in items:
        if stop() or failures == MAX_FAILURES:
            break
        try:
            log(item)
        except IndexUnavailable:
            raise
        except (TrackingError, StoreError, OSError) as error:
            errors[item] = str(error)
            failures += isinstance(error, TrackingError)
        else:
            failures = 0
            on_logged(item)
    return errors
