"""Results of an ablation: frames of its runs, statistics over seeds, and tables."""

from cope_sweep.read.tables.runs import Results, read_results
from cope_sweep.read.tables.stats import Summary, summarise
from cope_sweep.read.tables.table import Format, Table, find_format, formats, table

__all__ = ["Format", "Results", "Summary", "Table", "find_format", "formats", "read_results", "summarise", "table"]
