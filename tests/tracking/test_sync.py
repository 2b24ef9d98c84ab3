"""What a tracker has of a store after a sync, with every tracker."""

import json
import secrets
import time

import pytest

from cope_sweep.store import StoreError
from cope_sweep.store.index.mirroring import Mirrored
from cope_sweep.store.index.owners import new_owner
from cope_sweep.tracking import sync
from cope_sweep.tracking.sync import TrackerSync, backlog_count
from cope_sweep.tracking.translate import TAG, TrackingError, flat
from cope_sweep.tracking.uri import tracker_key
from tests.read.tables.ablations import plan_of
from tests.store.sweeps import begin, end, end_sweep, fail, finish, stop, write_sweep
from tests.tiny import tiny_run
from tests.tracking.memory import MemoryTracking
from tests.tracking.trackers import artifacts, history, run_of, sweep_of, synced

URI = "http://tracker"
NO_SERVER = pytest.mark.parametrize(
    "tracking", ["memory", pytest.param("sqlite", marks=pytest.mark.slow)], indirect=True
)
"""For behaviour that does not depend on the server, which is slow."""
METRICS = {"in_dist/token_error": 100 / 3, "dense/loss": 0.5}


@pytest.fixture
def plan(request):
    """Different runs for every test, because all tests share the server."""
    return plan_of(f"copying-{secrets.token_hex(4)}", seeds=[secrets.randbelow(2**30), secrets.randbelow(2**30)])


def test_an_index_that_answers_now_and_then_does_not_prolong_the_tries(store, monkeypatch):
    """Another process is to send, and sends nothing: an index that is away is no progress."""
    answers = iter([3, StoreError("away")] * 20)

    def count(*_):
        if isinstance(answer := next(answers), StoreError):
            raise answer
        return answer

    monkeypatch.setattr(sync, "backlog_count", count)
    monkeypatch.setattr(sync, "RETRY_INTERVAL_S", 0)
    session = sync.MirrorSession(store, URI)
    monkeypatch.setattr(session, "sync", lambda **_: False)
    assert session.send_all(tries=4).left == 3
    assert len(list(answers)) == 40 - 5


def test_a_sweep_with_every_status(store, plan, tracking):
    record = write_sweep(store, plan)
    cope, other, none = plan.rows
    finish(store, cope.runs[0], METRICS)
    fail(store, cope.runs[1])
    stop(store, other.runs[0])
    begin(store, other.runs[1], {"step": 1, "train/loss": 2.0})
    stop(store, none.runs[0], "stopped", message="median stopping at step 1")
    assert backlog_count(store, URI) == 4
    sync = synced(store, tracking)
    assert len(sync.written) == 5
    parent = sweep_of(tracking, record)
    runs = {run.run_id: run_of(tracking, run) for run in plan.runs}
    statuses = [runs[run.run_id] and runs[run.run_id].status for row in plan.rows for run in row.runs]
    assert statuses == ["finished", "failed", "killed", "running", "killed", None]

    done = runs[cope.runs[0].run_id]
    assert done.experiment == parent.experiment
    assert done.params == flat(cope.runs[0].model_dump(mode="json"))
    assert done.tags.items() >= {
        "mlflow.parentRunId": parent.id,
        "mlflow.source.git.commit": "0123abc",
        f"{TAG}run_id": cope.runs[0].run_id,
        f"{TAG}sweep_id": record.sweep_id,
        f"{TAG}sweep.{record.sweep_id}": "CoPE",
        f"{TAG}ablation": plan.name,
        f"{TAG}row": "CoPE",
        f"{TAG}axis.model.position": "CoPE",
        f"{TAG}status": "finished",
        f"{TAG}versions.torch": "2.15.0",
        f"{TAG}machine.host": "here",
        f"{TAG}device": "cpu",
        f"{TAG}threads": "2",
        f"{TAG}parameters": "1234",
    }.items()  # fmt: skip
    assert [p.value for p in history(tracking, done, "in_dist/token_error")] == [100 / 3]
    assert [p.value for p in history(tracking, done, "system/parameters")] == [1234]
    assert history(tracking, done, "system/threads") == []

    failed = runs[cope.runs[1].run_id]
    assert failed.tags[f"{TAG}message"] == "Diverged: the loss is nan"
    assert artifacts(tracking, failed) == ["error.txt"]
    stopped = runs[none.runs[0].run_id]
    assert stopped.tags[f"{TAG}status"] == "stopped"
    assert stopped.tags[f"{TAG}message"] == "median stopping at step 1"

    assert parent.status == "running"
    note = parent.tags["mlflow.note.content"]
    assert "6 runs: 1 finished, 1 running, 1 failed, 1 stopped, 1 interrupted, 1 pending." in note
    assert parent.tags[f"{TAG}runs.stopped"] == "1"


