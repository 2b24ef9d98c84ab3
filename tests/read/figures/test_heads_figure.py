"""Figures: the data to draw, and the SVG that matplotlib draws of it."""

import base64
import io
import json
import re
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.image import imread

from cope_sweep.inference.probe import head_statistics, probe
from cope_sweep.read.figures import heads as figure
from cope_sweep.read.figures.canvas import printable
from cope_sweep.read.figures.figure import Figure
from cope_sweep.read.figures.heads import HeadFigure, HeadMatrix, head_figures, page, picture
from cope_sweep.read.figures.kinds.maps import Maps
from tests.helpers.errors import raises
from tests.helpers.figure_files import Page, png_size, svg_texts
from tests.helpers.tiny_models import V, tiny_predictor

T = 12
TOKENS = np.random.default_rng(0).integers(0, V, T)
LABELS = [str(token) for token in TOKENS]
MARKS = {"low": TOKENS < 2}
COPE = [{"kind": "cope", "p_max": 4}]
SVG = "{http://www.w3.org/2000/svg}"
LOWER = np.tril_indices(T)


def draw(found, labels=LABELS, marks=MARKS, statistics=()):
    return picture(head_figures(found, marks, statistics), labels, marks, "svg").decode()


def images(drawing):
    """Image id → pixels, shape (T, T, 4), values 0 … 1."""
    found = {}
    for image in ElementTree.fromstring(drawing).iter(f"{SVG}image"):
        data = image.get("{http://www.w3.org/1999/xlink}href").removeprefix("data:image/png;base64,")
        if re.fullmatch(r"\d+-\d+", image.get("id", "")):
            found[image.get("id")] = imread(io.BytesIO(base64.b64decode(data)))
    return found


@pytest.fixture(scope="module")
def predictor():
    return tiny_predictor(COPE)


@pytest.fixture(scope="module")
def one_head(predictor):
    return probe(predictor, TOKENS, layers=[1], heads=[0])


@pytest.fixture(scope="module")
def drawing(one_head):
    return draw(one_head)


def test_the_data_of_every_head(predictor):
    found = probe(predictor, TOKENS)
    heads = head_figures(found, MARKS)
    assert [head.title for head in heads] == [f"Layer {layer} · head {head}" for layer in (0, 1) for head in (0, 1)]
    layer, head = found.layers[1], heads[2]
    cope = layer.contextual["cope"]
    expected = [cope.gates_HTT, cope.positions_HTT, layer.position_only_attention_HTT, layer.attention_HTT]
    for heatmap, matrix_HTT in zip(head.heatmaps, expected, strict=True):
        np.testing.assert_array_equal(heatmap.values_TT, matrix_HTT[0])
    assert [heatmap.symbol for heatmap in head.heatmaps] == ["g", "p", "position only", "a"]
    assert [heatmap.limit for heatmap in head.heatmaps] == [None, 3, None, None]
    assert head.heatmaps[1].maximum == cope.clamped_positions_HTT[0].max()
    means = [cope.gates_HTT[0, j:, j].mean(dtype=np.float64) for j in range(T)]
    np.testing.assert_allclose(head.mean_gates_T, means)


def test_the_summary_has_the_statistics_of_the_first_mark(predictor, one_head):
    statistics = head_statistics(predictor, [TOKENS], [MARKS])
    [head] = head_figures(one_head, MARKS, statistics)
    low = statistics[2].marks["low"]
    assert head.summary == (
        f"mean gate {low.on:.2f} on low, {low.off:.2f} elsewhere, AUC {low.auc:.2f}, "
        f"positions up to {statistics[2].position_max:.1f}, {100 * statistics[2].clamped:.1f} % of pairs beyond 3"
    )
    assert head.summary in draw(one_head, statistics=statistics)
    assert head_figures(one_head, MARKS)[0].summary == ""


