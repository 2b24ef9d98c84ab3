"""What MLflow has of a store after a sync."""

import itertools
import json
import time

import pytest

from cope_sweep.store.reading import read_run
from cope_sweep.tracking.sync import MAX_FAILURES, sync
from tests.helpers.finished_runs import fail, finish, plan_of
from tests.helpers.sweeps import begin, end, end_sweep, stop, write_sweep
from tests.helpers.tiny import tiny_run
from tests.tracking.trackers import TAG, artifacts, client_of, history, lease, run_of, runs_of, send, sweep_of, synced

pytestmark = pytest.mark.slow  # MLflow takes seconds to import
SQLITE = pytest.mark.parametrize("uri", ["sqlite"], indirect=True)
"""For behaviour that does not depend on the server, which is slow."""
METRICS = {"in_dist/token_error": 100 / 3, "dense/loss": 0.5}


def test_a_sweep_with_every_status(store, plan, uri):
    record = write_sweep(store, plan)
    cope, other, none = plan.rows
    finish(store, cope.runs[0], METRICS, {"steps": 6, "parameters": 1234, "device": "cpu", "threads": 2})
    fail(store, cope.runs[1])
    stop(store, other.runs[0])
    begin(store, other.runs[1], {"step": 1, "train/loss": 2.0})
    stop(store, none.runs[0], "stopped", message="median stopping at step 1")
    assert sync(store, uri, dry_run=True).left == 4
    synced(store, uri)
    send(store, uri, other.runs[1])
    parent = sweep_of(uri, record)
    runs = {run.run_id: run_of(uri, run) for run in plan.runs}
    statuses = [runs[run.run_id] and runs[run.run_id].status for row in plan.rows for run in row.runs]
    assert statuses == ["finished", "failed", "scheduled", "running", "killed", None]

    done = runs[cope.runs[0].run_id]
    assert done.experiment == parent.experiment
    assert done.params.items() >= {"task.kind": "selective_copy", "model.position": "cope", "model.dim": "8"}.items()
    assert done.tags.items() >= {
        "mlflow.parentRunId": parent.id,
        "mlflow.source.git.commit": "0123abc",
        f"{TAG}run_id": cope.runs[0].run_id,
        f"{TAG}sweep_id": record.sweep_id,
        f"{TAG}ablation": plan.name,
        f"{TAG}row": "CoPE",
        f"{TAG}axis.model.position": "CoPE",
        f"{TAG}status": "finished",
        f"{TAG}device": "cpu",
        f"{TAG}threads": "2",
    }.items()  # fmt: skip
    assert [p.value for p in history(uri, done, "in_dist/token_error")] == [100 / 3]
    assert [p.value for p in history(uri, done, "system/parameters")] == [1234]
    assert history(uri, done, "system/threads") == []

    failed = runs[cope.runs[1].run_id]
    assert failed.tags[f"{TAG}message"] == "Diverged: the loss is nan"
    assert artifacts(uri, failed) == ["error.txt"]
    stopped = runs[none.runs[0].run_id]
    assert stopped.tags[f"{TAG}status"] == "stopped"
    assert stopped.tags[f"{TAG}message"] == "median stopping at step 1"

    assert parent.status == "running"
    assert parent.name.startswith(f"{plan.name} · 20")
    assert parent.tags.items() >= {f"{TAG}versions.torch": "2.15.0", f"{TAG}machine.host": "here"}.items()
    end_sweep(store, record, "interrupted")
    synced(store, uri)
    parent = sweep_of(uri, record)
    assert parent.status == "killed"
    note = parent.tags["mlflow.note.content"]
    assert "6 runs: 1 finished, 1 stopped, 1 failed, 1 running, 1 interrupted, 1 pending." in note
    facts = [*done.tags.values(), *(name for name in done.tags)]
    assert len(done.tags) <= 20, facts


def test_points_have_the_time_of_day(store, plan, uri):
    write_sweep(store, plan)
    before_ms = time.time_ns() // 1_000_000
    folder = begin(store, plan.runs[0], {"step": 1, "train/loss": 2.5})
    time.sleep(0.05)
    folder.log({"step": 2, "train/loss": 1.5})
    send(store, uri, plan.runs[0])
    first, second = history(uri, run_of(uri, plan.runs[0]), "train/loss")
    assert before_ms <= first.timestamp_ms < second.timestamp_ms
    assert second.timestamp_ms <= time.time_ns() // 1_000_000