def test_points_have_the_time_of_day(store, plan, tracking):
    write_sweep(store, plan)
    before_ms = time.time_ns() // 1_000_000
    folder = begin(store, plan.runs[0], {"step": 1, "train/loss": 2.5})
    time.sleep(0.05)
    folder.log({"step": 2, "train/loss": 1.5})
    synced(store, tracking)
    first, second = history(tracking, run_of(tracking, plan.runs[0]), "train/loss")
    assert before_ms <= first.timestamp_ms < second.timestamp_ms
    assert second.timestamp_ms <= time.time_ns() // 1_000_000


def test_rows_of_older_versions_are_1_ms_per_step_apart(store, plan):
    write_sweep(store, plan)
    folder = begin(store, plan.runs[0])
    (folder.path / "curve.jsonl").write_text('{"step": 1, "train/loss": 2.5}\n{"step": 6, "train/loss": 1.25}\n')
    tracking = MemoryTracking()
    synced(store, tracking)
    created_ms = folder.spec["created_ms"]
    points = history(tracking, run_of(tracking, plan.runs[0]), "train/loss")
    assert [(p.step, p.timestamp_ms) for p in points] == [(1, created_ms + 1), (6, created_ms + 6)]


@NO_SERVER
def test_the_data_and_the_model_of_a_finished_run(store, plan, tracking):
    write_sweep(store, plan)
    finish(store, plan.runs[0], METRICS)
    finish(store, plan.runs[1], METRICS, {"steps": 6, "data": "0123456789abcdef"})
    fail(store, plan.runs[2])
    synced(store, tracking)
    generated, text, failed = (run_of(tracking, run) for run in plan.runs[:3])
    assert [(data.name, data.context) for data in generated.datasets] == [
        ("selective_copy/train", "train"), ("selective_copy/in_dist", "in_dist"), ("selective_copy/dense", "dense"),
    ]  # fmt: skip
    assert json.loads(generated.datasets[0].source)["task"]["blanks"] == 2
    assert {data.digest for data in text.datasets} == {"0123456789abcdef"}
    assert len(generated.datasets[0].digest) == 16
    assert [len(run.models) for run in (generated, text, failed)] == [1, 1, 0]
    assert failed.datasets == []


@NO_SERVER
def test_the_end_of_a_sweep(store, plan, tracking):
    record = write_sweep(store, plan)
    synced(store, tracking)
    for run in plan.runs:
        finish(store, run, METRICS)
    record = end_sweep(store, record)
    assert backlog_count(store, URI) == 7
    synced(store, tracking)
    parent = sweep_of(tracking, record)
    assert parent.status == "finished"
    assert parent.params["rows"] == "3"
    assert artifacts(tracking, parent) == ["ablation.yaml", "table.csv", "table.json", "table.md"]
    assert "| 1 |" in parent.tags["mlflow.note.content"]
    assert parent.tags[f"{TAG}runs.pending"] == "0"
    progress = history(tracking, parent, "runs/finished")
    assert progress[-1].value == 6
    assert record.started_ms <= progress[-1].timestamp_ms <= record.ended_ms
    assert len({point.step for point in progress}) == len(progress)
    assert {data.context for data in parent.datasets} == {"train", "in_dist", "dense"}


def test_a_second_sync_sends_nothing_and_duplicates_nothing(store, plan, tracking):
    record = write_sweep(store, plan)
    for run in plan.runs[:3]:
        finish(store, run, METRICS)
    fail(store, plan.runs[3])
    end_sweep(store, record, "failed")
    synced(store, tracking)
    before = {run.run_id: run_of(tracking, run) for run in plan.runs}
    assert synced(store, tracking).written == set()
    # Even where the index has no note of what was sent, as after `store rebuild`, or in a store of an older version.
    Mirrored(store.index, tracker_key(store, URI)).forget()
    assert backlog_count(store, URI) == 5
    synced(store, tracking)
    after = {run.run_id: run_of(tracking, run) for run in plan.runs}
    assert before == after
    for run in plan.runs[:3]:
        assert len(history(tracking, after[run.run_id], "train/loss")) == 2


