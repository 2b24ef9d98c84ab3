"""Figures of ablations and of checkpoints: first their data as a frame, then a drawing of it by matplotlib.

    kinds       FIGURES: every kind of figure, what it needs, and its options
    base        Figure: data, and its drawing as PNG, SVG, PDF or CSV
    canvas      style, layout and file formats; the only module that sets matplotlib's parameters
    curves, values, summary, importance, parallel, maps       one kind, or two related ones, each
    heads, page     all heatmaps of a probe, as a drawing and as an HTML page

pandas is imported when data is computed, matplotlib when it is drawn.
"""

from cope_sweep.read.figures.base import Figure, FigureError, Format
from cope_sweep.read.figures.kinds import FIGURES, FigureKind, MapOptions, Options

__all__ = ["FIGURES", "Figure", "FigureError", "FigureKind", "Format", "MapOptions", "Options"]
