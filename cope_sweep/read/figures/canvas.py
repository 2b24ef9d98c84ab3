"""Style, layout, axes and file formats of all figures, with matplotlib's objects and without pyplot.

matplotlib's parameters are global: `styled` sets them under a lock and restores them, so figures can be drawn in
several threads and do not depend on a user's matplotlibrc. Text is never parsed as mathematics. A logarithmic axis has
a place and a tick for 0.

A user's style sheet is applied on top of STYLE. So colours of series are those of the style (`colour`), and sizes of
texts that have no parameter of their own are in proportion to its `font.size` (`points`).
"""

from __future__ import annotations

import base64
import contextlib
import io
import math
import re
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeGuard

import matplotlib as mpl
import numpy as np
from matplotlib import style as style_sheets
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.rcsetup import cycler
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.typing import RcKeyType
from PIL import Image

from cope_sweep.errors import FigureError
from cope_sweep.read.figures.fonts import add_fallbacks
from cope_sweep.read.tables.model import Column

Size = tuple[float, float | None]
"""Width and height of a drawing in inches. Without a height, the content decides it, and the text keeps its size."""

DPI = 200
PANEL_WIDTH, PANEL_HEIGHT, LEAST_PANEL, LEAST_ROOMY_PANEL = 3.3, 2.6, 1.6, 2.4
"""Inches. LEAST_PANEL is the smallest width of panels side by side in a drawing of a given size; LEAST_ROOMY_PANEL, if
only its width is given, so that there can be more panels below each other."""
FONT_SIZE = 8
"""Points."""
CHARACTERS_PER_INCH = 15
"""Of a text with FONT_SIZE, about."""
MAX_LABEL = 60
"""Maximum number of characters of a name in a legend or at an axis."""

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#7A4B00")
"""Okabe and Ito's colours, which people with any colour vision can tell apart; brown replaces their yellow, which is
too light on white."""
MARKERS = ("o", "s", "^", "D", "v", "X", "P", "<", ">")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (4, 1.5, 1, 1.5)), (0, (1.5, 1)))
GREY = "#8a8f96"

NEAR_ZERO = 0.5
"""A linear axis of percentages starts at 0 if the smallest value is less than this share of the largest."""
MANY_STEPS = 20
"""Curves with fewer steps are shown whole."""
LOG_FROM_RATIO = 100
"""A metric has a logarithmic axis if its largest positive value is at least this many times the smallest."""
LOG_X_FROM_RATIO = 8
"""The same for a parameter on the x axis."""
MAX_DECADES = 6
"""Maximum number of decades of a logarithmic axis, above the part that is linear around 0."""
ZERO_WIDTH, ZERO_SHARE = 0.45, 0.16
"""The distance between 0 and the first decade of a logarithmic axis, in decades, and as a share of its decades: the
texts of the two ticks need room."""
MAX_TICKS = 8
MAX_TICKS_ACROSS = 5
"""The same for a logarithmic x axis, whose texts are side by side."""
MANY_NAMES = 10
"""If an axis has more names, they are turned by 90 degrees and smaller."""
SMALL_COLUMNS = 4
"""Number of small panels side by side."""
FEW_LINES, MOST_PANELS = 8, 12
"""If a panel would have more lines than FEW_LINES, each gets a panel of its own, with the others in grey; not if that
makes more than MOST_PANELS panels."""
FLATTENS = 0.2
"""A series is drawn at the edge if the axis would otherwise be more than 1 / FLATTENS times as long."""

STYLE: dict[RcKeyType, Any] = {
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib; viewers of an SVG may use another sans-serif font
    "font.size": FONT_SIZE,
    "figure.titlesize": 10,
    "axes.titlesize": 9,
    "axes.labelsize": "medium",  # `font.size`
    "axes.prop_cycle": cycler(color=PALETTE),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#d9dce0",
    "grid.linewidth": 0.6,
    "legend.fontsize": "medium",
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "pdf.fonttype": 42,  # text stays text
    "svg.fonttype": "none",
    "svg.hashsalt": "cope_sweep",  # the same data have the same ids
    "text.parse_math": False,  # `$` is a dollar sign
}

