"""The display of what is sent to MLflow: a bar on a terminal, a plain line now and then in logs and pipes."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_INTERVAL_S = 10.0


class SendingBar:
    """A context manager that is called with the number of runs and sweeps that were sent, and with that of all.

    Nothing is shown before the first call.
    """

    def __init__(self, console: Console, *, silent: bool = False) -> None:
        self._console, self._silent = console, silent
        self._bar: Progress | None = None
        self._printed_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, sent: int, total: int) -> None:
        if self._silent:
            return
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            if time.monotonic() - self._printed_s >= LINE_INTERVAL_S:
                self._printed_s = time.monotonic()
                self._console.print(f"sending to MLflow: {sent}/{total} runs and sweeps", highlight=False)
            return
        if self._bar is None:
            columns = (TextColumn("sending to MLflow"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console)
            self._bar.add_task("", total=total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], total=total, completed=sent)


@contextlib.contextmanager
def stopping() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set. A second Ctrl-C raises KeyboardInterrupt."""
    stop = threading.Event()

    def request_stop(signum: int, frame: object) -> None:
        if stop.is_set() and signum == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {signum: signal.signal(signum, request_stop) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
