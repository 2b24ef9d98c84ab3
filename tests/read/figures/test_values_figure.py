"""Metrics against parameters and contexts."""

import math
from dataclasses import replace

import pytest

from cope_sweep.read.figures.canvas import columns_of, number, series_style, styled
from tests.helpers.errors import raises
from tests.helpers.figure_files import made, svg_texts
from tests.helpers.finished_runs import CONTENT, fail, finish, plan_of
from tests.helpers.tiny import TINY
from tests.read.figures.test_figure_kinds import context_plan, fill


def lines(figure, *columns):
    return figure.frame[list(columns)].values.tolist()


def test_the_data_by_hand(grid_plan, grid_store):
    figure = made("values", grid_plan, grid_store, metric=("in_dist/token_error",))
    assert lines(figure, "panel", "series", "x", "x_label", "n", "seeds", "mean", "low", "high") == [
        ["In-dist.", "CoPE", 8.0, "", 2, 2, 10.0, 9.0, 11.0],
        ["In-dist.", "CoPE", 16.0, "", 2, 2, 14.0, 13.0, 15.0],
        ["In-dist.", "none", 8.0, "", 2, 2, 50.0, 49.0, 51.0],
        ["In-dist.", "none", 16.0, "", 2, 2, 54.0, 53.0, 55.0],
    ]
    assert figure.frame["std"].tolist() == pytest.approx([2**0.5] * 4)
    assert figure.frame["median"].tolist() == figure.frame["mean"].tolist()
    assert figure.frame["published"].tolist()[:2] == [4.5, 4.5]
    assert figure.frame["published"].isna().tolist() == [False, False, True, True]


def test_names_stand_after_the_numbers_of_an_axis(store):
    grid = {"model.position": {"CoPE": ["cope"]}, "model.position.cope.p_max": ["full", 10, 2]}
    plan = plan_of(grid=grid)
    fill(plan, store)
    places = made("values", plan, store, x="p_max").frame.drop_duplicates("x_label").sort_values("x")
    assert places["x_label"].tolist() == ["2", "10", "full"]


def test_null_is_a_value_of_an_axis(store):
    plan = plan_of(grid={"train.clip": [None, 0.5, 1.0]})
    fill(plan, store)
    places = made("values", plan, store).frame.drop_duplicates("x_label").sort_values("x")
    assert places["x_label"].tolist() == ["0.5", "1.0", plan.rows[0].labels["train.clip"]]


def test_the_panels_of_a_metric_are_one_line(store):
    base = {key: values for key, values in CONTENT["base"].items() if key != "task"}
    tasks = {f"Task {pairs}": {"kind": "flip_flop", "pairs": pairs} for pairs in (2, 3, 4, 5)}
    plan = plan_of(base=base, grid={"task": tasks, "model.dim": [8, 16]})
    fill(plan, store)
    drawing = made("values", plan, store, x="dim", panels="task").draw()
    assert columns_of(drawing.axes[0]) == 4
    titles = [panel.get_title(loc="left") for panel in drawing.axes]
    assert titles[:4] == [f"In-dist. · {task}" for task in tasks]


def test_panels_are_metrics_and_the_values_of_an_axis(grid_plan, grid_store):
    assert made("values", grid_plan, grid_store).frame["panel"].unique().tolist() == [
        "In-dist.",
        "OOD",
    ]
    one = made("values", grid_plan, grid_store, metric=("in_dist/token_error",), panels="position").frame
    assert one["panel"].unique().tolist() == ["CoPE", "none"]
    both = made("values", grid_plan, grid_store, panels="model.position").frame
    assert both["panel"].unique().tolist()[0] == "In-dist. · CoPE"
    assert both["series"].unique().tolist() == [""]