_LOCK = threading.RLock()
_METADATA: dict[str, dict[str, None]] = {  # left out: what differs between two drawings of the same data
    "png": {"Software": None},
    "svg": dict.fromkeys(("Date", "Creator", "Format", "Type")),
    "pdf": dict.fromkeys(("CreationDate", "Creator", "Producer")),
}


@contextlib.contextmanager
def styled(style: str | None = None) -> Iterator[None]:
    """A context to draw and save in, with matplotlib's defaults, STYLE and `style`, whatever the user's settings are.

    `style` is the path of a style sheet, or the name of one of matplotlib's. Raises FigureError if there is none.
    """
    with _LOCK, mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about characters that matplotlib's font does not have
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        if style is not None:
            _use_style(style)
        yield


def _use_style(style: str) -> None:
    try:
        style_sheets.use(style)
    except (OSError, ValueError) as error:  # ValueError: not text
        raise FigureError(
            f"--style {style}: this is neither a style sheet nor the name of one of matplotlib's",
            code="invalid_option",
            option="--style",
            value=style,
            allowed=list(style_sheets.available),
        ) from error


def _colours() -> list[str]:
    """The colours of the style."""
    colours: list[str] = mpl.rcParams["axes.prop_cycle"].by_key().get("color", [*PALETTE])
    return colours


def colour(index: int) -> str:
    """The colour of a series in the style."""
    return _colours()[index % len(_colours())]


def points(size: float) -> float:
    """A size of text that is `size` points in the default style, and in proportion to `font.size` in others."""
    return size * float(mpl.rcParams["font.size"]) / FONT_SIZE


def render(
    draw: Callable[[], Drawing],
    file_format: Literal["png", "svg", "pdf"],
    size: Size | None = None,
    style: str | None = None,
) -> bytes:
    """The file of a drawing. The same version of matplotlib gives the same bytes.

    `size` is given to the drawing, which then has it exactly; None: what its content needs. Raises FigureError for an
    unknown style (see `styled`).
    """
    stream = io.BytesIO()
    with styled(style):
        drawing = draw()
        if file_format != "svg" and add_fallbacks(drawing):
            drawing = draw()
        fitted(drawing, size).savefig(stream, format=file_format, dpi=DPI, metadata=_METADATA[file_format])
    content = stream.getvalue()
    return _PNG_IN_SVG.sub(_with_palette, content) if file_format == "svg" else content


_PNG_IN_SVG = re.compile(rb"data:image/png;base64,\s*([A-Za-z0-9+/=\s]+)")
_MOST_COLOURS = 256
"""Maximum number of colours of a PNG with a palette."""


def _with_palette(match: re.Match[bytes]) -> bytes:
    """A PNG in an SVG with a palette, a sixth of the size; unchanged if it has more than 256 colours."""
    image = Image.open(io.BytesIO(base64.b64decode(match[1]))).convert("RGBA")
    pixels = np.asarray(image)
    colours, indices = np.unique(pixels.reshape(-1, 4), axis=0, return_inverse=True)
    if len(colours) > _MOST_COLOURS or (colours[:, 3] != 255).any():
        return match[0]
    small = Image.fromarray(indices.reshape(pixels.shape[:2]).astype(np.uint8), "P")
    small.putpalette(colours[:, :3].tobytes())
    stream = io.BytesIO()
    small.save(stream, "PNG", optimize=True)
    return b"data:image/png;base64," + base64.b64encode(stream.getvalue())


def fitted(drawing: Drawing, size: Size | None) -> Drawing:
    """The drawing in this size, with titles that fit.

    A drawing without a layout engine is scaled as a whole; if only a width is given, and it fits, it stays as it is.
    """
    natural_width, natural_height = map(float, drawing.get_size_inches())
    if drawing.get_layout_engine() is None:
        if size is not None:
            width, height = size
            if height is None:
                factor = min(1.0, width / natural_width)
                width, height = factor * natural_width, factor * natural_height
            else:
                factor = min(width / natural_width, height / natural_height)
            drawing.set_size_inches(width, height)
            for text in drawing.findobj(Text):
                text.set_fontsize(float(text.get_fontsize()) * factor)
        return drawing
    if size is not None:
        drawing.set_size_inches(size[0], size[1] or natural_height)
        for panel in drawing.axes:
            for locator in (panel.xaxis.get_major_locator(), panel.yaxis.get_major_locator()):
                if isinstance(locator, MaxNLocator):
                    locator.set_params(nbins="auto")  # as many as there is room for
    _wrap_titles(drawing)
    return drawing


