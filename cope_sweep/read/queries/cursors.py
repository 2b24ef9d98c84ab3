"""Cursors: the place of the last run of a page as a text, which the request for the next page sends back."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import get_args

from cope_sweep.store import QueryError, RunQuery
from cope_sweep.store.index.model import Position, Value

INVALID = "cursor: not the cursor of a page of this query; take `next` of its last page, or begin without a cursor"
MAX_LENGTH = 2000


def encode(position: Position, query: RunQuery, place: str = "") -> str:
    """The cursor of a position in the order of a query; `place` is the ablation and scale that it was asked of."""
    text = json.dumps([_digest(query, place), *position], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode(cursor: str, query: RunQuery, place: str = "") -> Position:
    """The position that a cursor holds. Raises QueryError for a text that is no cursor, or that of another query."""
    try:
        text = base64.b64decode(cursor[:MAX_LENGTH] + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        values = json.loads(text)
        digest, *position = values
    except (ValueError, TypeError, RecursionError):
        raise QueryError(INVALID) from None
    if digest != _digest(query, place) or not all(
        each is None or isinstance(each, get_args(Value)) for each in position
    ):
        raise QueryError(INVALID)
    if not position or not isinstance(position[-1], str):
        raise QueryError(INVALID)
    return tuple(position)


def _digest(query: RunQuery, place: str) -> str:
    """Digest of the order and the conditions of a query, without the page."""
    conditions = (query.statuses, query.sweep_id, query.filters, query.sort, query.descending, place)
    return hashlib.sha256(repr(conditions).encode()).hexdigest()[:12]