@NO_SERVER
def test_a_failed_run_is_trained_again(store, plan, tracking):
    write_sweep(store, plan)
    run = plan.runs[0]
    fail(store, run)
    sync = synced(store, tracking)
    folder = begin(store, run)
    sync.sync()
    tracked = run_of(tracking, run)
    assert (tracked.status, tracked.tags[f"{TAG}attempt"], tracked.tags[f"{TAG}message"]) == ("running", "2", "")
    folder.rewind(0)
    folder.log({"step": 1, "train/loss": 2.5})
    folder.log({"step": 2, "train/loss": 1.5})
    folder.finish({"train/loss": 1.5}, {"steps": 2})
    end(store, run)
    sync.sync()
    tracked = run_of(tracking, run)
    assert tracked.status == "finished"
    assert [(p.step, p.value) for p in history(tracking, tracked, "train/loss")] == [(1, 2.5), (2, 1.5)]


@NO_SERVER
def test_points_of_steps_that_are_trained_again_are_not_duplicated_even_if_they_differ(store, plan, tracking):
    """Training on a GPU is not deterministic, and the time of day never is."""
    write_sweep(store, plan)
    run = plan.runs[0]
    folder = begin(store, run, *({"step": step, "train/loss": 9.0 - step} for step in (1, 2, 3)))
    sync = synced(store, tracking)
    folder.rewind(1)
    for step in (2, 3, 4):
        folder.log({"step": step, "train/loss": 8.99 - step})
        folder.log({"step": step, "dense/loss": 1.0})
    folder.finish({"train/loss": 4.99, "dense/loss": 1.0}, {"steps": 4})
    end(store, run)
    sync.sync()
    losses = history(tracking, run_of(tracking, run), "train/loss")
    assert [(p.step, p.value) for p in losses] == [(1, 8.0), (2, 7.0), (3, 6.0), (4, 4.99)]
    assert [p.step for p in history(tracking, run_of(tracking, run), "dense/loss")] == [2, 3, 4]


@NO_SERVER
def test_a_running_run_is_sent_as_it_goes_and_is_no_backlog(store, plan, tracking):
    write_sweep(store, plan)
    folder = begin(store, plan.runs[0], {"step": 1, "train/loss": 2.0})
    sync = synced(store, tracking)
    sync.written.clear()
    sync.sync()
    assert sync.written == set()
    folder.log({"step": 2, "train/loss": 1.0})
    sync.sync()
    assert [p.step for p in history(tracking, run_of(tracking, plan.runs[0]), "train/loss")] == [1, 2]


@NO_SERVER
def test_what_a_dead_process_left_is_backlog(store, plan, tracking):
    record = write_sweep(store, plan)
    begin(store, plan.runs[0], {"step": 1, "train/loss": 2.0})
    synced(store, tracking)
    assert run_of(tracking, plan.runs[0]).status == "running"
    end_sweep(store, record, "interrupted")
    assert backlog_count(store, URI) == 1
    store.index.renew(new_owner("tests"), 0.0)  # the lease expires
    assert backlog_count(store, URI) == 2
    assert store.end_expired() == [plan.runs[0].run_id]
    synced(store, tracking)
    assert run_of(tracking, plan.runs[0]).status == "killed"
    assert sweep_of(tracking, record).status == "killed"


def test_a_run_of_another_ablation_is_linked_and_not_copied(store, plan, tracking):
    first = write_sweep(store, plan)
    for run in plan.runs:
        finish(store, run, METRICS)
    synced(store, tracking)
    seeds = list(plan.ablation.content.seeds)
    other = plan_of(f"{plan.name}-other", grid={"model.position": {"CoPE, renamed": ["cope"]}}, seeds=[*seeds, 7])
    assert set(other.rows[0].runs[:2]) == set(plan.rows[0].runs)
    second = write_sweep(store, other, reused=[run.run_id for run in plan.rows[0].runs])
    synced(store, tracking)
    shared = run_of(tracking, plan.rows[0].runs[0])
    parent = sweep_of(tracking, second)
    assert shared.tags["mlflow.parentRunId"] == sweep_of(tracking, first).id
    assert shared.experiment != parent.experiment
    assert shared.tags[f"{TAG}sweep.{first.sweep_id}"] == "CoPE"
    assert shared.tags[f"{TAG}sweep.{second.sweep_id}"] == "CoPE, renamed"
    note = parent.tags["mlflow.note.content"]
    assert f"[CoPE, renamed · seed {seeds[0]}]({shared.link})" in note
    assert f"tags.`{TAG}sweep.{second.sweep_id}` != ''" in note
    assert parent.tags[f"{TAG}reused"] == "2"
    end_sweep(store, second)
    synced(store, tracking)
    assert "reused.json" in artifacts(tracking, parent)