def test_x_is_an_axis_by_either_name_a_key_a_fact_or_a_label(grid_plan, grid_store):
    def places(x):
        figure = made("values", grid_plan, grid_store, x=x, metric=("in_dist/token_error",))
        return [tuple(each) for each in lines(figure, "x", "x_label")]

    assert places("dim") == places("model.dim") == places(None)
    assert set(places("train.steps")) == {(6.0, "")}
    assert set(places("facts.parameters")) == {(1000.0, "")}
    assert set(places("position")) == {(0.0, "CoPE"), (1.0, "none")}
    assert set(places("task.kind")) == {(0.0, "selective_copy")}, "a text has a place with its name"
    with raises("unknown_key", key="model.dmi"):
        places("model.dmi")
    for fact in ("facts.device", "facts.parametres"):  # a text, and a misspelt one
        with raises("unknown_key", key=fact) as error:
            places(fact)
        assert "facts.parameters" in error.value.data["allowed"]


def test_against_a_measured_fact_each_row_is_a_series(store):
    plan = plan_of(grid={"model.position": {"CoPE": ["cope"], "none": []}})
    for cost, run in enumerate(plan.runs):
        finish(store, run, {"in_dist/token_error": 1.0}, {"tokens_per_s": 100.0 * 2**cost})
    figure = made("values", plan, store, x="facts.tokens_per_s", metric=("in_dist/token_error",))
    assert lines(figure, "series", "x") == [["CoPE", 250.0], ["none", 500.0]]
    assert "tokens per s" in svg_texts(figure.render("svg"))


def test_axes_that_vary_with_x_make_no_series(store):
    grid = {"model.position": {"CoPE": ["cope"], "none": []}, "model.dim": [8, 16], "train.batch": [4, 8]}
    plan = plan_of(grid=grid, exclude=[{"model.dim": 8, "train.batch": 8}, {"model.dim": 16, "train.batch": 4}])
    for run in plan.runs:
        finish(store, run, {"in_dist/token_error": 1.0})
    figure = made("values", plan, store, x="dim")
    assert figure.frame["series"].unique().tolist() == ["CoPE", "none"]


def test_rows_without_a_finished_run_are_left_out_and_counts_are_shown(grid_plan, store):
    first = grid_plan.rows[0]
    finish(store, first.runs[0], {"in_dist/token_error": 9.0})
    fail(store, first.runs[1])
    figure = made("values", grid_plan, store, metric=("in_dist/token_error",))
    assert lines(figure, "series", "x", "n", "seeds") == [["CoPE", 8.0, 1, 2], ["CoPE", 16.0, 0, 2]]  # published: 4.5
    assert "CoPE, n = 0–1 of 2" in svg_texts(figure.render("svg"))
    for run in grid_plan.runs:
        finish(store, run, {"in_dist/token_error": 9.0})
    legend = made("values", grid_plan, store, metric=("in_dist/token_error",)).draw().legends[0]
    assert legend.get_title().get_text().startswith("n = 2; median; ")
    assert "CoPE" in [text.get_text() for text in legend.get_texts()]


def test_contexts_by_hand(store):
    plan = context_plan()
    for row, error in zip(plan.rows, (20.0, 30.0, 40.0), strict=True):
        for run in row.runs:
            values = {"validation/perplexity@8": error + run.seed, "validation/perplexity@16": 2 * error}
            finish(store, run, values | {"test/perplexity@8": 1.0})
    figure = made("contexts", plan, store)
    assert lines(figure, "metric", "x", "mean", "low", "high")[:2] == [
        ["validation/perplexity", 8.0, 20.5, 20.0, 21.0],
        ["validation/perplexity", 16.0, 40.0, 40.0, 40.0],
    ]
    assert figure.frame["series"].tolist()[::2] == [row.name for row in plan.rows]
    texts = svg_texts(figure.render("svg"))
    assert "evaluation context (tokens)" in texts
    assert "perplexity" in texts
    test = made("contexts", plan, store, metric=("test/perplexity",))
    assert lines(test, "metric", "x", "mean")[0] == ["test/perplexity", 8.0, 1.0]