def test_a_metric_name_may_contain_an_at_sign(store, plan, uri):
    write_sweep(store, plan)
    finish(store, plan.runs[0], {"test/perplexity@2048": 3.5})
    synced(store, uri)
    assert [point.value for point in history(uri, run_of(uri, plan.runs[0]), "test/perplexity at 2048")] == [3.5]


@SQLITE
def test_the_data_and_the_model_of_a_finished_run(store, plan, uri):
    write_sweep(store, plan)
    finish(store, plan.runs[0], METRICS)
    finish(store, plan.runs[1], METRICS, {"steps": 6, "data": "0123456789abcdef"})
    fail(store, plan.runs[2])
    synced(store, uri)
    generated, text, failed = (run_of(uri, run) for run in plan.runs[:3])
    assert [(data.name, data.context) for data in generated.datasets] == [
        ("selective_copy/train", "train"), ("selective_copy/in_dist", "in_dist"), ("selective_copy/dense", "dense"),
    ]  # fmt: skip
    assert json.loads(generated.datasets[0].source)["task"]["blanks"] == 2
    assert {data.digest for data in text.datasets} == {"0123456789abcdef"}
    assert len(generated.datasets[0].digest) == 16
    assert [len(run.models) for run in (generated, text, failed)] == [1, 1, 0]
    assert failed.datasets == []


@SQLITE
def test_the_end_of_a_sweep(store, plan, uri):
    record = write_sweep(store, plan)
    for run in plan.runs:
        train(store, run, record)
    record = end_sweep(store, record)
    assert sync(store, uri, dry_run=True).left == 7
    synced(store, uri)
    parent = sweep_of(uri, record)
    assert parent.status == "finished"
    assert parent.params["rows"] == "3"
    assert artifacts(uri, parent) == ["ablation.yaml"]
    # Alone: a line through the metrics of different rows would look like a learning curve.
    assert set(client_of(uri).get_run(parent.id).data.metrics) == {"runs/finished"}
    progress = history(uri, parent, "runs/finished")
    assert progress[-1].value == 6
    assert record.started_ms <= progress[-1].timestamp_ms <= record.ended_ms
    assert len({point.step for point in progress}) == len(progress)
    assert {data.context for data in parent.datasets} == {"train", "in_dist", "dense"}


@SQLITE
def test_the_note_of_an_active_sweep_counts_its_runs_and_reads_no_results(store, plan, uri, monkeypatch):
    """It is written every few seconds, in the driver's process."""
    from cope_sweep.tracking.mlflow import MLflowLogger

    record = write_sweep(store, plan, notes=["a node was left out"])
    finish(store, plan.runs[0], METRICS)
    fail(store, plan.runs[1])
    monkeypatch.setattr(store.index, "records", None)
    MLflowLogger(store, uri).log_sweep(record.sweep_id)
    note = sweep_of(uri, record).tags["mlflow.note.content"]
    assert "6 runs: 1 finished, 1 failed, 4 pending." in note
    assert "a node was left out" in note


def test_a_second_sync_sends_nothing_and_duplicates_nothing(store, plan, uri):
    record = write_sweep(store, plan)
    for run in plan.runs[:3]:
        finish(store, run, METRICS)
    fail(store, plan.runs[3])
    end_sweep(store, record, "failed")
    synced(store, uri)
    before = {run.run_id: run_of(uri, run) for run in plan.runs}
    assert synced(store, uri) == 0
    after = {run.run_id: run_of(uri, run) for run in plan.runs}
    assert before == after
    for run in plan.runs[:3]:
        assert len(history(uri, after[run.run_id], "train/loss")) == 2