def _wrap_titles(drawing: Drawing) -> None:
    """Break the lines of titles and labels of x axes that are wider than their panel, or than the drawing."""
    drawing.draw_without_rendering()  # computes the layout
    texts_and_room = [(text, drawing.bbox.width) for text in drawing.texts]
    for axes in drawing.axes:
        titles = [axes.get_title(loc="left"), axes.get_title()]
        panel_width = axes.get_window_extent().width
        texts_and_room.append((axes.xaxis.label, panel_width))
        texts_and_room += [(child, panel_width) for child in axes.get_children() if _is_title(child, titles)]
    for text, room in texts_and_room:
        width = text.get_window_extent().width
        if width > room:
            lines = text.get_text().split("\n")
            length = max(8, int(0.95 * room / width * max(map(len, lines))))
            text.set_text("\n".join(textwrap.fill(line, length) for line in lines))


def _is_title(artist: Artist, titles: Sequence[str]) -> TypeGuard[Text]:
    return isinstance(artist, Text) and bool(artist.get_text()) and artist.get_text() in titles


def printable(text: str) -> str:
    """`text` with symbols for control characters, which XML does not allow."""
    symbols = {"\n": "⏎", "\t": "⇥"}
    return "".join(character if character.isprintable() else symbols.get(character, "�") for character in text)


def shortened(text: str, length: int = MAX_LABEL) -> str:
    """Printable text of at most `length` characters."""
    text = printable(text)
    return text if len(text) <= length else text[: length - 1] + "…"


def wrapped(texts: Sequence[str], width: float) -> list[str]:
    """The texts in lines that are about `width` inches long."""
    length = max(8, int(CHARACTERS_PER_INCH * width / points(1)))
    return [textwrap.fill(text, length) for text in texts]


def number(value: float, _: object = None) -> str:
    """The text of a tick: `0.01`, `512`, `16384`, `180 k`, `3.2 M`. matplotlib's own texts need its mathematics."""
    for limit, factor, unit in ((1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e5, 1e3, " k")):
        if abs(value) >= limit:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.5g}"


def panels(
    count: int,
    *,
    title: str = "",
    size: Size | None = None,
    height: float | None = None,
    width: float | None = None,
    small: bool = False,
    group: int = 1,
) -> tuple[Drawing, list[Axes]]:
    """A drawing with `count` panels, three side by side or four small ones; each has a light grid.

    Args:
        count: The number of panels.
        title: The title of the drawing.
        size: The size that the drawing will have, which decides how many panels are side by side; None: any.
        height: Height of a panel in inches; None: a default.
        width: Width of a panel in inches; None: a default.
        small: Whether panels are small.
        group: Groups of so many panels belong together; up to four are a line of panels.
    """
    columns = SMALL_COLUMNS if small else 3
    if small:
        height, width = 1.75, 2.5
    across = min(columns, count) if count != 4 else 2
    if 1 < group <= SMALL_COLUMNS and group < count:
        across = group
        width = width or min(PANEL_WIDTH, 3 * PANEL_WIDTH / group)
    if size is not None:
        least = LEAST_ROOMY_PANEL if size[1] is None else LEAST_PANEL
        across = max(1, min(across, int(size[0] / least)))
        width = size[0] / across
    elif width is None:  # a single panel is wider, to leave room for its legend
        width = PANEL_WIDTH if across > 1 else 1.4 * PANEL_WIDTH
    if height is None:
        height = PANEL_HEIGHT
    down = math.ceil(count / across)
    lines = textwrap.wrap(shortened(title, 200), max(20, int(11 * width * across)))
    drawing = Drawing(figsize=(width * across, height * down + 0.4 + 0.2 * len(lines)), layout="constrained")
    grid = drawing.subplots(down, across, squeeze=False)
    axes = list(grid.flat)
    for unused in axes[count:]:
        unused.remove()
    for panel in axes[:count]:
        panel.grid(visible=True)
    if lines:
        drawing.suptitle("\n".join(lines))
    return drawing, axes[:count]


