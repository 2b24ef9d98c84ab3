"""A progress bar for reading long texts, on standard error if that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(description: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar while the block runs; yields a function that advances it by a number of bytes."""
    if not sys.stderr.isatty():
        yield lambda done_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total_bytes)
        yield lambda done_bytes: bar.advance(task, done_bytes)
