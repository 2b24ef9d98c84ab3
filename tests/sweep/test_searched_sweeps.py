"""Sweeps of an ablation with a search by suggestions, trained in this process."""

import signal
from typing import Any

from cope_sweep.config import Plan, Resources, Row
from cope_sweep.read.queries import recorded_plan
from cope_sweep.read.tables import table
from cope_sweep.store import Budget, Event, Store
from cope_sweep.sweep.local_executor import run_local
from cope_sweep.sweep.sweep import SweepOutcome, sweep
from tests.read.tables.ablations import plan_of
from tests.tiny import TINY

LEARNING_RATES = {"kind": "optuna", "samples": 4, "space": {"train.lr": {"log_uniform": [1e-4, 1e-2]}}}


def search_of(**changes: Any) -> Plan:
    return plan_of(**{"search": LEARNING_RATES, "seeds": [0]} | changes)


def start(plan: Plan, store: Store, **options: Any) -> SweepOutcome:
    return sweep(
        recorded_plan(plan, store), store, run_local,
        resources=Resources(device="cpu"), executor_name="local", tracking_uri=None, **options,
    )  # fmt: skip


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
    text = table(recorded_plan(plan, store), store).to_markdown()
    assert all(row.labels["train.lr"] in text for row in rows)
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
    (run_id,) = set(ids(rows))
    assert store.index.records([run_id])[run_id].attempt == 2


def test_failed_runs_count_as_failures_and_are_suggested_again(store: Store) -> None:
    plan = search_of(base=TINY | {"train": {"steps": 6, "batch": 4, "lr": 1e30}}, search={
        "kind": "optuna", "samples": 2})  # fmt: skip
    outcome = start(plan, store, budget=Budget(max_failures=1))
    assert (outcome.failed, outcome.not_started, outcome.exit_code) == (1, 1, 130)
    outcome = start(plan, store)
    assert (outcome.failed, outcome.not_started, outcome.exit_code) == (2, 0, 1)
    assert start(plan, store, leave_out={"failed"}).sweep_id is None
    assert start(plan, store, leave_out={"pending", "interrupted", "stopped"}).failed == 2


def test_a_search_with_two_seeds_trains_whole_rows(store: Store) -> None:
    plan = search_of(seeds=[0, 1], search=LEARNING_RATES | {"samples": 2})
    for trained, reused, left in ((1, 0, 3), (1, 1, 2), (2, 2, 0)):
        outcome = start(plan, store, budget=Budget(max_runs=trained))
        assert (outcome.trained, outcome.reused, outcome.not_started) == (trained, reused, left)
    assert [len(row.runs) for row in recorded_plan(plan, store).rows] == [2, 2]
    assert start(plan, store).sweep_id is None
