"""The ablations that a store knows by the records of their sweeps: their files may be elsewhere, or gone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

from cachetools import LRUCache

from cope_sweep.config import LoadedAblation, SpecError
from cope_sweep.config.loading import validate
from cope_sweep.config.source import Source, parse_source
from cope_sweep.store import Store, SweepRecord
from cope_sweep.store.errors import DamagedError

NEWEST = 5
"""Sweeps of an ablation that are looked at: some records of older versions, or damaged ones, have no ablation."""
MAX_KNOWN = 256


@dataclass(frozen=True)
class Recorded:
    """An ablation as a sweep has recorded it."""

    sweep_id: str
    ablation: LoadedAblation
    text: str
    """Its file."""


class RecordedAblations:
    """Finds ablations in the records of sweeps. It is thread-safe."""

    def __init__(self, *, may_import: bool) -> None:
        """`may_import`: whether the modules are imported that an ablation names as plugins."""
        self._may_import = may_import
        self._known: LRUCache[str, Recorded | SpecError | None] = LRUCache(MAX_KNOWN)
        """Sweep id → its ablation, or why it is none; a record keeps the ablation that it begins with."""
        self._lock = Lock()

    def find(self, store: Store, name: str) -> Recorded | None:
        """The ablation of this name in the newest sweep that has recorded it; None: in no sweep.

        Raises SpecError where it is not valid here: a plugin is missing.
        """
        for sweep in store.index.sweep_page(ablation=name, limit=NEWEST).sweeps:
            found = self._of_sweep(store, sweep.sweep_id)
            if isinstance(found, SpecError):
                raise copy.copy(found)  # threads raise the same kept error, and each would add its frames to it
            if found is not None:
                return found
        return None

    def _of_sweep(self, store: Store, sweep_id: str) -> Recorded | SpecError | None:
        with self._lock:
            if sweep_id in self._known:
                return self._known[sweep_id]
        try:
            record = store.sweep(sweep_id)
        except DamagedError:
            return None
        found = None if record is None else self._read(record)
        with self._lock:
            self._known[sweep_id] = found
        return found

    def _read(self, record: SweepRecord) -> Recorded | SpecError | None:
        place = f"sweep {record.sweep_id}"
        try:
            data: Mapping[str, Any] = record.data or parse_source(record.file_text, place).data
            kept = {key: value for key, value in data.items() if self._may_import or key != "plugins"}
            return Recorded(record.sweep_id, validate(Source(place, kept), record.ablation), record.file_text)
        except SpecError as error:
            # Older records have the file alone, without what it inherits.
            return error if record.data else None
