"""The commands stop, logs and prune."""

import os
import threading
import time

from cope_sweep.api.questions import GetLog
from cope_sweep.store import LeaseHolder, Store
from cope_sweep.store.index.owners import new_owner
from tests.store.test_store import sweep_record
from tests.tiny import tiny_run


def running_sweep(shell, sweep_id="20260801-000000-aa"):
    store = Store(shell.folder / "store", create=True)
    record = sweep_record(sweep_id, status="running", ended_ms=None)
    store.write_sweep(record, new_owner(sweep_id))
    return store, record


def test_stop_asks_a_sweep_and_waits_for_its_end(shell):
    store, record = running_sweep(shell)

    def sweep():
        while not store.stop_requested(record.sweep_id):
            time.sleep(0.05)
        store.write_sweep(record.model_copy(update={"status": "interrupted", "ended_ms": 5}))

    thread = threading.Thread(target=sweep)
    thread.start()
    assert shell.json("stop", record.sweep_id) == {"stopped": [record.sweep_id], "running": []}
    thread.join()
    assert "the sweep has ended" in shell("stop", record.sweep_id)[0]
    assert "no sweep is running" in shell("stop", "all")[0]


def test_stop_says_that_a_sweep_goes_on(shell):
    store, record = running_sweep(shell)
    out, _ = shell("stop", "all", "--timeout", "0.1", code=1)
    assert "still running after 0.1 s" in out
    assert "asked to stop" in shell("stop", record.sweep_id, "--no-wait")[0]
    assert store.stop_requested(record.sweep_id)


def test_stop_of_an_unknown_sweep(shell):
    assert "no sweep 'none'" in " ".join(shell("stop", "none", code=2)[1].split())


def test_logs(stored):
    failed = stored.runs[1]
    out, _ = stored("logs", failed.run_id)
    assert "Traceback" in out
    out, _ = stored("logs", failed.run_id, "--follow")  # it is not running: nothing to wait for
    assert "Traceback" in out


def test_logs_as_json_are_those_of_the_service(stored):
    from cope_sweep.read.queries import Queries
    from cope_sweep.store import Store

    failed = stored.runs[1].run_id
    queries = Queries(Store(stored.folder / "store"))
    assert stored.json("logs", failed) == queries.ask(GetLog(failed, 200)).model_dump()
    assert stored.json("logs", failed, "--tail", "1") == queries.ask(GetLog(failed, 1)).model_dump()
    out, _ = stored("logs", failed, "--tail", "1")
    assert out.splitlines() == queries.ask(GetLog(failed, 1)).lines
    out, _ = stored("logs", failed, "--tail", "0")
    assert out == ""
    assert "leave out --follow" in stored.json("logs", failed, "--follow", code=2)["error"]["message"]


def test_logs_follow_a_run_to_its_end(shell):
    run = tiny_run()
    store = Store(shell.folder / "store", create=True)
    holder = LeaseHolder(store, "sweep")
    folder = store.run(run.run_id).begin(run, "here", holder.acquire(run).attempt)
    folder.note("first line")

    def train():
        time.sleep(1)
        folder.note("last line")
        folder.set_state("interrupted")
        holder.close()

    thread = threading.Thread(target=train)
    thread.start()
    out, _ = shell("logs", run.run_id, "-f")
    thread.join()
    assert [line.partition("  ")[2] for line in out.splitlines()] == ["first line", "last line"]


def test_logs_of_a_run_without_one(shell):
    assert "was not begun" in " ".join(shell("logs", "0" * 16, code=2)[1].split())
    assert "is not a run id" in " ".join(shell("logs", "x", code=2)[1].split())


def test_prune_shows_and_deletes(stored):
    path = stored.store.run(stored.runs[0].run_id).path / "state.json.damaged"
    path.write_text("{")
    os.utime(path, (time.time() - 3 * 86400,) * 2)
    out, _ = stored("prune")
    assert "state.json.damaged" in out
    assert "--yes deletes it" in out
    assert path.exists()
    answer = stored.json("prune", "--yes")
    assert (answer["deleted"], [each["path"] for each in answer["found"]]) == (True, [str(path)])
    assert not path.exists()


def test_prune_of_runs_that_no_ablation_has(stored):
    stored.write("tiny", (stored.folder / "ablations" / "tiny.yaml").read_text().replace("seeds: [0, 1]", "seeds: [0]"))
    answer = stored.json("prune", "--orphans", "--older-than", "100", "--yes")
    gone = {stored.runs[1].run_id, stored.runs[3].run_id}
    assert {each["path"].rpartition("/")[2] for each in answer["found"]} == gone
    assert not any(stored.store.run(run_id).path.exists() for run_id in gone)
    assert stored.store.run(stored.runs[0].run_id).status == "finished"


def test_prune_refuses_what_it_cannot_do(shell, stored):
    assert "--states running: choose from finished" in " ".join(
        stored("prune", "--states", "running", code=2)[1].split()
    )
    for path in (stored.folder / "ablations").iterdir():
        path.unlink()
    assert "all runs would be deleted" in " ".join(stored("prune", "--orphans", code=2)[1].split())
