"""A probe, drawn: for each head its gates, positions, attention from position alone, and attention, as heatmaps.

As in the paper's figures of attention maps and of gates: a query's row, a key's column, and a black plus on the
diagonal for each marked token. An SVG stands alone; the page holds the same drawings, says each cell's value under the
pointer, and shades the tokens by their gates. Nothing in either comes from elsewhere.

Shapes: T tokens; index [i, j] is of query i and key j ≤ i.
"""

from __future__ import annotations

import base64
import html
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cope_sweep.probe.heads import Head, Marks, seen_from
from cope_sweep.probe.matrices import LayerProbe, Probe, ProbeError

MAX_CELLS = 8 << 20
"""Of all the heatmaps together."""

SIDE, GAP, LEFT, TOP, BOTTOM = 296, 44, 34, 58, 40
"""Pixels: a heatmap, between two, before the first, above and below."""

Ramp = tuple[str, ...]
GREEN: Ramp = ("#f1f4f0", "#a8d5b1", "#3f9f6a", "#0b5a3c", "#04301f")
SUNSET: Ramp = ("#fdf3d0", "#f9c26b", "#ee7d54", "#b73a77", "#5b1a78", "#20103f")
BLUE: Ramp = ("#f1f3f7", "#b3cdea", "#5b93cf", "#1f5499", "#0b2452")
BEYOND = "#9aa3ad"
"""Where a position is beyond the last embedding."""


@dataclass(frozen=True)
class Panel:
    """One heatmap; its values begin at 0."""

    title: str
    symbol: str
    values_TT: np.ndarray
    top: float
    ramp: Ramp
    limit: int | None = None
    """Above: drawn as `BEYOND`."""


@dataclass(frozen=True)
class _Drawn:
    """One head: its title, its numbers in words, its heatmaps, and ḡ_j of its first contextual encoding."""

    title: str
    words: str
    panels: tuple[Panel, ...]
    gates_T: np.ndarray | None


def svg(probe: Probe, labels: Sequence[str], marks: Marks, heads: Sequence[Head] = ()) -> str:
    """One drawing of all the probe's layers and heads.

    `labels` are of the tokens; the first of `marks` is drawn; `heads` are the numbers to say with it. Raises ProbeError
    where there is too much to draw.
    """
    drawn = list(_drawn(probe, marks, heads))
    width = max(_width(each) for each in drawn)
    height = TOP + SIDE + BOTTOM
    rows = [_row(each, labels, _first(marks), index * height) for index, each in enumerate(drawn)]
    return _svg("".join(rows), width, height * len(drawn))


def page(probe: Probe, labels: Sequence[str], marks: Marks, heads: Sequence[Head] = (), *, title: str) -> str:
    """The same as one HTML file, which tells each cell's value. Raises as `svg`."""
    here = Path(__file__).parent
    sections = []
    for each in _drawn(probe, marks, heads):
        drawing = _svg(_row(each, labels, _first(marks), 0), _width(each), TOP + SIDE + BOTTOM)
        sections.append(f"<section>{drawing}{_tokens(each, labels, _first(marks))}</section>")
    name = next(iter(marks), None)
    said = f"{len(labels)} tokens" + (f"; + and underline: {_text(name)}" if name else "")
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{_text(title)}</title>\n'
        f"<style>\n{(here / 'figure.css').read_text(encoding='utf-8')}</style>\n"
        f"<header><h1>{_text(title)}</h1><p>{said}. Rows are queries, columns keys. {_LEGEND}</p></header>\n"
        f"<main>{''.join(sections)}</main>\n<output id=tip hidden></output>\n"
        f'<script type="application/json" id=labels>{_json(list(labels))}</script>\n'
        f"<script>\n{(here / 'figure.js').read_text(encoding='utf-8')}</script>\n</html>\n"
    )


_LEGEND = (
    "A gate says how much a key counts; positions are the sums of gates from the query back to the key, grey beyond "
    "the last embedding; attention from position alone is scaled so that each query's largest is 1."
)


def _drawn(probe: Probe, marks: Marks, heads: Sequence[Head]) -> Iterator[_Drawn]:
    """Each head's panels, made when they are drawn. Raises ProbeError, before any, where there are too many."""
    cells = len(probe.tokens_T) ** 2 * sum(len(_panels(each, 0)) * len(each.heads) for each in probe.layers)
    if cells > MAX_CELLS:
        raise ProbeError(
            f"{cells:,} cells are too many to draw ({MAX_CELLS:,} at most); choose layers and heads, or fewer tokens"
        )
    if not cells:
        raise ProbeError("no layer and head is left to draw")
    return _each_head(probe, marks, heads)