def test_perplexity_by_place_by_hand(store):
    """Where there are both, contexts are the default."""
    plan = context_plan("position_perplexity")
    for run in plan.runs:
        values = {f"validation/position_perplexity@{place}": 40.0 - place + run.seed for place in (16, 32)}
        finish(store, run, values | {"validation/perplexity@16": 7.0})
    assert made("contexts", plan, store).frame["metric"].unique().tolist() == ["validation/perplexity"]
    figure = made("contexts", plan, store, metric=("validation/position_perplexity",))
    assert lines(figure, "metric", "x", "mean")[:2] == [
        ["validation/position_perplexity", 16.0, 24.5],
        ["validation/position_perplexity", 32.0, 8.5],
    ]
    assert "place in the context (tokens)" in svg_texts(figure.render("svg"))
    with raises("unknown_metric", metric="validation/perplexity", allowed=["validation/position_perplexity"]):
        made("contexts", plan, store, metric=("validation/position_perplexity", "validation/perplexity"))


def test_errors_by_place_and_distance_by_hand(store):
    """They have an axis of their own each, and are no lengths."""
    base = {"task": {"kind": "word_problem", "group": "S3", "elements": 4, "longer_elements": 5}}
    names = [f"in_dist/position_error@{end}" for end in (1, 2, 4)]
    plan = plan_of(
        base=base,
        metrics=[{"name": "in_dist/token_error"}],
        published=[],
        figures=[{"kind": "contexts", "metric": "in_dist/position_error"}],
    )
    for run in plan.runs:
        finish(store, run, {"in_dist/token_error": 1.0} | dict(zip(names, (0.0, 10.0, 80.0), strict=True)))
    figure = made("contexts", plan, store, metric=("in_dist/position_error",))
    assert lines(figure, "metric", "x", "mean")[:3] == [
        ["in_dist/position_error", 1.0, 0.0],
        ["in_dist/position_error", 2.0, 10.0],
        ["in_dist/position_error", 4.0, 80.0],
    ]
    assert "place in the sequence (tokens)" in svg_texts(figure.render("svg"))
    figures = [{"kind": "contexts", "metric": "in_dist/distance_error"}]
    with raises("unknown_metric", metric="in_dist/distance_error"):
        plan_of(base=base, metrics=[{"name": "in_dist/token_error"}], published=[], figures=figures)


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
    figure = made("contexts", plan, store)
    assert figure.frame[["series", "x", "mean"]].dropna().values.tolist() == [
        ["CoPE", 1.0, 1.0],
        ["CoPE", 2.0, 2.0],
        ["CoPE", 4.0, 4.0],
        ["Absolute", 1.0, 9.0],
    ]
    assert "length of a test sequence (times the trained length)" in svg_texts(figure.render("svg"))


def test_a_task_without_lengths_has_no_panel(store):
    names = ["in_dist/token_error", "in_dist/token_error@2x"]
    plan = plan_of(
        base={"evaluate": {"lengths": [2]}},
        grid={"task": {"Copy": {"kind": "selective_copy"}, "Flip": {"kind": "flip_flop", "pairs": 4}}},
        when=[{"if": {"task": "Copy"}, "set": {"evaluate.lengths": []}}],
        metrics=[{"name": name} for name in names],
        published=[],
    )
    for row in plan.rows:
        for run in row.runs:
            finish(store, run, dict.fromkeys(names[: 1 + (row.labels["task"] == "Flip")], 5.0))
    figure = made("contexts", plan, store, panels="task")
    assert lines(figure, "panel", "x") == [["Flip", 1.0], ["Flip", 2.0]]


def test_contexts_have_a_panel_for_each_training_length(store):
    plan = context_plan(grid={"task.tokens": [8, 4], "model.position": {"CoPE": ["cope"], "none": []}})
    for run in plan.runs:
        finish(store, run, {"validation/perplexity@8": 5.0, "validation/perplexity@16": 6.0})
    figure = made("contexts", plan, store)
    assert figure.frame["panel"].unique().tolist() == ["training context = 8", "training context = 4"]
    assert figure.frame["series"].unique().tolist() == ["CoPE", "none"]


def test_an_ablation_without_contexts_says_so(grid_plan, grid_store):
    with raises("no_contexts", ablation="widths"):
        made("contexts", grid_plan, grid_store)


