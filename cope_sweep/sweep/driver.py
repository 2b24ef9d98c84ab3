"""The driver of a sweep: which run is next, who has its lease, how far it is, and how it has ended.

Both executors ask it for runs and report to it what becomes of them. A run is in one of four states:

    WAITING ────take────▶ TRAINING ──end──▶ ENDED
      ▲  │                 │    ▲
      │  └──refused──▶ ELSEWHERE │          another sweep has the lease
      │                 │  │     │
      └────given up─────┘  └──ended there──▶ ENDED
      └──────wait_again────┘                its process died, or left its node

All of its writing goes to the index; the run's folder is written by the process that trains the run.
"""

from __future__ import annotations

import enum
import queue
import threading
from collections import Counter, deque
from dataclasses import dataclass

from cope_sweep.config import Row, RunSpec
from cope_sweep.store import ENDED, Event, Lease, RunRecord, Store, StoreError
from cope_sweep.store.index import IndexUnavailable, IndexUnusable
from cope_sweep.store.reading import is_readable, read_run
from cope_sweep.sweep.executor import Workload

WAITS_FOR_INDEX = "the index does not answer: waiting for it"


class RunState(enum.Enum):
    """Where a run is in the sweep."""

    WAITING = "to be leased"
    TRAINING = "leased, and handed to a process that trains, or that will"
    ELSEWHERE = "leased by another sweep"
    ENDED = "nothing is left to do in this sweep"


@dataclass
class DrivenRun:
    """A run of the sweep."""

    spec: RunSpec
    state: RunState = RunState.WAITING
    attempt: int = 0
    """The number of its lease."""

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self.spec.run_id


