"""Figures of ablations and of checkpoints: first their data as a frame, then a drawing of it by matplotlib.

    figure      Figure: data, and its drawing as PNG, SVG, PDF or CSV; FIGURES: every kind, and what it needs
    available   the figures of an ablation: those that its file declares, and those that any ablation has
    canvas      style, layout, axes and file formats; the only module that sets matplotlib's parameters
    metrics     what the figures of an ablation's runs have in common: rows, metrics, statistics over seeds
    curves, values, importance    related kinds each
    heads       heatmaps of a checkpoint: maps, all heatmaps of a probe, and its HTML page

pandas is imported when data is computed, matplotlib when it is drawn.
"""

from cope_sweep.read.figures.figure import FIGURES, Figure, FigureError, FigureKind

__all__ = ["FIGURES", "Figure", "FigureError", "FigureKind"]
