"""Figures of ablations and of checkpoints: first their data as a frame, then a drawing of it by matplotlib.

    kinds       FIGURES: every kind, and what it needs
    figure      Figure: data, and its drawing as PNG, SVG, PDF or CSV
    available   the figures of an ablation: those that its file declares, and those that any ablation has
    canvas      style, layout, axes and file formats; the only module that sets matplotlib's parameters
    metrics     what the figures of an ablation's runs have in common: rows, metrics, statistics over seeds
    curves, values, heatmap, searches, importance    related kinds each
    heads       heatmaps of a checkpoint: maps, all heatmaps of a probe, and its HTML page
    marks       how well heads mark what maps of them claim

`FigureKind.make` imports the module of a kind, with pandas and matplotlib. `kinds` and `available` import neither.
"""

from cope_sweep.read.figures.kinds import FIGURES, FigureError, FigureKind

__all__ = ["FIGURES", "FigureError", "FigureKind"]