def test_each_cell_has_the_colour_of_its_value(one_head, drawing):
    drawn = images(drawing)
    assert sorted(drawn) == ["0-0", "0-1", "0-2", "0-3"]
    for heatmap, pixels in zip(head_figures(one_head, MARKS)[0].heatmaps, drawn.values(), strict=True):
        assert pixels.shape == (T, T, 4)
        colours = mpl.colormaps[heatmap.colours]
        expected = colours(heatmap.values_TT / heatmap.maximum)
        beyond = heatmap.values_TT > (heatmap.limit or np.inf)
        expected[beyond] = mpl.colors.to_rgba(figure.BEYOND_LIMIT_COLOUR)
        # The colour of the value or of the next one in the map, and 8 bits per channel.
        step = np.abs(np.diff(colours(np.arange(colours.N)), axis=0)).max()
        np.testing.assert_allclose(pixels[LOWER], expected[LOWER], atol=step + 1 / 255)
        assert (pixels[np.triu_indices(T, 1)] == 1).all()


def test_positions_beyond_the_limit_are_named(drawing):
    assert "(grey: beyond 3)" in drawing
    assert "beyond" not in draw(probe(tiny_predictor([{"kind": "cope", "p_max": "full"}]), TOKENS, [0], [0]))


def test_marked_tokens_have_a_plus_on_the_diagonal(drawing):
    cell = 72 * figure.SIDE / T
    centres = (np.flatnonzero(MARKS["low"]) + 0.5) * cell
    document = ElementTree.fromstring(drawing)
    for column in range(4):
        [group] = (each for each in document.iter(f"{SVG}g") if each.get("id") == f"0-{column}-marks")
        # Each plus is a horizontal and a vertical line: "M x1 y L x2 y M x y1 L x y2".
        drawn = [np.array(re.findall(r"-?[\d.]+", path.get("d")), dtype=float) for path in group.iter(f"{SVG}path")]
        pluses = np.array([((x1 + x2) / 2, y) for x1, y, x2, *_ in drawn])
        left = 72 * (figure.LEFT + column * (figure.SIDE + figure.GAP))
        expected = np.stack((left + centres, 72 * figure.TOP + centres), axis=1)
        np.testing.assert_allclose(pluses, expected.repeat(2, axis=0), atol=1e-4)  # a white outline and a plus


@pytest.mark.parametrize("label", ["<script>", '"><a>', "&amp;", "\n", "\t", "\x00\x07", "\ud800", "é", "$x$", "中"])
def test_any_label_is_valid_xml_text(label, recwarn):
    head = HeadFigure(f"Head {label}", "", (HeadMatrix("A", "a", np.ones((2, 2)), 1.0, "Blues"),), None)
    marks = {"first": np.array([True, False])}
    document = ElementTree.fromstring(picture([head], [label, "1"], marks, "svg"))
    texts = [text.text for text in document.iter(f"{SVG}text")]
    assert f"Head {printable(label)}" in texts
    if len(label) <= 4:  # longer labels are replaced by numbers
        assert texts.count(printable(label)) == 2
    assert not recwarn.list


@pytest.mark.parametrize(
    ("position", "symbols"),
    [
        ([], ["a"]),
        (["rope"], ["a"]),
        (["relative"], ["position only", "a"]),
        ([*COPE, {"kind": "cope_alibi", "slopes": [0.1, 0.2]}], ["g", "p", "g", "p", "position only", "a"]),
    ],
)
def test_the_heatmaps_follow_the_encodings(position, symbols):
    found = probe(tiny_predictor(position), TOKENS, layers=[0], heads=[0])
    [head] = head_figures(found, {})
    assert [heatmap.symbol for heatmap in head.heatmaps] == symbols
    assert len(images(draw(found, marks={}))) == len(symbols)