class Driver:
    """The runs of a sweep and their states. Thread-safe: Ray's executor asks for runs in Tune's thread."""

    def __init__(self, work: Workload) -> None:
        """Nothing is leased yet."""
        self.work, self.store, self.leases, self.search = work, work.store, work.leases, work.search
        self.store.wait_out_outages()
        self.lock = threading.RLock()
        self.runs: dict[str, DrivenRun] = {}
        self.counts: Counter[RunState] = Counter()
        """State → number of runs."""
        self.waiting: deque[DrivenRun] = deque()
        """The runs that wait, in order."""
        self.failed: set[str] = set()
        """Ids of the failed runs. A run counts before its end is recorded, so that no other one starts in between."""
        self._suggested: Row | None = None
        """A row of the search that is not recorded yet, because the index did not answer."""
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        """What `flush_events` reports to the caller: a display or a log need not be thread-safe."""
        self._index_is_away = False
        """It did not answer when it was asked last."""
        self._shown = ""
        """The last note about what the sweep waits for, without digits."""
        for run in self._unfinished():
            self.add(run)

    def _unfinished(self) -> list[RunSpec]:
        """The runs that are not finished, in order and without duplicates."""
        distinct = {run.run_id: run for run in self.work.runs}
        statuses = self.leases.waiting(lambda: self.store.index.statuses(distinct))
        return [run for run_id, run in distinct.items() if statuses.get(run_id) != "finished"]

    # -- the next run ----------------------------------------------------------------------------------------------

    def add(self, spec: RunSpec) -> DrivenRun:
        """Have another run wait."""
        with self.lock:
            run = self._new(spec)
            self.waiting.append(run)
            return run

    def _new(self, spec: RunSpec) -> DrivenRun:
        run = self.runs[spec.run_id] = DrivenRun(spec)
        self.counts[run.state] += 1
        return run

    def wait_again(self, run: DrivenRun) -> None:
        """Let a run wait again, before the others: it has started, and nobody trains it now."""
        with self.lock:
            self._move(run, RunState.WAITING)
            self.waiting.appendleft(run)

    def take(self) -> DrivenRun | None:
        """Lease the next run that waits, or else the first of the row that the search suggests next.

        Returns None while no run can be leased.
        """
        with self.lock:
            run = self._take_waiting()
            if run is None and self.suggest():
                run = self._take_waiting()
            return run

    def _take_waiting(self) -> DrivenRun | None:
        with self.lock:
            while self.waiting and not self.is_draining:
                run = self.waiting.popleft()
                try:
                    lease = self.leases.acquire(run.spec)
                except IndexUnusable:
                    raise
                except IndexUnavailable:
                    # No wait here: Tune's thread would stand still, and with it the results of other trials.
                    self.waiting.appendleft(run)
                    self._index_is_away = True
                    return None
                self._index_is_away = False
                if isinstance(lease, Lease):
                    run.attempt = lease.attempt
                    self._move(run, RunState.TRAINING)
                    return run
                if lease == "finished":
                    self._end(run, end_record(self.store, run.run_id))
                else:
                    self._move(run, RunState.ELSEWHERE)
            return None

    def suggest(self) -> bool:
        """Queue the runs of the search's next row, if no run waits. Returns False if it has none yet."""
        with self.lock:
            while self.search is not None and not self.is_draining and not self.waiting:
                try:
                    row = self._suggested = self._suggested or self.search.next_row()
                    if row is None:
                        return False
                    # Recorded before a run of it is leased: if this process dies then, the next sweep finds the row.
                    self.work.callbacks.on_row(row)
                except IndexUnusable:
                    raise
                except IndexUnavailable:
                    self._index_is_away = True
                    return False
                self._suggested = None
                to_train = self.search.runs_to_train(row)
                for spec in to_train:
                    self.add(spec)
                for spec in row.runs:
                    if spec not in to_train:
                        self._end(self._new(spec), end_record(self.store, spec.run_id), is_earlier=True)
            return bool(self.waiting)

    @property
    def is_draining(self) -> bool:
        """No more runs are started: the sweep was stopped, or too many runs have failed."""
        limit = self.work.max_failed_runs
        return self.work.stop.is_set() or (limit is not None and len(self.failed) >= limit)

    @property
    def may_suggest(self) -> bool:
        """The search may still suggest a row, now or after a run has ended."""
        return self.search is not None and (self._suggested is not None or not self.search.is_exhausted)

    @property
    def is_over(self) -> bool:
        """Every run has ended and was reported, or the sweep drains and none is in training."""
        with self.lock:
            if self.counts[RunState.TRAINING] or not self.events.empty():
                return False
            waits = self.counts[RunState.WAITING] or self.counts[RunState.ELSEWHERE] or self.may_suggest
            return self.is_draining or not waits

    # -- progress and ends -----------------------------------------------------------------------------------------

    def report(self, event: Event) -> None:
        """A run in training has come as far as `event` says. From any thread.

        The index gets it with the next renewal, the search now, and the caller with the next `flush_events`.
        """
        self.leases.report(event)
        self.events.put(event)
        if self.search is not None and event.evaluated and self.search.metric in event.metrics:
            with self.lock:
                self.search.report(event.run_id, event.step, event.metrics[self.search.metric])

    def end(self, run: DrivenRun, last: Event | None = None) -> None:
        """Record how a run in training has ended, by its folder; call `flush_events` then.

        A run that is not over waits again, unless the sweep is stopped; one whose lease another sweep has got is left
        to that one. `last` is its last event: a failure that its process could not record is recorded here.

        Raises:
            StoreError: The failure cannot be recorded here, either: the disk is full.
        """
        # Its process could not write to its folder, on a full disk say: the event alone has the reason.
        if last is not None and last.status == "failed" and self.store.run(run.run_id).status == "running":
            message = last.message or "failed"
            self._record_failure(run, message, message, keep_recorded=True)
        record = self.leases.end(run.run_id)
        with self.lock:
            if record is None:
                self._move(run, RunState.ELSEWHERE)
            elif record.status in ENDED or self.work.stop.is_set() or not is_readable(self.store.run(run.run_id)):
                # What an attempt has just written, and nobody can read, would be written by the next one, too.
                self._end(run, record)
            else:
                self.wait_again(run)

    def fail(self, run: DrivenRun, message: str, details: str, *, keep_recorded: bool = False) -> None:
        """Record that a run failed, instead of its process, and end its lease: see `RunFolder.record_failure`.

        Raises:
            StoreError: The run's folder cannot be written.
        """
        self._record_failure(run, message, details, keep_recorded=keep_recorded)
        self.end(run)

    def _record_failure(self, run: DrivenRun, message: str, details: str, *, keep_recorded: bool) -> None:
        folder = self.store.run(run.run_id).of_sweep(self.leases.sweep_id)
        try:
            folder.record_failure(run.spec, run.attempt, message, details, keep_recorded=keep_recorded)
        except OSError as error:
            path = str(folder.path)
            raise StoreError(
                f"{path}: cannot be written ({error.strerror or error})", code="not_writable", file=path
            ) from error

    def give_up(self, run: DrivenRun) -> None:
        """End the lease of a run that no process has started, or whose process did not answer in time."""
        record = self.leases.end(run.run_id)
        if record is None or record.attempt < run.attempt:  # its folder says how an earlier attempt ended
            record = RunRecord(run_id=run.run_id)
        with self.lock:
            self._end(run, record)

    def flush_events(self) -> None:
        """Call `on_event` with the events since the last call. In the caller's thread; raises whatever it raises."""
        while True:
            try:
                event = self.events.get_nowait()
            except queue.Empty:
                return
            self.work.callbacks.on_event(event)

    def _end(self, run: DrivenRun, record: RunRecord, *, is_earlier: bool = False) -> None:
        """`is_earlier`: it ended before this sweep, whose budget of failed runs it does not use."""
        self._move(run, RunState.ENDED)
        if record.status == "pending":  # no process has started it
            return
        if record.status == "failed" and not is_earlier:
            self.failed.add(run.run_id)
        if self.search is not None and record.status in ENDED:
            self.search.end(run.run_id)
        self.events.put(Event.of(record, run.spec.train.steps))

    def _move(self, run: DrivenRun, state: RunState) -> None:
        self.counts[run.state] -= 1
        self.counts[state] += 1
        run.state = state

    # -- runs of other sweeps --------------------------------------------------------------------------------------

    def look_elsewhere(self) -> None:
        """Notice which runs other sweeps have ended or given up, and show for what this sweep waits.

        Raises IndexUnusable, and whatever `on_note` raises.
        """
        text = WAITS_FOR_INDEX if self._index_is_away else None
        try:
            waiting_for = self._look_elsewhere()
            text = text or (None if self.counts[RunState.TRAINING] else waiting_for)
        except IndexUnusable:
            raise
        except IndexUnavailable:
            text = WAITS_FOR_INDEX
        # Without its digits, the note is the same every second, while the time in it counts down.
        without_digits = "".join(character for character in text or "" if not character.isdigit())
        if text is not None and without_digits != self._shown:
            self.work.callbacks.on_note(text)
        self._shown = without_digits

    def _look_elsewhere(self) -> str | None:
        """Returns a note if the sweep can only wait: for which sweeps, and how long. Raises IndexUnavailable."""
        with self.lock:
            other_sweeps = []
            if self.counts[RunState.ELSEWHERE]:
                other_sweeps = [run for run in self.runs.values() if run.state is RunState.ELSEWHERE]
        if not other_sweeps:
            return None
        statuses = self.store.index.statuses([run.run_id for run in other_sweeps])
        self._index_is_away = False
        unfinished = []
        for run in other_sweeps:
            status = statuses.get(run.run_id, "pending")
            if status == "running":
                unfinished.append(run)
            elif status in ENDED:
                with self.lock:
                    self._end(run, end_record(self.store, run.run_id))
            else:
                self.wait_again(run)
        return self._waiting_for(unfinished) if unfinished and len(unfinished) == len(other_sweeps) else None

    def _waiting_for(self, runs: list[DrivenRun]) -> str:
        holders = self.store.index.leases([run.run_id for run in runs])
        sweeps = sorted({sweep_id for sweep_id, _ in holders.values()})
        soonest_s = min((expires_in_s for _, expires_in_s in holders.values()), default=0.0)
        number = "a run that is" if len(runs) == 1 else f"{len(runs)} runs that are"
        return (
            f"waiting for {number} trained by the sweep {', '.join(sweeps)}; if its process has died, "
            f"the next one is free in {max(0.0, soonest_s):.0f} s"
        )


def end_record(store: Store, run_id: str) -> RunRecord:
    """The record of a run that nobody trains, by its folder."""
    return read_run(store.run(run_id)) or RunRecord(run_id=run_id)
