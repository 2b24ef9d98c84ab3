"""What only the local executor does. test_executor has the contract of both executors."""

import pytest

from cope_sweep.registry import PluginError
from cope_sweep.spec import Resources
from cope_sweep.store import Store
from cope_sweep.sweep.local import run_local
from tests.sweep.runs import LONG, ONE_GROUP, EventLog, Listener, seeds


def test_a_missing_plugin_is_an_error(store: Store, events: EventLog) -> None:
    with pytest.raises(PluginError, match="the plugin no_such_plugin cannot be imported"):
        run_local(seeds(1), store, ONE_GROUP, on_event=events, stop=events.stop, plugins=["no_such_plugin"])
    assert store.runs() == []


def test_a_missing_device_is_an_error(store: Store, events: EventLog) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ValueError, match=r"(?i)cuda"):
        run_local(seeds(1), store, Resources(device="cuda"), on_event=events, stop=events.stop)
    assert store.runs() == []


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
