"""Result tables, whose formats share one computed table, and the choice of a format."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from threading import Condition
from typing import TYPE_CHECKING, TypeVar

from cachetools import LRUCache, cached
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

from cope_services.errors import NotAcceptableError
from cope_sweep.api.questions import GetTable
from cope_sweep.read.queries import LoadedPlan, Queries
from cope_sweep.read.tables.table import Format, find_format, formats

if TYPE_CHECKING:
    from cope_sweep.read.tables import Table

Name = TypeVar("Name", bound=str)

RUNS_URL = "/api/v1/runs"
"""Where the numbers of HTML tables lead to."""
MAX_CACHED_RUNS = 200_000
"""Runs of all tables in the cache."""


class Tables:
    """Computes tables. It is thread-safe. `CachedRoute` keeps what was rendered of them."""

    def __init__(self, queries: Queries) -> None:
        self._queries = queries
        # With the condition, threads that request the same table wait until one of them has computed it.
        self._cached: Callable[[Hashable, LoadedPlan, str | None], Table] = cached(
            LRUCache(MAX_CACHED_RUNS, lambda table: len(table.records) + 1),
            key=lambda state, *_: state,
            condition=Condition(),
        )(lambda _, loaded, compare: queries.table(loaded.plan, compare=compare))

    def table(self, question: GetTable, output_format: Format) -> bytes:
        """The table of an ablation. Raises UserError."""
        loaded = self._queries.load(question.name, question.scale)
        state = self._queries.version(loaded), question.name, question.compare
        return output_format.file(self._cached(state, loaded, question.compare), runs=question.runs, runs_url=RUNS_URL)


def negotiate(output_format: str | None, accept: str | None) -> Format:
    """The format that the query names, or else the Accept header.

    Raises NotAcceptableError for an unknown media type, QueryError for an unknown name.
    """
    if output_format is not None:
        return find_format(output_format)
    return find_format(accepted(accept, {each.media_type: name for name, each in formats().items()}, "a table"))


def accepted(accept: str | None, available: Mapping[str, Name], what: str) -> Name:
    """The name of the media type that an Accept header prefers; the first one without a header.

    Args:
        accept: The header.
        available: Media type → name, the default first.
        what: What is available, for the message.

    Raises NotAcceptableError.
    """
    if not accept:
        return next(iter(available.values()))
    best = parse_accept_header(accept, MIMEAccept).best_match(list(available))
    if best is None:
        known = ", ".join(f"{media} ({name})" for media, name in available.items())
        raise NotAcceptableError(f"{what} is available as {known}; choose one with Accept or ?format=NAME")
    return available[best]
