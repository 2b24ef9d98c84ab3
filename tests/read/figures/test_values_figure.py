"""Metrics against parameters and contexts."""

import pytest

from cope_sweep.read.figures import FIGURES, FigureError, Options
from tests.read.figures.files import svg_texts
from tests.read.figures.test_figure_kinds import context_plan
from tests.read.tables.ablations import fail, finish, plan_of


def lines(figure, *columns):
    return figure.frame[list(columns)].values.tolist()


def test_the_data_by_hand(grid_plan, grid_store):
    figure = FIGURES["values"].make(grid_plan, grid_store, Options(metrics=("in_dist/token_error",)))
    assert lines(figure, "panel", "series", "x", "x_label", "n", "seeds", "mean", "low", "high") == [
        ["In-dist.", "CoPE", 8.0, "", 2, 2, 10.0, 9.0, 11.0],
        ["In-dist.", "CoPE", 16.0, "", 2, 2, 14.0, 13.0, 15.0],
        ["In-dist.", "none", 8.0, "", 2, 2, 50.0, 49.0, 51.0],
        ["In-dist.", "none", 16.0, "", 2, 2, 54.0, 53.0, 55.0],
    ]
    assert figure.frame["std"].tolist() == pytest.approx([2**0.5] * 4)
    assert figure.frame["published"].tolist()[:2] == [4.5, 4.5]
    assert figure.frame["published"].isna().tolist() == [False, False, True, True]


def test_an_interval_stays_inside_the_range_of_percentages(grid_plan, grid_store):
    figure = FIGURES["values"].make(grid_plan, grid_store, Options(band="interval"))
    assert (figure.frame["low"].dropna() >= 0).all()
    assert (figure.frame["high"].dropna() <= 100).all()
    first = figure.frame.iloc[0]
    assert first["low"] < 9.0 < 11.0 < first["high"]


def test_panels_are_metrics_and_the_values_of_an_axis(grid_plan, grid_store):
    assert FIGURES["values"].make(grid_plan, grid_store, Options()).frame["panel"].unique().tolist() == [
        "In-dist.",
        "OOD",
    ]
    one = Options(metrics=("in_dist/token_error",), panels="position")
    assert FIGURES["values"].make(grid_plan, grid_store, one).frame["panel"].unique().tolist() == [
        "position = CoPE", "position = none",
    ]  # fmt: skip
    both = FIGURES["values"].make(grid_plan, grid_store, Options(panels="model.position")).frame
    assert both["panel"].unique().tolist()[0] == "In-dist. · position = CoPE"
    assert both["series"].unique().tolist() == [""]


def test_x_is_an_axis_by_either_name_a_key_a_fact_or_a_label(grid_plan, grid_store):
    def places(x):
        figure = FIGURES["values"].make(grid_plan, grid_store, Options(x=x, metrics=("in_dist/token_error",)))
        return [tuple(each) for each in lines(figure, "x", "x_label")]

    assert places("dim") == places("model.dim") == places(None)
    assert set(places("train.steps")) == {(6.0, "")}
    assert set(places("facts.parameters")) == {(1000.0, "")}
    assert set(places("position")) == {(0.0, "CoPE"), (1.0, "none")}
    with pytest.raises(FigureError, match=r"--x model.dmi: no run of widths has this key; did you mean 'model.dim'\?"):
        places("model.dmi")


def test_axes_that_are_zipped_with_x_make_no_series(store):
    plan = plan_of(
        grid={"model.position": {"CoPE": ["cope"], "none": []}}, zip=[{"model.dim": [8, 16], "train.batch": [4, 8]}]
    )
    for run in plan.runs:
        finish(store, run, {"in_dist/token_error": 1.0})
    figure = FIGURES["values"].make(plan, store, Options(x="dim"))
    assert figure.frame["series"].unique().tolist() == ["CoPE", "none"]


