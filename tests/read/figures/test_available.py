"""The figures that an ablation has: the declared ones first, then those of any ablation."""

import pytest

from cope_sweep.api.figures import GetFigure
from cope_sweep.config import expand, load_ablation, with_overrides
from cope_sweep.read.figures.available import (
    available_figures,
    declared_figures,
    declared_question,
    draw_declared,
    draw_figure,
    fits,
)
from cope_sweep.read.figures.metrics import selected_rows
from cope_sweep.read.tables import read_results
from cope_sweep.store import Store
from tests.config.test_expand import BASE
from tests.helpers.errors import raises
from tests.helpers.finished_runs import finish, plan_of

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
def filled(plan, store):
    for number, row in enumerate(plan.rows):
        finish(store, row.runs[0], {"in_dist/token_error": 10.0 * number})
    return store


def draw(plan, store, name, file_format, **options):
    return draw_figure(read_results(plan, store), GetFigure(name=plan.name, figure=name, **options)).render(file_format)


def test_options_are_of_a_kind_not_of_a_declared_figure(plan, filled):
    def rows(**options):
        return [line.split(",")[0] for line in draw(plan, filled, "values", "csv", **options).decode().splitlines()[1:]]

    assert len(rows()) == 3
    assert len(rows(row=(plan.rows[0].name,))) == 1


def test_declared_figures_come_first(plan):
    found = available_figures(plan)
    assert [each.name for each in found[:3]] == ["values", "curves-1", "curves-2"]
    assert [each.title for each in found[:2]] == ["Depth", found[2].title]
    assert [each.name for each in found[3:]] == ["summary", "curves", "heatmap"]


def test_a_declared_figure_is_drawn_whatever_is_set(plan, filled):
    """`set` says which runs there are, not what a figure shows: `--kind curves-2 --set seeds=[60]`."""
    assert draw(plan, filled, "curves-2", "csv", set=["seeds=[0]"]) == draw(plan, filled, "curves-2", "csv")


def test_every_figure_is_drawn(plan, filled):
    text = draw(plan, filled, "values", "csv").decode()
    assert [line.split(",")[3] for line in text.splitlines()[1:]] == ["1.0", "2.0", "3.0"]
    for each in available_figures(plan):
        header, *lines = draw(plan, filled, each.name, "csv").splitlines()
        assert b"," in header
        assert lines or "curves" in each.name


def test_a_drawing_fits_a_width_alone():
    svg = b'<svg width="300pt" height="200pt">'
    assert [fits(svg, size) for size in (None, "4.2", "4", "4.2x3")] == [True, True, False, False]
    with raises("invalid_option", value="5in"):
        fits(svg, "5in")


def test_rows_by_their_names_need_no_search(plan, monkeypatch):
    monkeypatch.setattr("cope_sweep.read.figures.metrics.rows_named", None)
    names = [row.name for row in plan.rows[1:]]
    assert [row.name for row in selected_rows(plan, names)] == names


def test_what_there_is_not_cannot_be_drawn(plan, filled):
    with raises("not_found", figure="none") as error:
        draw(plan, filled, "none", "svg")
    assert error.value.data["allowed"][:2] == ["values", "curves-1"]


ERROR = "in_dist/token_error"
GRID = {"model.position": {"CoPE": ["cope"], "none": []}, "model.dim": [8, 16]}
FIGURES = [
    {"kind": "curves", "metrics": [ERROR], "rows": {"model.position": "CoPE", "model.dim": [16]}, "title": "A"},
    {"kind": "values", "x": "model.dim", "metrics": [ERROR], "log_x": True, "rows": {"model.position": [[]]}},
    {"kind": "curves", "metrics": [ERROR], "log": True, "best": True},
    {
        "kind": "maps",
        "rows": {"model.position": ["cope"], "model.dim": 8},
        "seed": 1,
        "show": "gates",
        "heads": [[0, 1]],
    },
    {"kind": "curves", "metrics": ["dense/loss"]},
]