@SQLITE
def test_a_failed_run_is_trained_again(store, plan, uri):
    write_sweep(store, plan)
    run = plan.runs[0]
    fail(store, run)
    synced(store, uri)
    folder = begin(store, run)
    send(store, uri, run)
    tracked = run_of(uri, run)
    assert (tracked.status, tracked.tags[f"{TAG}attempt"], tracked.tags[f"{TAG}message"]) == ("running", "2", "")
    folder.rewind(0)
    folder.log({"step": 1, "train/loss": 2.5})
    folder.log({"step": 2, "train/loss": 1.5})
    folder.finish({"train/loss": 1.5}, {"steps": 2})
    end(store, folder)
    synced(store, uri)
    tracked = run_of(uri, run)
    assert tracked.status == "finished"
    assert [(p.step, p.value) for p in history(uri, tracked, "train/loss")] == [(1, 2.5), (2, 1.5)]


@SQLITE
def test_points_of_steps_that_are_trained_again_are_not_duplicated_even_if_they_differ(store, plan, uri):
    """Training on a GPU is not deterministic, and the time of day never is."""
    write_sweep(store, plan)
    run = plan.runs[0]
    folder = begin(store, run, *({"step": step, "train/loss": 9.0 - step} for step in (1, 2, 3)))
    send(store, uri, run)
    folder.rewind(1)
    for step in (2, 3, 4):
        folder.log({"step": step, "train/loss": 8.99 - step})
        folder.log({"step": step, "dense/loss": 1.0})
    folder.finish({"train/loss": 4.99, "dense/loss": 1.0}, {"steps": 4})
    end(store, folder)
    synced(store, uri)
    losses = history(uri, run_of(uri, run), "train/loss")
    assert [(p.step, p.value) for p in losses] == [(1, 8.0), (2, 7.0), (3, 6.0), (4, 4.99)]
    assert [p.step for p in history(uri, run_of(uri, run), "dense/loss")] == [2, 3, 4]


@SQLITE
def test_what_a_dead_process_left_is_backlog(store, plan, uri):
    record = write_sweep(store, plan)
    begin(store, plan.runs[0], {"step": 1, "train/loss": 2.0})
    send(store, uri, plan.runs[0])
    assert run_of(uri, plan.runs[0]).status == "running"
    end_sweep(store, record, "interrupted")
    assert sync(store, uri, dry_run=True).left == 1
    store.index.renew("tests", 0.0)  # the lease expires
    assert sync(store, uri, dry_run=True).left == 2
    synced(store, uri)
    assert run_of(uri, plan.runs[0]).status == "scheduled"
    assert sweep_of(uri, record).status == "killed"


def test_a_run_of_another_ablation_is_linked_and_not_copied(store, plan, uri):
    first = write_sweep(store, plan)
    for run in plan.rows[0].runs:
        finish(store, run, METRICS)
    end_sweep(store, first)
    synced(store, uri)
    seeds = list(plan.ablation.content.seeds)
    other = plan_of(f"{plan.name}-other", grid={"model.position": {"CoPE, renamed": ["cope"]}}, seeds=[*seeds, 7])
    assert set(other.rows[0].runs[:2]) == set(plan.rows[0].runs)
    second = write_sweep(store, other, reused=[run.run_id for run in plan.rows[0].runs])
    send(store, uri, plan.rows[0].runs[0])
    end_sweep(store, second)
    synced(store, uri)
    shared = run_of(uri, plan.rows[0].runs[0])
    parent = sweep_of(uri, second)
    assert shared.tags["mlflow.parentRunId"] == sweep_of(uri, first).id
    assert shared.experiment != parent.experiment
    assert f"[CoPE, renamed · seed {seeds[0]}](#/runs/{shared.id})" in parent.tags["mlflow.note.content"]


def train(store, run, sweep):
    """Write `run` as finished by a sweep."""
    finish(store, run, METRICS)
    row = read_run(store.run(run.run_id), sweep.sweep_id)
    assert row is not None
    store.index.write([row])


