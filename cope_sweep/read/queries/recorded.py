"""Ablations from the records of their sweeps in a store. Their files may be elsewhere or deleted."""

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
"""Maximum number of sweeps to read per ablation: damaged records, and records of old versions, have no ablation."""
MAX_CACHED = 256


@dataclass(frozen=True)
class RecordedAblation:
    """An ablation, as recorded by a sweep."""

    sweep_id: str
    ablation: LoadedAblation
    text: str
    """The text of its file."""


class RecordedAblations:
    """Finds ablations in the records of sweeps. Thread-safe."""

    def __init__(self, *, may_import: bool) -> None:
        """With `may_import`, the modules that an ablation names as plugins are imported."""
        self._may_import = may_import
        self._cached: LRUCache[str, RecordedAblation | SpecError | None] = LRUCache(MAX_CACHED)
        """Sweep id → its ablation, or the error in it. The ablation in a record never changes."""
        self._lock = Lock()

    def find(self, store: Store, name: str) -> RecordedAblation | None:
        """The ablation from the newest sweep that has recorded it; None if no sweep has.

        Raises SpecError if it is not valid here, for example because a plugin is missing.
        """
        for sweep in store.index.sweep_page(ablation=name, limit=NEWEST).sweeps:
            ablation = self._of_sweep(store, sweep.sweep_id)
            if isinstance(ablation, SpecError):
                raise copy.copy(ablation)  # a copy: every thread that raises an error adds its frames to it
            if ablation is not None:
                return ablation
        return None

    def of_record(self, record: SweepRecord) -> LoadedAblation:
        """The ablation in a record, as `recorded_ablation`. Raises SpecError."""
        return recorded_ablation(record, may_import=self._may_import)

    def _of_sweep(self, store: Store, sweep_id: str) -> RecordedAblation | SpecError | None:
        with self._lock:
            if sweep_id in self._cached:
                return self._cached[sweep_id]
        try:
            record = store.sweep(sweep_id)
        except DamagedError:
            return None
        ablation = None if record is None else self._read(record)
        with self._lock:
            self._cached[sweep_id] = ablation
        return ablation

    def _read(self, record: SweepRecord) -> RecordedAblation | SpecError | None:
        try:
            return RecordedAblation(record.sweep_id, self.of_record(record), record.file_text)
        except SpecError as error:
            # Old records have the text of the file only, without the files from which it inherits.
            return error if record.data else None


def recorded_ablation(record: SweepRecord, *, may_import: bool) -> LoadedAblation:
    """The ablation in the record of a sweep, before its scale and `--set`. Raises SpecError.

    With `may_import`, the modules that it names as plugins are imported.
    """
    place = f"sweep {record.sweep_id}"
    data: Mapping[str, Any] = record.data or parse_source(record.file_text, place).data
    content = {key: value for key, value in data.items() if may_import or key != "plugins"}
    return validate(Source(place, content), record.ablation)