def test_rows_without_a_finished_run_are_left_out_and_counts_are_shown(grid_plan, store):
    first = grid_plan.rows[0]
    finish(store, first.runs[0], {"in_dist/token_error": 9.0})
    fail(store, first.runs[1])
    figure = FIGURES["values"].make(grid_plan, store, Options(metrics=("in_dist/token_error",)))
    assert lines(figure, "series", "x", "n", "seeds") == [["CoPE", 8.0, 1, 2], ["CoPE", 16.0, 0, 2]]  # published: 4.5
    assert "CoPE, n = 0–1 of 2" in svg_texts(figure.render("svg"))


def test_contexts_by_hand(store):
    plan = context_plan()
    for row, error in zip(plan.rows, (20.0, 30.0, 40.0), strict=True):
        for run in row.runs:
            values = {"validation/perplexity@8": error + run.seed, "validation/perplexity@16": 2 * error}
            finish(store, run, values | {"test/perplexity@8": 1.0})
    figure = FIGURES["contexts"].make(plan, store, Options())
    assert lines(figure, "metric", "x", "mean", "low", "high")[:2] == [
        ["validation/perplexity", 8.0, 20.5, 20.0, 21.0],
        ["validation/perplexity", 16.0, 40.0, 40.0, 40.0],
    ]
    assert figure.frame["series"].tolist()[::2] == [row.name for row in plan.rows]
    texts = svg_texts(figure.render("svg"))
    assert "evaluation context (tokens)" in texts
    assert "perplexity" in texts
    test = FIGURES["contexts"].make(plan, store, Options(metrics=("test/perplexity",)))
    assert lines(test, "metric", "x", "mean")[0] == ["test/perplexity", 8.0, 1.0]


def test_lengths_by_hand(store):
    """The metric at the trained length is the first point. Absolute positions have no other."""
    base = {"task": {"kind": "flip_flop", "pairs": 4}, "evaluate": {"lengths": [2, 4]}}
    names = ["in_dist/token_error", "in_dist/token_error@2x", "in_dist/token_error@4x"]
    plan = plan_of(
        base=base,
        grid={"model.position": {"CoPE": ["cope"], "Absolute": ["absolute"]}},
        metrics=[{"name": name, "label": name} for name in names],
        published=[],
    )
    cope, absolute = plan.rows
    for run in cope.runs:
        finish(store, run, dict(zip(names, (1.0, 2.0, 4.0), strict=True)))
    for run in absolute.runs:
        finish(store, run, {names[0]: 9.0})
    figure = FIGURES["contexts"].make(plan, store, Options())
    assert figure.frame[["series", "x", "mean"]].dropna().values.tolist() == [
        ["CoPE", 1.0, 1.0],
        ["CoPE", 2.0, 2.0],
        ["CoPE", 4.0, 4.0],
        ["Absolute", 1.0, 9.0],
    ]
    assert "length of a test sequence (times the trained length)" in svg_texts(figure.render("svg"))


def test_contexts_have_a_panel_for_each_training_length(store):
    plan = context_plan(grid={"task.tokens": [8, 4], "model.position": {"CoPE": ["cope"], "none": []}})
    for run in plan.runs:
        finish(store, run, {"validation/perplexity@8": 5.0, "validation/perplexity@16": 6.0})
    figure = FIGURES["contexts"].make(plan, store, Options())
    assert figure.frame["panel"].unique().tolist() == ["training context = 8", "training context = 4"]
    assert figure.frame["series"].unique().tolist() == ["CoPE", "none"]


def test_an_ablation_without_contexts_says_so(grid_plan, grid_store):
    with pytest.raises(FigureError, match="no metric of widths is of another length"):
        FIGURES["contexts"].make(grid_plan, grid_store, Options())


def test_an_ablation_without_axes_says_so(store):
    plan = plan_of(grid={})
    for kind, message in (
        ("values", "name what to draw against with --x KEY"),
        ("parallel", "no axis"),
        ("importance", "no axis"),
    ):
        with pytest.raises(FigureError, match=message):
            FIGURES[kind].make(plan, store, Options())
