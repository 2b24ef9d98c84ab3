"""A sweep: which runs it trains, its outcome, its record, and how signals stop it."""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cope_sweep.plan import Plan
from cope_sweep.spec import Resources, RunSpec
from cope_sweep.store import Event, RunFolder, Store
from cope_sweep.sweep.executor import ClusterError
from cope_sweep.sweep.sweep import SweepOutcome, stopping_on_signals, sweep
from tests.results.ablations import fail, finish, plan_of

METRICS = {"in_dist/token_error": 12.5, "dense/loss": 0.5}


class Scripted:
    """An executor that enters a given status for each run, instead of training it."""

    def __init__(self, store: Store, statuses: Sequence[str], error: Exception | None = None) -> None:
        self.store, self.statuses, self.error = store, statuses, error
        self.runs: list[RunSpec] = []
        self.plugins: Sequence[str] = ()

    def __call__(
        self,
        runs: Sequence[RunSpec],
        store: Store,
        resources: Resources,
        *,
        on_event: Callable[[Event], None],
        stop: threading.Event,
        plugins: Sequence[str] = (),
    ) -> None:
        self.runs, self.plugins = list(runs), plugins
        for run, status in zip(runs, self.statuses, strict=True):
            match status:
                case "finished":
                    finish(store, run, METRICS)
                case "failed":
                    fail(store, run)
                case "interrupted":
                    folder: RunFolder = store.run(run.run_id)
                    with folder.lock():
                        folder.begin(run, "here")
                        folder.set_state("interrupted")
            on_event(Event(run.run_id, status))  # type: ignore[arg-type]
        if self.error:
            raise self.error


def start(plan: Plan, store: Store, executor: Scripted, **options: Any) -> SweepOutcome:
    return sweep(plan, store, executor, resources=Resources(), executor_name="local", tracking_uri=None, **options)


@pytest.mark.parametrize(
    ("failed", "interrupted", "code"),
    [(0, 0, 0), (2, 0, 1), (0, 3, 130), (2, 3, 130)],
)
def test_exit_codes(failed: int, interrupted: int, code: int) -> None:
    assert SweepOutcome("id", 1, 0, failed, interrupted, 1.0).exit_code == code


def test_a_sweep_trains_unfinished_runs_and_records_the_table(store: Store) -> None:
    plan = plan_of()
    finish(store, plan.runs[0], METRICS)
    fail(store, plan.runs[1])
    executor = Scripted(store, ["finished"] * 5)
    events: list[Event] = []
    outcome = start(plan, store, executor, file_text="title: x", on_event=events.append)
    assert executor.runs == list(plan.runs[1:])
    assert len(events) == 5
    assert (outcome.trained, outcome.reused, outcome.failed, outcome.interrupted) == (5, 1, 0, 0)
    (record,) = store.sweeps()
    assert record["sweep_id"] == outcome.sweep_id
    assert (record["status"], record["file_text"], record["reused"]) == ("finished", "title: x", [plan.runs[0].run_id])
    assert record["ended_ms"] >= record["started_ms"]
    assert "In-dist." in record["table"]["markdown"]
    assert [run["run_id"] for run in record["runs"]] == [run.run_id for row in plan.rows for run in row.runs]


@pytest.mark.parametrize(
    ("statuses", "status", "code"),
    [
        (["finished"] * 5 + ["failed"], "failed", 1),
        (["finished"] * 4 + ["failed", "interrupted"], "interrupted", 130),
        (["finished"] * 5 + ["pending"], "interrupted", 130),
    ],
)
def test_the_record_says_how_a_sweep_ended(store: Store, statuses: list[str], status: str, code: int) -> None:
    plan = plan_of()
    outcome = start(plan, store, Scripted(store, statuses))
    assert outcome.exit_code == code
    assert outcome.trained == statuses.count("finished")
    assert store.sweeps()[0]["status"] == status


def test_failed_runs_are_kept_on_request(store: Store) -> None:
    plan = plan_of()
    for run in plan.runs[1:]:
        finish(store, run, METRICS)
    fail(store, plan.runs[0])
    outcome = start(plan, store, Scripted(store, []), retry_failed=False)
    assert (outcome.sweep_id, outcome.reused, outcome.failed, outcome.exit_code) == (None, 5, 1, 1)
    assert store.sweeps() == []
    assert start(plan, store, Scripted(store, ["finished"])).exit_code == 0


def test_an_error_of_the_executor_is_raised_after_the_sweep_was_recorded(store: Store) -> None:
    plan = plan_of()
    executor = Scripted(store, ["finished"] * 5 + ["pending"], ClusterError("the cluster broke"))
    with pytest.raises(ClusterError, match="the cluster broke"):
        start(plan, store, executor)
    assert store.sweeps()[0]["status"] == "interrupted"
    assert store.sweeps()[0]["table"] is not None


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_the_sweep_to_stop(signum: int) -> None:
    stop = threading.Event()
    before = signal.getsignal(signum)
    with stopping_on_signals(stop):
        os.kill(os.getpid(), signum)
        assert stop.is_set()
        os.kill(os.getpid(), signal.SIGTERM)  # a second one changes nothing
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signum) is before


def test_signal_handlers_are_kept_outside_of_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def run() -> None:
        with stopping_on_signals(threading.Event()):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]
