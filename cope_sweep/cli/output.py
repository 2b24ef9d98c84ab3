"""Output of the commands: consoles, plain tables, JSON, files, and numbers as people read them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TextIO, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from cope_sweep.errors import UserError
from cope_sweep.redaction import HIDDEN, redacted
from cope_sweep.terminal import SafeConsole, visible

if TYPE_CHECKING:
    from cope_sweep.store import SweepSummary

F = TypeVar("F", bound=str)

BINARY = ("parquet", "png", "pdf")
"""Formats of files that are not text."""
RIGHT_ALIGNED = ("seed", "parameters", "tokens", "per parameter", "FLOP", "time", "memory", "step", "finished")
"""Columns that hold numbers."""
NAMES = ("run", "ablation", "sweep", "status")
"""Columns of single words and of names that people copy: they are not wrapped."""
UNLIMITED = 10_000
"""Columns of a console whose lines are not wrapped."""
GAP = 2
"""Blanks between two columns of a table."""
LEAST_WRAPPED = 12
"""Smallest width of a wrapped column."""
MANY_ROWS = 500
"""Longer tables are written as plain lines: rich takes 0.5 ms for a row."""
DAY_S = 86_400
YEAR_DAYS = 365.25
YEAR_S = YEAR_DAYS * DAY_S
HOURS_MATTER_DAYS = 10
"""Shorter durations are shown with their hours."""


class OutputError(UserError):
    """Standard output cannot be written: its disk is full, or it was closed before the command started."""

    default_code = "output_failed"
    exit_code = 74  # EX_IOERR of sysexits.h


class _StandardOutput(io.FileIO):
    """Standard output. It raises OutputError, so that its errors differ from errors of other files."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(
                f"standard output cannot be written: {error.strerror}", reason=error.strerror or ""
            ) from error


class _StandardError(io.FileIO):
    """Standard error. It drops what it cannot write: there is nowhere to report it."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError:
            return len(data)


def print_note(console: Console, text: str) -> None:
    """Print what the user should know, in one line."""
    console.print(f"[yellow]note:[/yellow] {escaped(text)}", highlight=False, soft_wrap=True)


def check_output() -> None:
    """Make errors of standard output OutputErrors, and drop what standard error cannot take.

    Streams that a caller of this process has replaced stay as they are.

    Raises:
        OutputError: Standard output is closed.
    """
    if sys.stdout is None:
        raise OutputError("standard output is closed; send it to a file or to /dev/null", reason="closed")
    if sys.stdout is sys.__stdout__:
        sys.stdout = _with_raw(sys.__stdout__, _StandardOutput(sys.__stdout__.fileno(), "w", closefd=False))
    if sys.stderr is not None and sys.stderr is sys.__stderr__:
        sys.stderr = _with_raw(sys.__stderr__, _StandardError(sys.__stderr__.fileno(), "w", closefd=False))


_own: TextIO | None = None


def standard_output() -> TextIO:
    """Where commands write their results: standard output, also while `keep_for_results` keeps others from it."""
    return _own or sys.stdout


@contextlib.contextmanager
def keep_for_results() -> Iterator[None]:
    """Send what plugins and libraries print to standard error: a document on standard output holds nothing else."""
    global _own
    _own, sys.stdout = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout, _own = _own, None


def _with_raw(stream: TextIO, raw: io.FileIO) -> TextIO:
    """A text stream like `stream` that writes to `raw`."""
    stream.flush()
    is_unbuffered = isinstance(stream.buffer, io.RawIOBase)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=bool(stream.line_buffering) or is_unbuffered,
    )


def discard_output() -> None:
    """Discard what standard output and error cannot write: Python flushes both once more when it exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, OutputError):
            os.dup2(null, stream.fileno())


def forget_useless_sizes() -> None:
    """Forget COLUMNS and LINES where they are not sizes: rich prints nothing in zero columns, which some shells set."""
    for name in ("COLUMNS", "LINES"):
        value = os.environ.get(name)
        if value is not None and not (value.isascii() and value.isdigit() and int(value) > 0):
            del os.environ[name]


def make_console(*, stderr: bool = False) -> Console:
    """A console on standard output, or on standard error. Lines in a file or a pipe are as long as they need to be."""
    console = SafeConsole(stderr=True) if stderr else SafeConsole(file=_own)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = UNLIMITED
    return console


