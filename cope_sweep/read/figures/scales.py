"""Linear and logarithmic axes that show what they leave out: 0 has its place on a logarithmic axis, and a tick."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from cope_sweep.read.figures.canvas import GREY, finite, number, printable, shortened

LOG_FROM_RATIO = 100
"""Metrics are on a logarithmic axis if the greatest positive value is this many times the least."""
LOG_X_FROM_RATIO = 8
"""The same for a parameter."""
MAX_DECADES = 6
"""Decades above the part of the axis that is linear around 0."""
MAX_TICKS = 8


def metric_axis(
    axes: Axes, values: Sequence[float], label: str, *, log: bool | None, percent: bool, which: Literal["x", "y"] = "y"
) -> None:
    """Scale, ticks and label of an axis that shows a metric.

    A logarithmic axis is linear below the decade of the least positive value if a value is 0, and its label says so.
    Negative values make it linear.

    Args:
        axes: The panel, whose data is drawn already.
        values: All drawn values, bounds of intervals included.
        label: The metric and its unit.
        log: None: logarithmic if positive values differ by a factor of LOG_FROM_RATIO.
        percent: Whether 0 … 100 are the ends of the range.
        which: The axis.
    """
    label = printable(label)
    found = finite(values)
    positive = found[found > 0]
    if log is None:
        log = bool(len(positive)) and positive.max() >= LOG_FROM_RATIO * positive.min()
    axis = axes.xaxis if which == "x" else axes.yaxis
    set_scale, set_limits = (axes.set_xscale, axes.set_xlim) if which == "x" else (axes.set_yscale, axes.set_ylim)
    zero_line = axes.axvline if which == "x" else axes.axhline
    if not log or not len(positive) or (found < 0).any():
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        if len(found) and (percent or (found == 0).all()):
            top = max(found.max(), 1e-9 if percent and found.max() > 0 else 1.0)
            set_limits(min(found.min(), 0) - 0.03 * top, 1.05 * top)
    else:
        low, high = positive.min(), positive.max()
        high = max(high, 100.0) if percent and high > 30 else high
        first = math.floor(math.log10(low) + 1e-9)
        last = max(math.ceil(math.log10(high) - 1e-9), first + 1)
        first = max(first, last - MAX_DECADES)
        stride = math.ceil((last - first + 1) / MAX_TICKS)
        ticks = [10.0**power for power in range(first, last + 1, stride)]
        if (found == 0).any() or low < 10.0**first:
            set_scale("symlog", linthresh=10.0**first, linscale=0.6)
            set_limits(-0.15 * 10.0**first, 1.3 * max(high, ticks[0]))
            zero_line(0, color=GREY, linewidth=0.8, zorder=1)
            ticks = [0.0, *ticks]
            label += f"\n(log; linear below {number(10.0**first)})"
        else:
            set_scale("log")
            set_limits(low / 1.3, 1.3 * high)
            if high / low < 30:  # decades alone would give one tick or two
                ticks = _within_decades(first, last)
        axis.set_major_locator(FixedLocator([tick for tick in ticks if tick <= 1.3 * high]))
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(number))
    axis.set_label_text(label)


def parameter_axis(axes: Axes, positions: Sequence[float], labels: Sequence[str] | None, *, log: bool | None) -> None:
    """Ticks of the x axis: at the values of a parameter, or at names (`labels`), which are not on a scale."""
    if labels is not None:
        long = max((len(label) for label in labels), default=0) * len(labels) > 40
        texts = [shortened(label, 30) for label in labels]
        axes.set_xticks(list(positions), texts, rotation=30 if long else 0, ha="right" if long else "center")
        axes.margins(x=0.12)
        return
    distinct = np.unique(finite(positions))
    positive = len(distinct) > 2 and distinct.min() > 0
    if log is None:
        log = bool(positive and distinct.max() >= LOG_X_FROM_RATIO * distinct.min())
    if log and len(distinct) and distinct.min() > 0:
        axes.set_xscale("log")
    elif log:
        axes.set_xscale("symlog", linthresh=_least_positive(distinct), linscale=0.6)
    if 0 < len(distinct) <= MAX_TICKS and _apart(distinct, log=log):
        axes.xaxis.set_major_locator(FixedLocator(distinct.tolist()))
    elif log:
        chosen = distinct[:: math.ceil(len(distinct) / MAX_TICKS)] if len(distinct) else distinct
        axes.xaxis.set_major_locator(FixedLocator(chosen.tolist()))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(number))


def share_limits(panels: Sequence[Axes]) -> None:
    """Give panels with the same scale of y the same limits, so that heights compare."""
    limits = [panel.get_ylim() for panel in panels]
    for panel in panels:
        panel.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))


def _within_decades(first: int, last: int) -> list[float]:
    return [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]


def _least_positive(values: np.ndarray) -> float:
    positive = values[values > 0]
    return float(positive.min()) if len(positive) else 1.0


def _apart(distinct: np.ndarray, *, log: bool) -> bool:
    """Whether ticks at all these values would leave room for their texts."""
    if len(distinct) < 2:
        return True
    if log and distinct.min() <= 0:
        return True
    places = np.log(distinct) if log else distinct
    return bool(np.diff(places).min() >= 0.09 * (places[-1] - places[0]))
