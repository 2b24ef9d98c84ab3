"""The figures that an ablation has: the declared ones first, then those of any ablation."""

import pytest

from cope_sweep.api.questions import GetFigure
from cope_sweep.config import expand, load_ablation
from cope_sweep.errors import NotFoundError
from cope_sweep.read.figures import FigureError
from cope_sweep.read.figures.available import available_figures, draw_available
from cope_sweep.store import Store
from tests.config.test_expand import BASE
from tests.read.tables.ablations import finish

DECLARED = """\
figures:
  - {kind: values, title: Depth, x: model.layers, metrics: [in_dist/token_error]}
  - {kind: curves, metrics: [train/loss]}
  - {kind: curves, metrics: [in_dist/token_error]}
"""


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "some.yaml").write_text(BASE + "grid: {model.layers: [1, 2, 3]}\n" + DECLARED)
    return expand(load_ablation(tmp_path / "some.yaml"))


@pytest.fixture
def store(plan, tmp_path):
    store = Store(tmp_path / "store", create=True)
    for number, row in enumerate(plan.rows):
        finish(store, row.runs[0], {"in_dist/token_error": 10.0 * number})
    return store


def draw(plan, store, name, file_format, **options):
    return draw_available(plan, store, GetFigure(plan.name, name, format=file_format, **options))


def test_options_are_of_a_kind_not_of_a_declared_figure(plan, store):
    def rows(**options):
        return [line.split(",")[0] for line in draw(plan, store, "values", "csv", **options).decode().splitlines()[1:]]

    assert len(rows()) == 3
    assert len(rows(row=(plan.rows[0].name,))) == 1


def test_declared_figures_come_first(plan):
    found = available_figures(plan)
    assert [each.name for each in found[:3]] == ["values", "curves-1", "curves-2"]
    assert [each.title for each in found[:2]] == ["Depth", found[2].title]
    assert [each.name for each in found[3:]] == ["summary", "curves", "convergence", "importance", "parallel"]


def test_an_ablation_without_axis_has_fewer(tmp_path):
    (tmp_path / "one.yaml").write_text(BASE)
    assert [each.name for each in available_figures(expand(load_ablation(tmp_path / "one.yaml")))] == [
        "summary",
        "curves",
        "convergence",
    ]


def test_every_figure_is_drawn(plan, store):
    text = draw(plan, store, "values", "csv").decode()
    assert [line.split(",")[3] for line in text.splitlines()[1:]] == ["1.0", "2.0", "3.0"]
    for each in available_figures(plan):
        header, *lines = draw(plan, store, each.name, "csv").splitlines()
        assert b"," in header
        assert lines or "curves" in each.name or each.name == "convergence"


def test_what_cannot_be_drawn(plan, store, monkeypatch):
    with pytest.raises(NotFoundError, match="accepted: values, curves-1"):
        draw(plan, store, "none", "svg")
    monkeypatch.setattr("cope_sweep.read.figures.available.MAX_ROWS", 2)
    with pytest.raises(FigureError, match="3 rows, and pictures show at most 2"):
        draw(plan, store, "summary", "svg")
    assert draw(plan, store, "summary", "csv")
    assert draw(plan, store, "summary", "svg", row=(plan.rows[0].name,))