@SQLITE
def test_a_sweep_sends_what_the_killed_sweep_before_it_could_not_send(store, plan, uri):
    killed = write_sweep(store, plan, ttl_s=0.0)
    finished, *rest = plan.runs
    train(store, finished, killed)
    again = write_sweep(store, plan, reused=[finished.run_id])
    for run in rest:
        train(store, run, again)
    end_sweep(store, again)
    assert sync(store, uri, sweep_id=again.sweep_id, timeout_s=0)[1:] == (0, [])
    assert run_of(uri, finished).status == "finished"
    assert sweep_of(uri, killed).status == "killed"
    trained = [history(uri, sweep_of(uri, sweep), "runs/finished")[-1].value for sweep in (killed, again)]
    assert trained == [1, 5], "each run counts for the sweep that trained it"
    third = end_sweep(store, write_sweep(store, plan, reused=[run.run_id for run in plan.runs]))
    assert sync(store, uri, sweep_id=third.sweep_id, dry_run=True).left == 1, "the sweep itself"
    (store.root / "sweeps" / f"{killed.sweep_id}.json").write_text("{")
    assert sync(store, uri, sweep_id=again.sweep_id, dry_run=True).left == 0


@SQLITE
def test_a_sweep_whose_record_is_damaged_does_not_block_its_runs(store, plan, uri):
    record = write_sweep(store, plan)
    finish(store, plan.runs[0], METRICS)
    end_sweep(store, record)
    (store.root / "sweeps" / f"{record.sweep_id}.json").write_text("{")
    (reason,) = sync(store, uri, timeout_s=0).reasons
    assert run_of(uri, plan.runs[0]).status == "finished"
    assert f"{record.sweep_id}.json" in reason


@SQLITE
def test_long_texts_are_cut_in_tags_and_complete_in_artifacts(store, plan, uri):
    record = write_sweep(store, plan, hypothesis="h" * 30_000)
    fail(store, plan.runs[0], "m" * 9000)
    end_sweep(store, record)
    synced(store, uri)
    assert artifacts(uri, run_of(uri, plan.runs[0])) == ["error.txt"]
    assert len(sweep_of(uri, record).tags["mlflow.note.content"]) <= 8000


@SQLITE
def test_a_file_that_was_damaged_later_does_not_block_others(store, plan, uri):
    write_sweep(store, plan)
    for run in plan.runs:
        finish(store, run, METRICS)
    for run in plan.runs[:3]:
        (store.run(run.run_id).path / "spec.json").write_text("{")
    _, left, reasons = sync(store, uri, timeout_s=0)
    assert [run_of(uri, run) is not None for run in plan.runs] == [False] * 3 + [True] * 3
    assert "spec.json" in reasons[0]
    assert left == 3
    store.index.delete(run.run_id for run in plan.runs[:3])
    synced(store, uri)


@SQLITE
def test_the_model_of_a_run_that_was_sent_while_it_trained_has_the_final_metrics(store, plan, uri):
    write_sweep(store, plan)
    folder = begin(store, plan.runs[0], {"step": 1, "train/loss": 2.5, "dense/loss": 0.75})
    send(store, uri, plan.runs[0])
    folder.log({"step": 6, "train/loss": 1.25})
    with folder.save_checkpoint() as path:
        (path / "model.safetensors").write_bytes(b"weights")
    folder.finish({"train/loss": 1.25, "dense/loss": 0.75}, {"steps": 6, "parameters": 1234})
    end(store, folder)
    synced(store, uri)
    run = run_of(uri, plan.runs[0])
    assert {(metric.key, metric.value, metric.step) for metric in model_of(uri, run).metrics} == {
        ("train/loss", 1.25, 6), ("dense/loss", 0.75, 1), ("system/parameters", 1234, 6),
    }  # fmt: skip
    assert [point.step for point in history(uri, run, "train/loss")] == [1, 6]
    assert [point.step for point in history(uri, run, "dense/loss")] == [1]


def model_of(uri, run):
    (model_id,) = run.models
    return client_of(uri).get_logged_model(model_id)


WRITES = (
    "create_experiment", "create_run", "update_run", "set_terminated", "log_batch", "log_inputs", "log_text",
    "create_logged_model", "finalize_logged_model", "log_outputs",
)  # fmt: skip


@pytest.fixture
def around(monkeypatch):
    """A function that calls `before(name, client, run or model id)` and `after(name)` around each writing request."""
    from mlflow import MlflowClient

    def install(before=lambda *_: None, after=lambda name: None):
        def around_it(name, original):
            def request(client, *words, **options):
                before(name, client, words[0] if words else None)
                answer = original(client, *words, **options)
                after(name)
                return answer

            return request

        for name in WRITES:
            monkeypatch.setattr(MlflowClient, name, around_it(name, getattr(MlflowClient, name)))

    return install