def series_style(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of a series. The first 72 series differ; a repeated colour has other dashes."""
    return {
        "color": colour(index),
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index // len(_colours()) % len(DASHES)],
    }


def legend(drawing: Drawing, handles: Sequence[Artist], labels: Sequence[str], *, title: str = "") -> None:
    """Add a legend below the panels or, for many series, to the right of them."""
    if not handles:
        return
    texts = [shortened(label) for label in labels]
    is_right = len(texts) > 12
    columns = 1
    if is_right:
        drawing.set_figwidth(drawing.get_figwidth() + 0.7 + 0.075 * max(map(len, texts)))
        drawing.set_figheight(max(drawing.get_figheight(), 0.17 * len(texts) + 0.8))
    else:
        room = drawing.get_figwidth() / points(1) * CHARACTERS_PER_INCH
        columns = max(1, min(len(texts), int(room / (max(map(len, texts)) + 5))))
        drawing.set_figheight(drawing.get_figheight() + 0.17 * math.ceil(len(texts) / columns))
    drawing.legend(
        handles,
        texts,
        loc="outside right upper" if is_right else "outside lower center",
        ncols=columns,
        title=printable(title) or None,
        title_fontsize=points(8),
        handlelength=2.6,
    )


def panel_title(axes: Axes, parts: Sequence[str]) -> None:
    """Set a title of these parts, in a smaller font if it is long."""
    text = " · ".join(parts)
    title = axes.set_title(shortened(text), loc="left")
    if len(text) > 36:
        title.set_fontsize(points(7.5))


def columns_of(panel: Axes) -> int:
    """The number of panels side by side in the drawing of a panel."""
    place = panel.get_subplotspec()
    return 1 if place is None else int(place.get_gridspec().ncols)


def _width_of(panel: Axes) -> float:
    """The width of a panel with its labels, in inches, before the layout."""
    drawing = panel.get_figure(root=True)
    return math.inf if drawing is None else float(drawing.get_figwidth()) / columns_of(panel)


def label_edges(axes: Sequence[Axes]) -> None:
    """Keep the axis labels of the panels on the left and at the bottom only."""
    columns = columns_of(axes[0])
    for index, panel in enumerate(axes):
        panel.set_xlabel("" if index + columns < len(axes) else textwrap.fill(panel.get_xlabel(), 28))
        if index % columns:
            panel.set_ylabel("")


def has_own_panels(lines: int, panels: int = 1) -> bool:
    """Whether each line gets a panel of its own, given the numbers of lines and of panels that all lines are in."""
    return lines > FEW_LINES and lines * panels <= MOST_PANELS


def background(axes: Axes, x: Any, y: Any, **style: Any) -> Artist:
    """Draw a series that others are compared with as a thin grey line."""
    return axes.plot(x, y, color="#c3c7cc", linewidth=0.8, zorder=1, **style)[0]


def empty(title: str, size: Size | None, text: str) -> Drawing:
    """The drawing of a figure without data: a panel with a text."""
    drawing, (panel,) = panels(1, title=title, size=size)
    say_empty(panel, text)
    return drawing


def say_empty(axes: Axes, text: str) -> None:
    """Write into a panel that there is nothing to draw."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set(xticks=[], yticks=[])


def finite(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """The finite values."""
    array = np.asarray(values, dtype=np.float64)
    return array[np.isfinite(array)]


def is_logarithmic(values: Sequence[float] | np.ndarray, log: bool | None) -> bool:
    """Whether a metric's axis is logarithmic; if `log` is None, whether positive values differ by LOG_FROM_RATIO."""
    numbers = finite(values)
    positive = numbers[numbers > 0]
    if not len(positive) or (numbers < 0).any():
        return False
    return bool(positive.max() >= LOG_FROM_RATIO * positive.min()) if log is None else log


def metric_axis(
    axes: Axes, values: Sequence[float], metric: Column, *, log: bool | None, which: Literal["x", "y"] = "y"
) -> None:
    """Set scale, ticks and label of an axis that shows a metric.

    If a value is 0, a logarithmic axis has a place for it, apart from the others: the axis is interrupted between 0 and
    the decade of the smallest positive value. If there are values that are smaller than MAX_DECADES allow, the axis is
    linear there, and its label says so. An axis with negative values is linear.

    Args:
        axes: The panel, with its data drawn.
        values: All drawn values, including the ends of intervals; not scaled.
        metric: The metric, whose scale the ticks have; percentages range from 0 to 100.
        log: None: logarithmic if positive values differ by a factor of LOG_FROM_RATIO.
        which: The axis.
    """
    label, percent = printable(metric.quantity_title), metric.unit == "%"
    numbers, scale = finite(values) * metric.scale, metric.scale
    positive = numbers[numbers > 0]
    axis = axes.xaxis if which == "x" else axes.yaxis
    set_scale, set_lim = (axes.set_xscale, axes.set_xlim) if which == "x" else (axes.set_yscale, axes.set_ylim)
    zero_line = axes.axvline if which == "x" else axes.axhline

    def set_limits(low: float, high: float) -> None:
        set_lim(low / scale, high / scale)

    if not is_logarithmic(numbers, log):
        axis.set_major_locator(_ScaledLocator(scale))
        if len(numbers) and ((percent and numbers.min() < NEAR_ZERO * numbers.max()) or (numbers == 0).all()):
            top = max(numbers.max(), 1e-9 if percent and numbers.max() > 0 else 1.0)
            set_limits(min(numbers.min(), 0) - 0.03 * top, 1.05 * top)
    else:
        low, high = positive.min(), positive.max()
        if percent and high > 30:
            high = max(high, 100.0)
        first = math.floor(math.log10(low) + 1e-9)
        last = max(math.ceil(math.log10(high) - 1e-9), first + 1)
        first = max(first, last - MAX_DECADES)
        stride = math.ceil((last - first + 1) / (MAX_TICKS_ACROSS if which == "x" else MAX_TICKS))
        ticks = [10.0**power for power in range(first, last + 1, stride)]
        if (numbers == 0).any() or low < 10.0**first:
            set_scale("symlog", linthresh=10.0**first / scale, linscale=max(ZERO_WIDTH, ZERO_SHARE * (last - first)))
            set_limits(-0.3 * 10.0**first, 1.3 * max(high, ticks[0]))
            zero_line(0, color=GREY, linewidth=0.8, zorder=1)
            ticks = [0.0, *ticks]
            if low >= 10.0**first:  # nothing is between 0 and the first decade: the axis is interrupted there
                _interrupt(axes, 0.55 * 10.0**first / scale, which)
                label += "\n(log; 0 stands apart)"
            else:
                label += f"\n(log; linear below {number(10.0**first)})"
        else:
            set_scale("log")
            set_limits(low / 1.3, 1.3 * high)
            if high / low < 30:  # decades alone would give one or two ticks
                ticks = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
        axis.set_major_locator(FixedLocator([tick / scale for tick in ticks if tick <= 1.3 * high]))
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda place, _: number(place * scale)))
    axis.set_label_text(label)


