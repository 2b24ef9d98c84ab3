"""Probes of a checkpoint: gates, positions and attention of its heads, and statistics of them on marked tokens.

`cope_sweep.read.figures` draws them.
"""

from cope_sweep.inference.probe.heads import (
    HeadStatistics,
    MarkStatistics,
    TokenMarks,
    head_statistics,
    mark_statistics,
    mean_gates,
)
from cope_sweep.inference.probe.marks import split_sequences, text_marks, token_labels, token_marks
from cope_sweep.inference.probe.matrices import (
    ContextualMatrices,
    LayerProbe,
    Probe,
    ProbeError,
    matrix_count,
    probe,
    probe_layers,
    select_heads,
)

__all__ = [
    "ContextualMatrices",
    "HeadStatistics",
    "LayerProbe",
    "MarkStatistics",
    "Probe",
    "ProbeError",
    "TokenMarks",
    "head_statistics",
    "mark_statistics",
    "matrix_count",
    "mean_gates",
    "probe",
    "probe_layers",
    "select_heads",
    "split_sequences",
    "text_marks",
    "token_labels",
    "token_marks",
]