def _each_head(probe: Probe, marks: Marks, heads: Sequence[Head]) -> Iterator[_Drawn]:
    for layer in probe.layers:
        for row, head in enumerate(layer.heads):
            counted = next(iter(layer.counted.values()), None)
            gates_T = None if counted is None else seen_from(counted.gates_HTT[row])
            said = [_said(each, marks) for each in heads if (each.layer, each.head) == (layer.layer, head)]
            title = f"Layer {layer.layer} · head {head}"
            yield _Drawn(title, "; ".join(said), tuple(_panels(layer, row)), gates_T)


def _panels(layer: LayerProbe, row: int) -> list[Panel]:
    panels = []
    for kind, counted in layer.counted.items():
        of = f" ({kind})" if len(layer.counted) > 1 else ""
        positions_TT = counted.positions_HTT[row]
        most = float(counted.stopped_HTT[row].max())
        panels.append(Panel(f"Gates{of}", "g", counted.gates_HTT[row], 1.0, GREEN))
        panels.append(Panel(f"Positions{of}", "p", positions_TT, most, SUNSET, counted.limit))
    if layer.alone_HTT is not None:
        panels.append(Panel("Attention from position alone", "alone", layer.alone_HTT[row], 1.0, BLUE))
    panels.append(Panel("Attention", "a", layer.attention_HTT[row], float(layer.attention_HTT[row].max()), BLUE))
    return panels


def _said(head: Head, marks: Marks) -> str:
    """Its numbers in words, on the first mark."""
    name = next(iter(marks), None)
    parts = []
    if name is not None and name in head.marks:
        found = head.marks[name]
        if found.on is not None:
            parts.append(f"mean gate {found.on:.2f} on {name}")
        if found.off is not None:
            parts.append(f"{found.off:.2f} elsewhere")
        if found.auc is not None:
            parts.append(f"AUC {found.auc:.2f}")
    parts.append(f"positions up to {head.position_max:.1f}")
    if head.clamped is not None:
        parts.append(f"{100 * head.clamped:.1f} % of pairs beyond {head.limit}")
    return ", ".join(parts)


def _first(marks: Marks) -> np.ndarray:
    """Which tokens the first mark has."""
    return np.flatnonzero(next(iter(marks.values()), np.zeros(0, dtype=bool)))


def _width(drawn: _Drawn) -> int:
    return LEFT + len(drawn.panels) * (SIDE + GAP)


def _svg(content: str, width: int, height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="#1d2129">'
        f"<defs>{''.join(map(_gradient, (GREEN, SUNSET, BLUE)))}</defs>"
        f'<rect width="100%" height="100%" fill="#fff"/>{content}</svg>\n'
    )


def _row(drawn: _Drawn, labels: Sequence[str], marked: np.ndarray, y: int) -> str:
    """One head's heatmaps side by side, under their heading."""
    parts = [f'<text x="{LEFT}" y="20" font-size="14" font-weight="600">{_text(drawn.title)}']
    parts.append(f'<tspan dx="12" font-size="12" font-weight="400" fill="#667080">{_text(drawn.words)}</tspan></text>')
    for index, panel in enumerate(drawn.panels):
        parts.append(f'<g transform="translate({LEFT + index * (SIDE + GAP)} {TOP})">')
        parts.append(_panel(panel, labels, marked))
        parts.append("</g>")
    return f'<g transform="translate(0 {y})">{"".join(parts)}</g>\n'


def _panel(panel: Panel, labels: Sequence[str], marked: np.ndarray) -> str:
    T, side = len(labels), SIDE
    cell = side / T
    smooth = "auto" if side < T else "pixelated"
    # Half of a square of 16-bit steps from 0 to `top`, row by row: what the page reads values from.
    scale = max(float(panel.values_TT.max()), 1e-9)
    steps = np.rint(panel.values_TT[np.tril_indices(T)] / scale * 65535).astype("<u2")
    parts = [
        f'<text y="-10" font-weight="600">{_text(panel.title)}</text>',
        _scale(panel),
        f'<image width="{side}" height="{side}" preserveAspectRatio="none" style="image-rendering:{smooth}" '
        f'data-symbol="{panel.symbol}" data-scale="{scale!r}" data-cells="{_base64(steps.tobytes())}" '
        f'href="data:image/png;base64,{_base64(_png(panel))}"/>',
        f'<path d="M0 0V{side}H{side}" fill="none" stroke="#c6ccd4"/>',
        *_axes(labels, cell),
    ]
    arm = min(max(cell * 0.75, 3.5), 6)
    pluses = "".join(
        f"M{(t + 0.5) * cell - arm:.1f} {(t + 0.5) * cell:.1f}h{2 * arm:.1f}m{-arm:.1f} {-arm:.1f}v{2 * arm:.1f}"
        for t in marked
    )
    parts.append(f'<path d="{pluses}" stroke="#fff" stroke-width="3" opacity=".75"/>')
    parts.append(f'<path d="{pluses}" stroke="#000" stroke-width="1.2"/>')
    return "".join(parts)


