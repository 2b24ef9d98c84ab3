"""Figures of ablations and of checkpoints: the data are computed first, as a frame, and then drawn with matplotlib.

    base        FigureKind: what a kind of figure has
    kinds       one file for each kind
    figure      Figure: data, and its drawing as PNG, SVG, PDF or CSV
    available   the figures of an ablation: those that its file declares, and those that any ablation has
    canvas      style, layout, axes and file formats; the only module that sets matplotlib's parameters
    metrics     what the figures of an ablation's runs share: rows, metrics, statistics over seeds
    series      what figures of final metrics share: a frame of points, and lines against x
    heads       all heatmaps of a checkpoint's probe, and its HTML page
    marks       measures how well heads mark what a figure claims

This module, `kinds` and `available` import neither pandas, matplotlib nor torch.
"""

from collections.abc import Mapping
from typing import cast

from cope_sweep import figures
from cope_sweep.read.figures import kinds as _kinds  # noqa: F401 - the kinds register when they are imported
from cope_sweep.read.figures.base import FigureKind

FIGURES = cast(Mapping[str, type[FigureKind]], figures.FIGURES)
"""Name → kind."""

__all__ = ["FIGURES", "FigureKind"]