@NO_SERVER
def test_the_next_sweep_sends_runs_of_an_earlier_one_under_the_earlier_one(store, plan, tracking):
    first = write_sweep(store, plan)
    for run in plan.runs[:2]:
        finish(store, run, METRICS)
    first = end_sweep(store, first, "interrupted")
    begun_ms = store.run(plan.runs[1].run_id).spec["created_ms"]
    second = write_sweep(store, plan, started_ms=begun_ms + 1, reused=[run.run_id for run in plan.runs[:2]])
    while time.time_ns() // 1_000_000 < second.started_ms:
        pass
    finish(store, plan.runs[2], METRICS)
    synced(store, tracking)
    old, new = sweep_of(tracking, first), sweep_of(tracking, second)
    shared = run_of(tracking, plan.runs[0])
    assert shared.tags["mlflow.parentRunId"] == old.id
    assert shared.tags.keys() >= {f"{TAG}sweep.{first.sweep_id}", f"{TAG}sweep.{second.sweep_id}"}
    assert run_of(tracking, plan.runs[2]).tags["mlflow.parentRunId"] == new.id
    assert (old.status, new.status) == ("killed", "running")
    assert "table.md" in artifacts(tracking, old)


def test_a_shared_run_belongs_to_the_last_sweep_that_started_before_it(store, plan):
    run = plan.runs[0]
    finish(store, run, METRICS)
    begun_ms = store.run(run.run_id).spec["created_ms"]
    other = plan_of("without-the-run", seeds=[2**30])
    write_sweep(store, plan, started_ms=begun_ms - 3000)
    owner = write_sweep(store, plan, started_ms=begun_ms)
    write_sweep(store, other, started_ms=begun_ms - 1000)
    write_sweep(store, plan, started_ms=begun_ms + 1000)
    tracking = MemoryTracking()
    synced(store, tracking)
    assert run_of(tracking, run).tags["mlflow.parentRunId"] == sweep_of(tracking, owner).id
    assert run_of(tracking, run).tags[f"{TAG}sweep_id"] == owner.sweep_id


def test_runs_without_a_sweep_are_sent_too(store, plan):
    finish(store, plan.runs[0], METRICS)
    tracking = MemoryTracking()
    synced(store, tracking)
    (run,) = tracking.runs.values()
    assert run.status == "finished"
    assert "mlflow.parentRunId" not in run.tags


def test_a_sweep_whose_record_is_damaged_does_not_block_its_runs(store, plan):
    record = write_sweep(store, plan)
    finish(store, plan.runs[0], METRICS)
    (store.root / "sweeps" / f"{record.sweep_id}.json").write_text("{")
    tracking = MemoryTracking()
    sync = TrackerSync(store, URI, tracking)
    sync.sync()
    assert run_of(tracking, plan.runs[0]).status == "finished"
    assert "not valid JSON" in sync.errors[record.sweep_id]


@NO_SERVER
def test_long_texts_are_cut_in_tags_and_complete_in_artifacts(store, plan, tracking):
    record = write_sweep(store, plan, hypothesis="h" * 30_000)
    fail(store, plan.runs[0], "m" * 9000, "t" * 20_000)
    synced(store, tracking)
    assert artifacts(tracking, run_of(tracking, plan.runs[0])) == ["error.txt"]
    assert len(sweep_of(tracking, record).tags["mlflow.note.content"]) <= 8000


def test_damaged_runs_are_shown_as_such(store, plan):
    write_sweep(store, plan)
    begin(store, plan.runs[0], {"step": 1, "train/loss": 2.0})
    (store.run(plan.runs[0].run_id).path / "spec.json").write_text("{")
    end(store, plan.runs[0])
    finish(store, plan.runs[1], METRICS)
    tracking = MemoryTracking()
    synced(store, tracking)
    damaged = run_of(tracking, plan.runs[0])
    assert damaged.status == "failed"
    assert damaged.tags[f"{TAG}status"] == "damaged"
    assert "not valid JSON" in damaged.tags[f"{TAG}message"]
    assert run_of(tracking, plan.runs[1]).status == "finished"


