"""A probe as one HTML file that loads nothing from elsewhere.

It has the heatmaps, the value of the cell under the pointer, and the tokens, shaded by their gates.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jinja2 import Environment
from markupsafe import Markup

from cope_sweep.inference.probe import HeadStatistics, Probe, TokenMarks
from cope_sweep.read.figures.canvas import printable
from cope_sweep.read.figures.heads import HeadFigure, first_mark, head_figures, svg

TEMPLATE = Path(__file__).with_name("page.html.jinja")


def page(
    probe: Probe, labels: Sequence[str], marks: TokenMarks, statistics: Sequence[HeadStatistics] = (), *, title: str
) -> str:
    """The HTML text.

    Args:
        probe: The matrices.
        labels: The text of each token.
        marks: The marked tokens; the first mark is drawn.
        statistics: Statistics of the heads, shown in their titles.
        title: Title of the page.

    Raises ProbeError where there is too much to draw, or nothing.
    """
    marked = first_mark(marks)
    sections = []
    for index, head in enumerate(head_figures(probe, marks, statistics)):
        drawing = svg([head], labels, marked, id_prefix=f"{index}-")
        sections.append(
            {
                "svg": Markup(drawing[drawing.index("<svg") :]),  # noqa: S704 - made above; matplotlib escapes its text
                "tokens": _tokens(head, labels, marked),
                "matrices": [_matrix(f"{index}-0-{column}", head, column) for column in range(len(head.heatmaps))],
            }
        )
    template = Environment(autoescape=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    mark = printable(next(iter(marks), ""))
    return template.render(title=printable(title), labels=list(labels), mark=mark, sections=sections)


def _tokens(head: HeadFigure, labels: Sequence[str], marked: np.ndarray) -> list[dict[str, object]]:
    """The tokens with their mean gates; empty for a head without gates."""
    if head.mean_gates_T is None:
        return []
    is_marked = set(marked.tolist())
    return [
        {"label": printable(label), "gate": gate, "marked": t in is_marked, "ends_line": "\n" in label}
        for t, (label, gate) in enumerate(zip(labels, head.mean_gates_T.tolist(), strict=True))
    ]


def _matrix(image_id: str, head: HeadFigure, column: int) -> dict[str, str]:
    """The values of a heatmap: float32, little-endian, rows i = 0 … T − 1 with keys j = 0 … i, as base64."""
    heatmap = head.heatmaps[column]
    values = heatmap.values_TT[np.tril_indices(len(heatmap.values_TT))].astype("<f4")
    return {"image": image_id, "symbol": heatmap.symbol, "values": base64.b64encode(values.tobytes()).decode()}
