"""Cursors: texts that name a place in the order of a query. They stay valid while other runs arrive or vanish."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import get_args

from cope_sweep.records import Value
from cope_sweep.store.index.model import QueryError, RunQuery

SortPosition = tuple[Value | None, ...]
"""The values of the sorted columns, and the run id, of the run at a place. Two runs never have the same."""

MAX_CURSOR = 2000
INVALID = "cursor: not the cursor of a page of this query; use `next` of its last page, or start without a cursor"


def encode_cursor(position: SortPosition, query: RunQuery) -> str:
    """The cursor of a position in the order of a query."""
    text = json.dumps([_digest(query), *position], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode_cursor(query: RunQuery) -> SortPosition | None:
    """The position that a query's cursor names; None without one.

    Raises QueryError for a text that is not a cursor, one of another query, and one beside an offset.
    """
    if query.cursor is None:
        return None
    if query.offset:
        raise QueryError("a page has a cursor or an offset, not both; leave out the offset", code="cursor_and_offset")
    padded = query.cursor[:MAX_CURSOR] + "=" * (-len(query.cursor) % 4)
    try:
        digest, *position = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (ValueError, TypeError, RecursionError):
        raise QueryError(INVALID, code="another_cursor") from None
    are_values = all(value is None or isinstance(value, get_args(Value)) for value in position)
    if digest != _digest(query) or not are_values or not position or not isinstance(position[-1], str):
        raise QueryError(INVALID, code="another_cursor")
    return tuple(position)


def _digest(query: RunQuery) -> str:
    """Digest of the order and the conditions of a query, without the page."""
    conditions = (
        query.statuses,
        query.sweep_id,
        query.filters,
        query.search_words,
        query.sort,
        query.descending,
        query.plan,
    )
    return hashlib.sha256(repr(conditions).encode()).hexdigest()[:12]