def test_a_file_that_was_damaged_later_does_not_block_others(store, plan):
    write_sweep(store, plan)
    for run in plan.runs:
        finish(store, run, METRICS)
    for run in plan.runs[:3]:
        (store.run(run.run_id).path / "spec.json").write_text("{")
    sync = TrackerSync(store, URI, MemoryTracking())
    sync.sync()
    assert sync.written == {run.run_id for run in plan.runs[3:]}
    assert "not valid JSON" in sync.errors[plan.runs[0].run_id]
    assert sync.left == backlog_count(store, URI) == 3


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
    sync = TrackerSync(store, URI, tracking)
    for _ in range(3):
        sync.sync()
    assert sync.written == {run.run_id for run in plan.runs[3:]}
    assert sync.reasons() == ["no (3×)"]
    assert "6 finished" in sweep_of(tracking, record).tags["mlflow.note.content"]
    tracking.refused.clear()
    sync.sync()
    assert sync.errors == {}
    assert len(tracking.runs) == 7
    assert backlog_count(store, URI) == 0


def test_an_unavailable_tracker_is_not_asked_for_every_run(store, plan):
    write_sweep(store, plan)
    for run in plan.runs:
        finish(store, run, METRICS)
    tracking = Flaky()
    tracking.down = True
    sync = TrackerSync(store, URI, tracking)
    sync.sync()
    # Two requests for runs, one for the sweep.
    assert tracking.requests == 3
    assert backlog_count(store, URI) == 6
    tracking.down = False
    sync.sync()
    assert sync.errors == {}
    assert {run.status for run in tracking.runs.values() if f"{TAG}run_id" in run.tags} == {"finished"}


class Interrupted(MemoryTracking):
    """A tracker whose client is killed in the middle of its nth writing request; the request itself is carried out."""

    def __init__(self, survives):
        super().__init__()
        self.survives = survives

    def _die(self):
        self.survives -= 1
        if self.survives < 0:
            raise KeyboardInterrupt

    def create(self, *words, **entries):
        run = super().create(*words, **entries)
        self._die()
        return run

    def log(self, run, **entries):
        super().log(run, **entries)
        self._die()

    def set_status(self, run, status, ended_ms=None):
        super().set_status(run, status, ended_ms)
        self._die()


@pytest.mark.parametrize("survives", range(14))
def test_a_mirror_that_is_killed_at_any_request_loses_and_duplicates_nothing(store, plan, survives):
    record = write_sweep(store, plan)
    finish(store, plan.runs[0], METRICS)
    finish(store, plan.runs[1], METRICS)
    end_sweep(store, record)
    undisturbed = MemoryTracking()
    synced(store, undisturbed)
    Mirrored(store.index, tracker_key(store, URI)).forget()
    tracking = Interrupted(survives)
    try:
        TrackerSync(store, URI, tracking).sync()
    except KeyboardInterrupt:
        tracking.survives = 1000
        synced(store, tracking)
    assert len(tracking.runs) == 3
    assert len(tracking.models) == 2
    for run in plan.runs[:2]:
        mine, theirs = run_of(tracking, run), run_of(undisturbed, run)
        assert mine.status == "finished"
        assert sorted(map(str, tracking.points[mine.id])) == sorted(map(str, undisturbed.points[theirs.id]))


def test_a_database_that_was_replaced_gets_everything_again(store, plan):
    record = write_sweep(store, plan)
    finish(store, plan.runs[0], METRICS)
    end_sweep(store, record)
    synced(store, MemoryTracking())
    empty = MemoryTracking()
    synced(store, empty)
    assert len(empty.runs) == 2


def test_a_run_in_the_trash_of_the_tracker_stays_there(store, plan):
    write_sweep(store, plan)
    fail(store, plan.runs[0])
    tracking = MemoryTracking()
    synced(store, tracking)
    run_of(tracking, plan.runs[0]).deleted = True
    finish(store, plan.runs[0], METRICS)
    synced(store, tracking)
    assert len(tracking.runs) == 2


def test_the_runs_of_one_sweep_can_be_sent_first(store, plan):
    other = plan_of("another", seeds=[1])
    write_sweep(store, other)
    for run in other.runs:
        finish(store, run, METRICS)
    record = write_sweep(store, plan)
    for run in plan.runs[:2]:
        finish(store, run, METRICS)
    tracking = MemoryTracking()
    sync = TrackerSync(store, URI, tracking, first_sweep=record.sweep_id)
    sync.sync(deadline_s=time.monotonic() - 1)  # one run
    sync.sync(deadline_s=time.monotonic() - 1)
    assert sync.written == {run.run_id for run in plan.runs[:2]}
    assert sync.left == len(other.runs)


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
