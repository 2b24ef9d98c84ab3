"""What a person sees while a sweep runs: a live table on a terminal, plain lines where there is none."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cope_sweep.plan import Plan
from cope_sweep.record import Event, Ledger
from cope_sweep.spec import Metric

LINE_EVERY_S = 10.0
"""Seconds from one plain line about a run to the next, while nothing but its step changes."""
ROWS_SHOWN = 24
STYLES = {"running": "cyan", "finished": "green", "failed": "bold red", "interrupted": "yellow", "pending": "dim"}


class Progress(Protocol):
    """A context in which events are shown."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def __call__(self, event: Event) -> None: ...


@dataclass
class Board:
    """Every run's latest event, and the time still needed."""

    names: dict[str, str]
    """Run id → what people call it."""
    latest: dict[str, Event]
    started_s: float
    under_way: bool = False
    """Whether any run of this sweep was heard of."""

    @staticmethod
    def of(plan: Plan, ledger: Ledger) -> Board:
        names, latest = {}, {}
        for run in plan.runs:
            row = plan.row_of(run.run_id)
            names[run.run_id] = f"{row.name if row else ''} · seed {run.seed}"
            folder = ledger.run(run.run_id)
            result = folder.result
            steps = run.train.steps
            latest[run.run_id] = (
                Event(run.run_id, "finished", steps, steps, result["metrics"], message="done before")
                if result
                else Event(run.run_id, "pending", 0, steps)
            )
        return Board(names, latest, time.monotonic())

    def update(self, event: Event) -> None:
        self.under_way = True
        # The metrics of a run outlive an event that carries none (its failure, say).
        metrics: Mapping[str, float] = event.metrics or self.latest[event.run_id].metrics
        self.latest[event.run_id] = Event(**{**event.__dict__, "metrics": metrics})

    def count(self, status: str) -> int:
        return sum(event.status == status for event in self.latest.values())

    def eta_s(self) -> float | None:
        """Seconds until every run is done, from the speed of those that train now; None before there is any."""
        running = [e for e in self.latest.values() if e.status == "running" and e.steps_per_s]
        if not running:
            return None
        speed = sum(e.steps_per_s or 0.0 for e in running)
        left = sum(e.steps - e.step for e in self.latest.values() if e.status in ("running", "pending", "interrupted"))
        return left / speed if speed else None

    def summary(self) -> str:
        parts = [f"{self.count(s)} {s}" for s in ("finished", "running", "pending", "interrupted", "failed")]
        shown = " · ".join(part for part in parts if not part.startswith("0 "))
        if not self.under_way and self.count("finished") < len(self.latest):
            shown += " · starting workers"
        eta_s = self.eta_s()
        elapsed = f"{duration(time.monotonic() - self.started_s)} elapsed"
        return f"{shown} · {elapsed}" + (f" · about {duration(eta_s)} left" if eta_s is not None else "")


class LiveTable:
    """A table that redraws itself in place."""

    def __init__(self, board: Board, metrics: list[Metric], title: str, console: Console) -> None:
        self.board, self.metrics, self.title = board, metrics[:3], title
        self.live = Live(console=console, refresh_per_second=4, get_renderable=self.render)

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def __call__(self, event: Event) -> None:
        self.board.update(event)

    def render(self) -> RenderableType:
        table = Table(title=self.title, title_justify="left", box=None, padding=(0, 1), expand=False)
        table.add_column("run", no_wrap=True, overflow="ellipsis", max_width=44)
        table.add_column("", no_wrap=True)
        table.add_column("step", justify="right", no_wrap=True)
        table.add_column("", width=14)
        table.add_column("loss", justify="right")
        for metric in self.metrics:
            table.add_column(metric.title, justify="right")
        table.add_column("steps/s", justify="right")
        table.add_column("left", justify="right")
        shown = self._shown()
        for event in shown:
            table.add_row(*self._cells(event))
        hidden = len(self.board.latest) - len(shown)
        footer = [Text(f"… and {hidden} more runs", style="dim")] if hidden else []
        return Group(table, *footer, Text(self.board.summary(), style="dim"))

    def _shown(self) -> list[Event]:
        """All runs where they fit; else those that train, failed, or ended last."""
        events = list(self.board.latest.values())
        if len(events) <= ROWS_SHOWN:
            return events
        rank = {"running": 0, "failed": 1, "interrupted": 2, "finished": 3, "pending": 4}
        chosen = sorted(events, key=lambda e: rank[e.status])[:ROWS_SHOWN]
        keep = {event.run_id for event in chosen}
        return [event for event in events if event.run_id in keep]

    def _cells(self, event: Event) -> list[RenderableType]:
        style = STYLES[event.status]
        name = Text(self.board.names[event.run_id], style="dim" if event.status == "pending" else "")
        if event.status == "failed":
            name.append(f"\n{event.message}", style="red")
        loss = event.metrics.get("train/loss")
        values = [event.metrics.get(metric.name) for metric in self.metrics]
        running = event.status == "running"
        left_s = (event.steps - event.step) / event.steps_per_s if running and event.steps_per_s else None
        return [
            name,
            Text(event.status, style=style),
            f"{event.step}/{event.steps}",
            ProgressBar(total=max(1, event.steps), completed=event.step, width=14),
            "" if loss is None else f"{loss:.3f}",
            *(
                "" if value is None else f"{value:.{metric.decimals}f}"
                for value, metric in zip(values, self.metrics, strict=True)
            ),
            f"{event.steps_per_s:.0f}" if event.steps_per_s and running else "",
            duration(left_s) if left_s is not None else "",
        ]


class PlainLines:
    """A line when a run's status changes, and now and then while it trains: for logs and pipes."""

    def __init__(self, board: Board, metrics: list[Metric], title: str, console: Console) -> None:
        self.board, self.metrics, self.title, self.console = board, metrics[:3], title, console
        self.printed_s: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._print(f"{self.title}: {self.board.summary()}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._print(f"{self.title}: {self.board.summary()}")

    def __call__(self, event: Event) -> None:
        before = self.board.latest[event.run_id].status
        self.board.update(event)
        now = time.monotonic()
        if event.status == before and now - self.printed_s.get(event.run_id, -LINE_EVERY_S) < LINE_EVERY_S:
            return
        self.printed_s[event.run_id] = now
        shown = [
            f"{m.label or m.name} {v:.{m.decimals}f}{m.unit}"
            for m in self.metrics
            if (v := event.metrics.get(m.name)) is not None
        ]
        loss = event.metrics.get("train/loss")
        parts = [
            f"{event.status:<11}",
            self.board.names[event.run_id],
            f"step {event.step}/{event.steps}",
            *([f"loss {loss:.3f}"] if loss is not None else []),
            *shown,
            *([f"{event.steps_per_s:.0f} steps/s"] if event.steps_per_s else []),
            *([event.message] if event.message else []),
        ]  # fmt: skip
        self._print("  ".join(parts))

    def _print(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)


def progress(plan: Plan, ledger: Ledger, console: Console) -> Progress:
    """The display that suits the console."""
    board = Board.of(plan, ledger)
    content = plan.ablation.content
    display = LiveTable if console.is_terminal and not console.is_dumb_terminal else PlainLines
    return display(board, content.metrics, f"{plan.name}: {content.title}", console)


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `5 h 03 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
