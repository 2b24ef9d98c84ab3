"""Rows × columns with numbers and colours: ranks, order, grey and missing cells, by hand."""

import math
import re

import pytest

from cope_sweep.api.figures import GetFigure
from cope_sweep.config import expand, load_ablation
from cope_sweep.read.figures.available import declared_figures, draw_declared, draw_figure
from cope_sweep.read.tables import read_results
from tests.helpers.errors import raises
from tests.helpers.figure_files import made, svg_texts
from tests.helpers.finished_runs import fail, finish, plan_of

COPIED, DENSE, ACCURATE = "in_dist/token_error", "dense/token_error", "sparse/token_error"
TEXT = """\
title: Grid
base:
  task: {kind: selective_copy, tokens: 4, blanks: 4, dense_blanks: 2, sparse_blanks: 8}
  model: {layers: 1, dim: 8, heads: 2}
  train: {steps: 6, batch: 4}
grid:
  model.dim: [8, 16]
  model.position: {A: [cope], B: [rope], C: [alibi], D: [t5]}
seeds: [0, 1]
metrics:
  - {name: in_dist/token_error, label: In-dist., unit: "%", learned: 1.0}
  - {name: dense/token_error, label: OOD, unit: "%", decimals: 1}
figures:
  - kind: heatmap
    title: Encodings
    panels: model.dim
    columns:
      "8": {in_dist/token_error: as trained, dense/token_error: fewer}
      "16": {dense/token_error: fewer}
    caption: Two seeds.
"""
VALUES = {  # row → in distribution and dense of width 8, dense of width 16; in distribution of width 16 is 0
    "A": (0.0, 40.0, 10.0),
    "B": (1.0, 20.0, 30.0),
    "C": (92.0, 20.0, 20.0),  # has not learned
    "D": (0.0, 30.0, None),  # its width 16 has no finished run
}


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "grid.yaml").write_text(TEXT)
    return expand(load_ablation(tmp_path / "grid.yaml"))


@pytest.fixture
def results(plan, store):
    for row in plan.rows:
        in_dist, dense, wide = VALUES[row.labels["model.position"]]
        if row.labels["model.dim"] == "16":
            in_dist, dense = 0.0, wide
        for run in row.runs:
            if dense is not None:
                finish(store, run, {COPIED: in_dist, DENSE: dense + (1.0 if run.seed else -1.0)})
    return read_results(plan, store)


@pytest.fixture
def figure(plan, results):
    return draw_declared(results, declared_figures(plan)[0])


def by_cell(figure, name):
    frame = figure.frame
    cells = zip(frame["row"], frame["group"], frame["column"], frame[name], strict=True)
    return {(row, group, column): value for row, group, column, value in cells}


def test_ranks_and_order_by_hand(figure):
    """Equal values share their ranks; columns that a row lacks rank none. Whether a task is learned is a share."""
    ranks = by_cell(figure, "rank")
    assert {cell: rank for cell, rank in ranks.items() if cell[1] == "8"} == {
        ("A", "8", "as trained"): 2.0, ("A", "8", "fewer"): 4.0,
        ("B", "8", "as trained"): 2.0, ("B", "8", "fewer"): 1.5,
        ("C", "8", "as trained"): 4.0, ("C", "8", "fewer"): 1.5,
        ("D", "8", "as trained"): 2.0, ("D", "8", "fewer"): 3.0,
    }  # fmt: skip
    assert [math.isnan(rank) for cell, rank in ranks.items() if cell[1] == "16"] == [True] * 3
    rows = figure.frame.drop_duplicates("row")
    assert rows["row"].tolist() == ["B", "D", "C", "A"]
    assert rows["mean_rank"].tolist() == [1.75, 2.5, 2.75, 3.0]