class _ScaledLocator(MaxNLocator):
    """Ticks at places that are round numbers after the multiplication by a scale."""

    def __init__(self, scale: float) -> None:
        super().__init__(6, steps=[1, 2, 2.5, 5, 10])
        self._scale = scale

    def tick_values(self, vmin: float, vmax: float) -> Any:
        return np.asarray(super().tick_values(vmin * self._scale, vmax * self._scale)) / self._scale


def _interrupt(axes: Axes, place: float, which: Literal["x", "y"]) -> None:
    """Draw the sign of an interrupted axis at a place: two slashes across its line."""
    is_x = which == "x"
    marker = [(-0.5, -1.0), (0.5, 1.0)] if is_x else [(-1.0, -0.5), (1.0, 0.5)]
    transform = axes.get_xaxis_transform() if is_x else axes.get_yaxis_transform()
    for factor, colour_of_line, width in ((1.0, "white", 4.0), (0.8, "black", 0.8), (1.2, "black", 0.8)):
        x, y = (factor * place, 0.0) if is_x else (0.0, factor * place)
        axes.plot(
            x, y, color=colour_of_line, marker=marker, markersize=7, linestyle="none", markeredgewidth=width,
            transform=transform, clip_on=False, zorder=5,
        )  # fmt: skip


def parameter_axis(axes: Axes, positions: Sequence[float], labels: Sequence[str] | None, *, log: bool | None) -> None:
    """Set the ticks of the x axis: at the values of a parameter, or at names (`labels`), which have no scale."""
    if labels is not None:
        texts = [shortened(label, 30) for label in labels]
        longest = max(map(len, texts), default=0)
        is_long = longest * len(labels) > 40
        # A slanted name reaches to the left by most of its length.
        too_long = is_long and longest / CHARACTERS_PER_INCH > 0.6 * _width_of(axes)
        if len(labels) > MANY_NAMES or too_long:
            axes.set_xticks(list(positions), texts, rotation=90, fontsize=points(0.75 * FONT_SIZE))
        else:
            axes.set_xticks(list(positions), texts, rotation=30 if is_long else 0, ha="right" if is_long else "center")
        axes.margins(x=0.12)
        return
    distinct = np.unique(finite(positions))
    is_positive = len(distinct) > 2 and distinct.min() > 0
    if log is None:
        log = bool(is_positive and distinct.max() >= LOG_X_FROM_RATIO * distinct.min())
    if log and len(distinct) and distinct.min() > 0:
        axes.set_xscale("log")
    elif log:
        axes.set_xscale("symlog", linthresh=float(min(distinct[distinct > 0], default=1.0)), linscale=0.6)
    if 0 < len(distinct) <= MAX_TICKS and _have_room(distinct, log=log):
        axes.xaxis.set_major_locator(FixedLocator(distinct.tolist()))
    elif log:
        axes.xaxis.set_major_locator(FixedLocator(_log_ticks(distinct)))
    else:
        axes.xaxis.set_major_locator(_ScaledLocator(1.0))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(number))


