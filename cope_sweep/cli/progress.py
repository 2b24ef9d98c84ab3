"""Displays of progress: live tables and bars on a terminal, plain lines in logs and pipes."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Self

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cope_sweep.cli.output import duration, make_console
from cope_sweep.config import Metric, Plan, Row
from cope_sweep.read.numbers import fixed, metric_text
from cope_sweep.store import ENDED, Event, Status, Store

LINE_INTERVAL_S = 10.0
"""Between two plain lines about a run, or about a sweep of a service, whose status does not change."""
MAX_ROWS = 24
"""Runs in training that the live table shows."""
SUMMARY_ORDER = ("finished", "running", "pending", "interrupted", "stopped", "failed")
INDEXING = "making the index"
"""Title of the progress bar while the index is made."""
SENDING = "sending to MLflow", "runs and sweeps"
"""Title and unit of the progress bar while runs are sent."""


@dataclass
class Board:
    """The latest event of every run."""

    names: dict[str, str]
    """Run id → row and seed, in the order of the plan."""
    latest: dict[str, Event]
    """Run id → its latest event, in the same order."""
    started_s: float
    """`time.monotonic()` at the start of the sweep."""
    to_suggest: int = 0
    """Number of rows that the plan's search has yet to suggest."""
    any_event: bool = False
    """Whether this sweep has reported an event yet."""

    @staticmethod
    def of(plan: Plan, store: Store, leave_out: Collection[Status] = ()) -> Board:
        """The board of a plan, with the runs of the store that have ended, and that a sweep does not train again.

        `leave_out` are statuses of further runs that it does not train.
        """
        kept = {*plan.done_statuses, *({*leave_out} & {*ENDED})}
        records = store.index.records(run.run_id for run in plan.runs)
        rows = {run.run_id: row.name for row in plan.rows for run in row.runs}
        names, latest = {}, {}
        for run in plan.runs:
            names[run.run_id] = f"{rows[run.run_id]} · seed {run.seed}"
            record, steps = records.get(run.run_id), run.train.steps
            if record is not None and record.status in kept:
                latest[run.run_id] = Event.of(record, steps)
            else:
                latest[run.run_id] = Event(run_id=run.run_id, steps=steps)
        return Board(names, latest, time.monotonic(), 0 if "pending" in leave_out else plan.open_samples)

    def add(self, row: Row) -> None:
        """Add a row that the plan's search has suggested."""
        for run in row.runs:
            self.names[run.run_id] = f"{row.name} · seed {run.seed}"
            self.latest[run.run_id] = Event(run_id=run.run_id, steps=run.train.steps)
        self.to_suggest = max(0, self.to_suggest - 1)

    def update(self, event: Event) -> None:
        """Replace a run's latest event. An event without metrics, such as a failure, keeps the metrics before it."""
        self.any_event = True
        self.names.setdefault(event.run_id, event.run_id)  # a search has suggested the run
        before = self.latest.get(event.run_id, event)
        self.latest[event.run_id] = event.model_copy(update={"metrics": event.metrics or before.metrics})

    def counts(self) -> Counter[str]:
        """Status → number of runs."""
        return Counter(event.status for event in self.latest.values())

    def remaining_s(self) -> float | None:
        """Seconds until every run is finished, from the speed of the runs in training.

        None if none has a speed, or while rows are still to be suggested.
        """
        unfinished = [event for event in self.latest.values() if event.status not in ENDED]
        steps_per_s = sum(event.steps_per_s or 0.0 for event in unfinished if event.status == "running")
        steps_left = sum(event.steps - event.step for event in unfinished)
        return steps_left / steps_per_s if steps_per_s and not self.to_suggest else None

    def steps(self) -> tuple[int, int]:
        """Steps done, and all steps. A run that ended early counts as done to its last step."""
        latest = self.latest.values()
        done = sum(event.steps if event.status in ENDED else event.step for event in latest)
        return done, sum(event.steps for event in latest)

    def summary(self) -> str:
        """One line: the number of runs by status, the time since the start, the time left."""
        counts = self.counts()
        parts = [f"{counts[status]} {status}" for status in SUMMARY_ORDER if counts[status]]
        if self.to_suggest:
            parts.append(f"{self.to_suggest} to suggest")
        if not self.any_event and counts["finished"] < len(self.latest) + self.to_suggest:
            parts.append("starting workers")
        parts.append(f"{duration(time.monotonic() - self.started_s)} elapsed")
        if (remaining_s := self.remaining_s()) is not None:
            parts.append(f"about {duration(remaining_s)} left")
        return " · ".join(parts)


