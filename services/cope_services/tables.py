"""Tables in five formats, drawn once for each state of their files: an unchanged one costs a few stats."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cope_services.errors import NotAcceptableError
from cope_services.kept import Kept
from cope_services.library import Library
from cope_sweep import __version__

if TYPE_CHECKING:
    from cope_sweep.results import Table

TableFormat = Literal["json", "csv", "markdown", "latex", "html"]

MEDIA_TYPES: dict[TableFormat, str] = {
    "json": "application/json",
    "csv": "text/csv",
    "markdown": "text/markdown",
    "latex": "application/x-tex",
    "html": "text/html",
}
KEPT = 64
"""Tables in memory, and a quarter of the bodies."""


@dataclass(frozen=True)
class Drawing:
    """A body ready to send, and the tag of the state that it shows."""

    etag: str
    media_type: str
    body: bytes


class Tables:
    """Draws the tables and the plots' data of a library. Threads may share one."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._tables: Kept[Table] = Kept(KEPT)
        self._bodies: Kept[bytes] = Kept(4 * KEPT)

    def table(self, name: str, scale: str | None, form: TableFormat, *, runs: bool = False) -> Drawing:
        """The table of an ablation; with `runs`, CSV has a line for each run."""
        from cope_sweep.results import table  # with it comes pandas

        planned = self.library.catalogue.planned(name, scale)
        state = _tag(self.library.fingerprint(planned))

        def draw() -> bytes:
            whole = self._tables.get((name, scale), state, lambda: table(planned.plan, self.library.ledger))
            return _drawn(whole, form, runs=runs)

        body = self._bodies.get((name, scale, form, runs), state, draw)
        return Drawing(_tag((state, form, runs)), MEDIA_TYPES[form], body)

    def curves(self, name: str, scale: str | None, metric: str | None) -> Drawing:
        """Learning curves as JSON. Raises SpecError, ServiceErrors."""
        planned = self.library.catalogue.planned(name, scale)
        state = _tag(self.library.fingerprint(planned, curves=True))

        def draw() -> bytes:
            return self.library.curves(planned, metric).model_dump_json().encode()

        body = self._bodies.get(("curves", name, scale, metric), state, draw)
        return Drawing(_tag((state, metric)), "application/json", body)


def negotiate(form: TableFormat | None, accept: str | None) -> TableFormat:
    """The format asked for by name, or else by an Accept header. Raises NotAcceptableError where none of it is had."""
    if form is not None:
        return form
    wanted: list[tuple[float, int, TableFormat]] = []
    for index, part in enumerate((accept or "*/*").split(",")):
        media, *parameters = (piece.strip().lower() for piece in part.split(";"))
        quality = next((float(q[1]) for p in parameters if (q := re.fullmatch(r"q=(0(?:\.\d+)?|1(?:\.0+)?)", p))), 1.0)
        pattern = re.escape(media).replace(r"\*", ".*")
        found = next((name for name, known in MEDIA_TYPES.items() if re.fullmatch(pattern, known)), None)
        if found and quality > 0:
            wanted.append((-quality, index, found))
    if not wanted:
        known = ", ".join(f"{media} ({name})" for name, media in MEDIA_TYPES.items())
        raise NotAcceptableError(f"a table can be had as {known}; ask with Accept, or ?format=NAME")
    return min(wanted)[2]


def _drawn(whole: Table, form: TableFormat, *, runs: bool) -> bytes:
    draw: dict[TableFormat, Callable[[], str]] = {
        "json": lambda: json.dumps(whole.to_json(), allow_nan=False, ensure_ascii=False),
        "csv": lambda: whole.to_csv(runs=runs),
        "markdown": whole.to_markdown,
        "latex": whole.to_latex,
        "html": whole.to_html,
    }
    return draw[form]().encode()


def _tag(state: object) -> str:
    return hashlib.sha256(f"{__version__} {state!r}".encode()).hexdigest()[:32]
