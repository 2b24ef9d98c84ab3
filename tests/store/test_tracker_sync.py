"""Sync of a store with every tracker."""

import json
import secrets
import time

import pytest

from cope_sweep.store.tracker_sync import TrackerSync
from cope_sweep.store.tracking import MemoryTracking, TrackingError
from cope_sweep.store.translate import TAG, flat
from tests.results.ablations import fail, finish, plan_of
from tests.store.sweeps import end_sweep, write_sweep
from tests.store.trackers import history
from tests.tiny import tiny_run

NO_SERVER = pytest.mark.parametrize(
    "tracking", ["memory", pytest.param("sqlite", marks=pytest.mark.slow)], indirect=True
)
"""For behaviour that does not depend on the server, which is slow."""
METRICS = {"in_dist/token_error": 100 / 3, "dense/loss": 0.5}


@pytest.fixture
def plan(request):
    """Different runs for every test, because all tests share the server."""
    return plan_of(f"copying-{secrets.token_hex(4)}", seeds=[secrets.randbelow(2**30), secrets.randbelow(2**30)])


def synced(store, record, tracking):
    sync = TrackerSync(store, record["sweep_id"], tracking)
    sync.sync()
    assert sync.errors == {}
    return sync


def run_of(tracking, run):
    return tracking.find({f"{TAG}run_id": run.run_id})


def sweep_of(tracking, record):
    return tracking.find({f"{TAG}kind": "sweep", f"{TAG}sweep_id": record["sweep_id"]})


def begin(store, run, *rows):
    folder = store.run(run.run_id)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.begin(run, "here")
    for row in rows:
        folder.log(row)
    return folder


def test_a_sweep_with_every_status(store, plan, tracking):
    record = write_sweep(store, plan)
    cope, other, _ = plan.rows
    finish(store, cope.runs[0], METRICS)
    fail(store, cope.runs[1])
    begin(store, other.runs[0], {"step": 1, "train/loss": 2.0}).set_state("interrupted")
    with store.run(other.runs[1].run_id).lock():
        begin(store, other.runs[1])
        sync = synced(store, record, tracking)
    assert len(sync.written) == 4
    parent = sweep_of(tracking, record)
    runs = {run.run_id: run_of(tracking, run) for run in plan.runs}
    statuses = [runs[run.run_id].status if runs[run.run_id] else None for row in plan.rows for run in row.runs]
    assert statuses == ["finished", "failed", "interrupted", "running", None, None]

    done = runs[cope.runs[0].run_id]
    assert done.experiment == parent.experiment
    assert done.params == flat(cope.runs[0].model_dump(mode="json"))
    assert done.tags.items() >= {
        "mlflow.parentRunId": parent.id,
        "mlflow.source.git.commit": "0123abc",
        f"{TAG}run_id": cope.runs[0].run_id,
        f"{TAG}sweep_id": record["sweep_id"],
        f"{TAG}ablation": plan.name,
        f"{TAG}row": "CoPE",
        f"{TAG}axis.model.position": "CoPE",
        f"{TAG}status": "finished",
        f"{TAG}versions.torch": "2.15.0",
        f"{TAG}machine.host": "here",
        f"{TAG}device": "cpu",
    }.items()  # fmt: skip
    created_ms = store.run(cope.runs[0].run_id).spec["created_ms"]
    assert [(p.step, p.value, p.timestamp_ms) for p in history(tracking, done, "train/loss")] == [
        (1, 2.5, created_ms + 1), (6, 1.25, created_ms + 6),
    ]  # fmt: skip
    assert [p.value for p in history(tracking, done, "in_dist/token_error")] == [100 / 3]
    assert [p.value for p in history(tracking, done, "facts/parameters")] == [1234]
    assert tracking.artifacts(done, "checkpoint") == ["checkpoint/config.json", "checkpoint/model.safetensors"]

    failed = runs[cope.runs[1].run_id]
    assert failed.tags[f"{TAG}message"] == "Diverged: the loss is nan"
    assert tracking.artifacts(failed) == ["error.txt"]

    assert parent.status == "running"
    assert "6 runs: 1 finished, 1 running, 1 failed, 1 interrupted, 2 pending." in parent.tags["mlflow.note.content"]
    assert parent.params["rows"] == "3"


