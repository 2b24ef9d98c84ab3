"""Style, layout and file formats of all figures, with matplotlib's objects and without pyplot.

matplotlib's parameters are global: `styled` sets them under a lock and restores them. So figures can be drawn in many
threads, and do not depend on a user's matplotlibrc. Text is never read as mathematics. Fonts are matplotlib's.
"""

from __future__ import annotations

import contextlib
import io
import math
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.typing import RcKeyType

DPI = 200
PANEL_WIDTH, PANEL_HEIGHT = 3.3, 2.6
"""Inches."""
MAX_LABEL = 60
"""Characters of a name in a legend or at an axis."""

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#7A4B00")
"""Okabe and Ito's colours for all kinds of colour vision, with brown for their yellow, which is too light on white."""
MARKERS = ("o", "s", "^", "D", "v", "X", "P", "<", ">")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (4, 1.5, 1, 1.5)), (0, (1.5, 1)))
GREY = "#8a8f96"

STYLE: dict[RcKeyType, Any] = {
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],  # what matplotlib brings; viewers of an SVG may take another sans-serif
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#d9dce0",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "pdf.fonttype": 42,  # text stays text
    "svg.fonttype": "none",
    "svg.hashsalt": "cope_sweep",  # the same ids in each drawing of the same data
    "text.parse_math": False,  # a `$` is a dollar sign
}

_LOCK = threading.RLock()
_METADATA: dict[str, dict[str, None]] = {  # nothing that changes from day to day
    "png": {"Software": None},
    "svg": dict.fromkeys(("Date", "Creator", "Format", "Type")),
    "pdf": dict.fromkeys(("CreationDate", "Creator", "Producer")),
}


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Draw and save in this context: matplotlib's defaults with STYLE, whatever the user's settings are."""
    with _LOCK, mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # characters that matplotlib's font does not have
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        yield


def render(draw: Callable[[], Drawing], file_format: Literal["png", "svg", "pdf"]) -> bytes:
    """The file of a drawing. The same drawing gives the same bytes with the same version of matplotlib."""
    stream = io.BytesIO()
    with styled():
        draw().savefig(stream, format=file_format, dpi=DPI, metadata=_METADATA[file_format])
    return stream.getvalue()


def printable(text: str) -> str:
    """`text` with symbols in place of control characters, which XML does not allow."""
    symbols = {"\n": "⏎", "\t": "⇥"}
    return "".join(each if each.isprintable() else symbols.get(each, "�") for each in text)


def shortened(text: str, length: int = MAX_LABEL) -> str:
    """Printable text of at most `length` characters."""
    text = printable(text)
    return text if len(text) <= length else text[: length - 1] + "…"


def number(value: float, _: object = None) -> str:
    """A tick's text: `0.01`, `512`, `16384`, `180 k`, `3.2 M`; matplotlib's own would need its mathematics."""
    for limit, factor, unit in ((1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e5, 1e3, " k")):
        if abs(value) >= limit:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.5g}"


def panels(
    count: int, *, title: str = "", height: float = PANEL_HEIGHT, width: float | None = None, columns: int = 3
) -> tuple[Drawing, list[Axes]]:
    """A drawing with `count` panels of these inches, at most `columns` side by side, each with a light grid."""
    across = min(columns, count) if count != 4 else 2
    down = math.ceil(count / across)
    if width is None:  # one panel is wider, so that its legend has room
        width = PANEL_WIDTH if across > 1 else 1.4 * PANEL_WIDTH
    lines = textwrap.wrap(shortened(title, 200), max(20, int(11 * width * across)))
    drawing = Drawing(figsize=(width * across, height * down + 0.4 + 0.2 * len(lines)), layout="constrained")
    grid = drawing.subplots(down, across, squeeze=False)
    axes = list(grid.flat)
    for unused in axes[count:]:
        unused.remove()
    for each in axes[:count]:
        each.grid(visible=True)
    if lines:
        drawing.suptitle("\n".join(lines), fontsize=10)
    return drawing, axes[:count]


def series_style(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of a series. Those of the first 72 differ; from the ninth on, dashes differ too."""
    return {
        "color": PALETTE[index % len(PALETTE)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index // len(PALETTE) % len(DASHES)],
    }


def legend(drawing: Drawing, handles: Sequence[Artist], labels: Sequence[str], *, title: str = "") -> None:
    """A legend below the panels, or, for many series, right of them."""
    if not handles:
        return
    texts = [shortened(label) for label in labels]
    right = len(texts) > 12
    width = drawing.get_figwidth()
    columns = 1 if right else max(1, min(len(texts), int(width * 15 / (max(map(len, texts)) + 5))))
    if right:
        drawing.set_figwidth(width + 0.7 + 0.075 * max(map(len, texts)))
        drawing.set_figheight(max(drawing.get_figheight(), 0.17 * len(texts) + 0.8))
    else:
        drawing.set_figheight(drawing.get_figheight() + 0.17 * math.ceil(len(texts) / columns))
    drawing.legend(
        handles,
        texts,
        loc="outside right upper" if right else "outside lower center",
        ncols=columns,
        title=printable(title) or None,
        title_fontsize=8,
        handlelength=2.6,
    )


def say_empty(axes: Axes, text: str = "no finished run") -> None:
    """Say in a panel that there is nothing to draw."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set(xticks=[], yticks=[])


def finite(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """The finite values."""
    array = np.asarray(values, dtype=np.float64)
    return array[np.isfinite(array)]
