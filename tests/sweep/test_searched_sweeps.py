"""Sweeps of an ablation with a search by suggestions, trained in this process."""

import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest

from cope_sweep.config import Plan, Resources, Row, load_ablation, plan_of_recorded
from cope_sweep.read.queries import recorded_plan
from cope_sweep.read.tables import table
from cope_sweep.store import Budget, Event, Store
from cope_sweep.store.indexing import refresh_index
from cope_sweep.sweep.executor import Callbacks
from cope_sweep.sweep.local_executor import run_local
from cope_sweep.sweep.search import RUN_ID, study_name, study_url
from cope_sweep.sweep.sweep import Sweep, SweepOutcome
from tests.helpers.databases import index_url  # noqa: F401 - a fixture
from tests.helpers.fault_sweeps import LONG, RUN, is_training, until
from tests.helpers.finished_runs import plan_of
from tests.helpers.tiny import TINY

LEARNING_RATES = {"kind": "optuna", "samples": 4, "space": {"train.lr": {"log_uniform": [1e-4, 1e-2]}}}


def search_of(**changes: Any) -> Plan:
    return plan_of(**{"search": LEARNING_RATES, "seeds": [0]} | changes)


def start(plan: Plan, store: Store, **options: Any) -> SweepOutcome:
    plan, cpu = recorded_plan(plan, store), Resources(device="cpu")
    return Sweep(plan, store, run_local, executor_name="local", resources=cpu, **options).run()


def ids(rows: list[Row]) -> list[str]:
    return [row.runs[0].run_id for row in rows]


def test_a_sweep_trains_what_is_suggested_and_the_next_one_continues(store: Store) -> None:
    plan = search_of()
    rows: list[Row] = []
    seen: list[str] = []

    def on_event(event: Event) -> None:
        assert event.run_id in ids(rows)  # a display knows the row before its first event
        seen.append(event.run_id)

    callbacks = Callbacks(on_event=on_event, on_row=rows.append)
    outcome = start(plan, store, budget=Budget(max_runs=1), callbacks=callbacks)
    assert (outcome.trained, outcome.not_started, outcome.exit_code) == (1, 3, 130)
    outcome = start(plan, store, callbacks=callbacks)
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
        outcome = start(plan, store, callbacks=Callbacks(on_event=on_event, on_row=rows.append))
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


def test_failed_runs_of_an_earlier_sweep_use_no_budget(store: Store) -> None:
    """They are in a row that is suggested again for its other seed."""
    plan = search_of(base=TINY | {"train": {"steps": 6, "batch": 4, "lr": 1e30}}, seeds=[0, 1], search={
        "kind": "optuna", "samples": 2})  # fmt: skip
    assert start(plan, store, budget=Budget(max_runs=1)).failed == 1
    outcome = start(plan, store, leave_out={"failed"}, budget=Budget(max_failures=1))
    assert (outcome.failed, outcome.not_started) == (2, 2)


def test_a_search_with_two_seeds_trains_whole_rows(store: Store) -> None:
    plan = search_of(seeds=[0, 1], search=LEARNING_RATES | {"samples": 2})
    for trained, reused, left in ((1, 0, 3), (1, 1, 2), (2, 2, 0)):
        outcome = start(plan, store, budget=Budget(max_runs=trained))
        assert (outcome.trained, outcome.reused, outcome.not_started) == (trained, reused, left)
    assert [len(row.runs) for row in recorded_plan(plan, store).rows] == [2, 2]
    assert start(plan, store).sweep_id is None


def test_rows_that_wait_are_counted_run_by_run(store: Store) -> None:
    plan = search_of(seeds=[0, 1], search=LEARNING_RATES | {"samples": 2})
    start(plan, store)
    first, second = (row.runs[1].run_id for row in recorded_plan(plan, store).rows)
    for run_id in (first, second):
        store.delete_run(run_id)
    outcome = start(plan, store, budget=Budget(max_runs=1))
    assert (outcome.trained, outcome.reused, outcome.not_started) == (1, 2, 1)