def counts_text(counts: Mapping[Any, int]) -> str:
    """`3 finished, 1 failed`."""
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items(), key=lambda item: -item[1]))


def sweep_counts(sweep: SweepSummary) -> str:
    """The counts of a sweep as a text. Of one that has ended, what is running is so in another sweep."""
    from cope_sweep.store import ACTIVE

    names = {} if sweep.status in ACTIVE else {"running": "running in another sweep"}
    return counts_text({names.get(status, status): number for status, number in sweep.counts.items()})


def grid(*columns: str) -> Table:
    """An empty table without lines, for `print_table`. Columns of numbers are right-aligned."""
    table = _empty_grid()
    for index, column in enumerate(columns):
        whole = index == 0 or column in (*RIGHT_ALIGNED, *NAMES)
        justify: Literal["left", "right"] = "right" if column in RIGHT_ALIGNED else "left"
        table.add_column(column, justify=justify, no_wrap=whole, overflow="fold")  # long words are not cut
    return table


def _empty_grid() -> Table:
    return Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)


def with_columns(table: Table, wanted: Callable[[Column], object]) -> Table:
    """A table of `grid` without its other columns."""
    columns = [column for column in table.columns if wanted(column)]
    shown = _empty_grid()
    for column in columns:
        shown.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap, overflow=column.overflow)
    for row, cells in zip(table.rows, zip(*(column.cells for column in columns), strict=True), strict=True):
        shown.add_row(*cells, style=row.style)
    return shown


def print_table(table: Table, optional: Sequence[str] = ()) -> list[str]:
    """Print a table of `grid` to standard output. Returns the names of the columns that are left out.

    In a narrow terminal, `optional` columns are left out until it fits, in the order given. Names and numbers are
    printed whole: where the other columns cannot be wrapped enough, lines are longer than the terminal is wide.
    """
    console = make_console()
    measured = [(column, max(map(_width, (column.header, *column.cells)))) for column in table.columns]
    left_out: list[str] = []
    for name in optional:
        if sum(width + GAP for _, width in measured) - GAP <= console.width:
            break
        left_out.append(name)
        measured = [(column, width) for column, width in measured if column.header != name]
    if left_out:
        table = with_columns(table, lambda column: column.header not in left_out)
    if table.row_count > MANY_ROWS:
        _write_plain(table, [width for _, width in measured])
        return left_out
    with_gaps = [(column, width + GAP) for column, width in measured[:-1]] + measured[-1:]
    # Another gap for each column: texts are wrapped less than they could be.
    least = sum((width if column.no_wrap else min(width, LEAST_WRAPPED)) + GAP for column, width in with_gaps)
    console.width = max(console.width, least - GAP)
    console.print(table)
    return left_out


def _width(cell: Any) -> int:
    return max(map(cell_len, _plain(cell).split("\n")))


def _plain(cell: Any) -> str:
    # Most cells have no markup, which takes longer to parse than all the rest.
    text = str(cell)
    return Text.from_markup(text).plain if "[" in text or "\\" in text else text


def _write_plain(table: Table, widths: Sequence[int]) -> None:
    """Write a long table as lines without styles, whose cells are not wrapped."""
    for row in zip(*((column.header, *column.cells) for column in table.columns), strict=True):
        cells = []
        for column, cell, width in zip(table.columns, map(_plain, row), widths, strict=True):
            space = " " * (width - cell_len(cell))
            cells.append(space + cell if column.justify == "right" else cell + space)
        standard_output().write((" " * GAP).join(cells).rstrip() + "\n")


def escaped(text: object) -> str:
    """The text with its square brackets escaped, so that rich prints them, without secrets, and all of it `visible`."""
    return escape(visible(redacted(str(text))))


def print_steps(console: Console, steps: Sequence[tuple[str, str]]) -> None:
    """Print commands that are useful now, with what they do: a line each, so that they can be copied."""
    console.print("Next:", style="bold")
    for command, description in steps:
        line = f"  [bold cyan]{escaped(command)}[/bold cyan]   [dim]{description}[/dim]"
        console.print(line, soft_wrap=True, highlight=False)
    if any(HIDDEN in redacted(command) for command, _ in steps):
        text = (
            f"{HIDDEN} hides secrets. Put such a URL into COPE_SWEEP_INDEX, COPE_SWEEP_STORE or MLFLOW_TRACKING_URI "
            "instead, and leave out its option."
        )
        console.print(text, soft_wrap=True, style="dim", highlight=False)