def test_the_column_of_the_task_itself_has_the_seeds_that_learned_it(plan, store):
    """Errors of seeds are near 0 or large, so that a mean describes none: 1 of 2 is 45 % of errors on the mean."""
    for row in plan.rows:
        for run in row.runs:
            finish(store, run, {COPIED: 90.0 if run.seed and row.labels["model.position"] == "B" else 0.5, DENSE: 1.0})
    figure = draw_declared(read_results(plan, store), declared_figures(plan)[0])
    learned = {row: k for (row, _, column), k in by_cell(figure, "learned").items() if column == "as trained"}
    assert learned == {"A": 2.0, "B": 1.0, "C": 2.0, "D": 2.0}
    assert all(math.isnan(k) for (_, _, column), k in by_cell(figure, "learned").items() if column == "fewer")
    texts = svg_texts(figure.render("svg"))
    assert (texts.count("2/2"), texts.count("1/2")) == (3, 1)
    assert not figure.frame["grey"].any(), "half of the seeds have learned"


def test_a_run_that_failed_has_not_learned_its_task(plan, store):
    for row in plan.rows:
        for run in row.runs:
            if run.seed and row.labels["model.position"] == "B":
                fail(store, run)
            else:
                finish(store, run, {COPIED: 0.5, DENSE: 1.0})
    figure = draw_declared(read_results(plan, store), declared_figures(plan)[0])
    texts = svg_texts(figure.render("svg"))
    assert (texts.count("2/2"), texts.count("1/2")) == (3, 1)
    assert by_cell(figure, "n")["B", "8", "fewer"] == 1


def test_a_column_may_be_computed_from_metrics_of_the_runs(tmp_path, store):
    text = TEXT.replace("dense/token_error", "dense_and_sparse/token_error")
    (tmp_path / "grid.yaml").write_text(text)
    plan = expand(load_ablation(tmp_path / "grid.yaml"))
    for run in plan.runs:
        finish(store, run, {COPIED: 0.5, DENSE: 10.0, ACCURATE: 20.0})
    figure = draw_declared(read_results(plan, store), declared_figures(plan)[0])
    assert by_cell(figure, "mean")["A", "16", "fewer"] == 15.0


def test_means_that_differ_by_rounding_share_their_ranks(plan, store):
    """The means of 0.1 and 0.7 and of 0.2 and 0.6."""
    errors = {"A": (0.1, 0.7), "B": (0.2, 0.6), "C": (0.3, 0.3), "D": (9.0, 9.0)}
    for row in plan.rows:
        for run, error in zip(row.runs, errors[row.labels["model.position"]], strict=True):
            finish(store, run, {COPIED: 0.0, DENSE: error})
    figure = draw_declared(read_results(plan, store), declared_figures(plan)[0])
    ranks = {row: rank for (row, group, _), rank in by_cell(figure, "rank").items() if group == "16"}
    assert ranks == {"A": 2.5, "B": 2.5, "C": 1.0, "D": 4.0}


def test_other_cells_of_a_row_that_has_not_learned_its_task_are_grey(figure):
    assert {cell for cell, grey in by_cell(figure, "grey").items() if grey} == {("C", "8", "fewer")}
    assert by_cell(figure, "mean")["C", "8", "as trained"] == 92.0
    assert set(figure.frame["n"]) == set(figure.frame["seeds"]) == {2}
    assert by_cell(figure, "std")["A", "16", "fewer"] == pytest.approx(2**0.5)


def test_the_drawing_has_every_number_and_says_what_grey_is(figure):
    texts = svg_texts(figure.render("svg"))
    assert texts.count("–") == 1  # D of width 16
    assert {"2/2", "0/2", "40.0", "10.0", "2.8", "dim 8", "dim 16", "as", "trained", "Encodings"} <= set(texts)
    below = " ".join(texts)
    assert "Mean of 2 seeds, coloured from best (blue) to worst (red) of each column." in below
    assert "k/n (as trained): seeds that have learned the task, with at most 1 %. Grey: most seeds have not;" in below
    assert "Mean rank: in the columns that all rows have. Two seeds." in below
    shown = figure.render("svg").decode()
    assert shown.count("fill: #d4d7db") == 1


def test_the_name_of_a_group_that_is_wider_than_its_columns_has_several_lines(tmp_path, store):
    (tmp_path / "grid.yaml").write_text(
        TEXT.replace("model.dim: [8, 16]", "model.dim: {Copy of eight tokens from the outputs: 8, Wide: 16}")
        .replace('"8": {', "Copy of eight tokens from the outputs: {")
        .replace('"16": {', "Wide: {")
    )
    plan = expand(load_ablation(tmp_path / "grid.yaml"))
    for row in plan.rows:
        for run in row.runs:
            finish(store, run, {COPIED: 0.0, DENSE: 1.0})
    texts = svg_texts(draw_declared(read_results(plan, store), declared_figures(plan)[0]).render("svg"))
    assert {"Copy of eight tokens", "from the outputs", "Wide"} <= set(texts)


