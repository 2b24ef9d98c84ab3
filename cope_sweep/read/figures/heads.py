"""Heatmaps of heads: gates, positions, position-only attention and attention, drawn with matplotlib.

The heatmaps follow the paper's figures of attention maps and gates: a row per query, a column per key, and a black plus
on the diagonal for each marked token. The paper's Figure 4 is position-only attention, and its Figure 6 gates, with a
plus on each line break, or where the title of a section starts. `head_figures` computes the data of a probe, `picture`
draws all heatmaps of each head in a row, and `page` is a self-contained HTML file of them. `kinds.maps` draws one kind
of heatmap for chosen heads of a checkpoint.

Shapes: T tokens; index [i, j] is query i and key j ≤ i.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import matplotlib as mpl
import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator

from cope_sweep.errors import ProbeError
from cope_sweep.inference.probe import HeadStatistics, LayerProbe, Probe, TokenMarks, mean_gates
from cope_sweep.read.figures.canvas import number, printable, render, shortened
from cope_sweep.read.numbers import fixed

MAX_CELLS = 8 << 20
"""Maximum number of cells of all heatmaps in a drawing."""
MAX_TOKEN_TICKS = 50
"""Maximum number of ticks of an axis: for longer sequences, every n-th token has one, or ticks are numbers."""
SHORT_TOKEN = 4
"""Maximum number of characters of a token that fits into a cell of a heatmap."""

TEMPLATE = Path(__file__).with_name("page.html.jinja")
BEYOND_LIMIT_COLOUR = "#9aa3ad"

SIDE, GAP, LEFT, TOP, BOTTOM = 3.0, 0.75, 0.5, 0.7, 0.45
"""Layout in inches: a heatmap, the gap to the right of it with its colour bar, and the margins of a row of heatmaps."""


@dataclass(frozen=True)
class HeadMatrix:
    """One matrix to draw; its colour scale starts at 0."""

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

    @property
    def colour_note(self) -> str:
        """The part of a title that explains the colour of values beyond the limit; empty without such values."""
        return f" (grey: beyond {self.limit})" if self.beyond else ""


@dataclass(frozen=True)
class HeadFigure:
    """One head: its title, a summary of its statistics, its heatmaps and its mean gates."""

    title: str
    summary: str
    heatmaps: tuple[HeadMatrix, ...]
    mean_gates_T: np.ndarray | None
    """ḡ_j of its first contextual encoding, shape (T,); None without one."""


def head_figures(probe: Probe, marks: TokenMarks, statistics: Sequence[HeadStatistics] = ()) -> list[HeadFigure]:
    """The data to draw for each layer and head of a probe.

    Summaries are about `statistics` and the first of `marks`. Raises ProbeError if nothing is selected, or if the
    heatmaps have more than MAX_CELLS cells.
    """
    heatmaps = sum(len(layer_heatmaps(layer, 0)) * len(layer.heads) for layer in probe.layers if layer.heads)
    cells = len(probe.tokens_T) ** 2 * heatmaps
    if cells > MAX_CELLS:
        raise ProbeError(
            f"{cells:,} cells are too many to draw (at most {MAX_CELLS:,}); choose layers and heads, or fewer tokens",
            code="too_many_cells",
            cells=cells,
            limit=MAX_CELLS,
        )
    if not cells:
        raise ProbeError("nothing to draw: no layer and head is selected", code="no_head")
    summaries = {(head.layer, head.head): summary(head, marks) for head in statistics}
    return [
        HeadFigure(
            title=f"Layer {layer.layer} · head {head}",
            summary=summaries.get((layer.layer, head), ""),
            heatmaps=tuple(layer_heatmaps(layer, row)),
            mean_gates_T=next(
                (mean_gates(each.gates_HTT[row], each.seen_TT) for each in layer.contextual.values()), None
            ),
        )
        for layer in probe.layers
        for row, head in enumerate(layer.heads)
    ]


def layer_heatmaps(layer: LayerProbe, row: int) -> list[HeadMatrix]:
    """The heatmaps of one head; `row` is its index in the layer's matrices."""
    heatmaps = []
    for kind, matrices in layer.contextual.items():
        suffix = f" ({kind})" if len(layer.contextual) > 1 else ""
        maximum = float(matrices.clamped_positions_HTT[row].max())
        positions_TT = matrices.positions_HTT[row]
        heatmaps.append(HeadMatrix(f"Gates{suffix}", "g", matrices.gates_HTT[row], 1.0, "Greens"))
        heatmaps.append(HeadMatrix(f"Positions{suffix}", "p", positions_TT, maximum, "magma_r", matrices.limit))
    if layer.position_only_attention_HTT is not None:
        values_TT = layer.position_only_attention_HTT[row]
        heatmaps.append(HeadMatrix("Position-only attention", "position only", values_TT, 1.0, "Blues"))
    values_TT = layer.attention_HTT[row]
    heatmaps.append(HeadMatrix("Attention", "a", values_TT, float(values_TT.max()), "Blues"))
    return heatmaps


def summary(statistics: HeadStatistics, marks: TokenMarks) -> str:
    """The statistics of a head on the first mark, as text."""
    parts = gate_means(statistics, marks)
    of_mark = statistics.marks.get(next(iter(marks), ""))
    if of_mark is not None and of_mark.auc is not None:
        parts.append(f"AUC {fixed(of_mark.auc, 2)}")
    parts.append(f"positions up to {fixed(statistics.position_max, 1)}")
    if statistics.clamped is not None:
        parts.append(f"{fixed(100 * statistics.clamped, 1)} % of pairs beyond {statistics.limit}")
    return ", ".join(parts)


