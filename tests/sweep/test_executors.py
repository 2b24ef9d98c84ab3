"""What both executors do: the contract of `cope_sweep.sweep.executor.Executor`."""

import threading
import time
from collections.abc import Callable

import pytest

from cope_sweep.record import Event, Ledger
from cope_sweep.spec import RunSpec
from cope_sweep.sweep.executor import Executor
from cope_sweep.sweep.local import run_local
from tests.sweep.conftest import ONE_GROUP, Heard, seeds
from tests.tiny import tiny_run

LONG = {"train.steps": 100_000, "evaluate.every": 100_000}


class Listener:
    """Passes events on to `heard`, and acts on them."""

    def __init__(self, heard: Heard, act: Callable[[Event], None]) -> None:
        self.heard, self.act = heard, act

    def __call__(self, event: Event) -> None:
        self.heard(event)
        self.act(event)


def test_every_run_is_trained_in_order_and_only_once(executor: Executor, ledger: Ledger, heard: Heard) -> None:
    runs = seeds(4)
    run_local([runs[2]], ledger, ONE_GROUP, on_event=heard, stop=heard.stop)
    first = ledger.run(runs[2].run_id).path.joinpath("result.json").read_bytes()
    executor([*runs, runs[0]], ledger, ONE_GROUP, on_event=heard, stop=heard.stop)

    order = [2, 0, 1, 3]
    assert heard.ends() == [(runs[index].run_id, "finished") for index in order]
    assert ledger.run(runs[2].run_id).path.joinpath("result.json").read_bytes() == first
    for run in runs:
        folder = ledger.run(run.run_id)
        assert folder.status == "finished"
        assert folder.curve()[-1]["step"] == run.train.steps
        assert heard.of(run)[0].status == "running"
        assert heard.of(run)[-1].metrics == folder.result["metrics"]
        assert ":" in heard.of(run)[-1].worker_id


def test_a_failing_run_fails_alone(executor: Executor, ledger: Ledger, heard: Heard) -> None:
    bad = tiny_run(**{"train.lr": 1e20, "train.steps": 200})
    runs = [tiny_run(seed=1), bad, tiny_run(seed=2)]
    executor(runs, ledger, ONE_GROUP, on_event=heard, stop=heard.stop)

    assert [status for _, status in heard.ends()] == ["finished", "failed", "finished"]
    assert "Diverged" in str(heard.of(bad)[-1].message)
    state = ledger.run(bad.run_id).state
    assert "Diverged" in state["message"]
    assert "Traceback" in state["traceback"]
    # What failed is tried again, if it is asked for again; by whichever executor.
    run_local([bad], ledger, ONE_GROUP, on_event=heard, stop=heard.stop)
    assert ledger.run(bad.run_id).state["attempt"] == 2


def test_stop_interrupts_and_the_next_call_goes_on(executor: Executor, ledger: Ledger, heard: Heard) -> None:
    running, pending = seeds(2, **LONG)

    def stop_late(event: Event) -> None:
        if event.step >= 20:
            heard.stop.set()

    executor([running, pending], ledger, ONE_GROUP, on_event=Listener(heard, stop_late), stop=heard.stop)
    assert heard.ends() == [(running.run_id, "interrupted")]
    assert ledger.run(running.run_id).status == "interrupted"
    assert ledger.run(running.run_id).resume.exists()
    assert ledger.run(pending.run_id).status == "pending"
    assert not ledger.run(pending.run_id).path.exists()
    reached = heard[-1].step

    again = Heard()

    def stop_at_once(event: Event) -> None:
        if event.step:
            again.stop.set()

    run_local([running], ledger, ONE_GROUP, on_event=Listener(again, stop_at_once), stop=again.stop)
    assert next(event.step for event in again if event.step) >= reached


def test_a_run_in_other_hands_is_waited_for(executor: Executor, ledger: Ledger, heard: Heard) -> None:
    taken, given_up, free = seeds(3)
    locks = [ledger.run(run.run_id).lock() for run in (taken, given_up)]
    for run, lock in zip((taken, given_up), locks, strict=True):
        assert lock.__enter__()
        ledger.run(run.run_id).begin(run, "another process")

    def let_go(event: Event) -> None:
        if event.run_id == free.run_id and event.status == "finished":
            threading.Thread(target=end_both).start()

    def end_both() -> None:
        time.sleep(1.5)
        ledger.run(taken.run_id).finish({"in_dist/loss": 0.5}, {})
        for lock in locks:
            lock.__exit__(None, None, None)

    executor([taken, given_up, free], ledger, ONE_GROUP, on_event=Listener(heard, let_go), stop=heard.stop)
    assert heard.ends()[0] == (free.run_id, "finished")
    assert sorted(heard.ends()[1:]) == sorted([(taken.run_id, "finished"), (given_up.run_id, "finished")])
    assert heard.of(taken)[-1].metrics == {"in_dist/loss": 0.5}
    assert heard.of(taken)[-1].worker_id == "another process"
    assert ledger.run(given_up.run_id).curve()[-1]["step"] == given_up.train.steps


def test_nothing_to_do(executor: Executor, ledger: Ledger, heard: Heard) -> None:
    executor([], ledger, ONE_GROUP, on_event=heard, stop=heard.stop)
    assert not heard


def test_an_error_of_the_listener_stops_the_sweep(executor: Executor, ledger: Ledger, heard: Heard) -> None:
    runs: list[RunSpec] = seeds(2, **LONG)

    def break_down(event: Event) -> None:
        if event.step >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        executor(runs, ledger, ONE_GROUP, on_event=Listener(heard, break_down), stop=heard.stop)
    assert heard.stop.is_set()
    assert ledger.run(runs[0].run_id).status == "interrupted"
    assert ledger.run(runs[0].run_id).resume.exists()
    assert ledger.run(runs[1].run_id).status == "pending"