@NO_SERVER
def test_the_end_of_a_sweep(store, plan, tracking):
    record = write_sweep(store, plan)
    sync = synced(store, record, tracking)
    for run in plan.runs:
        finish(store, run, METRICS)
    record = end_sweep(store, record)
    sync.sync()
    parent = sweep_of(tracking, record)
    assert parent.status == "finished"
    assert tracking.artifacts(parent) == ["ablation.yaml", "table.csv", "table.json", "table.md"]
    assert "| 1 |" in parent.tags["mlflow.note.content"]
    assert parent.tags[f"{TAG}runs.pending"] == "0"


def test_a_second_sync_sends_nothing_and_duplicates_nothing(store, plan, tracking):
    record = write_sweep(store, plan)
    for run in plan.runs[:3]:
        finish(store, run, METRICS)
    fail(store, plan.runs[3])
    first = synced(store, record, tracking)
    before = {run.run_id: run_of(tracking, run) for run in plan.runs}
    first.sync()
    again = synced(store, record, tracking)
    after = {run.run_id: run_of(tracking, run) for run in plan.runs}
    assert before == after
    assert again.written == {plan.runs[3].run_id}
    for run in plan.runs[:3]:
        assert len(history(tracking, after[run.run_id], "train/loss")) == 2


@NO_SERVER
def test_a_failed_run_is_trained_again(store, plan, tracking):
    record = write_sweep(store, plan)
    run = plan.runs[0]
    fail(store, run)
    sync = synced(store, record, tracking)
    folder = store.run(run.run_id)
    with folder.lock():
        folder.begin(run, "there")
        sync.sync()
        tracked = run_of(tracking, run)
        assert (tracked.status, tracked.tags[f"{TAG}attempt"], tracked.tags[f"{TAG}message"]) == ("running", "2", "")
        folder.rewind(0)
        folder.log({"step": 1, "train/loss": 2.5})
        folder.log({"step": 2, "train/loss": 1.5})
        folder.finish({"train/loss": 1.5}, {"steps": 2})
    sync.sync()
    tracked = run_of(tracking, run)
    assert tracked.status == "finished"
    assert [(p.step, p.value) for p in history(tracking, tracked, "train/loss")] == [(1, 2.5), (2, 1.5)]


@NO_SERVER
def test_points_of_steps_that_are_trained_again_are_not_duplicated_even_if_they_differ(store, plan, tracking):
    """Training on a GPU is not deterministic."""
    record = write_sweep(store, plan)
    run = plan.runs[0]
    folder = begin(store, run, *({"step": step, "train/loss": 9.0 - step} for step in (1, 2, 3)))
    sync = synced(store, record, tracking)
    folder.rewind(1)
    for step in (2, 3, 4):
        folder.log({"step": step, "train/loss": 8.99 - step})
        folder.log({"step": step, "dense/loss": 1.0})
    sync.sync()
    losses = history(tracking, run_of(tracking, run), "train/loss")
    assert [(p.step, p.value) for p in losses] == [(1, 8.0), (2, 7.0), (3, 6.0), (4, 4.99)]
    assert [p.step for p in history(tracking, run_of(tracking, run), "dense/loss")] == [2, 3, 4]


