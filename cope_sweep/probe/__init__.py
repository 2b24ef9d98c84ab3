"""Probes of a checkpoint: what its heads count, where they look, and how well that goes with separators."""

from cope_sweep.probe.figure import page, svg
from cope_sweep.probe.heads import Head, Marks, Separation, heads_of, seen_from, separation
from cope_sweep.probe.marks import labels_of, marks_of, text_marks
from cope_sweep.probe.matrices import Counted, LayerProbe, Probe, ProbeError, choose, each_layer, probe

__all__ = [
    "Counted",
    "Head",
    "LayerProbe",
    "Marks",
    "Probe",
    "ProbeError",
    "Separation",
    "choose",
    "each_layer",
    "heads_of",
    "labels_of",
    "marks_of",
    "page",
    "probe",
    "seen_from",
    "separation",
    "svg",
    "text_marks",
]