def test_an_ablation_without_axes_says_so(store):
    plan = plan_of(grid={})
    with raises("no_axis", ablation=plan.name):
        made("values", plan, store)


def test_the_summary_by_hand(grid_plan, grid_store):
    figure = made("summary", grid_plan, grid_store, row=("CoPE · 8", "none · 8"))
    columns = ["row", "metric", "n", "seeds", "mean", "low", "high"]
    assert figure.frame[columns].values.tolist() == [
        ["CoPE · 8", "in_dist/token_error", 2, 2, 10.0, 9.0, 11.0],
        ["CoPE · 8", "dense/token_error", 2, 2, 25.0, 25.0, 25.0],
        ["none · 8", "in_dist/token_error", 2, 2, 50.0, 49.0, 51.0],
        ["none · 8", "dense/token_error", 2, 2, 25.0, 25.0, 25.0],
    ]
    assert figure.frame[["published", "published_std"]].iloc[0].tolist() == [4.5, 0.5]
    texts = svg_texts(figure.render("svg"))
    assert {"CoPE · dim 8", "published ± std", "In-dist.", "token error (%)"} <= set(texts)
    assert {"2 seeds", "seed", "median"} <= set(texts)


def test_the_summary_has_lines_for_rules_and_one_axis_for_errors(grid_plan, grid_store):
    figure = made("summary", grid_plan, grid_store)
    task = grid_plan.runs[0].task
    for split, lines in zip(("in_dist", "dense"), (figure.frame.iloc[::2], figure.frame.iloc[1::2]), strict=True):
        most_frequent = next(iter(task.shortcut_errors(split, 2048).values()))
        assert set(lines["metric"]) == {f"{split}/token_error"}
        assert set(lines["most_frequent"]) == {most_frequent}
    assert figure.frame["shortcut"].isna().all(), "selective copy has no other rule"
    drawn = figure.draw()
    assert len({panel.get_xlim() for panel in drawn.axes}) == 1
    assert "most frequent answer" in [text.get_text() for text in drawn.legends[0].get_texts()]


def test_the_first_rule_of_a_summary_need_not_be_the_most_frequent_answer(store):
    task = {"kind": "dyck", "brackets": 12, "longer_brackets": 16, "depth": 2, "deeper_depth": 3}
    names = ["in_dist/f1_error", "in_dist/token_error"]
    plan = plan_of(base=TINY | {"task": task}, metrics=[{"name": name, "unit": "%"} for name in names])
    fill(plan, store)
    frame = made("summary", plan, store).frame
    rules = [plan.runs[0].task.shortcut_errors("in_dist", 2048, name.partition("/")[2]) for name in names]
    of_f1, of_tokens = (frame[frame["metric"] == name].iloc[0] for name in names)
    assert math.isnan(of_f1["most_frequent"])
    assert of_f1["shortcut"] == min(rules[0].values())
    assert of_tokens["most_frequent"] == rules[1].pop("the most frequent answer")
    assert of_tokens["shortcut"] == min(rules[1].values())


@pytest.mark.parametrize(("width", "named"), [(9.0, [True, False, False]), (4.0, [True, False, True])])
def test_the_leftmost_panels_of_a_summary_name_the_rows(width, named, store):
    plan = plan_of(metrics=[{"name": f"{split}/token_error"} for split in ("in_dist", "dense", "sparse")])
    for run in plan.runs:
        finish(store, run, {metric.name: 5.0 for metric in plan.ablation.content.metrics})
    panels = replace(made("summary", plan, store), size=(width, 3.0)).draw().axes
    assert [any(label.get_text() for label in panel.get_yticklabels()) for panel in panels] == named


def drawn_points(panel, x=None):
    """The points of a panel's lines, those at x only."""
    points = [tuple(point) for line in panel.get_lines() for point in line.get_xydata()]
    return [point for point in points if x is None or point[0] == pytest.approx(x)]


