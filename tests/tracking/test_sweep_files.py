"""What the run of a sweep has in MLflow: its report, its table with verdicts and its figures."""

import time
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cope_sweep.cli.application import app
from cope_sweep.read.queries.sweep_files import sweep_files
from cope_sweep.tracking.background import BackgroundLogger
from cope_sweep.tracking.sync import sync
from tests.helpers.finished_runs import CONTENT, finish, plan_of
from tests.helpers.processes import TIMEOUT_S
from tests.helpers.sweeps import end_sweep, write_sweep
from tests.tracking.trackers import artifacts, client_of, run_of, sweep_of

pytestmark = pytest.mark.slow
FILES = ["ablation.yaml", "figures", "report.html", "table.csv", "table.md"]
DRAWN = CONTENT | {
    "grid": {"model.position": {"CoPE": ["cope"], "None": []}},
    "seeds": [0, 1, 2, 3],  # fewer have no verdict
    "figures": [{"kind": "curves", "metrics": ["train/loss"]}],
}


@pytest.fixture
def swept(store):
    """A sweep that has ended, and that has recorded its ablation."""
    plan = plan_of(**DRAWN)
    record = write_sweep(store, plan, data=DRAWN)
    for row, error in zip(plan.rows, (1.0, 50.0), strict=True):
        for seed, run in enumerate(row.runs):
            finish(store, run, {"in_dist/token_error": error + seed, "dense/loss": 0.5})
    return plan, end_sweep(store, record)


def send(store, uri, files=None):
    _, left, reasons = sync(store, uri, timeout_s=0, files=files or partial(sweep_files, store))
    assert (left, reasons) == (0, [])


def text_of(uri, run, name):
    return Path(client_of(uri).download_artifacts(run.id, name)).read_text(encoding="utf-8")


def test_a_sweep_has_its_table_with_verdicts_its_figures_and_its_report(store, server_uri, swept):
    plan, record = swept
    send(store, server_uri)
    parent = sweep_of(server_uri, record)
    assert artifacts(server_uri, parent) == FILES
    assert "| worse" in text_of(server_uri, parent, "table.md")
    header, first, *_ = text_of(server_uri, parent, "table.csv").splitlines()
    assert "verdict" in header
    assert first.startswith("CoPE")
    figures = [each.path for each in client_of(server_uri).list_artifacts(parent.id, "figures")]
    assert figures == ["figures/copying.curves.svg"]
    assert text_of(server_uri, parent, figures[0]).startswith("<?xml")
    assert "data:image/svg+xml" in text_of(server_uri, parent, "report.html")
    assert "**Artifacts**" in parent.tags["mlflow.note.content"]
    assert artifacts(server_uri, run_of(server_uri, plan.runs[0])) == []


def test_a_report_that_cannot_be_made_does_not_keep_a_sweep_from_being_sent(store, sqlite_uri, swept):
    def fails(record):
        raise SystemExit("no fonts")

    send(store, sqlite_uri, fails)
    parent = sweep_of(sqlite_uri, swept[1])
    assert parent.status == "finished"
    assert artifacts(sqlite_uri, parent) == ["ablation.yaml"]
    assert "could not be made: no fonts" in parent.tags["mlflow.note.content"]


def test_the_last_sweep_of_the_same_values_has_them(store, swept):
    plan, first = swept
    assert sweep_files(store, first)
    time.sleep(0.01)
    again = end_sweep(store, write_sweep(store, plan, data=DRAWN, reused=[run.run_id for run in plan.runs]))
    assert sweep_files(store, first) == {}
    assert sweep_files(store, again)
    other = end_sweep(store, write_sweep(store, plan, data=DRAWN, sets=["train.steps=7"]))
    assert sweep_files(store, other) == {}  # none of its runs is finished
    assert sweep_files(store, again)


def test_a_sweep_in_training_sends_them_at_its_end_once(store, sqlite_uri, swept):
    plan, _ = swept
    record, made = write_sweep(store, plan, data=DRAWN), []

    def files(record):
        made.append(record.status)
        return sweep_files(store, record)

    logger = BackgroundLogger(store, sqlite_uri, record, files=files)
    logger.start()
    record = end_sweep(store, record)
    assert logger.finish(patience_s=TIMEOUT_S) == []
    assert made == ["finished"]
    assert artifacts(sqlite_uri, sweep_of(sqlite_uri, record)) == FILES


def test_the_command_sends_them(store, sqlite_uri, swept):
    done = CliRunner().invoke(app, ["sync", "--store", str(store.root), "--json"])
    assert done.exit_code == 0, done.output
    assert artifacts(sqlite_uri, sweep_of(sqlite_uri, swept[1])) == FILES
