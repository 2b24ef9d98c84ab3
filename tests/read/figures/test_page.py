"""The HTML page: its values, its tokens, and its independence of the web."""

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from cope_sweep.inference.probe import probe
from cope_sweep.read.figures.heads import page
from tests.inference.tiny_models import V, tiny_predictor

T = 6
TOKENS = np.random.default_rng(0).integers(0, V, T)
LABELS = [str(token) for token in TOKENS]
MARKS = {"low": TOKENS < 2}


class Parsed(HTMLParser):
    """The start tags and the content of scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.is_script = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.is_script = tag == "script"

    def handle_data(self, data):
        if self.is_script:
            self.scripts.append(data)

    def handle_endtag(self, tag):
        self.is_script = False


@pytest.fixture(scope="module")
def found():
    return probe(tiny_predictor([{"kind": "cope", "p_max": 4}]), TOKENS, layers=[0])


def test_every_heatmap_has_its_values(found):
    text = page(found, LABELS, MARKS, title="x")
    layer = found.layers[0]
    for head, script in enumerate(Parsed(text).scripts[:2]):
        cope = layer.contextual["cope"]
        matrices = [cope.gates_HTT, cope.positions_HTT, layer.position_only_attention_HTT, layer.attention_HTT]
        for column, (matrix, expected_HTT) in enumerate(zip(json.loads(script), matrices, strict=True)):
            assert matrix["image"] == f"{head}-0-{column}"
            assert f'id="{matrix["image"]}"' in text
            values = np.frombuffer(base64.b64decode(matrix["values"]), "<f4")
            np.testing.assert_array_equal(values, expected_HTT[head][np.tril_indices(T)])


@pytest.mark.parametrize(
    "label", ["<script>alert(1)</script>", '"><img src=x>', "&amp;", "\n", "\t", "\x00\x07", "\ud800", "é"]
)
def test_labels_and_title_are_only_text(label):
    found = probe(tiny_predictor(["rope"]), [0, 1], layers=[0], heads=[0])  # one heatmap
    text = page(found, [label, "1"], {label: np.array([True, False])}, title=f"A {label}")
    text.encode()
    parsed = Parsed(text)
    tags = [tag for tag, _ in parsed.tags]
    assert "img" not in tags
    assert tags.count("script") == 3  # the matrices of the head, the labels, the program
    assert json.loads(parsed.scripts[1]) == [label, "1"]


def test_tokens_are_shaded_by_their_mean_gates(found):
    spans = [attrs for tag, attrs in Parsed(page(found, LABELS, MARKS, title="x")).tags if tag == "span"]
    assert len(spans) == 2 * T
    gates = found.layers[0].contextual["cope"].gates_HTT[1]
    means = [gates[j:, j].mean() for j in range(T)]
    shades = [float(span["style"].split(":")[1]) for span in spans[T:]]
    np.testing.assert_allclose(shades, means, atol=6e-4)  # three decimal places
    assert [span.get("class") == "marked" for span in spans[T:]] == MARKS["low"].tolist()


def test_the_page_loads_nothing(found):
    text = page(found, LABELS, MARKS, title="x")
    addresses = re.findall(r"""(?:href|src)=["']?([^"' >]{0,40})""", text) + re.findall(r"url\(([^)]*)\)", text)
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert set(re.findall(r"https?://[^\"' ]*", text)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_a_model_without_gates_has_no_tokens():
    text = page(probe(tiny_predictor(["rope"]), TOKENS), LABELS, {}, title="x")
    assert 'class="tokens"' not in text
    assert "A plus" not in text
