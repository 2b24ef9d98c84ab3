"""The formats of tables, for the command line and the REST service.

An installed package adds one by an entry point of the group `cope_sweep.formats`, which names a `Format`.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from pydantic_core import to_json

from cope_sweep.store import QueryError

if TYPE_CHECKING:
    from cope_sweep.read.tables.table import Table

ENTRY_POINTS = "cope_sweep.formats"
TERMINAL_WIDTH = 160
"""Columns of a terminal's table where there is no terminal."""


@dataclass(frozen=True)
class Format:
    """A format of tables."""

    name: str
    media_type: str
    suffix: str
    """Ending of files: `.csv`."""
    render: Callable[[Table, str | None], bytes]
    """The table in this format. The second argument is the URL of a list of runs, or None: see `render.html`."""
    render_runs: Callable[[Table], bytes] | None = None
    """One line for each run; None: this format cannot show single runs."""
    binary: bool = False
    """Whether it is not text."""

    def file(self, table: Table, *, runs: bool = False, runs_url: str | None = None) -> bytes:
        """The table; with `runs`, one line for each run. Raises QueryError where this format has no such lines."""
        if not runs or self.name == "json":  # which always holds every run
            return self.render(table, runs_url)
        if self.render_runs is None:
            able = " or ".join(each.name for each in formats().values() if each.render_runs)
            raise QueryError(
                f"{self.name} has no lines for single runs: choose the format {able}; json holds every run"
            )
        return self.render_runs(table)


@cache
def formats() -> Mapping[str, Format]:
    """Name → format: JSON first, then the others of this package, then those of installed packages.

    Raises QueryError where an installed one cannot be used.
    """
    found = {each.name: each for each in BUILT_IN}
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            loaded = entry_point.load()
        except Exception as error:
            raise QueryError(
                f"the entry point {entry_point.name!r} ({entry_point.value}) of the group {ENTRY_POINTS} cannot be "
                f"loaded: {type(error).__name__}: {error}; correct or uninstall its package"
            ) from error
        if not isinstance(loaded, Format) or loaded.name in found:
            raise QueryError(
                f"the entry point {entry_point.name!r} ({entry_point.value}) of the group {ENTRY_POINTS} is no Format "
                "with a name of its own; correct or uninstall its package"
            )
        found[loaded.name] = loaded
    return found


def find_format(name: str) -> Format:
    """The format with a name. Raises QueryError with the names of all."""
    if name not in formats():
        raise QueryError(f"no format {name!r}; the formats are: {', '.join(formats())}")
    return formats()[name]


def _json(table: Table, runs_url: str | None) -> bytes:
    # The json module encodes indented documents in Python: 4 s for 100,000 runs.
    return to_json(table.to_json(), indent=2, inf_nan_mode="null") + b"\n"


def _terminal(table: Table, runs_url: str | None) -> bytes:
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), width=TERMINAL_WIDTH, record=True)
    console.print(table.to_rich())
    return console.export_text().encode()


BUILT_IN = (
    Format("json", "application/json", ".json", _json),
    Format(
        "csv", "text/csv", ".csv", lambda table, _: table.to_csv().encode(),
        lambda table: table.to_csv(runs=True).encode(),
    ),
    Format("markdown", "text/markdown", ".md", lambda table, _: table.to_markdown().encode()),
    Format("latex", "application/x-tex", ".tex", lambda table, _: table.to_latex().encode()),
    Format("html", "text/html", ".html", lambda table, runs_url: table.to_html(runs_url=runs_url).encode()),
    Format(
        "parquet", "application/vnd.apache.parquet", ".parquet", lambda table, _: table.to_parquet(),
        lambda table: table.to_parquet(runs=True), binary=True,
    ),
    Format("terminal", "text/plain", ".txt", _terminal),
)  # fmt: skip