def test_failed_runs_that_were_not_tried_again_are_left(store: Store) -> None:
    plan = search_of(base=TINY | {"train": {"steps": 6, "batch": 4, "lr": 1e30}}, search={
        "kind": "optuna", "samples": 2})  # fmt: skip
    outcome = start(plan, store)
    assert outcome.failed == 2
    store.delete_sweep(str(outcome.sweep_id))  # its rows are known to the study alone
    outcome = start(plan, store, budget=Budget(max_runs=1))
    assert (outcome.failed, outcome.not_started, outcome.exit_code) == (1, 1, 130)


def test_a_budget_that_ends_inside_the_last_row_is_used_up(store: Store) -> None:
    plan = search_of(seeds=[0, 1], search=LEARNING_RATES | {"samples": 1})
    outcome = start(plan, store, budget=Budget(max_runs=1))
    assert outcome.stop_reasons == ("the budget of 1 run is used up",)


def test_a_killed_sweep_has_recorded_its_rows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, finished = search_of(), Counter[str]()

    def on_event(event: Event) -> None:
        finished[event.status] += 1
        if finished["finished"] == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Sweep, "_record", lambda sweep: None)
        start(plan, store, callbacks=Callbacks(on_event=on_event))
    (sweep,) = store.index.sweeps()
    record = store.sweep(sweep.sweep_id)
    assert record
    assert len(record.runs) == sweep.runs == 2
    store.index.delete_sweep(sweep.sweep_id)
    refresh_index(store.index, store.files)
    assert len(recorded_plan(plan, store).rows) == 2
    assert start(plan, store).reused == 2


def test_rows_that_no_sweep_has_recorded_any_more_are_recorded_again(store: Store) -> None:
    plan = search_of()
    outcome = start(plan, store, budget=Budget(max_runs=2))
    assert outcome.sweep_id
    store.delete_sweep(outcome.sweep_id)
    assert recorded_plan(plan, store).rows == ()
    outcome = start(plan, store)
    assert (outcome.trained, outcome.reused, outcome.exit_code) == (2, 2, 0)
    assert len(recorded_plan(plan, store).rows) == 4


SEARCHED = """\
title: Tiny
base:
  task: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4, vocabulary: 6}
  model: {layers: 1, dim: 8, heads: 2}
  train: {batch: 4, steps: STEPS}
  evaluate: {every: 100, sequences: 8, final_sequences: 8}
metrics: [{name: in_dist/token_error}]
search: {kind: optuna, samples: 4, space: {train.lr: {log_uniform: [1e-4, 1e-2]}}}
resources: {device: cpu, checkpoint_every_s: 0.2}
"""


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_two_sweeps_at_once_continue_a_killed_one_and_train_each_run_once(
    tmp_path: Path,
    index_url: str,  # noqa: F811
) -> None:
    file = tmp_path / "searched.yaml"
    file.write_text(SEARCHED.replace("STEPS", str(LONG // 2)))
    store = Store(tmp_path / "store", index=index_url, create=True)
    index = ["--index", index_url] if index_url else []
    command = [*RUN, str(file), "--store", str(store.root), *index, "--no-mlflow", "--local"]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: any(is_training(store, run_id) for run_id in store.index.statuses()))
    killed.kill()
    killed.wait()
    started = list(store.index.statuses())
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]

    statuses = store.index.statuses()
    assert len(statuses) in (4, 5)  # both may ask for the last row
    assert set(statuses.values()) == {"finished"}
    attempts = {run_id: store.run(run_id).state["attempt"] for run_id in statuses}
    assert Counter(attempts.values()) == {1: len(statuses) - 1, 2: 1}
    assert attempts[started[-1]] == 2
    plan = recorded_plan(plan_of_recorded(load_ablation(file), []), store)
    assert {run.run_id for run in plan.runs} == set(statuses)
    trials = optuna.load_study(study_name=study_name(plan), storage=study_url(store)).trials
    told = {trial.user_attrs[RUN_ID] for trial in trials if trial.state.name == "COMPLETE"}
    assert told == set(statuses)
