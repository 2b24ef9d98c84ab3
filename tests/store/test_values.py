"""Whatever a run's files hold, it can be indexed: as it is, or as interrupted with the file and the key."""

import json
import shutil

import pytest

from cope_sweep.api.runs import GetRun, ListRuns
from cope_sweep.config import expand, load_ablation
from cope_sweep.read.queries import Queries
from cope_sweep.store import Store
from cope_sweep.store.indexing import refresh_index
from tests.config.test_expand import BASE
from tests.helpers.finished_runs import fail, finish, stop

STRANGE = [
    [], {"\ud800": 1}, "text", "\ud800", "nul \0", None, -1, 10**400, 2**63, float("nan"),
]  # fmt: skip
PLACES = {
    "spec.json": [["spec"], ["created_ms"], ["run_id"], *(["spec", key] for key in ("task", "model", "train", "evaluate", "seed")),
                  ["spec", "train", "steps"], ["spec", "model", "layers"], ["spec", "model", "position"]],
    "state.json": [["status"], ["attempt"], ["worker_id"], ["updated_ms"], ["message"], ["traceback"]],
    "result.json": [["metrics"], ["facts"], ["ended_ms"], ["files"], ["metrics", "in_dist/token_error"], ["facts", "steps"],
                    ["facts", "worker_id"], ["facts", "device"]],
}  # fmt: skip


def put(path, keys, value):
    document = json.loads(path.read_text())
    inner = document
    for key in keys[:-1]:
        inner = inner.setdefault(key, {})
    inner[keys[-1]] = value
    path.write_text(json.dumps(document))


@pytest.fixture
def plan(tmp_path):
    cases = sum(len(places) for places in PLACES.values()) * len(STRANGE)
    (tmp_path / "many.yaml").write_text(BASE + f"seeds: {list(range(cases + 1))}\n")
    return expand(load_ablation(tmp_path / "many.yaml"))


def test_no_value_of_a_file_hides_other_runs(plan, tmp_path):
    store = Store(tmp_path / "store", create=True)
    good, *runs = plan.runs
    finish(store, good, {"in_dist/token_error": 12.5}, {"device": "cpu"})
    cases = [(name, keys, value) for name, places in PLACES.items() for keys in places for value in STRANGE]
    fail(store, runs[0])
    stop(store, runs[1])
    made = [store.run(run.run_id).path for run in (good, runs[0], runs[1])]
    templates = [path.rename(tmp_path / path.name) for path in made]
    shutil.copytree(templates[0], made[0])
    for number, (run, (name, keys, value)) in enumerate(zip(runs, cases, strict=True)):
        path = store.run(run.run_id).path
        shutil.copytree(templates[0 if name == "result.json" else 1 + number % 2], path)
        put(path / "spec.json", ["run_id"], run.run_id)
        put(path / name, keys, value)
    store.index.delete(store.index.statuses())
    refresh_index(store.index, store.files)
    queries = Queries(Store(tmp_path / "store"))
    question = ListRuns(limit=1000, sort="in_dist/token_error")
    page = queries.ask(question)
    assert page.total >= len(cases) * 0.9
    json.loads(page.model_dump_json())
    known = {run.run_id: run for run in page.runs}
    assert known[good.run_id].status == "finished"
    unread = [run for run in page.runs if run.status == "interrupted" and ".json: " in (run.message or "")]
    assert len(unread) > len(cases) / 2
    for run in runs[::3]:
        if run.run_id in known:
            json.loads(queries.ask(GetRun(run_id=run.run_id)).model_dump_json())


@pytest.mark.parametrize(("fact", "key"), [("device", "facts.device"), ("host", "facts.host")])
def test_the_message_names_file_and_key(plan, tmp_path, fact, key):
    store = Store(tmp_path / "store", create=True)
    run = plan.runs[0]
    finish(store, run, {}, {})
    put(store.run(run.run_id).path / "result.json", ["facts", fact], "\ud800")
    refresh_index(store.index, store.files)
    message = Queries(store).ask(GetRun(run_id=run.run_id)).message
    assert f"result.json: {key}: " in message