def test_a_run_of_another_ablation_is_linked_and_not_copied(store, plan, tracking):
    first = write_sweep(store, plan)
    for run in plan.runs:
        finish(store, run, METRICS)
    synced(store, first, tracking)
    seeds = list(plan.ablation.content.seeds)
    other = plan_of(f"{plan.name}-other", grid={"model.position": {"CoPE, renamed": ["cope"]}}, seeds=[*seeds, 7])
    assert set(other.rows[0].runs[:2]) == set(plan.rows[0].runs)
    second = write_sweep(store, other, reused=[run.run_id for run in plan.rows[0].runs])
    synced(store, second, tracking)
    shared = run_of(tracking, plan.rows[0].runs[0])
    parent = sweep_of(tracking, second)
    assert shared.tags["mlflow.parentRunId"] == sweep_of(tracking, first).id
    assert shared.experiment != parent.experiment
    assert f"[CoPE, renamed · seed {seeds[0]}]({shared.link})" in parent.tags["mlflow.note.content"]
    assert parent.tags[f"{TAG}reused"] == "2"
    assert "reused.json" in tracking.artifacts(parent)


@NO_SERVER
def test_the_next_sweep_sends_runs_of_an_earlier_one_under_the_earlier_one(store, plan, tracking):
    first = write_sweep(store, plan)
    for run in plan.runs[:2]:
        finish(store, run, METRICS)
    first = end_sweep(store, first, "interrupted")
    begun_ms = store.run(plan.runs[1].run_id).spec["created_ms"]
    second = write_sweep(store, plan, started_ms=begun_ms + 1, reused=[run.run_id for run in plan.runs[:2]])
    while time.time_ns() // 1_000_000 < second["started_ms"]:
        pass
    finish(store, plan.runs[2], METRICS)
    synced(store, second, tracking)
    old, new = sweep_of(tracking, first), sweep_of(tracking, second)
    assert run_of(tracking, plan.runs[0]).tags["mlflow.parentRunId"] == old.id
    assert run_of(tracking, plan.runs[2]).tags["mlflow.parentRunId"] == new.id
    assert (old.status, new.status) == ("interrupted", "running")
    assert "table.md" in tracking.artifacts(old)


def test_a_shared_run_belongs_to_the_last_sweep_that_started_before_it(store, plan):
    run = plan.runs[0]
    finish(store, run, METRICS)
    begun_ms = store.run(run.run_id).spec["created_ms"]
    other = plan_of("without-the-run", seeds=[2**30])
    write_sweep(store, plan, started_ms=begun_ms - 3000)
    owner = write_sweep(store, plan, started_ms=begun_ms - 2000)
    write_sweep(store, other, started_ms=begun_ms - 1000)
    write_sweep(store, plan, started_ms=begun_ms + 1000)
    tracking = MemoryTracking()
    synced(store, write_sweep(store, plan, started_ms=begun_ms + 2000), tracking)
    assert run_of(tracking, run).tags["mlflow.parentRunId"] == sweep_of(tracking, owner).id
    assert run_of(tracking, run).tags[f"{TAG}sweep_id"] == owner["sweep_id"]


def test_a_run_that_a_sweep_began_in_its_first_millisecond_belongs_to_it(store, plan):
    run = plan.runs[0]
    finish(store, run, METRICS)
    begun_ms = store.run(run.run_id).spec["created_ms"]
    write_sweep(store, plan, started_ms=begun_ms - 1000)
    owner = write_sweep(store, plan, started_ms=begun_ms)
    tracking = MemoryTracking()
    synced(store, write_sweep(store, plan, started_ms=begun_ms + 1), tracking)
    assert run_of(tracking, run).tags[f"{TAG}sweep_id"] == owner["sweep_id"]
    # The owner itself also sends it as its own.
    tracking = MemoryTracking()
    synced(store, owner, tracking)
    assert run_of(tracking, run).tags[f"{TAG}sweep_id"] == owner["sweep_id"]


def test_a_run_that_is_older_than_all_sweeps_belongs_to_the_one_that_is_synced(store, plan):
    run = plan.runs[0]
    finish(store, run, METRICS)
    begun_ms = store.run(run.run_id).spec["created_ms"]
    write_sweep(store, plan, started_ms=begun_ms + 1000)
    record = write_sweep(store, plan, started_ms=begun_ms + 2000)
    tracking = MemoryTracking()
    synced(store, record, tracking)
    assert run_of(tracking, run).tags[f"{TAG}sweep_id"] == record["sweep_id"]


