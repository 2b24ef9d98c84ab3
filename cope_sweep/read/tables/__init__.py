"""Results of an ablation: frames of its runs, statistics over seeds, and tables."""

from cope_sweep.read.tables.results import Results, read_results
from cope_sweep.read.tables.stats import Summary, summarise
from cope_sweep.read.tables.table import FORMATS, Table, table, table_file

__all__ = ["FORMATS", "Results", "Summary", "Table", "read_results", "summarise", "table", "table_file"]
