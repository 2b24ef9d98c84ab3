"""The suggestions of a sweep, trained in this process."""

import signal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.config import Plan, Resources, Row, RunSpec
from cope_sweep.read.queries import recorded_plan
from cope_sweep.read.tables import table
from cope_sweep.store import Budget, Event, Store
from cope_sweep.sweep.local_executor import run_local
from cope_sweep.sweep.search import Suggestions
from cope_sweep.sweep.sweep import SweepOutcome, sweep
from tests.read.tables.ablations import finish, plan_of, stop
from tests.store.sweeps import write_sweep
from tests.tiny import TINY

METRIC = "in_dist/token_error"
LEARNING_RATES = {"kind": "optuna", "samples": 4, "space": {"train.lr": {"log_uniform": [1e-4, 1e-2]}}}


def search_of(**changes: Any) -> Plan:
    return plan_of(**{"search": LEARNING_RATES, "seeds": [0]} | changes)


def start(plan: Plan, store: Store, **options: Any) -> SweepOutcome:
    return sweep(
        plan, store, run_local, resources=Resources(device="cpu"), executor_name="local", tracking_uri=None, **options
    )


def ids(rows: list[Row]) -> list[str]:
    return [row.runs[0].run_id for row in rows]


def test_a_sweep_trains_what_is_suggested_and_the_next_one_continues(store: Store) -> None:
    plan = search_of()
    rows: list[Row] = []
    seen: list[str] = []

    def on_event(event: Event) -> None:
        assert event.run_id in ids(rows)  # a display knows the row before its first event
        seen.append(event.run_id)

    outcome = start(plan, store, budget=Budget(max_runs=1), on_event=on_event, on_row=rows.append)
    assert (outcome.trained, outcome.not_started, outcome.exit_code) == (1, 3, 130)
    outcome = start(plan, store, on_event=on_event, on_row=rows.append)
    assert (outcome.trained, outcome.reused, outcome.not_started, outcome.exit_code) == (3, 1, 0, 0)
    assert len(set(ids(rows))) == 4
    assert set(seen) == set(ids(rows))
    record = store.sweep(outcome.sweep_id)
    assert [run.run_id for run in record.runs] == ids(rows)
    assert record.reused == ids(rows)[:1]
    assert all(row.labels["train.lr"] in record.table["markdown"] for row in rows)
    assert table(recorded_plan(plan, store), store).to_csv() == record.table["csv"]
    assert start(plan, store).sweep_id is None


def test_an_interrupted_run_is_suggested_again_first(store: Store) -> None:
    plan = search_of(base=TINY | {"train": {"steps": 100_000, "batch": 4}})
    rows: list[Row] = []

    def on_event(event: Event) -> None:
        if event.step:
            signal.raise_signal(signal.SIGTERM)

    for _ in range(2):
        outcome = start(plan, store, on_event=on_event, on_row=rows.append)
        assert (outcome.interrupted, outcome.not_started, outcome.exit_code) == (1, 3, 130)
    (run_id,) = ids(rows)
    assert store.index.records([run_id])[run_id].attempt == 2


def test_failed_runs_count_as_failures_and_are_suggested_again(store: Store) -> None:
    plan = search_of(base=TINY | {"train": {"steps": 6, "batch": 4, "lr": 1e30}}, search={
        "kind": "optuna", "samples": 2})  # fmt: skip
    outcome = start(plan, store, budget=Budget(max_failures=1))
    assert (outcome.failed, outcome.not_started, outcome.exit_code) == (1, 1, 130)
    outcome = start(plan, store)
    assert (outcome.failed, outcome.not_started, outcome.exit_code) == (2, 0, 1)
    assert start(plan, store, leave_out={"failed"}).sweep_id is None
    assert start(plan, store, leave_out={"pending", "interrupted", "stopped", "damaged"}).failed == 2


class Recorder:
    """Suggestions of a plan whose runs nobody trains."""

    def __init__(self, store: Store, plan: Plan, **options: Any) -> None:
        self.rows: list[Row] = []
        self.events: list[Event] = []
        record = write_sweep(store, recorded_plan(plan, store))
        self.suggestions = Suggestions(
            recorded_plan(plan, store), store, record, "owner",
            on_row=self.rows.append, on_event=self.events.append, **options,
        )  # fmt: skip

    @property
    def trials(self) -> list[Any]:
        """What Optuna knows."""
        study: Any = self.suggestions._search.study
        return list(study.trials)


def test_a_run_that_is_known_counts_at_once(store: Store) -> None:
    """A run of another ablation is the same run: it is in the table and is not trained again."""
    run = Recorder(store, search_of()).suggestions.next_run()
    finish(store, run, {METRIC: 1.0})
    second = Recorder(store, search_of(name="other"))
    other = second.suggestions.next_run()
    assert second.suggestions.runs == [run, other]
    assert second.suggestions.left == 2
    assert second.suggestions.record.reused == [run.run_id]
    second.suggestions.publish()
    assert ids(second.rows) == [run.run_id, other.run_id]
    assert [(event.run_id, event.status) for event in second.events] == [(run.run_id, "finished")]


def test_the_last_value_of_a_stopped_run_counts(store: Store) -> None:
    first = Recorder(store, search_of(), early_ends=True)
    run = first.suggestions.next_run()
    stop(store, run)  # at step 3, with an error of 0.5
    first.suggestions.end(run.run_id, "stopped", None)
    first.suggestions.publish()
    again = Recorder(store, search_of(), early_ends=True)
    for each in (first, again):
        (trial,) = each.trials
        assert (trial.state.name, [*trial.intermediate_values.values()]) == ("PRUNED", [0.5])
    assert store.index.records([run.run_id])[run.run_id].value(METRIC) is None


def test_no_run_is_suggested_after_the_sweep_was_stopped(store: Store) -> None:
    recorder = Recorder(store, search_of())
    recorder.suggestions.next_run()
    recorder.suggestions.stop()
    assert recorder.suggestions.next_run() is None
    assert (recorder.suggestions.left, recorder.suggestions.missing) == (3, 3)


@settings(max_examples=20, deadline=None)
@given(order=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=30), samples=st.integers(1, 6))
def test_sweeps_at_the_same_time_suggest_as_many_rows_as_one(
    tmp_path_factory: pytest.TempPathFactory, order: list[tuple[int, bool]], samples: int
) -> None:
    """Whichever asks next, whatever ends when: together they train exactly `samples` runs, and all know them all."""
    store = Store(tmp_path_factory.mktemp("store"), create=True)
    plan = search_of(search=LEARNING_RATES | {"samples": samples})
    recorders = [Recorder(store, plan) for _ in range(3)]
    known: list[list[RunSpec]] = [[], [], []]

    def ask(number: int) -> bool:
        run = recorders[number].suggestions.next_run()
        if run is not None:
            known[number].append(run)
        return run is not None

    def end(number: int) -> None:
        for run in known[number]:
            finish(store, run, {METRIC: 1.0}) if store.status(run.run_id) != "finished" else None
            recorders[number].suggestions.end(run.run_id, "finished", 1.0)

    for number, ends in order:
        end(number) if ends else ask(number)
    for _ in range(2):
        for number in range(3):
            while ask(number):
                pass
            end(number)
    assert [recorder.suggestions.left for recorder in recorders] == [0, 0, 0]
    assert len(recorded_plan(plan, store).rows) == samples
    for recorder in recorders:
        assert {run.run_id for run in recorder.suggestions.runs} == {run.run_id for each in known for run in each}
        assert len(recorder.suggestions.close().runs) == samples