def test_the_summary_draws_seeds_and_their_median(store):
    """Errors of a task that a seed either learns or does not: nothing is drawn at the mean of 10."""
    plan = plan_of(metrics=[{"name": "in_dist/token_error", "unit": "%"}], seeds=[0, 1, 2, 3, 4])
    for run in plan.runs:
        finish(store, run, {"in_dist/token_error": 50.0 if run.seed == 4 else 0.0})
    figure = made("summary", plan, store)
    assert figure.frame[["mean", "median", "low", "high"]].values.tolist() == [[10.0, 0.0, 0.0, 50.0]] * len(plan.rows)
    panel = figure.draw().axes[0]
    assert not drawn_points(panel, 10.0)
    assert len(drawn_points(panel, 50.0)) >= len(plan.rows)
    heights = [y for _, y in drawn_points(panel, 0.0) if abs(y) < 0.5]
    assert len(set(heights)) > 3, "equal seeds stand apart"


@pytest.mark.parametrize("paired", [True, False])
def test_the_summary_joins_the_runs_of_a_seed_if_they_are_paired(paired, store):
    """The differences that the test is about; the means of rows hide them."""
    plan = plan_of(metrics=[{"name": "dense/loss"}], seeds=[0, 1, 2], paired=paired)
    for place, row in enumerate(plan.rows):
        for run in row.runs:
            finish(store, run, {"dense/loss": 5.0 + run.seed + 0.1 * place})
    drawing = made("summary", plan, store).draw()
    joined = [line.get_xdata().tolist() for line in drawing.axes[0].get_lines() if line.get_linestyle() == "-"]
    expected = [[5.0 + seed + 0.1 * place for place in range(len(plan.rows))] for seed in range(3)]
    found = [xs for xs in joined if len(xs) == len(plan.rows)]
    assert found == ([pytest.approx(xs) for xs in expected] if paired else [])
    assert ("the same seed" in [text.get_text() for text in drawing.legends[0].get_texts()]) is paired


def test_series_with_the_same_places_stand_side_by_side_with_dots_for_seeds(store):
    plan = plan_of(grid={"model.dim": [8, 16, 32], "model.position": {"CoPE": ["cope"], "none": []}}, seeds=[0, 1, 2])
    for run in plan.runs:
        finish(store, run, {"in_dist/token_error": [0.0, 0.0, 30.0][run.seed]})
    figure = made("values", plan, store, x="dim", metric=("in_dist/token_error",))
    points = drawn_points(figure.draw().axes[0])
    at_30, at_0 = ({round(x, 6) for x, y in points if y == value} for value in (30.0, 0.0))
    assert len(at_30) == len(at_0 & at_30) == 6, "three places of two series: dots of seeds above their medians"
    assert not any(y == 10.0 for _, y in points), "the mean"
    assert all(min(abs(x - dim) / dim for dim in (8, 16, 32)) < 0.1 for x in at_30)
    [alone] = (
        made("values", plan, store, x="dim", metric=("in_dist/token_error",), row=("8 · CoPE", "16 · CoPE")).draw().axes
    )
    assert {x for x, y in drawn_points(alone) if y == 30.0} == {8.0, 16.0}


def test_a_row_that_diverges_does_not_flatten_the_axis(store):
    plan = plan_of(metrics=[{"name": "dense/loss"}, {"name": "in_dist/token_error", "unit": "%"}])
    for row, loss in zip(plan.rows, (0.5, 0.52, 9.0), strict=True):
        for run in row.runs:
            finish(store, run, {"dense/loss": loss + 0.01 * run.seed, "in_dist/token_error": 10 * loss})
    drawn = made("summary", plan, store).draw()
    assert drawn.axes[0].get_xlim()[1] < 1
    assert [each.get_text() for each in drawn.axes[0].texts] == ["9.005 →"]
    assert drawn.axes[1].get_xlim()[1] > 90, "a percentage has two ends"


