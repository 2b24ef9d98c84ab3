"""A ledger carried to every tracker."""

import json
import secrets
import time

import pandas as pd
import pytest

from cope_sweep.record.carry import Carrier
from cope_sweep.record.tracking import MemoryTracking, TrackingError
from cope_sweep.record.translate import TAG, flat
from cope_sweep.results import frame, frame_from_tracking
from tests.record.sweeps import end_sweep, write_sweep
from tests.results.ablations import fail, finish, plan_of
from tests.tiny import tiny_run

HERE = pytest.mark.parametrize("tracking", ["memory", "sqlite"], indirect=True)
"""For what a server has no part in: it takes longer."""
METRICS = {"in_dist/token_error": 100 / 3, "dense/loss": 0.5}


@pytest.fixture
def plan(request):
    """Runs of their own for every test: a server's store is shared by them."""
    return plan_of(f"copying-{secrets.token_hex(4)}", seeds=[secrets.randbelow(2**30), secrets.randbelow(2**30)])


def carried(ledger, record, tracking):
    carrier = Carrier(ledger, record["sweep_id"], tracking)
    carrier.sync()
    assert carrier.errors == {}
    return carrier


def run_of(tracking, run):
    return tracking.find({f"{TAG}run_id": run.run_id})


def sweep_of(tracking, record):
    return tracking.find({f"{TAG}kind": "sweep", f"{TAG}sweep_id": record["sweep_id"]})


def begin(ledger, run, *rows):
    folder = ledger.run(run.run_id)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.begin(run, "here")
    for row in rows:
        folder.log(row)
    return folder


def test_a_sweep_with_every_status(ledger, plan, tracking):
    record = write_sweep(ledger, plan)
    cope, other, _ = plan.rows
    finish(ledger, cope.runs[0], METRICS)
    fail(ledger, cope.runs[1])
    begin(ledger, other.runs[0], {"step": 1, "train/loss": 2.0}).set_state("interrupted")
    with ledger.run(other.runs[1].run_id).lock():
        begin(ledger, other.runs[1])
        carrier = carried(ledger, record, tracking)
    assert len(carrier.written) == 4
    parent = sweep_of(tracking, record)
    runs = {run.run_id: run_of(tracking, run) for run in plan.runs}
    standings = [runs[run.run_id].standing if runs[run.run_id] else None for row in plan.rows for run in row.runs]
    assert standings == ["finished", "failed", "interrupted", "running", None, None]

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
    created_ms = ledger.run(cope.runs[0].run_id).spec["created_ms"]
    assert [(p.step, p.value, p.timestamp_ms) for p in tracking.history(done, "train/loss")] == [
        (1, 2.5, created_ms + 1), (6, 1.25, created_ms + 6),
    ]  # fmt: skip
    assert [p.value for p in tracking.history(done, "in_dist/token_error")] == [100 / 3]
    assert [p.value for p in tracking.history(done, "facts/parameters")] == [1234]
    assert tracking.artifacts(done, "checkpoint") == ["checkpoint/config.json", "checkpoint/model.safetensors"]

    failed = runs[cope.runs[1].run_id]
    assert failed.tags[f"{TAG}message"] == "Diverged: the loss is nan"
    assert tracking.artifacts(failed) == ["error.txt"]

    assert parent.standing == "running"
    assert "6 runs: 1 finished, 1 running, 1 failed, 1 interrupted, 2 pending." in parent.tags["mlflow.note.content"]
    assert parent.params["rows"] == "3"


@HERE
def test_the_end_of_a_sweep(ledger, plan, tracking):
    record = write_sweep(ledger, plan)
    carrier = carried(ledger, record, tracking)
    for run in plan.runs:
        finish(ledger, run, METRICS)
    record = end_sweep(ledger, record)
    carrier.sync()
    parent = sweep_of(tracking, record)
    assert parent.standing == "finished"
    assert tracking.artifacts(parent) == ["ablation.yaml", "table.csv", "table.json", "table.md"]
    assert "| 1 |" in parent.tags["mlflow.note.content"]
    assert parent.tags[f"{TAG}runs.pending"] == "0"


def test_carrying_it_again_sends_nothing_and_doubles_nothing(ledger, plan, tracking):
    record = write_sweep(ledger, plan)
    for run in plan.runs[:3]:
        finish(ledger, run, METRICS)
    fail(ledger, plan.runs[3])
    first = carried(ledger, record, tracking)
    before = {run.run_id: run_of(tracking, run) for run in plan.runs}
    first.sync()
    again = carried(ledger, record, tracking)
    after = {run.run_id: run_of(tracking, run) for run in plan.runs}
    assert before == after
    assert again.written == {plan.runs[3].run_id}
    for run in plan.runs[:3]:
        assert len(tracking.history(after[run.run_id], "train/loss")) == 2


