"""Submissions: what a job finds in the store, what comes from outside, and sweeps whose job does not come to their end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cope_sweep.config import expand, load_ablation, with_overrides
from cope_sweep.config.paths import check_paths
from cope_sweep.read.reports.files import run_frame
from cope_sweep.store import Store, read_submission, write_submission
from cope_sweep.sweep.jobs import (
    end_submission,
    failing,
    job_submission,
    new_submission,
    parsed_spec,
    record_submission,
    retried,
    settle_submission,
    stop_sweep,
)
from cope_sweep.sweep.local_executor import run_local
from cope_sweep.sweep.sweep import Sweep
from cope_sweep.tracking.content import source_tags
from tests.helpers.errors import raises

PARENT = """\
title: Parent
base:
  task: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4, vocabulary: 6}
  model: {layers: 1, dim: 8, heads: 2}
  train: {steps: 6, batch: 4, lr: 1e-3}
  evaluate: {every: 3, sequences: 8, final_sequences: 8}
metrics: [{name: in_dist/token_error}]
scales: {small: {set: {train.steps: 4}}}
"""
CHILD = "title: Child\ninherit: parent\ngrid: {model.position: {CoPE: [cope], none: []}}\n"


@pytest.fixture
def child(tmp_path: Path) -> Path:
    (tmp_path / "parent.yaml").write_text(PARENT)
    (tmp_path / "child.yaml").write_text(CHILD)
    return tmp_path / "child.yaml"


def submitted(child: Path, store: Store, **options: object):
    """A submission of the child, recorded in the store, and its plan."""
    loaded = load_ablation(child)
    submission = new_submission(loaded, file_text=CHILD, scale="small", sets=["seeds=[0, 1]"], **options)
    plan = expand(with_overrides(loaded, scale="small", assignments=["seeds=[0, 1]"]))
    record_submission(submission, plan, store)
    return submission, plan


def test_the_job_has_the_same_runs_without_the_files(child: Path, store: Store) -> None:
    submission, plan = submitted(child, store, max_failures=3)
    child.unlink()
    child.with_name("parent.yaml").unlink()
    read, again = job_submission(store, submission.sweep_id)
    assert read == submission
    assert again.runs == plan.runs
    assert again.rows == plan.rows
    assert again.ablation.replaced == plan.ablation.replaced
    record = store.sweep(submission.sweep_id)
    assert (record.status, record.ablation, record.file_text, len(record.runs)) == ("pending", "child", CHILD, 4)


def test_the_job_has_the_same_rows(child: Path, store: Store) -> None:
    """The rows of `--rows` travel with the submission, and are in the command that repeats it."""
    submission, plan = submitted(child, store, rows=["model.position=CoPE"])
    _, again = job_submission(store, submission.sweep_id)
    assert [row.name for row in again.rows] == [row.name for row in plan.rows if row.labels["model.position"] == "CoPE"]
    assert 0 < len(again.rows) < len(plan.rows)
    assert submission.command[-2:] == ["--rows", "model.position=CoPE"]


def test_a_job_executes_it_under_its_id(child: Path, store: Store) -> None:
    submission, plan = submitted(child, store)
    outcome = Sweep(plan, store, run_local, executor_name="local", submission=submission).run()
    assert (outcome.sweep_id, outcome.trained) == (submission.sweep_id, 4)
    again, _ = submitted(child, store)
    outcome = Sweep(plan, store, run_local, executor_name="local", submission=again).run()
    assert (outcome.sweep_id, outcome.trained, outcome.reused) == (again.sweep_id, 0, 4)
    # The sweep that had nothing to train is recorded as finished, too.
    for sweep_id in (submission.sweep_id, again.sweep_id):
        record = store.sweep(sweep_id)
        assert record.status == "finished"
        assert store.index.sweep(sweep_id).status == "finished"


@pytest.mark.parametrize("job_has", [None, "of the job"])
def test_the_record_has_the_commit_that_was_submitted(
    child: Path, store: Store, monkeypatch: pytest.MonkeyPatch, job_has: str | None
) -> None:
    monkeypatch.setattr("cope_sweep.sweep.jobs.git_commit", lambda: "submitted")
    submission, _ = submitted(child, store)
    assert store.sweep(submission.sweep_id).git_commit == "submitted"
    # The code that a job executes was sent without the Git repository, or lies in an image with another one.
    monkeypatch.setattr("cope_sweep.sweep.sweep.git_commit", lambda: job_has)
    read, plan = job_submission(store, submission.sweep_id)
    Sweep(plan, store, run_local, executor_name="local", submission=read).run()
    record = store.sweep(submission.sweep_id)
    assert record.git_commit == "submitted"
    records = store.index.records(run.run_id for run in plan.runs)
    assert set(run_frame(plan, records, store)["commit"]) == {"submitted"}
    assert source_tags(record)["mlflow.source.git.commit"] == "submitted"


def test_a_retry_has_the_commit_from_which_it_was_submitted(
    child: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    submission, _ = submitted(child, store)
    monkeypatch.setattr("cope_sweep.sweep.jobs.git_commit", lambda: "later")
    assert retried(submission).git_commit == "later"


def test_a_stop_before_the_start_is_obeyed(child: Path, store: Store) -> None:
    submission, plan = submitted(child, store)
    store.index.request_stop(submission.sweep_id)

    def executor(*arguments: object, **options: object) -> None:
        raise AssertionError("it was to stop")

    outcome = Sweep(plan, store, executor, executor_name="local", submission=submission).run()
    assert (outcome.not_started, outcome.notes) == (4, ("stopped: a stop was requested",))
    assert store.index.sweep(submission.sweep_id).status == "interrupted"
    assert not store.index.stop_requested(submission.sweep_id)


def test_a_sweep_that_was_stopped_before_its_start_has_ended(child: Path, store: Store) -> None:
    """Also where its job never starts. A job that starts later does not execute it."""
    submission, plan = submitted(child, store)
    assert stop_sweep(store, submission.sweep_id)
    record = store.sweep(submission.sweep_id)
    assert (record.status, record.notes) == ("interrupted", ["it was stopped before it had started"])
    late = Sweep(plan, store, run_local, executor_name="local", submission=submission)
    with raises("has_ended", sweep_id=submission.sweep_id, status="interrupted"), failing(store, submission.sweep_id):
        late.run()
    assert store.sweep(submission.sweep_id) == record
    assert not stop_sweep(store, submission.sweep_id)


def test_a_sweep_that_does_not_begin_is_recorded_as_failed(child: Path, store: Store) -> None:
    submission, _ = submitted(child, store)
    with pytest.raises(ZeroDivisionError), failing(store, submission.sweep_id):
        raise ZeroDivisionError("no\nroom")
    record = store.sweep(submission.sweep_id)
    assert (record.status, record.notes) == ("failed", ["the sweep did not start: no room"])
    with pytest.raises(KeyError), failing(store, "20260101-000000-00"):
        raise KeyError


@pytest.mark.parametrize(
    ("before", "after"), [("pending", "failed"), ("running", "interrupted"), ("finished", "finished")]
)
def test_the_end_of_a_job_ends_its_sweep(child: Path, store: Store, before: str, after: str) -> None:
    submission, _ = submitted(child, store)
    record = store.sweep(submission.sweep_id)
    store.write_sweep(record.model_copy(update={"status": before}))
    store.index.request_stop(submission.sweep_id)
    settle_submission(store, submission.sweep_id, "it was killed")
    ended = store.sweep(submission.sweep_id)
    assert ended.status == store.index.sweep(submission.sweep_id).status == after
    assert [note.endswith("it was killed") for note in ended.notes] == [True] * (before != after)
    assert not store.index.stop_requested(submission.sweep_id)
    end_submission(store, "20260101-000000-00", "unknown", ("pending",))


def test_the_record_of_a_submission_names_the_runs_that_it_does_not_train(child: Path, store: Store) -> None:
    child.write_text(CHILD + "schedule: asha\n")
    submission, _ = submitted(child, store, leave_out=["failed"])
    assert store.sweep(submission.sweep_id).leave_out == ["failed", "stopped"]


def test_a_retry_is_another_sweep_of_the_same_runs(child: Path, store: Store) -> None:
    submission, plan = submitted(child, store, leave_out=["failed"], request="x")
    again = retried(submission, "y")
    assert again.retry_of == submission.sweep_id != again.sweep_id
    assert (again.leave_out, again.request, again.data) == ([], "y", submission.data)
    write_submission(store, again)
    assert job_submission(store, again.sweep_id)[1].runs == plan.runs


def test_an_unknown_or_damaged_submission(store: Store) -> None:
    for name in ("20260101-000000-00", "../../etc/passwd", ""):
        with raises("not_found", sweep_id=name):
            read_submission(store, name)
    store.write("submissions/20260101-000000-00.json", b'{"sweep_id": 5}')
    with raises("damaged_file", file=f"{store.location}/submissions/20260101-000000-00.json"):
        read_submission(store, "20260101-000000-00")


def test_an_infinite_number_from_outside_is_refused(child: Path) -> None:
    """JSON's 1e999 is one."""
    with raises("not_finite", place="mine", key_path="title", value="inf"):
        parsed_spec({"title": float("inf")}, "mine", child.parent)


def test_paths_are_refused_unless_the_operator_has_named_them(child: Path) -> None:
    text = PARENT.replace("{kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4, vocabulary: 6}",
                          f"{{kind: wikitext, corpus: mine, folder: {os.sep}data, tokens: 8, vocabulary: 300}}")  # fmt: skip
    child.write_text(text.replace("in_dist/token_error", "train/loss"))
    own = expand(load_ablation(child))
    with raises("path_of_another_machine", ablation="child", key="task.folder", value="/data"):
        check_paths(own)
    check_paths(own, own)
    other = expand(with_overrides(load_ablation(child), assignments=["task.folder=/etc"]))
    with raises("path_of_another_machine", key="task.folder", value="/etc"):
        check_paths(other, own)
    for key, task in {
        "path": "{kind: text, corpus: a, path: /etc}", "dataset": "{kind: text, dataset: a/b}",
        "tokenizer": "{kind: text, tokenizer: a/b}", "tokenizer_file": "{kind: text, tokenizer: /etc/x.json}",
    }.items():  # fmt: skip
        other = expand(with_overrides(load_ablation(child), assignments=[f"task={task}"]))
        with raises("path_of_another_machine", key=f"task.{key}"):
            check_paths(other, own)
