"""What only the local executor does. test_executor has the contract of both executors."""

import threading
from functools import partial

import pytest
from sqlalchemy import text

from cope_sweep.config import Resources
from cope_sweep.config.ablation import Asha
from cope_sweep.registry import PluginError
from cope_sweep.store import Event, Lease, LeaseHolder, Store
from cope_sweep.sweep import executor
from tests.sweep.runs import LONG, ONE_GROUP, EventLog, Listener, other_sweep, seeds, train_by

run_local = partial(train_by, executor.run_local)


def test_a_missing_plugin_is_an_error(store: Store, events: EventLog) -> None:
    with pytest.raises(PluginError, match="the plugin no_such_plugin cannot be imported"):
        run_local(seeds(1), store, ONE_GROUP, on_event=events, stop=events.stop, plugins=["no_such_plugin"])
    assert store.index.statuses() == {}


def test_a_missing_device_is_an_error(store: Store, events: EventLog) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ValueError, match=r"(?i)cuda"):
        run_local(seeds(1), store, Resources(device="cuda"), on_event=events, stop=events.stop)
    assert store.index.statuses() == {}


def test_an_error_after_the_sweep_was_stopped_is_raised_at_once(store: Store, events: EventLog) -> None:
    """A second Ctrl-C: the run was given its time to write a checkpoint after the first."""
    runs = seeds(1, **LONG)

    def stop_then_fail(event: object) -> None:
        if events.stop.is_set():
            raise KeyboardInterrupt
        if events[-1].step:
            events.stop.set()

    with pytest.raises(KeyboardInterrupt):
        run_local(runs, store, ONE_GROUP, on_event=Listener(events, stop_then_fail), stop=events.stop)


def test_a_lost_lease_ends_the_run_here(store: Store, events: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process was suspended until its lease expired, and another sweep took the run."""
    monkeypatch.setattr(executor, "LeaseHolder", partial(LeaseHolder, ttl_s=0.5))
    (run,) = seeds(1, **LONG)

    def take(event: Event) -> None:
        if event.step and not taken:
            (owner,) = {owner for _, owner in owners()}
            store.index.renew(str(owner), -1.0)
            taken.append(other.acquire(run))

    def owners() -> list[tuple[str, str | None]]:
        with store.index.database.reading() as connection:
            return [tuple(row) for row in connection.execute(text("SELECT run_id, owner FROM runs"))]

    taken: list[object] = []
    with other_sweep(store) as other:
        threading.Timer(3.0, events.stop.set).start()
        run_local([run], store, ONE_GROUP, on_event=Listener(events, take), stop=events.stop)
        assert isinstance(taken[0], Lease)
        assert events.ends() == []
        assert store.status(run.run_id) == "running"


def test_a_schedule_has_no_effect_and_that_is_said(store: Store, events: EventLog) -> None:
    notes: list[str] = []
    rule = Asha(metric="in_dist/loss", goal="min", grace=3)
    run_local(seeds(1), store, ONE_GROUP, on_event=events, stop=events.stop, schedule=rule, on_note=notes.append)
    assert [status for _, status in events.ends()] == ["finished"]
    assert notes == [
        "ASHA (in_dist/loss, grace 3 steps) ends no run here: --local trains one run after another, each to its end"
    ]