@HERE
def test_a_run_goes_on_after_a_failure(ledger, plan, tracking):
    record = write_sweep(ledger, plan)
    run = plan.runs[0]
    fail(ledger, run)
    carrier = carried(ledger, record, tracking)
    folder = ledger.run(run.run_id)
    with folder.lock():
        folder.begin(run, "there")
        carrier.sync()
        tracked = run_of(tracking, run)
        assert (tracked.standing, tracked.tags[f"{TAG}attempt"], tracked.tags[f"{TAG}message"]) == ("running", "2", "")
        folder.rewind(0)
        folder.log({"step": 1, "train/loss": 2.5})
        folder.log({"step": 2, "train/loss": 1.5})
        folder.finish({"train/loss": 1.5}, {"steps": 2})
    carrier.sync()
    tracked = run_of(tracking, run)
    assert tracked.standing == "finished"
    assert [(p.step, p.value) for p in tracking.history(tracked, "train/loss")] == [(1, 2.5), (2, 1.5)]


@HERE
def test_points_that_are_trained_again_are_not_doubled_even_if_they_differ(ledger, plan, tracking):
    """A GPU does not repeat itself to the bit."""
    record = write_sweep(ledger, plan)
    run = plan.runs[0]
    folder = begin(ledger, run, *({"step": step, "train/loss": 9.0 - step} for step in (1, 2, 3)))
    carrier = carried(ledger, record, tracking)
    folder.rewind(1)
    for step in (2, 3, 4):
        folder.log({"step": step, "train/loss": 8.99 - step})
        folder.log({"step": step, "dense/loss": 1.0})
    carrier.sync()
    history = tracking.history(run_of(tracking, run), "train/loss")
    assert [(p.step, p.value) for p in history] == [(1, 8.0), (2, 7.0), (3, 6.0), (4, 4.99)]
    assert [p.step for p in tracking.history(run_of(tracking, run), "dense/loss")] == [2, 3, 4]


def test_a_run_of_another_ablation_is_not_copied_but_listed(ledger, plan, tracking):
    first = write_sweep(ledger, plan)
    for run in plan.runs:
        finish(ledger, run, METRICS)
    carried(ledger, first, tracking)
    seeds = list(plan.ablation.content.seeds)
    other = plan_of(
        f"{plan.name}-other", grid={"model.position": {"CoPE by another name": ["cope"]}}, seeds=[*seeds, 7]
    )
    assert set(other.rows[0].runs[:2]) == set(plan.rows[0].runs)
    second = write_sweep(ledger, other, reused=[run.run_id for run in plan.rows[0].runs])
    carried(ledger, second, tracking)
    shared = run_of(tracking, plan.rows[0].runs[0])
    parent = sweep_of(tracking, second)
    assert shared.tags["mlflow.parentRunId"] == sweep_of(tracking, first).id
    assert shared.experiment != parent.experiment
    assert f"[CoPE by another name · seed {seeds[0]}]({shared.link})" in parent.tags["mlflow.note.content"]
    assert parent.tags[f"{TAG}reused"] == "2"
    assert "reused.json" in tracking.artifacts(parent)


@HERE
def test_what_an_earlier_sweep_could_not_carry_comes_with_the_next_and_stays_its_own(ledger, plan, tracking):
    first = write_sweep(ledger, plan)
    for run in plan.runs[:2]:
        finish(ledger, run, METRICS)
    first = end_sweep(ledger, first, "interrupted")
    time.sleep(0.002)
    second = write_sweep(ledger, plan, reused=[run.run_id for run in plan.runs[:2]])
    finish(ledger, plan.runs[2], METRICS)
    carried(ledger, second, tracking)
    old, new = sweep_of(tracking, first), sweep_of(tracking, second)
    assert run_of(tracking, plan.runs[0]).tags["mlflow.parentRunId"] == old.id
    assert run_of(tracking, plan.runs[2]).tags["mlflow.parentRunId"] == new.id
    assert (old.standing, new.standing) == ("interrupted", "running")
    assert "table.md" in tracking.artifacts(old)


