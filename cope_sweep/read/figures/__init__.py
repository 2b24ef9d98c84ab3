"""Figures of ablations and of checkpoints: the data are computed first, as a frame, and then drawn with matplotlib.

    kinds       FIGURES: every kind, and what it needs
    figure      Figure: data, and its drawing as PNG, SVG, PDF or CSV
    available   the figures of an ablation: those that its file declares, and those that any ablation has
    canvas      style, layout, axes and file formats; the only module that sets matplotlib's parameters
    metrics     what the figures of an ablation's runs share: rows, metrics, statistics over seeds
    curves, values, heatmap, budget    one or several kinds each
    heads       heatmaps of a checkpoint: maps, all heatmaps of a probe, and its HTML page
    marks       measures how well heads mark what a figure claims

`FigureKind.make` imports the module of a kind, and with it pandas and matplotlib. `kinds` and `available` import
neither.
"""

from cope_sweep.read.figures.kinds import FIGURES, FigureKind

__all__ = ["FIGURES", "FigureKind"]