def test_names_rows_and_options():
    found = declared_figures(plan_of(grid=GRID, figures=FIGURES))
    assert [each.name for each in found] == ["curves-1", "values", "curves-2", "maps", "curves-3"]
    everything = ("CoPE · 8", "CoPE · 16", "none · 8", "none · 16")
    rows = [("CoPE · 16",), ("none · 8", "none · 16"), everything, ("CoPE · 8",), everything]
    assert [each.rows for each in found] == rows
    own = plan_of(grid=GRID, figures=FIGURES)
    curves, values, marked = (declared_question(own, each) for each in found[:3])
    assert curves == GetFigure(name=own.name, figure="curves-1", metric=(ERROR,), row=("CoPE · 16",), log=False)
    assert values == GetFigure(name=own.name, figure="values", metric=(ERROR,), row=rows[1], x="model.dim")
    assert marked == GetFigure(name=own.name, figure="curves-2", metric=(ERROR,), row=everything, log=True)


@pytest.mark.parametrize(("key", "log"), [({}, True), ({"log_x": True}, True), ({"log_x": False}, False)])
def test_the_axis_of_x_is_logarithmic_as_its_values_ask_for_or_as_the_file_says(store, key, log):
    figure = {"kind": "values", "x": "model.dim", "metrics": [ERROR], **key}
    plan = plan_of(grid={"model.dim": [8, 16, 32, 64, 128, 256]}, figures=[figure])
    for run in plan.runs:
        finish(store, run, {ERROR: 10.0})
    drawn = draw_declared(read_results(plan, store), declared_figures(plan)[0]).draw()
    assert (drawn.axes[0].get_xscale() == "log") is log


def test_drawings_hold_the_declared_rows(store):
    plan = plan_of(grid=GRID, figures=FIGURES)
    for run in plan.runs:
        finish(store, run, {ERROR: 10.0 + run.seed, "dense/loss": 0.5})
    curves, values, *_ = (draw_declared(read_results(plan, store), each) for each in declared_figures(plan)[:2])
    assert curves.title == "A"
    assert set(curves.frame["row"]) == {"CoPE · 16"}
    assert values.frame["x"].tolist() == [8.0, 16.0]


def test_maps_need_their_checkpoint(store):
    small = {"small": {"set": {"train.steps": 3}}}
    plan = expand(with_overrides(plan_of(grid=GRID, figures=FIGURES, scales=small).ablation, scale="small"))
    run = plan.rows[0].runs[1]
    with raises("not_finished", figure="maps", run_id=run.run_id, status="pending") as error:
        draw_declared(read_results(plan, store), declared_figures(plan)[3])
    assert "cope-sweep run copying --scale small" in str(error.value)


CONTEXTS = """\
title: Contexts
base:
  task: {kind: code, tokens: 16}
  model: {dim: 8, heads: 2, layers: 1}
  train: {steps: 6, batch: 4}
  evaluate: {contexts: [16, 32]}
grid:
  model.position: {Relative: [relative], CoPE: [cope]}
when:
  - {if: {model.position: Relative}, set: {evaluate.variants: {capped: {relative.far: last}}}}
metrics: [{name: validation/perplexity@16}, {name: validation/perplexity@32}]
figures: [{kind: contexts, metric: validation/perplexity}]
"""


def test_variants_have_lines_of_their_own(store, tmp_path):
    (tmp_path / "contexts.yaml").write_text(CONTEXTS)
    plan = expand(load_ablation(tmp_path / "contexts.yaml"))
    for index, row in enumerate(plan.rows):
        values = {f"validation/perplexity@{n}": n + index for n in (16, 32)}
        if index == 0:
            values |= {f"capped/validation/perplexity@{n}": n / 2 for n in (16, 32)}
        finish(store, row.runs[0], values)
    frame = draw_declared(read_results(plan, Store(store.root)), declared_figures(plan)[0]).frame
    lines = {series: part["mean"].tolist() for series, part in frame.groupby("series")}
    assert sorted(lines.values()) == [[8.0, 16.0], [16.0, 32.0], [17.0, 33.0]]
    assert [each for each in lines if each.endswith(", capped")]