@HERE
def test_an_abandoned_sweep_was_interrupted(ledger, plan, tracking):
    record = write_sweep(ledger, plan)
    begin(ledger, plan.runs[0])
    Carrier(ledger, record["sweep_id"], tracking).sync(abandoned=True)
    assert sweep_of(tracking, record).standing == "interrupted"
    assert run_of(tracking, plan.runs[0]).standing == "interrupted"


def test_the_frame_is_the_same_from_either(ledger, plan, tracking):
    record = write_sweep(ledger, plan)
    for run in plan.rows[0].runs:
        finish(ledger, run, METRICS, {"steps": 6, "parameters": 12, "speed": 1 / 3, "device": "cpu", "host": "7"})
    fail(ledger, plan.rows[1].runs[0])
    begin(ledger, plan.rows[2].runs[0])
    carried(ledger, record, tracking)
    ours, theirs = frame(plan, ledger), frame_from_tracking(plan, tracking)
    both = [column for column in ours if column in theirs]
    assert both == ours.columns.tolist()
    pd.testing.assert_frame_equal(theirs[both], ours[both])


@HERE
def test_long_texts_are_cut_but_whole_in_artifacts(ledger, plan, tracking):
    record = write_sweep(ledger, plan, hypothesis="h" * 30_000)
    folder = begin(ledger, plan.runs[0])
    folder.fail("m" * 9000, "t" * 20_000)
    carried(ledger, record, tracking)
    assert tracking.artifacts(run_of(tracking, plan.runs[0])) == ["error.txt"]
    assert len(sweep_of(tracking, record).tags["mlflow.note.content"]) <= 8000


def test_a_run_whose_files_are_broken_keeps_no_other_back(ledger, plan):
    record = write_sweep(ledger, plan)
    for run in plan.runs:
        finish(ledger, run, METRICS)
    for run in plan.runs[:3]:
        (ledger.run(run.run_id).path / "result.json").write_text("{")
    carrier = Carrier(ledger, record["sweep_id"], MemoryTracking())
    carrier.sync()
    carrier.sync()
    assert carrier.written == {run.run_id for run in plan.runs[3:]}
    assert "not valid JSON" in carrier.errors[plan.runs[0].run_id]


class Flaky(MemoryTracking):
    """A tracker that fails while `down`, and always for some runs."""

    def __init__(self, poison=()):
        super().__init__()
        self.down, self.poison, self.asked = False, set(poison), 0

    def log(self, run, **what):
        self.asked += 1
        if self.down or run.tags.get(f"{TAG}run_id") in self.poison:
            raise TrackingError("no")
        super().log(run, **what)


def test_runs_that_are_refused_keep_no_other_back(ledger, plan):
    record = write_sweep(ledger, plan)
    for run in plan.runs:
        finish(ledger, run, METRICS)
    tracking = Flaky(poison=[run.run_id for run in plan.runs[:3]])
    carrier = Carrier(ledger, record["sweep_id"], tracking)
    carrier.sync()
    carrier.sync()
    assert carrier.written == {run.run_id for run in plan.runs[3:]}
    assert set(carrier.errors.values()) == {"no"}
    assert "6 finished" in sweep_of(tracking, record).tags["mlflow.note.content"]
    tracking.poison.clear()
    carrier.sync()
    assert carrier.errors == {}
    assert len(tracking.runs) == 7


def test_a_tracker_that_is_gone_is_not_asked_for_every_run(ledger, plan):
    record = write_sweep(ledger, plan)
    for run in plan.runs:
        finish(ledger, run, METRICS)
    tracking = Flaky()
    tracking.down = True
    carrier = Carrier(ledger, record["sweep_id"], tracking)
    carrier.sync()
    # Twice for runs, and once for the sweep.
    assert tracking.asked == 3
    tracking.down = False
    carrier.sync()
    assert carrier.errors == {}
    assert {run.standing for run in tracking.runs.values() if f"{TAG}run_id" in run.tags} == {"finished"}


def test_specs_in_dotted_names():
    run = tiny_run(**{"model.position": ["cope", "absolute"], "train.betas": [0.9, 0.99]})
    params = flat(run.model_dump(mode="json"))
    assert params["task.kind"] == "selective_copy"
    assert params["model.position"] == "cope+absolute"
    assert params["model.position.0.p_max"] == "64"
    assert params["train.betas"] == "[0.9, 0.99]"
    assert params["model.ffn_dim"] == "null"
    assert flat(tiny_run().model_dump(mode="json"))["model.position"] == "none"
    assert json.loads(json.dumps(params)) == params
