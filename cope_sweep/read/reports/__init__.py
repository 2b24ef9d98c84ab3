"""Reports of ablations: their evidence as files, and one document of all.

    evidence     the table, figures and provenance of one ablation at one scale, and its files
    runs         the runs of an evidence file: Parquet, and back; reports that are kept with the code
    document     one HTML document of all ablations

A report is computed from a plan and a store; the same store gives the same bytes.
"""

from cope_sweep.read.reports.evidence import Evidence, ReportError, evidence, write_evidence

__all__ = ["Evidence", "ReportError", "evidence", "write_evidence"]