def _scale(panel: Panel) -> str:
    """A strip of the colours, with the numbers at its ends; it stands in the half that holds no pairs."""
    beyond = ""
    if panel.limit is not None and (panel.values_TT > panel.limit).any():
        beyond = (
            f'<rect x="{SIDE - 44}" y="26" width="10" height="8" fill="{BEYOND}"/>'
            f'<text x="{SIDE - 49}" y="34" text-anchor="end" fill="#667080">beyond {panel.limit}</text>'
        )
    return (
        f'<rect x="{SIDE - 104}" y="10" width="70" height="8" fill="url(#{_name(panel.ramp)})"/>'
        f'<text x="{SIDE - 108}" y="18" text-anchor="end" fill="#667080">0</text>'
        f'<text x="{SIDE - 30}" y="18" fill="#667080">{panel.top:.3g}</text>{beyond}'
    )


def _gradient(ramp: Ramp) -> str:
    stops = "".join(
        f'<stop offset="{index / (len(ramp) - 1):.3f}" stop-color="{colour}"/>' for index, colour in enumerate(ramp)
    )
    return f'<linearGradient id="{_name(ramp)}">{stops}</linearGradient>'


def _name(ramp: Ramp) -> str:
    return f"ramp-{ramp[-1][1:]}"


def _axes(labels: Sequence[str], cell: float) -> Iterator[str]:
    """The tokens themselves where there is room, else their numbers."""
    T = len(labels)
    if cell >= 6 and max(map(len, labels)) <= 4:
        size = min(10, cell)
        for t, label in enumerate(labels):
            base = (t + 0.5) * cell + size / 3
            where = (f'x="-4" y="{base:.1f}"', f'transform="translate({base:.1f} {SIDE + 4}) rotate(-90)"')
            yield from (f'<text {at} text-anchor="end" font-size="{size:.1f}">{_text(label)}</text>' for at in where)
        return
    step = next(step for power in range(7) for step in (10**power, 2 * 10**power, 5 * 10**power) if T / step <= 8)
    for t in range(0, T, step):
        middle = (t + 0.5) * cell
        yield (
            f'<path d="M0 {middle:.1f}h-4M{middle:.1f} {SIDE}v4" stroke="#c6ccd4"/>'
            f'<text x="-7" y="{middle + 4:.1f}" text-anchor="end" fill="#667080">{t}</text>'
            f'<text x="{middle:.1f}" y="{SIDE + 16}" text-anchor="middle" fill="#667080">{t}</text>'
        )


def _tokens(drawn: _Drawn, labels: Sequence[str], marked: np.ndarray) -> str:
    """The tokens, shaded by ḡ_j, which the page shades anew for the query under the pointer."""
    if drawn.gates_T is None:
        return ""
    shown = set(marked.tolist())
    spans = []
    for t, (label, gate) in enumerate(zip(labels, drawn.gates_T.tolist(), strict=True)):
        on = ' class="on"' if t in shown else ""
        spans.append(f'<span{on} style="--gate:{gate:.3f}" title="{t}: mean gate {gate:.3f}">{_text(label)}</span>')
        spans.append("\n" if "\n" in label else "")
    return f'<p class="tokens">{"".join(spans)}</p>'


def _png(panel: Panel) -> bytes:
    """A palette image of T × T pixels: 0 what is after the query, 1 … 254 the ramp, 255 beyond the limit."""
    T = len(panel.values_TT)
    shares_TT = np.clip(panel.values_TT / (panel.top or 1.0), 0, 1)
    index_TT = (1 + np.rint(253 * shares_TT)).astype(np.uint8)
    if panel.limit is not None:
        index_TT[panel.values_TT > panel.limit] = 255
    index_TT = np.tril(index_TT)
    stops_NC = np.array([[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in (*panel.ramp, BEYOND)])
    at = np.linspace(0, len(panel.ramp) - 1, 254)
    ramp_C = [np.interp(at, np.arange(len(panel.ramp)), stops_NC[:-1, channel]) for channel in range(3)]
    palette = np.vstack(([[255] * 3], np.rint(np.stack(ramp_C, axis=1)), stops_NC[-1:])).astype(np.uint8)
    lines = np.hstack((np.zeros((T, 1), np.uint8), index_TT)).tobytes()
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", T, T, 8, 3, 0, 0, 0)),
        (b"PLTE", palette.tobytes()),
        (b"tRNS", b"\0"),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    )
    body = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _json(value: object) -> str:
    """JSON that may stand in a script element."""
    return json.dumps(value).replace("<", "\\u003c")


def _text(text: str) -> str:
    # Control characters cannot stand in XML, whatever they are written as.
    seen = "".join(
        character if character.isprintable() else {"\n": "⏎", "\t": "⇥"}.get(character, "�") for character in text
    )
    return html.escape(seen)