def gate_means(statistics: HeadStatistics, marks: TokenMarks) -> list[str]:
    """The mean gate of a head on the tokens of the first mark, and on the others."""
    name = next(iter(marks), "")
    of_mark = statistics.marks.get(name)
    texts = []
    if of_mark is not None and of_mark.on is not None:
        texts.append(f"mean gate {fixed(of_mark.on, 2)} on {name}")
    if of_mark is not None and of_mark.off is not None:
        texts.append(f"{fixed(of_mark.off, 2)} elsewhere")
    return texts


def picture(
    heads: Sequence[HeadFigure],
    labels: Sequence[str],
    marks: TokenMarks,
    file_format: Literal["png", "svg", "pdf"],
    *,
    id_prefix: str = "",
) -> bytes:
    """The file of a drawing with a row of heatmaps per head. The same arguments give the same bytes.

    Args:
        heads: The rows, at least one.
        labels: The text of each token.
        marks: The marked tokens; those of the first mark get a plus.
        file_format: The format of the file.
        id_prefix: Prefix of the ids of images: heatmap c of row r has the id `{id_prefix}{r}-{c}`, and its marks have
            `{id_prefix}{r}-{c}-marks`.
    """
    labels = [printable(label) for label in labels]
    return render(partial(_draw_rows, heads, labels, _first_mark(marks), id_prefix), file_format)


def _first_mark(marks: TokenMarks) -> np.ndarray:
    """Indices of the tokens with the first mark."""
    return np.flatnonzero(next(iter(marks.values()), np.zeros(0, dtype=bool)))


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
            axes.set_title(heatmap.title + heatmap.colour_note, loc="left", weight="bold")
            axes.tick_params(labelleft=column == 0)  # the heatmaps of a head share their rows
    return drawing


def draw_heatmap(
    axes: Axes,
    heatmap: HeadMatrix,
    labels: Sequence[str],
    marked: np.ndarray,
    gid: str,
    *,
    side: float = SIDE,
    max_label: int | None = None,
) -> None:
    """Draw a heatmap with its colour bar into a panel of `side` inches.

    Ticks are at most MAX_TOKEN_TICKS tokens, each cut to `max_label` characters. Without `max_label`, they are all
    tokens if these are few and short, and numbers otherwise.
    """
    T = len(labels)
    colours = mpl.colormaps[heatmap.colours].with_extremes(over=BEYOND_LIMIT_COLOUR, bad="white")
    image = axes.imshow(
        np.ma.masked_where(~np.tri(T, dtype=bool), heatmap.values_TT),
        cmap=colours,
        vmin=0,
        vmax=heatmap.maximum or 1.0,
        interpolation="none",  # one pixel of the file per cell
        gid=gid,
    )
    bar = axes.inset_axes((1.02, 0, 0.03, 1))
    axes.figure.colorbar(image, cax=bar, extend="max" if heatmap.beyond else "neither")
    bar.yaxis.set_major_formatter(FuncFormatter(number))
    longest = max(map(len, labels))
    if max_label or (longest <= SHORT_TOKEN and T <= MAX_TOKEN_TICKS):
        stride = math.ceil(T / MAX_TOKEN_TICKS)
        size = min(8.0, 0.9 * 72 * side * stride / T)
        texts = [shortened(label, max_label or SHORT_TOKEN) for label in labels[::stride]]
        axes.set_xticks(range(0, T, stride), texts, fontsize=size, rotation=90 if longest > 1 else 0)
        axes.set_yticks(range(0, T, stride), texts, fontsize=size)
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


def page(
    probe: Probe, labels: Sequence[str], marks: TokenMarks, statistics: Sequence[HeadStatistics] = (), *, title: str
) -> str:
    """A self-contained HTML page with all heatmaps of a probe, as text.

    Args:
        probe: The matrices.
        labels: The text of each token.
        marks: The marked tokens; the first mark is drawn.
        statistics: Statistics of the heads, for their titles.
        title: Title of the page.

    Raises ProbeError if there is too much to draw, or nothing.
    """
    marked = _first_mark(marks)
    sections = []
    for index, head in enumerate(head_figures(probe, marks, statistics)):
        drawing = picture([head], labels, marks, "svg", id_prefix=f"{index}-").decode()
        sections.append(
            {
                "svg": Markup(drawing[drawing.index("<svg") :]),  # noqa: S704 - made above; matplotlib escapes its text
                "tokens": _tokens(head, labels, marked),
                "matrices": [_matrix(f"{index}-0-{column}", head, column) for column in range(len(head.heatmaps))],
            }
        )
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(TEMPLATE.read_text(encoding="utf-8"))
    mark = printable(next(iter(marks), ""))
    return template.render(title=printable(title), labels=list(labels), mark=mark, sections=sections)


def _tokens(head: HeadFigure, labels: Sequence[str], marked: np.ndarray) -> list[dict[str, object]]:
    """The tokens with their mean gates, for the template; empty if the head has no gates."""
    if head.mean_gates_T is None:
        return []
    is_marked = set(marked.tolist())
    return [
        {"label": printable(label), "gate": gate, "marked": t in is_marked, "ends_line": "\n" in label}
        for t, (label, gate) in enumerate(zip(labels, head.mean_gates_T.tolist(), strict=True))
    ]


def _matrix(image_id: str, head: HeadFigure, column: int) -> dict[str, str]:
    """The values of a heatmap for the template: base64 of little-endian float32, rows i = 0 … T − 1, keys j = 0 … i."""
    heatmap = head.heatmaps[column]
    values = heatmap.values_TT[np.tril_indices(len(heatmap.values_TT))].astype("<f4")
    return {"image": image_id, "symbol": heatmap.symbol, "values": base64.b64encode(values.tobytes()).decode()}
