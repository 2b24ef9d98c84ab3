"""Results of an ablation: frames of its runs, statistics over seeds, and tables."""

from cope_sweep.read.tables.formats import Format, find_format, formats
from cope_sweep.read.tables.frame import curves, frame
from cope_sweep.read.tables.stats import Summary, summarise
from cope_sweep.read.tables.table import Table, table

__all__ = ["Format", "Summary", "Table", "curves", "find_format", "formats", "frame", "summarise", "table"]
