"""The command `stop`."""

import threading

from cope_sweep.store import Store
from tests.helpers.processes import until
from tests.helpers.sweeps import sweep_record


def running_sweep(shell, sweep_id="20260801-000000-aa"):
    store = Store(shell.folder / "store", create=True)
    record = sweep_record(sweep_id, status="running", ended_ms=None)
    store.write_sweep(record, ttl_s=60)
    return store, record


def test_stop_asks_a_sweep_and_waits_for_its_end(shell):
    store, record = running_sweep(shell)

    def sweep():
        until(lambda: store.index.stop_requested(record.sweep_id))
        store.write_sweep(record.model_copy(update={"status": "interrupted", "ended_ms": 5}))

    thread = threading.Thread(target=sweep)
    thread.start()
    assert shell.json("stop", record.sweep_id) == {"stopped": [record.sweep_id], "running": []}
    assert "the sweep has ended" in shell("stop", record.sweep_id)[0]
    assert "no sweep is running" in shell("stop", "all")[0]
    thread.join()


def test_stop_ends_a_sweep_whose_job_has_not_started(shell):
    store = Store(shell.folder / "store", create=True)
    record = sweep_record("20260801-000000-aa", status="pending", ended_ms=None)
    store.write_sweep(record)
    assert shell.json("stop", record.sweep_id, "--timeout", "0") == {"stopped": [record.sweep_id], "running": []}
    assert store.sweep(record.sweep_id).status == "interrupted"


def test_stop_says_that_a_sweep_goes_on(shell):
    store, record = running_sweep(shell)
    out, _ = shell("stop", "all", "--timeout", "0.1", code=1)
    assert "still running after 0.1 s" in out
    assert "asked to stop" in shell("stop", record.sweep_id, "--no-wait")[0]
    assert shell.json("stop", record.sweep_id, "--no-wait") == {"stopped": [], "running": [record.sweep_id]}
    assert store.index.stop_requested(record.sweep_id)


def test_stop_of_an_unknown_sweep(shell):
    shell.refuses("not_found", "stop", "none", sweep_id="none")