def test_the_value_of_a_far_row_and_a_metric_without_a_column_have_the_scale_of_the_metric(store):
    plan = plan_of(metrics=[{"name": "dense/loss", "unit": "mnat", "scale": 1000}])
    for row, loss in zip(plan.rows, (0.5, 0.52, 9.0), strict=True):
        for run in row.runs:
            finish(store, run, {"dense/loss": loss + 0.01 * run.seed, "sparse/loss": loss + 0.01 * run.seed})
    drawn = made("summary", plan, store, metric=("dense/loss", "sparse/loss")).draw()
    assert [[each.get_text() for each in panel.texts] for panel in drawn.axes] == [["9005 →"]] * 2
    assert [panel.get_xlabel() for panel in drawn.axes] == ["loss (mnat)"] * 2


@pytest.mark.parametrize(("rows", "panels"), [(8, 1), (9, 9), (13, 1)])
def test_many_lines_have_panels_of_their_own(rows, panels, store):
    plan = plan_of(grid={"model.dim": [8 * (index + 1) for index in range(rows)]}, seeds=[0])
    for run in plan.runs:
        finish(store, run, {"in_dist/token_error": 5.0, "dense/loss": 0.5})
    drawn = made("curves", plan, store, metric=("train/loss",)).draw()
    assert len(drawn.axes) == panels
    assert [text.get_text() for text in drawn.legends[0].get_texts()][-1:] == (
        ["the other rows"] if panels > 1 else [f"dim {8 * rows}, n = 1"]
    )


def test_points_and_the_lines_of_many_panels_share_them(store):
    dims, layers = [8 * (index + 1) for index in range(9)], [1, 2, 3, 4]
    plan = plan_of(grid={"model.dim": dims, "model.layers": layers}, seeds=[0])
    for index, run in enumerate(plan.runs):
        finish(store, run, {"in_dist/token_error": 5.0}, {"parameters": 100 + index})
    error = ("in_dist/token_error",)
    costs = made("values", plan, store, x="facts.parameters", panels="layers", metric=error)
    assert len(costs.draw().axes) == 4, "a point for each row in the panel of its layers"
    lines = made("values", plan, store, x="train.steps", panels="dim", metric=error)
    assert len(lines.draw().axes) == 9


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.001, "0.001"), (512, "512"), (16384, "16384"), (180000, "180 k"), (3.2e6, "3.2 M"), (1e11, "100 G"), (-2.5, "-2.5")],
)  # fmt: skip
def test_numbers_at_ticks(value, text):
    assert number(value) == text


def test_the_styles_of_many_series_differ():
    with styled():
        styles = [series_style(index) for index in range(72)]
    assert len({(each["color"], each["marker"]) for each in styles}) == 72
    assert len({each["color"] for each in styles[:8]}) == 8
    assert {each["linestyle"] for each in styles[:8]} == {"-"}
    assert styles[8]["linestyle"] != "-"


def test_on_a_logarithmic_axis_zero_stands_apart(store):
    """As far from 0.02 as its text needs, whatever the decade; the axis is interrupted there."""
    plan = plan_of(metrics=[{"name": "in_dist/token_error", "label": "In-dist.", "unit": "%"}], seeds=[0])
    for run, value in zip(plan.runs, (0.0, 0.02, 50.0), strict=True):
        finish(store, run, {"in_dist/token_error": value})
    figure = made("summary", plan, store)
    texts = svg_texts(figure.render("svg"))
    assert "(log; 0 stands apart)" in texts
    assert {"0", "0.01", "0.1", "1", "10"} <= set(texts)
    panel = figure.draw().axes[0]
    zero, first, second = (panel.transData.transform((x, 0))[0] for x in (0.0, 0.01, 0.1))
    assert first - zero < 0.75 * (second - first)
    linear = svg_texts(made("summary", plan, store, log=False).render("svg"))
    assert "token error (%)" in linear
    assert not any("log" in text for text in linear)
    for run, value in zip(plan.runs, (1e-9, 0.02, 50.0), strict=True):
        finish(store, run, {"in_dist/token_error": value})
    below = svg_texts(made("summary", plan, store).render("svg"))
    assert "(log; linear below 0.0001)" in below, "a value is there, so nothing is cut out"
    panels = svg_texts(made("contexts", context_plan(), store).render("svg"))
    assert not any("/" in text and "_" in text for text in panels), "keys are in words"
