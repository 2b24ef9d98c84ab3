"""The display of a sweep, recorded as text."""

import io
import time

import pytest
from rich.console import Console

from cope_sweep.cli import progress
from cope_sweep.cli.progress import Board, LiveTable, PlainLines, progress_display
from cope_sweep.config import expand, load_ablation, row_of, with_overrides
from cope_sweep.store import Event
from tests.cli.conftest import TINY
from tests.helpers.finished_runs import finish, stop


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    return expand(load_ablation(tmp_path / "tiny.yaml"))


@pytest.fixture
def board(plan, store):
    return Board.of(plan, store)


def console(*, terminal=False):
    return Console(file=io.StringIO(), force_terminal=terminal, width=160, color_system=None)


def rendered(display):
    output = console()
    output.print(display.render())
    return output.file.getvalue()


def event(board, index, status, step=0, **more):
    return Event(run_id=[*board.names][index], status=status, step=step, steps=6, **more)


def test_rows_that_a_search_suggests_are_added(tmp_path, store):
    search = "search: {kind: optuna, samples: 2, space: {train.lr: {log_uniform: [1e-4, 1e-2]}}}\n"
    (tmp_path / "tiny.yaml").write_text(TINY.replace("seeds: [0, 1]", "seeds: [0]") + search)
    plan = expand(load_ablation(tmp_path / "tiny.yaml"))
    display = progress_display(plan, store, console(terminal=True))
    assert display.board.summary().startswith("2 to suggest · starting workers · ")
    row = row_of(plan.ablation, {"model.position": "none", "train.lr": 0.001})
    display.add(row)
    display(Event(run_id=row.runs[0].run_id, status="running", step=3, steps=6, steps_per_s=1.0))
    assert display.board.summary().startswith("1 running · 1 to suggest · 0 s elapsed")
    retried = Board.of(plan, store, leave_out=["pending"])  # as `retry --failed` does, which suggests nothing
    assert "to suggest" not in retried.summary()
    assert display.board.remaining_s() is None  # what follows is not known
    assert "none · 0.001 · seed 0" in rendered(display)


@pytest.mark.parametrize("schedule", ["asha", "none"])
def test_the_board_knows_runs_that_have_ended_and_are_not_trained_again(plan, store, schedule):
    plan = expand(with_overrides(plan.ablation, assignments=[f"schedule={schedule}"]))
    finish(store, plan.runs[0], {"in_dist/token_error": 25.0})
    stop(store, plan.runs[1])
    if schedule == "none":
        assert Board.of(plan, store).counts() == {"finished": 1, "pending": 3}
    board = Board.of(plan, store, leave_out=["stopped"])
    assert board.counts() == {"finished": 1, "stopped": 1, "pending": 2}
    board.update(event(board, 2, "running", 0, steps_per_s=1.0))
    assert board.remaining_s() == 12
    assert board.steps() == (6 + 6, 24)


def test_updates_change_the_totals(board):
    board.update(event(board, 0, "running", 2, steps_per_s=4.0, metrics={"train/loss": 1.5}))
    assert board.counts() == {"running": 1, "pending": 3}
    assert board.remaining_s() == 22 / 4
    assert board.summary().endswith(" · about 6 s left")
    board.update(event(board, 0, "failed", 2, message="diverged"))
    assert board.latest[next(iter(board.names))].metrics == {"train/loss": 1.5}, "an event without metrics keeps them"
    board.update(event(board, 1, "interrupted", 5))
    assert board.summary().startswith("2 pending · 1 interrupted · 1 failed · ")
    board.update(event(board, 2, "running", 0, steps_per_s=1.0))
    assert board.remaining_s() == 6 + 1 + 6


def test_the_live_table(plan, board):
    screen = console()
    table = LiveTable(board, plan.ablation.content.metrics, "tiny: A tiny copy", screen)
    metrics = {"train/loss": 1.25, "in_dist/token_error": 33.333}
    table(event(board, 0, "running", 3, steps_per_s=0.5, metrics=metrics))
    table(event(board, 1, "failed", 2, message="the loss is not finite; lower train.lr"))
    assert screen.file.getvalue() == "failed       none · seed 0  step 2/6  the loss is not finite; lower train.lr\n"
    title, headings, running, bar, summary = rendered(table).splitlines()
    assert title == "tiny: A tiny copy"
    assert headings.split() == ["run", "step", "loss", "In-dist.", "(%)", "steps/s", "left"]
    assert running.split() == ["CoPE", "·", "seed", "0", "3/6", "1.250", "33.33", "0", "6", "s"]
    assert board.steps() == (3 + 6, 24)
    assert set(bar) <= {"━", "╺", "╸", " "}
    assert summary.startswith("1 running · 2 pending · 1 failed")


def test_the_live_table_fits_a_terminal_of_80_columns(plan, board):
    board.names = {run_id: f"{name} in every one of its layers, with RoPE" for run_id, name in board.names.items()}
    table = LiveTable(board, plan.ablation.content.metrics, "t", console())
    table(event(board, 0, "running", 3, steps_per_s=0.01, metrics={"train/loss": 1.25, "in_dist/token_error": 33.333}))
    output = Console(file=io.StringIO(), width=80, color_system=None)
    output.print(table.render())
    text = output.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert {"33.33", "1.250", "(%)", "steps/s", "RoPE"} <= set(text.split())
    assert "…" not in text


def test_the_live_table_is_no_longer_than_a_screen(plan, board, monkeypatch):
    monkeypatch.setattr(progress, "MAX_ROWS", 2)
    table = LiveTable(board, plan.ablation.content.metrics, "t", console())
    for number in range(3):
        table(event(board, number, "running", 1))
    assert "… and 1 more in training" in rendered(table)


def test_plain_lines(plan, store):
    output = console()
    with progress_display(plan, store, output) as display:
        assert isinstance(display, PlainLines)
        metrics = {"train/loss": 1.25, "in_dist/token_error": 33.333}
        display(event(display.board, 0, "running", 1))
        display(event(display.board, 0, "running", 2))  # too soon after the line before
        display(event(display.board, 0, "finished", 6, metrics=metrics, steps_per_s=12.0))
        display(event(display.board, 1, "failed", 2, message="diverged"))
    first, running, finished, failed, last = output.file.getvalue().splitlines()
    assert first.startswith("tiny: A tiny copy: 4 pending · starting workers · ")
    assert running == "running      CoPE · seed 0  step 1/6"
    assert finished == "finished     CoPE · seed 0  step 6/6  loss 1.250  In-dist. 33.33 %  12 steps/s"
    assert failed == "failed       none · seed 0  step 2/6  diverged"
    assert last.startswith("tiny: A tiny copy: 1 finished · 2 pending · 1 failed · ")


def test_a_small_value_is_not_shown_as_zero(plan, board):
    """As in the table at the end."""
    output = console()
    PlainLines(board, plan.ablation.content.metrics, "t", output)(
        event(board, 0, "finished", 6, metrics={"in_dist/token_error": 0.004})
    )
    assert "In-dist. 0.004 %" in output.file.getvalue()


def test_plain_lines_repeat_after_the_interval(plan, board, monkeypatch):
    output = console()
    lines = PlainLines(board, plan.ablation.content.metrics, "t", output)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for step in range(4):
        lines(event(board, 0, "running", step))
        now[0] += progress.LINE_INTERVAL_S / 2
    assert [line.split()[-1] for line in output.file.getvalue().splitlines()] == ["0/6", "2/6"]
