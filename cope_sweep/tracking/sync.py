"""Sends everything to MLflow that it lacks of a store: the command `cope-sweep sync`.

MLflow is asked once for all its runs, which takes a server 2 ms per run, and what differs from the index is sent. What
a sweep trains at the moment is left out: it sends that itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from cope_sweep.store import RunRecord, Store, StoreError, SweepSummary
from cope_sweep.store.index import IndexUnavailable
from cope_sweep.store.index.database import sqlite_file
from cope_sweep.tracking.recorder import MAX_FAILURES, RETRY_INTERVAL_S, OnSending
from cope_sweep.tracking.uri import LOG_FILE, TrackingError, check_sqlite, follow_artifacts, import_mlflow

if TYPE_CHECKING:
    from cope_sweep.tracking.send import Seen, Sender


class Synced(NamedTuple):
    """The end of a sync."""

    sent: int
    """Number of runs and sweeps that were sent."""
    left: int | None
    """Number of runs and sweeps that MLflow still lacks; None: it did not answer."""
    reasons: list[str]
    """Why something was not sent, one line each."""


@dataclass
class _Missing:
    """What MLflow lacks."""

    runs: dict[str, RunRecord]
    sweeps: dict[str, SweepSummary]
    failed: set[str] = field(default_factory=set)
    """Runs that were refused before."""

    def __len__(self) -> int:
        return len(self.runs) + len(self.sweeps)


def sync(
    store: Store,
    uri: str,
    on_sending: OnSending = lambda sent, total: None,
    *,
    timeout_s: float = 60.0,
    interrupted: Callable[[], bool] = lambda: False,
    dry_run: bool = False,
) -> Synced:
    """Send what MLflow lacks, and try again as long as there is progress.

    Args:
        store: The store.
        uri: The tracker.
        on_sending: Called after each run and sweep.
        timeout_s: How long to try without sending anything.
        interrupted: Asked before each run whether to end. What has ended in the store is shown as ended by then.
        dry_run: Only count.
    """
    path = sqlite_file(uri)
    is_empty = path is not None and not path.exists()
    missing = _missing(store, {}, {})
    if path is not None and not is_empty and not dry_run:
        check_sqlite(path)
        follow_artifacts(path)
    if not missing or (dry_run and is_empty):
        return Synced(0, len(missing), [])
    import_mlflow(store.root / LOG_FILE)
    from cope_sweep.tracking.send import Sender

    sender: Sender | None = None
    sent, unsent, failed, progress_s = 0, len(missing), set[str](), time.monotonic()
    while True:
        errors: dict[str, str] = {}
        try:
            sender = sender or Sender(store, uri)
            seen = sender.seen_runs(), sender.seen_sweeps()
            missing = _missing(store, *seen)
            missing.failed, unsent = failed, len(missing)
            if dry_run:
                break
            for item in _sending(sender, missing, seen, errors, interrupted):
                sent, unsent, progress_s = sent + 1, unsent - 1, time.monotonic()
                failed.discard(item)
                on_sending(sent, sent + unsent)
        except (TrackingError, StoreError, OSError) as error:
            errors[""] = str(error)
        failed |= errors.keys()
        if interrupted() or not errors or time.monotonic() - progress_s > timeout_s:
            break
        time.sleep(RETRY_INTERVAL_S)
    if sender is not None:
        sender.tracker.close()
    counts = Counter(errors.values())
    reasons = [f"{reason} ({count}×)" if count > 1 else reason for reason, count in counts.items()]
    if unsent and interrupted() and not reasons:
        reasons = [f"interrupted with {unsent} {'runs and sweeps' if unsent > 1 else 'run or sweep'} to send"]
    return Synced(sent, unsent, reasons)


def _missing(store: Store, seen_runs: Mapping[str, Seen], seen_sweeps: Mapping[str, Seen]) -> _Missing:
    """The runs and sweeps that have ended and are not complete in MLflow, which shows what was `seen`."""
    missing, living = _Missing({}, {}), set()
    for sweep in store.index.sweeps():
        seen = seen_sweeps.get(sweep.sweep_id)
        if sweep.status == "running":
            living.add(sweep.sweep_id)
        elif sweep.status != "pending" and not (seen and seen.has_sweep(sweep.status)):
            missing.sweeps[sweep.sweep_id] = sweep
    for run_id, record in store.index.records(store.index.statuses(), values=False).items():
        seen, parent = seen_runs.get(run_id), seen_sweeps.get(record.sweep_id or "")
        has_ended = record.status not in ("running", "pending") and record.sweep_id not in living
        if has_ended and not (seen and seen.has_run(record, parent.tracked_id if parent else None)):
            missing.runs[run_id] = record
    return missing


def _sending(
    sender: Sender,
    missing: _Missing,
    seen: tuple[Mapping[str, Seen], Mapping[str, Seen]],
    errors: dict[str, str],
    interrupted: Callable[[], bool],
) -> Iterator[str]:
    """Send what MLflow lacks, and yield each run and sweep that was sent; `errors` gets the reasons for the others.

    What MLflow shows as running is shown as ended first, so that nothing stays running there wherever this ends.
    """
    seen_runs, seen_sweeps = seen
    for sweep_id in missing.sweeps:
        if sweep_id in seen_sweeps and seen_sweeps[sweep_id].status == "RUNNING":
            sender.end_sweep(sweep_id)
    for run_id, record in missing.runs.items():
        if run_id in seen_runs:
            sender.end_run(seen_runs[run_id], record)
    incomplete, failures = set[str | None](), 0
    runs = sorted(missing.runs, key=lambda run_id: run_id in missing.failed)
    for item in [*runs, *missing.sweeps]:
        if interrupted() or failures == MAX_FAILURES:
            return
        if item in incomplete:  # a sweep whose runs are not all there
            continue
        try:
            if item in missing.runs:
                sender.send_run(item, is_new=item not in seen_runs)
            else:
                sender.send_sweep(item)
        except IndexUnavailable:
            raise
        except (TrackingError, StoreError, OSError) as error:
            errors[item] = str(error)
            incomplete.add(missing.runs[item].sweep_id if item in missing.runs else item)
            failures = failures + 1 if isinstance(error, TrackingError) else failures
        else:
            failures = 0
            yield item
