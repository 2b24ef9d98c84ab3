"""Stores as earlier versions have written them, one in each folder of `formats`: opened, repaired, resumed and served.

A store has a finished run and an interrupted one, small enough for Git; its index is SQL text.
"""

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
from cope_services.http.settings import Settings

from cope_sweep.store import Filter, RunQuery, Store
from tests.cli.conftest import Shell
from tests.helpers.sample_store import API, serving

FORMATS = sorted(path for path in (Path(__file__).parent / "formats").iterdir() if path.is_dir())


@pytest.fixture(params=FORMATS, ids=lambda path: path.name)
def old(request, tmp_path):
    """A folder with a store of an earlier version, and the ablation of its sweep."""
    shell = Shell(tmp_path)
    store = tmp_path / "store"
    shutil.copytree(request.param, store)
    with sqlite3.connect(store / "index.db") as database:
        database.executescript((store / "index.sql").read_text())
    (sweep,) = (store / "sweeps").iterdir()
    text = json.loads(sweep.read_text())["file_text"]
    shell.write("tiny", text.replace("resources: {keep_final_state: false}\n", ""))  # a key of that version
    shell.finished, shell.interrupted = sorted(
        (path.name for path in (store / "runs").iterdir()),
        key=lambda run_id: not (store / "runs" / run_id / "result.json").exists(),
    )
    return shell


@pytest.mark.slow
@pytest.mark.parametrize("indexed", [True, False])
def test_a_store_of_an_earlier_version(old, indexed):
    if not indexed:
        (old.folder / "store" / "index.db").unlink()
    statuses = {old.finished: "finished", old.interrupted: "interrupted"}
    store = Store(old.folder / "store")
    assert store.index.statuses() == statuses
    filters = (Filter("task.kind", "=", "selective_copy"), Filter("facts.device", "=", "cpu"))
    assert [each.run_id for each in store.index.page(RunQuery(filters=filters)).runs] == [old.finished]
    assert store.index.records([old.finished])[old.finished].metrics == store.run(old.finished).result["metrics"]
    store.index.close()
    assert old.json("store", "check", "--checksums") == []
    assert old.json("store", "check", "--repair") == []
    assert {run["run_id"]: run["status"] for run in old.json("runs")["runs"]} == statuses

    settings = {"store": old.folder / "store", "ablations": old.folder / "ablations", "device": "cpu"}
    with serving(Settings.model_validate(settings | {"keys_file": old.folder / "keys.txt"})) as client:
        assert client.get(f"{API}/runs/{old.finished}").json()["status"] == "finished"
        body = {"models": [old.finished], "tokens": [[0, 2, 3, 0]]}
        answer = client.post(f"{API}/perplexity", json=body)
        assert answer.status_code == 200, answer.text

    outcome = old.json("run", "tiny", "--local", "--no-mlflow")["sweep"]
    if {
        run["run_id"] for run in old.json("status", "tiny")["runs"]
    } == statuses.keys():  # else a task has a new VERSION
        assert (outcome["trained"], outcome["reused"]) == (1, 1)
        result = Store(old.folder / "store").run(old.interrupted).result
        assert result["facts"]["resumed_from_step"] > 0
        assert "restarted" not in result["facts"]