@NO_SERVER
def test_an_abandoned_sweep_is_interrupted(store, plan, tracking):
    record = write_sweep(store, plan)
    begin(store, plan.runs[0])
    TrackerSync(store, record["sweep_id"], tracking).sync(abandoned=True)
    assert sweep_of(tracking, record).status == "interrupted"
    assert run_of(tracking, plan.runs[0]).status == "interrupted"


@NO_SERVER
def test_long_texts_are_cut_in_tags_and_complete_in_artifacts(store, plan, tracking):
    record = write_sweep(store, plan, hypothesis="h" * 30_000)
    folder = begin(store, plan.runs[0])
    folder.fail("m" * 9000, "t" * 20_000)
    synced(store, record, tracking)
    assert tracking.artifacts(run_of(tracking, plan.runs[0])) == ["error.txt"]
    assert len(sweep_of(tracking, record).tags["mlflow.note.content"]) <= 8000


def test_a_run_with_broken_files_does_not_block_others(store, plan):
    record = write_sweep(store, plan)
    for run in plan.runs:
        finish(store, run, METRICS)
    for run in plan.runs[:3]:
        (store.run(run.run_id).path / "result.json").write_text("{")
    sync = TrackerSync(store, record["sweep_id"], MemoryTracking())
    sync.sync()
    sync.sync()
    assert sync.written == {run.run_id for run in plan.runs[3:]}
    assert "not valid JSON" in sync.errors[plan.runs[0].run_id]


class Flaky(MemoryTracking):
    """A tracker that refuses all requests while `down`, and always those for some runs."""

    def __init__(self, refused=()):
        super().__init__()
        self.down, self.refused, self.requests = False, set(refused), 0

    def log(self, run, **entries):
        self.requests += 1
        if self.down or run.tags.get(f"{TAG}run_id") in self.refused:
            raise TrackingError("no")
        super().log(run, **entries)


def test_refused_runs_do_not_block_others(store, plan):
    record = write_sweep(store, plan)
    for run in plan.runs:
        finish(store, run, METRICS)
    tracking = Flaky(refused=[run.run_id for run in plan.runs[:3]])
    sync = TrackerSync(store, record["sweep_id"], tracking)
    sync.sync()
    sync.sync()
    assert sync.written == {run.run_id for run in plan.runs[3:]}
    assert set(sync.errors.values()) == {"no"}
    assert "6 finished" in sweep_of(tracking, record).tags["mlflow.note.content"]
    tracking.refused.clear()
    sync.sync()
    assert sync.errors == {}
    assert len(tracking.runs) == 7


def test_an_unavailable_tracker_is_not_asked_for_every_run(store, plan):
    record = write_sweep(store, plan)
    for run in plan.runs:
        finish(store, run, METRICS)
    tracking = Flaky()
    tracking.down = True
    sync = TrackerSync(store, record["sweep_id"], tracking)
    sync.sync()
    # Two requests for runs, one for the sweep.
    assert tracking.requests == 3
    tracking.down = False
    sync.sync()
    assert sync.errors == {}
    assert {run.status for run in tracking.runs.values() if f"{TAG}run_id" in run.tags} == {"finished"}


def test_specs_are_flattened_to_dotted_names():
    run = tiny_run(**{"model.position": ["cope", "absolute"], "train.betas": [0.9, 0.99]})
    params = flat(run.model_dump(mode="json"))
    assert params["task.kind"] == "selective_copy"
    assert params["model.position"] == "cope+absolute"
    assert params["model.position.0.p_max"] == "64"
    assert params["train.betas"] == "[0.9, 0.99]"
    assert params["model.ffn_dim"] == "null"
    assert flat(tiny_run().model_dump(mode="json"))["model.position"] == "none"
    assert json.loads(json.dumps(params)) == params
