"""Maps of heads: their data, the selected heads, and the drawing."""

import numpy as np
import pytest

from cope_sweep.inference.probe import ProbeError, head_statistics, probe
from cope_sweep.read.figures import FIGURES, FigureError, MapOptions
from tests.inference.tiny_models import V, tiny_predictor
from tests.read.figures.files import png_size, svg_texts

TOKENS = np.random.default_rng(0).integers(0, V, 12)
maps = FIGURES["maps"].make


@pytest.fixture(scope="module")
def predictor():
    return tiny_predictor([{"kind": "cope", "p_max": 4}])


@pytest.mark.parametrize("show", ["gates", "positions", "position_attention", "attention"])
def test_the_data_are_the_matrices_of_the_probe(predictor, show):
    figure = maps(predictor, TOKENS, MapOptions(show=show, heads=((1, 0), (0, 1))))
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
    figure = maps(predictor, TOKENS, MapOptions(show="gates", heads=((0, 0), (1, 1)), mark="data"))
    texts = svg_texts(figure.render("svg"))
    assert {"Layer 0 · head 0", "Layer 1 · head 1", "key token", "query token", "data token"} <= set(texts)
    assert f"Gates: selective_copy, cope (run {predictor.run.run_id})" in " ".join(texts)
    assert all(predictor.run.task.token_label(token) in texts for token in TOKENS.tolist())
    assert figure.render("svg") == figure.render("svg")
    assert png_size(figure.render("png"))[0] > 1000
    assert figure.render("pdf").startswith(b"%PDF")


def test_a_number_of_heads_selects_those_that_separate_the_marks_best(predictor):
    mark = "data"
    marks = {mark: predictor.run.task.marks(TOKENS)[mark]}
    statistics = head_statistics(predictor, [TOKENS], [marks])
    best = max(statistics, key=lambda each: each.marks[mark].auc)
    figure = maps(predictor, TOKENS, MapOptions(show="gates", heads=1, mark=mark))
    assert set(zip(figure.frame["layer"], figure.frame["head"], strict=True)) == {(best.layer, best.head)}
    everything = maps(predictor, TOKENS, MapOptions(show="gates", heads=99))
    assert everything.frame.groupby(["layer", "head"]).ngroups == 4


def test_a_model_without_gates_has_attention_of_its_first_heads():
    rope = tiny_predictor(["rope"])
    figure = maps(rope, TOKENS, MapOptions(show="attention", heads=2))
    assert set(zip(figure.frame["layer"], figure.frame["head"], strict=True)) == {(0, 0), (0, 1)}
    with pytest.raises(FigureError, match="has no gates: its encodings have no gates; it has: attention$"):
        maps(rope, TOKENS, MapOptions(show="gates"))
    with pytest.raises(FigureError, match="have no position logits"):
        maps(rope, TOKENS, MapOptions())


@pytest.mark.parametrize("tokens", [1, 70])
def test_any_length(predictor, tokens):
    figure = maps(predictor, np.zeros(tokens, dtype=int), MapOptions(heads=1))
    assert len(figure.frame) == tokens * (tokens + 1) / 2
    assert svg_texts(figure.render("svg"))


def test_what_does_not_exist(predictor, monkeypatch):
    with pytest.raises(FigureError, match=r"no mark 'newline'.*accepted: data, blank, marker"):
        maps(predictor, TOKENS, MapOptions(mark="newline"))
    with pytest.raises(ProbeError, match="no layer 2 with head 0: this model has layers 0 … 1 and heads 0 … 1"):
        maps(predictor, TOKENS, MapOptions(heads=((2, 0),)))
    monkeypatch.setattr("cope_sweep.read.figures.heads.MAX_CELLS", 12 * 12)
    with pytest.raises(FigureError, match="2 maps of 12 tokens have more than 144 cells"):
        maps(predictor, TOKENS, MapOptions(heads=2))
