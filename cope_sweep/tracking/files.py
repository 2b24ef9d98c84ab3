"""The files about a sweep that its run in MLflow has. Another room makes them: this one may not import `read`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cope_sweep.store import SweepRecord

SweepFiles = Callable[[SweepRecord], Mapping[str, bytes]]
"""Makes files about a sweep that has ended, for its run in MLflow: path → content. `cope_sweep.read` draws them."""


def no_files(record: SweepRecord) -> Mapping[str, bytes]:
    """No files about a sweep."""
    return {}
