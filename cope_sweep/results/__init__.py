"""From the record of runs to frames, statistics and tables: data first, rendering second."""

from cope_sweep.results.frame import curves, frame, frame_from_tracking
from cope_sweep.results.stats import Summary, summarise
from cope_sweep.results.table import Table, table, table_of

__all__ = ["Summary", "Table", "curves", "frame", "frame_from_tracking", "summarise", "table", "table_of"]
