"""Result tables and learning curves, rendered once for each version of ablation file and store.

An unchanged table costs one `stat` call and two small SQL queries.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Condition
from typing import TYPE_CHECKING, TypeVar

from cachetools import LRUCache, cached

from cope_services.errors import NotAcceptableError
from cope_sweep import __version__
from cope_sweep.queries import Queries
from cope_sweep.results.formats import Format, find_format, formats

if TYPE_CHECKING:
    from cope_sweep.results import Table

T = TypeVar("T")

RUNS_URL = "/api/v1/runs"
"""Where the numbers of HTML tables lead to."""
MAX_TABLES = 64
"""Tables in the cache."""
MAX_BODIES = 256
"""Rendered bodies in the cache."""


@dataclass(frozen=True)
class RenderedBody:
    """A response body and the ETag of the state that it shows."""

    etag: str
    media_type: str
    body: bytes


class Tables:
    """Renders tables and curves. It is thread-safe."""

    def __init__(self, queries: Queries) -> None:
        self.queries = queries
        # With the condition, threads that request the same body wait until one of them has rendered it.
        self._tables: Callable[[Hashable, Callable[[], Table]], Table] = cached(
            LRUCache(MAX_TABLES), key=_cache_key, condition=Condition()
        )(_compute)
        self._bodies: Callable[[Hashable, Callable[[], bytes]], bytes] = cached(
            LRUCache(MAX_BODIES), key=_cache_key, condition=Condition()
        )(_compute)

    def table(
        self, name: str, scale: str | None, output_format: Format, *, runs: bool = False, against: str | None = None
    ) -> RenderedBody:
        """The table of an ablation. With `runs`, formats that can have a line for each run. Raises UserError."""
        loaded = self.queries.load(name, scale)
        state = _digest((self.queries.version(loaded), against))
        etag = _digest((state, output_format.name, runs))

        def render() -> bytes:
            whole = self._tables(state, lambda: self.queries.table(loaded.plan, against=against))
            if runs and output_format.render_runs is not None:
                return output_format.render_runs(whole)
            return output_format.render(whole, RUNS_URL)

        return RenderedBody(etag, output_format.media_type, self._bodies(etag, render))

    def curves(self, name: str, scale: str | None, metric: str | None) -> RenderedBody:
        """Learning curves as JSON: as new as the index, which hears of a running run every few seconds.

        Raises UserError.
        """
        loaded = self.queries.load(name, scale)
        etag = _digest(("curves", self.queries.version(loaded), metric))

        def render() -> bytes:
            return self.queries.curves(loaded, metric).model_dump_json().encode()

        return RenderedBody(etag, "application/json", self._bodies(etag, render))


def negotiate(output_format: str | None, accept: str | None) -> Format:
    """The format that the query names, or else the Accept header.

    Raises NotAcceptableError for an unknown media type, QueryError for an unknown name.
    """
    if output_format is not None:
        return find_format(output_format)
    accepted: list[tuple[float, int, str]] = []
    for index, part in enumerate((accept or "*/*").split(",")):
        media, *parameters = (piece.strip().lower() for piece in part.split(";"))
        quality = next((float(q[1]) for p in parameters if (q := re.fullmatch(r"q=(0(?:\.\d+)?|1(?:\.0+)?)", p))), 1.0)
        pattern = re.escape(media).replace(r"\*", ".*")
        found = next((name for name, each in formats().items() if re.fullmatch(pattern, each.media_type)), None)
        if found and quality > 0:
            accepted.append((-quality, index, found))
    if not accepted:
        known = ", ".join(f"{each.media_type} ({name})" for name, each in formats().items())
        raise NotAcceptableError(f"a table is available as {known}; choose one with Accept or ?format=NAME")
    return find_format(min(accepted)[2])


def _compute(key: Hashable, compute: Callable[[], T]) -> T:
    """compute(): cached under `key`."""
    return compute()


def _cache_key(key: Hashable, compute: Callable[[], object]) -> Hashable:
    return key


def _digest(state: object) -> str:
    return hashlib.sha256(f"{__version__} {state!r}".encode()).hexdigest()[:32]