def print_json(value: Any) -> None:
    """Print one JSON document to standard output: plain data, which may hold models of pydantic."""

    def plain(item: Any) -> Any:
        return item.model_dump() if hasattr(item, "model_dump") else str(item)

    standard_output().write(json.dumps(value, indent=2, default=plain) + "\n")


def format_of(output: Path | None, suffixes: Mapping[str, F], default: F) -> F:
    """The format that the suffix of a path names; without a path, the default. Raises UserError for another suffix."""
    if output is None:
        return default
    if (suffix := output.suffix.lower()) not in suffixes:
        raise UserError(
            f"{output}: unknown suffix; end it with {', '.join(suffixes)}, or give --format",
            code="unknown_format",
            file=str(output),
            allowed=list(suffixes),
        )
    return suffixes[suffix]


def save(output: Path | None, file_format: str, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file in a format to a path; None: to standard output.

    For links, permissions and what is left after an interruption see `store.files.overwriting`. Raises UserError.
    """
    if output is None:
        if file_format in BINARY:
            raise UserError(
                f"{file_format} is binary; write it to a file with --output FILE",
                code="missing_option",
                option="--output",
                format=file_format,
            )
        standard_output().flush()
        write(standard_output().buffer)
        return
    from cope_sweep.store.files import overwriting

    try:
        with overwriting(output) as file:
            write(file)
    except OSError as error:
        raise UserError(
            f"{output}: {error.strerror or error}; name another file with --output",
            code="not_writable",
            file=str(output),
        ) from error


@contextlib.contextmanager
def writing_to(folder: Path, option: str) -> Iterator[None]:
    """A block that writes files to the folder of an option. Raises UserError instead of OSError."""
    try:
        yield
    except OSError as error:
        place = error.filename or folder
        raise UserError(
            f"{place}: {error.strerror or error}; name another folder with {option}",
            code="not_writable",
            file=str(place),
        ) from error


def duration(seconds: float) -> str:
    """A duration in its two largest units: `45 s`, `3 min 20 s`, `2 h 14 min`, `3 d 4 h`, `120 d`, `1.5 y`, `12 y`."""
    total_s = round(seconds)
    if total_s < 60:
        return f"{total_s} s"
    if total_s < 3600:
        return f"{total_s // 60} min {total_s % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    if hours < HOURS_MATTER_DAYS * 24:
        return f"{hours // 24} d {hours % 24} h"
    days = round(seconds / DAY_S)
    if days <= YEAR_DAYS:
        return f"{days} d"
    years = seconds / YEAR_S
    return f"{years:.1f} y" if years < 9.95 else f"{years:,.0f} y"


def estimated_time(seconds: float, least_s: float, *, lacks_gpu: bool) -> str:
    """The estimated duration of training: `about 2 min 10 s`, and what it is if the machine stays as busy as now.

    `needs a GPU` if it is more than a year, and a GPU may be used but this machine has none.

    Args:
        seconds: The estimate while other programs use the machine.
        least_s: The estimate while none does.
        lacks_gpu: A GPU may be used, and this machine has none.
    """
    if least_s > YEAR_S and lacks_gpu:
        return "needs a GPU"
    alone, busy = duration(least_s), duration(seconds)
    return f"about {alone}" if alone == busy else f"about {alone}, or {busy} if the machine stays as busy as now"


def quantity(number: float) -> str:
    """A number with a decimal prefix: `936`, `105.2 k`, `3.3 M`, `1.5 G`."""
    for limit, unit in ((1e3, ""), (1e6, " k"), (1e9, " M")):
        if number < limit - (0.05 * limit / 1e3 if unit else 0):
            return f"{number / limit * 1e3:.1f}{unit}" if unit else f"{number:.0f}"
    return f"{number / 1e9:,.1f} G"


def size(size_bytes: float) -> str:
    """A size in bytes with a binary prefix: `512 B`, `640.0 MiB`, `1.2 GiB`."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size_bytes /= 1024
        if size_bytes < 1023.95:
            return f"{size_bytes:.1f} {unit}"
    return f"{size_bytes / 1024:,.1f} TiB"