@SQLITE
def test_refused_runs_do_not_block_others(store, plan, uri, around):
    record = write_sweep(store, plan)
    for run in plan.runs:
        lease(store, record, run)
        finish(store, run, METRICS)
    refused = {run.run_id for run in plan.runs[:3]}

    def before(name, client, run_id):
        if name == "log_batch" and client.get_run(run_id).data.tags.get(f"{TAG}run_id") in refused:
            raise OSError("no")

    around(before)
    end_sweep(store, record)
    _, left, (reason,) = sync(store, uri, timeout_s=5)
    assert left == 3
    assert [run_of(uri, run).tags[f"{TAG}status"] for run in plan.runs[3:]] == ["finished"] * 3
    assert "failed: no" in reason
    refused.clear()
    synced(store, uri)
    assert len(runs_of(uri)) == 7
    assert "6 finished" in sweep_of(uri, record).tags["mlflow.note.content"]


@SQLITE
def test_an_unavailable_tracker_is_not_asked_for_every_run(store, plan, uri, around):
    write_sweep(store, plan)
    for run in plan.runs:
        finish(store, run, METRICS)
    requests = []

    def before(name, *_):
        if name == "log_batch":
            requests.append(name)
            if len(requests) <= MAX_FAILURES:
                raise OSError("down")

    around(before)
    assert sync(store, uri, timeout_s=0).left == 6
    assert len(requests) == MAX_FAILURES
    synced(store, uri)
    assert {run.status for run in runs_of(uri, f"tags.`{TAG}kind` = 'run'")} == {"finished"}


@SQLITE
@pytest.mark.parametrize(
    "survives", [n if n % 4 == 1 else pytest.param(n, marks=pytest.mark.thorough) for n in range(21)]
)
def test_a_sender_that_is_killed_at_any_request_loses_and_duplicates_nothing(store, plan, uri, around, survives):
    """In the middle of its nth writing request; the request itself is carried out."""
    record = write_sweep(store, plan)
    finish(store, plan.runs[0], METRICS)
    finish(store, plan.runs[1], METRICS)
    end_sweep(store, record)
    requests = itertools.count()

    def after(name):
        if next(requests) == survives:
            raise KeyboardInterrupt

    around(after=after)
    was_killed = False
    try:
        synced(store, uri)
    except KeyboardInterrupt:
        was_killed = True
        synced(store, uri)
    assert was_killed == (survives < 20)
    assert len(runs_of(uri)) == 3
    assert [each.status for each in runs_of(uri)] == ["finished"] * 3
    for run in plan.runs[:2]:
        assert [tuple(point[:2]) for point in history(uri, run_of(uri, run), "train/loss")] == [(1, 2.5), (6, 1.25)]
        assert len(history(uri, run_of(uri, run), "dense/loss")) == 1
        assert len(model_of(uri, run_of(uri, run)).metrics) == 4
    models = client_of(uri).search_logged_models([runs_of(uri)[0].experiment])
    assert len(models) == 2


@SQLITE
def test_a_run_in_the_trash_of_the_tracker_stays_there(store, plan, uri):
    write_sweep(store, plan)
    fail(store, plan.runs[0])
    synced(store, uri)
    client_of(uri).delete_run(run_of(uri, plan.runs[0]).id)
    finish(store, plan.runs[0], METRICS)
    synced(store, uri)
    assert len(runs_of(uri)) == 1


def test_specs_are_flattened_to_dotted_names():
    from cope_sweep.tracking.content import flat

    run = tiny_run(**{"model.position": ["cope", "absolute"], "train.betas": [0.9, 0.99]})
    params = flat(run.model_dump(mode="json"))
    assert params["task.kind"] == "selective_copy"
    assert params["model.position"] == "cope+absolute"
    assert params["model.position.cope.p_max"] == "64"
    assert params["train.betas"] == "[0.9, 0.99]"
    assert params["model.ffn_dim"] == "null"
    assert flat(tiny_run().model_dump(mode="json"))["model.position"] == "none"
    assert json.loads(json.dumps(params)) == params
