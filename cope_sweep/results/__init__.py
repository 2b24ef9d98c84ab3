"""Results of an ablation: frames of its runs, statistics over seeds, and tables."""

from cope_sweep.results.formats import Format, find_format, formats
from cope_sweep.results.frame import curves, frame
from cope_sweep.results.stats import Summary, summarise
from cope_sweep.results.table import Table, table

__all__ = ["Format", "Summary", "Table", "curves", "find_format", "formats", "frame", "summarise", "table"]