class PlainLines:
    """A context manager that is called with every event of a sweep.

    It prints a line whenever a run's status changes, and one every LINE_INTERVAL_S while the run trains.
    """

    def __init__(self, board: Board, metrics: list[Metric], title: str, console: Console) -> None:
        self.board, self.title, self.console = board, title, console
        self.metrics = metrics[:1]  # the table at the end shows all
        self.printed_s: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._print(f"{self.title}: {self.board.summary()}")
        return self

    def __exit__(self, *exception: object) -> None:
        self._print(f"{self.title}: {self.board.summary()}")

    def add(self, row: Row) -> None:
        """Show a row that the plan's search has suggested."""
        self.board.add(row)

    def __call__(self, event: Event) -> None:
        before = self.board.latest.get(event.run_id, event).status
        self.board.update(event)
        now = time.monotonic()
        if event.status == before and now - self.printed_s.get(event.run_id, -LINE_INTERVAL_S) < LINE_INTERVAL_S:
            return
        self.printed_s[event.run_id] = now
        self._print(self._line(event))

    def _line(self, event: Event) -> str:
        parts = [f"{event.status:<11}", self.board.names[event.run_id], f"step {event.step}/{event.steps}"]
        if (loss := event.metrics.get("train/loss")) is not None:
            parts.append(f"loss {fixed(loss, 3)}")
        for metric in self.metrics:
            if (value := event.value(metric.name)) is not None:
                unit = f" {metric.unit}" if metric.unit else ""
                parts.append(f"{metric.label or metric.name} {metric_text(metric, value)}{unit}")
        if event.steps_per_s:
            parts.append(f"{event.steps_per_s:.0f} steps/s")
        if event.message:
            parts.append(event.message)
        return "  ".join(parts)

    def _print(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)


class LiveTable(PlainLines):
    """For terminals: a line per run in training and a bar for the sweep, redrawn in place; failures stay above."""

    def __init__(self, board: Board, metrics: list[Metric], title: str, console: Console) -> None:
        super().__init__(board, metrics, title, console)
        self.live = Live(console=console, refresh_per_second=4, get_renderable=self.render)

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.live.stop()

    def __call__(self, event: Event) -> None:
        before = self.board.latest.get(event.run_id, event).status
        self.board.update(event)
        if event.status == "failed" != before:
            self._print(self._line(event))

    def render(self) -> RenderableType:
        """The runs in training, the bar, and the summary."""
        running = [event for event in self.board.latest.values() if event.status == "running"]
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("run", overflow="fold")
        for heading in ("step", "loss", *(metric.title for metric in self.metrics), "steps/s", "left"):
            table.add_column(heading, justify="right", no_wrap=True)
        for event in running[:MAX_ROWS]:
            table.add_row(*self._cells(event))
        hidden = len(running) - MAX_ROWS
        more = [Text(f"… and {hidden} more in training", style="dim")] if hidden > 0 else []
        done, total = self.board.steps()
        bar = Table.grid(expand=True)
        bar.add_row(ProgressBar(total=max(1, total), completed=done))
        runs: list[Table | Text] = [table, *more] if running else []
        return Group(Text(self.title, style="italic"), *runs, bar, Text(self.board.summary(), style="dim"))

    def _cells(self, event: Event) -> list[RenderableType]:
        loss = event.metrics.get("train/loss")
        values = [(event.value(metric.name), metric) for metric in self.metrics]
        return [
            Text(self.board.names[event.run_id]),
            f"{event.step}/{event.steps}",
            "" if loss is None else fixed(loss, 3),
            *("" if value is None else metric_text(metric, value) for value, metric in values),
            f"{event.steps_per_s:.0f}" if event.steps_per_s else "",
            duration((event.steps - event.step) / event.steps_per_s) if event.steps_per_s else "",
        ]


def progress_display(plan: Plan, store: Store, console: Console, leave_out: Collection[Status] = ()) -> PlainLines:
    """The display that fits the console: LiveTable on a terminal, else PlainLines.

    `leave_out` are statuses of runs that the sweep does not train.
    """
    board = Board.of(plan, store, leave_out)
    content = plan.ablation.content
    display = LiveTable if console.is_terminal and not console.is_dumb_terminal else PlainLines
    return display(board, content.metrics, f"{plan.name}: {content.title}", console)


@contextlib.contextmanager
def progress_bar(console: Console, title: str, unit: str = "runs") -> Iterator[Callable[[int, int], None]]:
    """A function to call with the number of things done and their total.

    It shows a bar on a terminal, and a plain line every LINE_INTERVAL_S in logs and pipes; nothing before the first
    call. If it printed a line, the last line shows the end.
    """
    bar = Progress(TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console)
    task = bar.add_task("", total=None)
    printed_s, printed, line = time.monotonic(), "", ""

    def print_line() -> None:
        nonlocal printed_s, printed
        printed_s, printed = time.monotonic(), line
        console.print(line, highlight=False)

    def show(done: int, total: int) -> None:
        nonlocal line
        line = f"{title}: {done}/{total} {unit}"
        if console.is_terminal and not console.is_dumb_terminal:
            bar.start()
            bar.update(task, total=total, completed=done)
        elif time.monotonic() - printed_s >= LINE_INTERVAL_S:
            print_line()

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()
        elif printed and printed != line:
            print_line()


def indexing_bar() -> Callable[[int, int], None]:
    """A function that shows the progress of making the index, for `Store`: a bar from its first call to its last."""
    bars = contextlib.ExitStack()
    bar: Callable[[int, int], None] | None = None

    def show(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            bar = bars.enter_context(progress_bar(make_console(stderr=True), INDEXING))
            if context := click.get_current_context(silent=True):
                context.call_on_close(bars.close)  # if the command ends before the bar does
        bar(done, total)
        if done == total:
            bars.close()

    return show