def test_without_a_declaration_columns_are_those_of_the_table(plan, results):
    question = GetFigure(name=plan.name, figure="heatmap", panels="dim", metric=(DENSE,))
    frame = draw_figure(results, question).frame
    assert set(frame["column"]) == {"OOD"}
    assert frame["group"].unique().tolist() == ["8", "16"]
    assert frame["row"].unique().tolist()[:2] == ["B", "C"]
    whole = draw_figure(
        results, GetFigure(name=plan.name, figure="heatmap", row=(plan.rows[0].name, plan.rows[4].name))
    )
    assert whole.frame["row"].unique().tolist() == ["dim 16", "dim 8"]
    assert whole.frame["column"].tolist() == ["In-dist.", "OOD"] * 2
    with raises("unknown_axis", axis="dims"):
        draw_figure(results, GetFigure(name=plan.name, figure="heatmap", panels="dims"))


def test_the_greater_is_the_better_where_the_metric_says_so(store):
    metrics = [{"name": "in_dist/loss", "label": "x", "goal": "max", "learned": 30.0}, {"name": "dense/loss"}]
    plan = plan_of(name="any", grid={"model.dim": [8, 16]}, metrics=metrics, published=[])
    for row, value in zip(plan.rows, (20.0, 40.0), strict=True):
        for run in row.runs:
            finish(store, run, {"in_dist/loss": value, "dense/loss": 1.0})
    figure = made("heatmap", plan, store)
    assert figure.frame[["row", "metric", "rank", "grey"]].values.tolist() == [
        ["dim 16", "in_dist/loss", 1.0, False], ["dim 16", "dense/loss", 1.5, False],
        ["dim 8", "in_dist/loss", 2.0, False], ["dim 8", "dense/loss", 1.5, True],
    ]  # fmt: skip
    assert "k/n (x): seeds that have learned the task, with at least 30." in " ".join(svg_texts(figure.render("svg")))


@pytest.mark.parametrize(("value", "is_best"), [(3.0, True), (0.0, False)])
def test_equal_cells_are_the_best_for_either_goal(store, value, is_best):
    metrics = [{"name": "in_dist/loss", "goal": "max"}, {"name": "dense/loss"}]
    plan = plan_of(name="any", grid={"model.dim": [8, 16]}, metrics=metrics, published=[])
    for run in plan.runs:
        finish(store, run, {"in_dist/loss": value, "dense/loss": value})
    svg = made("heatmap", plan, store).render("svg").decode()
    fills = re.findall(r"fill: (#[0-9a-f]{6})", svg.partition("PolyCollection")[2])[:4]
    assert (len(set(fills)) == 1) == is_best


def test_an_axis_that_is_fixed_takes_its_heatmap_with_it(tmp_path, plan):
    from cope_sweep.config import expand, with_overrides

    assert expand(with_overrides(plan.ablation, assignments=["model.dim=8"])).ablation.content.figures == []


@pytest.mark.parametrize(
    ("before", "after", "code", "data"),
    [
        ('"16": {', '"61": {', "unknown_value", {"key_path": "figures[0].columns.61", "value": "61"}),
        (
            "dense/token_error: fewer}\n    cap",
            "dens/token_error: fewer}\n    cap",
            "unknown_metric",
            {"metric": "dens/token_error"},
        ),
        ("panels: model.dim", "panels: model.dims", "unknown_axis", {"key_path": "figures[0].panels"}),
        ("columns:\n", "colours: rows\n    columns:\n", "unknown_choice", {"key_path": "figures[0].colours"}),
    ],
)
def test_errors_name_their_key(tmp_path, before, after, code, data):
    assert before in TEXT
    (tmp_path / "grid.yaml").write_text(TEXT.replace(before, after))
    with raises(code, **data):
        expand(load_ablation(tmp_path / "grid.yaml"))