@pytest.mark.parametrize("tokens", [1, 47, pytest.param(300, marks=pytest.mark.thorough)])
def test_any_length(predictor, tokens):
    ids = np.zeros(tokens, dtype=int)
    found = probe(predictor, ids, layers=[0], heads=[0])
    drawn = images(draw(found, ["0"] * tokens, {"first": np.arange(tokens) == 0}))
    assert [pixels.shape for pixels in drawn.values()] == [(tokens, tokens, 4)] * 4


def test_too_large_drawings_are_refused(predictor, monkeypatch):
    found = probe(predictor, TOKENS)
    monkeypatch.setattr(figure, "MAX_CELLS", 4 * 4 * T * T - 1)
    with raises("too_many_cells", cells=2304):
        head_figures(found, MARKS)
    with raises("no_head"):
        head_figures(probe(predictor, TOKENS, layers=[]), MARKS)


def maps(predictor, tokens, options):
    data = options.of_tokens(predictor, tokens)
    return Figure("maps", data.title, data)


@pytest.mark.parametrize("show", ["gates", "positions", "position_attention", "attention"])
def test_the_data_are_the_matrices_of_the_probe(predictor, show):
    figure = maps(predictor, TOKENS, Maps(show=show, heads=[(1, 0), (0, 1)]))
    layers = probe(predictor, TOKENS).layers
    for layer, head in ((1, 0), (0, 1)):
        found, cope = layers[layer], layers[layer].contextual["cope"]
        matrix_HTT = {
            "gates": cope.gates_HTT,
            "positions": cope.positions_HTT,
            "position_attention": found.position_only_attention_HTT,
            "attention": found.attention_HTT,
        }[show]
        lines = figure.frame[(figure.frame["layer"] == layer) & (figure.frame["head"] == head)]
        assert len(lines) == 12 * 13 / 2
        np.testing.assert_allclose(lines["value"], matrix_HTT[head][lines["query"], lines["key"]], rtol=1e-6)
    labels = [predictor.run.task.token_label(token) for token in TOKENS.tolist()]
    assert figure.frame["key_token"].tolist() == [labels[key] for key in figure.frame["key"]]


def test_the_drawing_has_a_panel_for_each_head_and_the_tokens(predictor):
    figure = maps(predictor, TOKENS, Maps(show="gates", heads=[(0, 0), (1, 1)], mark="data"))
    content = figure.render("svg")
    texts = svg_texts(content)
    assert {"Layer 0 · head 0", "Layer 1 · head 1", "key token", "query token", "data token"} <= set(texts)
    assert f"Gates: selective_copy, cope (run {predictor.run.run_id})" in " ".join(texts)
    assert all(predictor.run.task.token_label(token) in texts for token in TOKENS.tolist())
    assert re.search(r"mean gate 0\.\d\d on data, 0\.\d\d elsewhere", " ".join(texts))
    assert figure.render("svg") == content
    assert png_size(figure.render("png"))[0] > 1000
    assert figure.render("pdf").startswith(b"%PDF")


def test_a_number_of_heads_selects_those_that_separate_the_marks_best(predictor):
    mark = "data"
    marks = {mark: predictor.run.task.marks(TOKENS)[mark]}
    statistics = head_statistics(predictor, [TOKENS], [marks])
    best = max(statistics, key=lambda each: each.marks[mark].auc)
    figure = maps(predictor, TOKENS, Maps(show="gates", heads=1, mark=mark))
    assert set(zip(figure.frame["layer"], figure.frame["head"], strict=True)) == {(best.layer, best.head)}
    everything = maps(predictor, TOKENS, Maps(show="gates", heads=99))
    assert everything.frame.groupby(["layer", "head"]).ngroups == 4


def test_a_model_without_gates_has_attention_of_its_first_heads():
    rope = tiny_predictor(["rope"])
    figure = maps(rope, TOKENS, Maps(show="attention", heads=2))
    assert set(zip(figure.frame["layer"], figure.frame["head"], strict=True)) == {(0, 0), (0, 1)}
    with raises("no_such_map", show="gates", allowed=["attention"]):
        maps(rope, TOKENS, Maps(show="gates"))
    with raises("no_such_map") as error:
        maps(rope, TOKENS, Maps())
    assert error.value.data["show"] == "position_attention"


