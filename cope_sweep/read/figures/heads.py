"""Heatmaps of a probe: gates, positions, position-only attention and attention of each head, drawn with matplotlib.

The heatmaps follow the paper's figures of attention maps and gates: a row per query, a column per key, and a black plus
on the diagonal for each marked token. `head_figures` computes the data; `svg` draws all heatmaps of each head in a row.

Shapes: T tokens; index [i, j] is query i and key j ≤ i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator

from cope_sweep.inference.probe import HeadStatistics, LayerProbe, Probe, ProbeError, TokenMarks, mean_gates
from cope_sweep.read.figures.canvas import number, printable, render

MAX_CELLS = 8 << 20
"""Limit for the cells of all heatmaps of one drawing."""

MAX_TOKEN_TICKS = 50
"""Longer sequences have numbers at the axes instead of tokens."""

BEYOND_LIMIT_COLOUR = "#9aa3ad"

SIDE, GAP, LEFT, TOP, BOTTOM = 3.0, 0.75, 0.5, 0.7, 0.45
"""Layout in inches: a heatmap; the space right of it for its colour bar; the margins of a row of heatmaps."""


@dataclass(frozen=True)
class Heatmap:
    """One matrix to draw; its colour scale begins at 0."""

    title: str
    symbol: str
    values_TT: np.ndarray
    """float32; only j ≤ i is drawn."""
    maximum: float
    """Upper end of the colour scale."""
    colours: str
    """Name of a matplotlib colour map, light to dark."""
    limit: int | None = None
    """Larger values are drawn in BEYOND_LIMIT_COLOUR; None: no limit."""

    @property
    def beyond(self) -> bool:
        """Whether a value is larger than the limit."""
        return self.limit is not None and bool((self.values_TT > self.limit).any())


@dataclass(frozen=True)
class HeadFigure:
    """One head: its title, a summary of its statistics, its heatmaps and its mean gates."""

    title: str
    summary: str
    heatmaps: tuple[Heatmap, ...]
    mean_gates_T: np.ndarray | None
    """ḡ_j of its first contextual encoding, shape (T,); None without one."""


def head_figures(probe: Probe, marks: TokenMarks, statistics: Sequence[HeadStatistics] = ()) -> list[HeadFigure]:
    """The data to draw for each layer and head of the probe.

    `statistics` and the first of `marks` make the summaries. Raises ProbeError where nothing is selected, or where the
    heatmaps have more than MAX_CELLS cells.
    """
    heatmaps = sum(len(layer_heatmaps(layer, 0)) * len(layer.heads) for layer in probe.layers if layer.heads)
    cells = len(probe.tokens_T) ** 2 * heatmaps
    if cells > MAX_CELLS:
        raise ProbeError(
            f"{cells:,} cells are too many to draw (at most {MAX_CELLS:,}); choose layers and heads, or fewer tokens"
        )
    if not cells:
        raise ProbeError("nothing to draw: no layer and head is selected")
    return [
        HeadFigure(
            title=f"Layer {layer.layer} · head {head}",
            summary="; ".join(
                summary(each, marks) for each in statistics if (each.layer, each.head) == (layer.layer, head)
            ),
            heatmaps=tuple(layer_heatmaps(layer, row)),
            mean_gates_T=next((mean_gates(each.gates_HTT[row]) for each in layer.contextual.values()), None),
        )
        for layer in probe.layers
        for row, head in enumerate(layer.heads)
    ]


def layer_heatmaps(layer: LayerProbe, row: int) -> list[Heatmap]:
    """The heatmaps of one head; `row` is its index in the layer's matrices."""
    heatmaps = []
    for kind, matrices in layer.contextual.items():
        suffix = f" ({kind})" if len(layer.contextual) > 1 else ""
        maximum = float(matrices.clamped_positions_HTT[row].max())
        positions_TT = matrices.positions_HTT[row]
        heatmaps.append(Heatmap(f"Gates{suffix}", "g", matrices.gates_HTT[row], 1.0, "Greens"))
        heatmaps.append(Heatmap(f"Positions{suffix}", "p", positions_TT, maximum, "magma_r", matrices.limit))
    if layer.position_only_attention_HTT is not None:
        values_TT = layer.position_only_attention_HTT[row]
        heatmaps.append(Heatmap("Position-only attention", "position only", values_TT, 1.0, "Blues"))
    values_TT = layer.attention_HTT[row]
    heatmaps.append(Heatmap("Attention", "a", values_TT, float(values_TT.max()), "Blues"))
    return heatmaps


