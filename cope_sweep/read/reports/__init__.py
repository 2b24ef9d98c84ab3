"""Reports on ablations, as files.

    evidence     the report on one ablation at one scale, and its files
    aggregates, shortcuts, learned, thresholds, heads, trained, provenance     parts of a report
    html         a report as one HTML file, from its Markdown
    files        the runs of a report, written to Parquet

A report is computed from a plan and a store. The same store gives the same bytes.
"""

from cope_sweep.read.reports.evidence import Evidence, ReportError, evidence, write_evidence

__all__ = ["Evidence", "ReportError", "evidence", "write_evidence"]