def test_a_mark_that_no_token_has_is_said(predictor):
    figure = maps(predictor, np.zeros(5, dtype=int), Maps(heads=1, mark="marker"))
    assert "no marker token in this text" in " ".join(svg_texts(figure.render("svg")))


def test_what_does_not_exist(predictor, monkeypatch):
    with raises("unknown_mark", mark="newline", allowed=["data", "blank", "marker"]):
        maps(predictor, TOKENS, Maps(mark="newline"))
    with raises("no_such_head", layer=2, head=0):
        maps(predictor, TOKENS, Maps(heads=[(2, 0)]))
    monkeypatch.setattr("cope_sweep.read.figures.heads.MAX_CELLS", 12 * 12)
    with raises("too_many_cells", heads=2, tokens=12, limit=144):
        maps(predictor, TOKENS, Maps(heads=2))


@pytest.fixture(scope="module")
def first_layer(predictor):
    return probe(predictor, TOKENS, layers=[0])


@pytest.fixture(scope="module")
def first_page(first_layer):
    return page(first_layer, LABELS, MARKS, title="x")


def test_every_heatmap_has_its_values(first_layer, first_page):
    layer = first_layer.layers[0]
    for head, script in zip((0, 1), Page(first_page).scripts[:2], strict=True):
        cope = layer.contextual["cope"]
        matrices = [cope.gates_HTT, cope.positions_HTT, layer.position_only_attention_HTT, layer.attention_HTT]
        for column, (matrix, expected_HTT) in enumerate(zip(json.loads(script), matrices, strict=True)):
            assert matrix["image"] == f"{head}-0-{column}"
            assert f'id="{matrix["image"]}"' in first_page
            values = np.frombuffer(base64.b64decode(matrix["values"]), "<f4")
            np.testing.assert_array_equal(values, expected_HTT[head][np.tril_indices(T)])


@pytest.mark.parametrize(
    "label", ["<script>alert(1)</script>", '"><img src=x>', "&amp;", "\n", "\t", "\x00\x07", "\ud800", "é"]
)
def test_labels_and_title_are_only_text(label):
    found = probe(tiny_predictor(["rope"]), [0, 1], layers=[0], heads=[0])  # one heatmap
    text = page(found, [label, "1"], {label: np.array([True, False])}, title=f"A {label}")
    text.encode()
    parsed = Page(text)
    assert parsed.count("img") == 0
    assert parsed.count("script") == 3  # the matrices of the head, the labels, the program
    assert json.loads(parsed.scripts[1]) == [label, "1"]


def test_tokens_are_shaded_by_their_mean_gates(first_layer, first_page):
    spans = [attrs for tag, attrs in Page(first_page).tags if tag == "span"]
    assert len(spans) == 2 * T
    gates = first_layer.layers[0].contextual["cope"].gates_HTT[1]
    means = [gates[j:, j].mean() for j in range(T)]
    shades = [float(span["style"].split(":")[1]) for span in spans[T:]]
    np.testing.assert_allclose(shades, means, atol=6e-4)  # three decimal places
    assert [span.get("class") == "marked" for span in spans[T:]] == MARKS["low"].tolist()


def test_the_page_loads_nothing(first_page):
    addresses = re.findall(r"""(?:href|src)=["']?([^"' >]{0,40})""", first_page)
    addresses += re.findall(r"url\(([^)]*)\)", first_page)
    assert all(address.startswith(("#", "data:")) for address in addresses)
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\"' ]*", first_page)) <= namespaces


def test_a_model_without_gates_has_no_tokens():
    text = page(probe(tiny_predictor(["rope"]), TOKENS), LABELS, {}, title="x")
    assert 'class="tokens"' not in text
    assert "A plus" not in text