def summary(statistics: HeadStatistics, marks: TokenMarks) -> str:
    """The statistics of a head on the first mark, as text."""
    name = next(iter(marks), "")
    parts = []
    if name in statistics.marks:
        found = statistics.marks[name]
        if found.on is not None:
            parts.append(f"mean gate {found.on:.2f} on {name}")
        if found.off is not None:
            parts.append(f"{found.off:.2f} elsewhere")
        if found.auc is not None:
            parts.append(f"AUC {found.auc:.2f}")
    parts.append(f"positions up to {statistics.position_max:.1f}")
    if statistics.clamped is not None:
        parts.append(f"{100 * statistics.clamped:.1f} % of pairs beyond {statistics.limit}")
    return ", ".join(parts)


def first_mark(marks: TokenMarks) -> np.ndarray:
    """Indices of the tokens that the first mark has."""
    return np.flatnonzero(next(iter(marks.values()), np.zeros(0, dtype=bool)))


def svg(heads: Sequence[HeadFigure], labels: Sequence[str], marked: np.ndarray, *, id_prefix: str = "") -> str:
    """One SVG drawing, a row of heatmaps per head. The same arguments give the same text.

    Args:
        heads: The rows, at least one.
        labels: The text of each token.
        marked: Indices of the tokens that get a plus.
        id_prefix: Prefix of the ids of the images; heatmap c of row r has the id `{id_prefix}{r}-{c}`, its marks have
            `{id_prefix}{r}-{c}-marks`.
    """
    return picture(heads, labels, marked, "svg", id_prefix=id_prefix).decode()


def picture(
    heads: Sequence[HeadFigure],
    labels: Sequence[str],
    marked: np.ndarray,
    file_format: Literal["png", "svg", "pdf"],
    *,
    id_prefix: str = "",
) -> bytes:
    """The file of the drawing of `svg`, in any format."""
    labels = [printable(label) for label in labels]
    return render(partial(_draw_rows, heads, labels, marked, id_prefix), file_format)


def _draw_rows(heads: Sequence[HeadFigure], labels: Sequence[str], marked: np.ndarray, id_prefix: str) -> Drawing:
    row_height = TOP + SIDE + BOTTOM
    width = LEFT + max(len(head.heatmaps) for head in heads) * (SIDE + GAP)
    height = len(heads) * row_height
    drawing = Drawing(figsize=(width, height))
    for row, head in enumerate(heads):
        top = height - row * row_height
        for text, y, weight in ((head.title, 0.16, "bold"), (head.summary, 0.33, "normal")):
            drawing.text(LEFT / width, (top - y) / height, printable(text), weight=weight, va="center")
        for column, heatmap in enumerate(head.heatmaps):
            left = LEFT + column * (SIDE + GAP)
            axes = drawing.add_axes((left / width, (top - TOP - SIDE) / height, SIDE / width, SIDE / height))
            draw_heatmap(axes, heatmap, labels, marked, gid=f"{id_prefix}{row}-{column}")
            beyond = f" (grey: beyond {heatmap.limit})" if heatmap.beyond else ""
            axes.set_title(heatmap.title + beyond, loc="left", weight="bold")
            axes.tick_params(labelleft=column == 0)  # the heatmaps of a head share their rows
    return drawing


def draw_heatmap(
    axes: Axes,
    heatmap: Heatmap,
    labels: Sequence[str],
    marked: np.ndarray,
    gid: str,
    *,
    side: float = SIDE,
    max_label: int = 4,
) -> None:
    """Draw a heatmap with its colour bar into a panel of `side` inches.

    Tokens are the ticks where there are at most MAX_TOKEN_TICKS of at most `max_label` characters; else numbers are.
    """
    T = len(labels)
    colours = mpl.colormaps[heatmap.colours].with_extremes(over=BEYOND_LIMIT_COLOUR, bad="white")
    image = axes.imshow(
        np.ma.masked_where(~np.tri(T, dtype=bool), heatmap.values_TT),
        cmap=colours,
        vmin=0,
        vmax=heatmap.maximum or 1.0,
        interpolation="none",  # one pixel per cell in the file
        gid=gid,
    )
    bar = axes.inset_axes((1.02, 0, 0.03, 1))
    axes.figure.colorbar(image, cax=bar, extend="max" if heatmap.beyond else "neither")
    bar.yaxis.set_major_formatter(FuncFormatter(number))
    longest = max(map(len, labels))
    if longest <= max_label and T <= MAX_TOKEN_TICKS:
        size = min(8.0, 0.9 * 72 * side / T)
        axes.set_xticks(range(T), labels, fontsize=size, rotation=90 if longest > 1 else 0)
        axes.set_yticks(range(T), labels, fontsize=size)
    else:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(8, integer=True))
            axis.set_major_formatter(FuncFormatter(number))
    axes.tick_params(length=2)
    axes.plot(
        marked,
        marked,
        "+k",
        markersize=min(max(1.5 * 72 * side / T, 5), 9),
        markeredgewidth=1,
        path_effects=[withStroke(linewidth=2.5, foreground="white")],
        clip_on=False,
        gid=f"{gid}-marks",
    )
