"""Drawings are whole, safe, and hold the numbers that they show."""

import base64
import json
import re
import struct
import zlib
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from cope_sweep.probe import ProbeError, figure, heads_of, page, probe, svg
from tests.probe.models import V, tiny_predictor

T = 12
TOKENS = np.random.default_rng(0).integers(0, V, T)
LABELS = [str(token) for token in TOKENS]
MARKS = {"low": TOKENS < 2}
COPE = [{"kind": "cope", "p_max": 4}]
SVG = "{http://www.w3.org/2000/svg}"


def images(drawing):
    return ElementTree.fromstring(drawing).iter(f"{SVG}image")


def cells(image):
    """The matrix that the page reads values from."""
    steps = np.frombuffer(base64.b64decode(image.get("data-cells")), "<u2")
    matrix = np.zeros((T, T))
    matrix[np.tril_indices(T)] = steps * float(image.get("data-scale")) / 65535
    return matrix


def pixels(image):
    """Palette indices and colours of an image, by the PNG specification."""
    data = base64.b64decode(image.get("href").removeprefix("data:image/png;base64,"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (length,), name = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length]) == (zlib.crc32(name + body),)
        chunks[name], at = body, at + 12 + length
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (T, T, 8, 3, 0, 0, 0)
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(T, T + 1)
    assert (lines[:, 0] == 0).all()
    return lines[:, 1:], np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)


def test_every_panel_holds_its_matrix():
    found = probe(tiny_predictor(COPE), TOKENS)
    expected = []
    for each in found.layers:
        for row in (0, 1):
            counted = each.counted["cope"]
            expected += [
                counted.gates_HTT[row],
                counted.positions_HTT[row],
                each.alone_HTT[row],
                each.attention_HTT[row],
            ]
    drawn = list(images(svg(found, LABELS, MARKS)))
    assert [image.get("data-symbol") for image in drawn] == ["g", "p", "alone", "a"] * 4
    for image, matrix in zip(drawn, expected, strict=True):
        np.testing.assert_allclose(cells(image), matrix, atol=matrix.max() / 65535)


def test_colours_follow_values_and_positions_beyond_the_limit_are_grey():
    found = probe(tiny_predictor(COPE), TOKENS, layers=[1], heads=[0])
    gates, positions, *_ = images(svg(found, LABELS, MARKS))
    counted = found.layers[0].counted["cope"]
    index, palette = pixels(gates)
    assert (index[np.triu_indices(T, 1)] == 0).all()
    lower = np.tril_indices(T)
    np.testing.assert_allclose((index[lower] - 1.0) / 253, counted.gates_HTT[0][lower], atol=0.5 / 253 + 1e-6)
    brightness = palette[1:255].astype(float) @ [0.299, 0.587, 0.114]
    assert (np.diff(brightness) < 0.5).all()  # more is darker, for those who see no colours, too
    index, palette = pixels(positions)
    beyond = counted.positions_HTT[0] > 3
    assert beyond.any()
    np.testing.assert_array_equal(index == 255, beyond)
    assert bytes(palette[255]).hex() == figure.BEYOND[1:]
    assert "beyond 3" in svg(found, LABELS, MARKS)


def test_marked_tokens_have_a_plus_on_the_diagonal():
    found = probe(tiny_predictor(COPE), TOKENS, layers=[0], heads=[0])
    drawn = svg(found, LABELS, MARKS)
    black = [path.get("d") for path in ElementTree.fromstring(drawn).iter(f"{SVG}path") if path.get("stroke") == "#000"]
    cell = figure.SIDE / T
    for path in black:
        centres = [float(y) for y in re.findall(r"M[\d.-]+ ([\d.-]+)h", path)]
        np.testing.assert_allclose(centres, (np.flatnonzero(MARKS["low"]) + 0.5) * cell, atol=0.1)
    assert len(black) == 4
    assert "mean gate" not in drawn
    heads = heads_of(tiny_predictor(COPE), [TOKENS], [MARKS])
    auc = heads[0].marks["low"].auc
    assert f"AUC {auc:.2f}" in svg(found, LABELS, MARKS, heads)


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.seen, self.scripts, self.into = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        self.into = tag

    def handle_data(self, data):
        if self.into == "script":
            self.scripts.append(data)


@pytest.mark.parametrize(
    "label", ["<script>alert(1)</script>", '"><img src=x>', "&amp;", "\n", "\t", "\x00\x07", "\ud800", "é"]
)
def test_labels_are_only_text(label):
    labels = [label, *LABELS[1:]]
    found = probe(tiny_predictor(COPE), TOKENS, layers=[0], heads=[0])
    text = page(found, labels, MARKS, title=f"A {label}")
    text.encode()
    parsed = Page(text)
    tags = {tag for tag, _ in parsed.seen}
    assert "img" not in tags
    assert sum(tag == "script" for tag, _ in parsed.seen) == 2
    assert json.loads(parsed.scripts[0]) == labels
    list(images(svg(found, labels, MARKS)))


def test_the_page_shades_tokens_by_their_mean_gate():
    found = probe(tiny_predictor(COPE), TOKENS, layers=[0], heads=[1])
    spans = [attrs for tag, attrs in Page(page(found, LABELS, MARKS, title="x")).seen if tag == "span"]
    gates = found.layers[0].counted["cope"].gates_HTT[0]
    means = [gates[j:, j].mean() for j in range(T)]
    np.testing.assert_allclose([float(span["style"].split(":")[1]) for span in spans], means, atol=6e-4)
    assert [span.get("class") == "on" for span in spans] == MARKS["low"].tolist()


@pytest.mark.parametrize(
    "position", [[], ["rope"], ["relative"], [*COPE, {"kind": "cope_alibi", "slopes": [0.1, 0.2]}]]
)
def test_whatever_the_encodings(position):
    found = probe(tiny_predictor(position), TOKENS, layers=[0])
    titles = {"none": 1, "rope": 1, "relative": 2}.get(
        position[0] if position and isinstance(position[0], str) else "", 6
    )
    panels = 1 if position in ([], ["rope"]) else titles
    assert len(list(images(svg(found, LABELS, {})))) == 2 * panels
    assert "<main>" in page(found, LABELS, {}, title="x")


@pytest.mark.parametrize("tokens", [1, 2, 47, 300])
def test_any_length(tokens):
    ids = np.zeros(tokens, dtype=int)
    found = probe(tiny_predictor(COPE), ids, layers=[0], heads=[0])
    assert len(list(images(svg(found, ["0"] * tokens, {"all": ids == 0})))) == 4


def test_too_much_to_draw_is_said(monkeypatch):
    found = probe(tiny_predictor(COPE), TOKENS)
    monkeypatch.setattr(figure, "MAX_CELLS", 4 * 4 * T * T - 1)
    for draw in (lambda: svg(found, LABELS, MARKS), lambda: page(found, LABELS, MARKS, title="x")):
        with pytest.raises(ProbeError, match="2,304 cells are too many to draw"):
            draw()