def _log_ticks(values: np.ndarray) -> list[float]:
    """Round numbers between values on a logarithmic axis, few enough for their texts; with 0 if it is a value."""
    positive = values[values > 0]
    low, high = positive.min() / 1.1, positive.max() * 1.1
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]
        if len(ticks) <= MAX_TICKS_ACROSS:
            break
    ticks = ticks[:: math.ceil(len(ticks) / MAX_TICKS_ACROSS)]
    return [0.0, *ticks] if len(positive) < len(values) else ticks


def fit_curves(axes: Axes, x: Any, y: Any) -> None:
    """Limit a linear y axis to the values after the first tenth of x, if earlier values would take half of it.

    `x` and `y` are all points. The start of such curves is outside the panel.
    """
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    is_finite = np.isfinite(x) & np.isfinite(y)
    if axes.get_yscale() != "linear" or len(np.unique(x[is_finite])) < MANY_STEPS:
        return
    late = y[is_finite & (x >= x[is_finite].min() + 0.1 * np.ptp(x[is_finite]))]
    if not 0 < np.ptp(late) < 0.5 * np.ptp(y[is_finite]):
        return
    margin = 0.06 * np.ptp(late)
    axes.set_ylim(late.min() - margin, late.max() + margin)


def share_limits(panels: Sequence[Axes]) -> None:
    """Give panels the same limits of y, so that heights compare, unless one would fill less than a third of them."""
    limits = [panel.get_ylim() for panel in panels]
    low, high = min(low for low, _ in limits), max(high for _, high in limits)
    are_linear = all(panel.get_yscale() == "linear" for panel in panels)
    if are_linear and min(top - bottom for bottom, top in limits) < (high - low) / 3:
        return
    for panel in panels:
        panel.set_ylim(low, high)


def flattening(spans: Mapping[str, Sequence[float]], metric: Column) -> str | None:
    """The series (name → values) that leaves the others less than FLATTENS of the axis; None if no series does.

    For a metric with two bounds, such as a percentage, it is None: if values differ much, its axis is logarithmic.
    """
    values_of = {name: finite(values) for name, values in spans.items() if len(finite(values))}

    def axis_length(without: str | None) -> float:
        rest = np.concatenate([values for name, values in values_of.items() if name != without])
        return float(rest.max() - rest.min())

    if metric.bounds.kind == "both" or len(values_of) < 3:
        return None
    farthest = min(values_of, key=axis_length)
    return farthest if 0 < axis_length(farthest) < FLATTENS * axis_length(None) else None


def _have_room(distinct: np.ndarray, *, log: bool) -> bool:
    """Whether ticks at all these values leave room for their texts."""
    if len(distinct) < 2 or (log and distinct.min() <= 0):
        return True
    places = np.log(distinct) if log else distinct
    longest = max(len(number(value)) for value in distinct)
    return bool(np.diff(places).min() >= (0.03 + 0.02 * longest) * (places[-1] - places[0]))
