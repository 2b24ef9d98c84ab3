"""Pages of runs from memory: for a server, which answers thousands of different queries about the same runs.

A catalogue holds, for all runs of the index, the columns by which pages were filtered and sorted, and each run's part
of an answer as JSON: about 1 kB for each run. A thread reads them when they are first asked for, and then only what has
changed. What memory cannot answer, or not yet, is None: `runs.page` then asks the database, with the same answer.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

from cachetools import LRUCache

from cope_sweep.errors import UserError
from cope_sweep.queries import cursors
from cope_sweep.queries.ablations import AblationFiles
from cope_sweep.queries.catalogue_page import View, body, part_of, select
from cope_sweep.queries.records import Chosen, run_fields
from cope_sweep.queries.runs import PageRequest, places, shown
from cope_sweep.store import QueryError, Store
from cope_sweep.store.index.columns import RunColumns, read_columns, refreshed, with_column
from cope_sweep.store.index.filters import TAGS

MAX_COLUMNS, MAX_ORDERS, MAX_CHOICES = 64, 16, 4
"""Columns, orders and choices of fields in memory; those that were not asked for longest make room."""
MAX_BYTES = 256 << 20
"""Parts of answers in memory."""
BATCH = 500
"""Runs whose parts of answers are made at a time."""

Fields = frozenset[str]
Order = tuple[str, bool]


@dataclass(frozen=True)
class _State:
    """Of the ablation files and the index, as it was last seen."""

    files: Hashable
    index: Hashable
    expired: frozenset[str]
    """Runs that are marked as running and read as interrupted."""


@dataclass(frozen=True)
class _Snapshot:
    """All runs at one state."""

    state: _State
    view: View
    parts: dict[Fields, list[bytes | None]] = field(default_factory=dict)
    """For each choice of fields, the JSON of each run: see `part_of`."""


class Catalogue:
    """The runs of a store in memory. It is thread-safe; its own thread runs only while there is something to read."""

    def __init__(self, store: Callable[[], Store], files: AblationFiles | None) -> None:
        self._store, self._files = store, files
        self._state: _State | None = None
        self._snapshot: _Snapshot | None = None
        self._columns: LRUCache[str, None] = LRUCache(MAX_COLUMNS)
        self._orders: LRUCache[Order, None] = LRUCache(MAX_ORDERS)
        self._choices: LRUCache[Fields, Chosen] = LRUCache(MAX_CHOICES)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def observe(self, files: Hashable, index: Hashable, expired: Sequence[str]) -> None:
        """Note the state of the ablation files and of the index: pages are of this state from now on."""
        self._state = _State(files, index, frozenset(expired))

    def page(self, request: PageRequest, *, reads: bool) -> bytes | None:
        """A page as the JSON of `RunPage`. Raises QueryError for the cursor of another query.

        With `reads`, runs that are not in memory are read, which takes some milliseconds. Raises StoreError then.
        """
        query, snapshot = request.query, self._snapshot
        if not self._is_answered(request):
            return None
        wanted = shown(request)
        columns, order = wanted.keys | ({"status"} if query.statuses else set()), (query.sort, query.descending)
        if (
            snapshot is None
            or snapshot.state != self._state
            or order not in snapshot.view.orders
            or not columns <= snapshot.view.runs.columns.keys()
            or (parts := snapshot.parts.get(wanted.fields)) is None
        ):
            self._want(columns, order, wanted)
            return None
        if request.cursor is not None:
            query = replace(query, after=cursors.decode(request.cursor, query, request.place))
        found = select(snapshot.view, query)
        if found is None:
            return None
        shown_places = found.places.tolist()
        own = [parts[place] for place in shown_places]
        if None in own and reads:
            self._make_parts(snapshot, wanted, parts, [place for place in shown_places if parts[place] is None])
            own = [parts[place] for place in shown_places]
        known = [part for part in own if part is not None]
        return body(snapshot.view, known, request, wanted, found) if len(known) == len(own) else None

    def wait(self) -> None:
        """Return when all that was asked for is in memory."""
        while (thread := self._thread) is not None:
            thread.join()

    def _is_answered(self, request: PageRequest) -> bool:
        """Whether memory answers such queries, at any time."""
        query = request.query
        if self._state is None or request.place or query.run_ids is not None or query.sweep_id is not None:
            return False
        if any(key.startswith(TAGS) for key in (query.sort, *(each.key for each in query.filters))):
            return False
        if request.cursor is not None and query.offset:
            return False
        # PostgreSQL compares texts by the rules of a language.
        orders_texts = any(isinstance(each.value, str) and each.operator not in ("=", "!=") for each in query.filters)
        return not orders_texts or self._store().index.database.is_sqlite

    def _want(self, columns: Fields, order: Order, wanted: Chosen) -> None:
        with self._lock:
            self._columns.update(dict.fromkeys(columns))
            self._orders[order] = None
            self._choices[wanted.fields] = wanted
            if self._thread is None:
                self._thread = threading.Thread(target=self._read, name="catalogue", daemon=True)
                self._thread.start()

    def _read(self) -> None:
        """Read until all that is wanted is in memory. An error ends this; the next page begins it again."""
        try:
            with contextlib.suppress(UserError, OSError):
                while self._read_something():
                    pass
        finally:
            self._thread = None

    def _read_something(self) -> bool:
        """Read a column, make an order, or make the parts of answers; False if nothing is missing."""
        state, snapshot = self._state, self._snapshot
        if state is None:
            return False
        if snapshot is None or snapshot.state != state:
            self._snapshot = self._next(state, snapshot)
            return True
        with self._lock:
            columns, orders, choices = list(self._columns), list(self._orders), list(self._choices.values())
        for key in columns:
            if key not in snapshot.view.runs.columns and self._add_column(snapshot, key):
                return True
        for sort, descending in orders:
            if snapshot.view.can_order(sort) and (sort, descending) not in snapshot.view.orders:
                snapshot.view.make_order(sort, descending=descending)
                return True
        for fields in snapshot.parts.keys() - {each.fields for each in choices}:
            del snapshot.parts[fields]
        made = [self._fill(snapshot, wanted) for wanted in choices]
        return any(made)

    def _add_column(self, snapshot: _Snapshot, key: str) -> bool:
        """Read a column; False for a key that no run has, which the database says."""
        try:
            runs = with_column(self._store().index, snapshot.view.runs, key)
        except QueryError:
            with self._lock:
                self._columns.pop(key, None)
            return False
        self._snapshot = replace(snapshot, view=replace(snapshot.view, runs=runs))
        return True

    def _next(self, state: _State, before: _Snapshot | None) -> _Snapshot:
        """The runs at a state, with all of `before` that has not changed."""
        index = self._store().index
        if before is None:
            return _Snapshot(state, View(read_columns(index), state.expired))
        with self._lock:
            columns = {key: column for key, column in before.view.runs.columns.items() if key in self._columns}
        runs = refreshed(index, replace(before.view.runs, columns=columns))
        view = View(runs, state.expired)
        if runs.changed is None or runs.sweeps != before.view.runs.sweeps or state.files != before.state.files:
            return _Snapshot(state, view)
        parts = {fields: _without(known, before, runs, state) for fields, known in before.parts.items()}
        return _Snapshot(state, view, parts)

    def _fill(self, snapshot: _Snapshot, wanted: Chosen) -> bool:
        """Make the parts of answers that are missing, while there is room; False if nothing was to do."""
        parts = snapshot.parts.setdefault(wanted.fields, [None] * len(snapshot.view.runs.run_ids))
        missing = [place for place, part in enumerate(parts) if part is None]
        room = MAX_BYTES - sum(len(part) for each in snapshot.parts.values() for part in each if part is not None)
        made = 0
        for start in range(0, len(missing), BATCH):
            if made > room or snapshot.state != self._state:
                break
            made += self._make_parts(snapshot, wanted, parts, missing[start : start + BATCH])
        return made > 0

    def _make_parts(
        self, snapshot: _Snapshot, wanted: Chosen, parts: list[bytes | None], missing: Sequence[int]
    ) -> int:
        """Make the parts of answers at these places; their size in bytes. A run that was deleted has none."""
        store = self._store()
        ids = [snapshot.view.runs.run_ids[place] for place in missing]
        records = store.index.records(ids)
        found = places(store, self._files, ids) if wanted.places else {}
        made = 0
        for place, run_id in zip(missing, ids, strict=True):
            if (record := records.get(run_id)) is not None:
                part = parts[place] = part_of(run_fields(record, found.get(run_id, [])), wanted)
                made += len(part)
        return made


def _without(known: Sequence[bytes | None], before: _Snapshot, runs: RunColumns, state: _State) -> list[bytes | None]:
    """The parts that were made before, without those of runs that have changed."""
    parts = [*known, *([None] * (len(runs.run_ids) - len(known)))]
    for place in runs.changed or ():
        parts[place] = None
    if other := state.expired ^ before.state.expired:
        for place, run_id in enumerate(runs.run_ids):
            if run_id in other:
                parts[place] = None
    return parts
