"""The data of summaries, of importance and of parallel coordinates, and what scales do with it."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.read.figures import FIGURES, FigureError, Options
from cope_sweep.read.figures.canvas import number, series_style
from cope_sweep.read.figures.importance import importance_frame
from cope_sweep.read.figures.parallel import coordinate
from tests.read.figures.files import svg_texts
from tests.read.tables.ablations import finish, plan_of


def test_the_summary_by_hand(grid_plan, grid_store):
    figure = FIGURES["summary"].make(grid_plan, grid_store, Options(rows=("CoPE · 8", "none · 8")))
    columns = ["row", "metric", "n", "seeds", "mean", "low", "high"]
    assert figure.frame[columns].values.tolist() == [
        ["CoPE · 8", "in_dist/token_error", 2, 2, 10.0, 9.0, 11.0],
        ["CoPE · 8", "dense/token_error", 2, 2, 25.0, 25.0, 25.0],
        ["none · 8", "in_dist/token_error", 2, 2, 50.0, 49.0, 51.0],
        ["none · 8", "dense/token_error", 2, 2, 25.0, 25.0, 25.0],
    ]
    assert figure.frame[["published", "published_std"]].iloc[0].tolist() == [4.5, 0.5]
    texts = svg_texts(figure.render("svg"))
    assert {"CoPE · 8  n = 2", "measured", "published ± std", "In-dist.", "token error (%)"} <= set(texts)


def test_shares_of_variance_by_hand():
    """Values 0, 2 | 4, 6 and 10, 12 | 14, 16: the mean is 8, Σ(y − 8)² = 64+36+16+4+4+16+36+64 = 240."""
    runs = pd.DataFrame({"row": list("aabbccdd"), "y": [0.0, 2, 4, 6, 10, 12, 14, 16]})
    levels = pd.DataFrame({"A": list("00001111"), "B": list("00110011")})
    found = importance_frame(runs, levels, "y").set_index("factor")
    assert found["share"].to_dict() == pytest.approx(
        {
            "A": 8 * 5.0**2 / 240,  # level means 3 and 13
            "B": 8 * 2.0**2 / 240,  # level means 6 and 10
            "interactions": 0.0,
            "seeds": 8 * 1.0**2 / 240,  # each value is 1 from its row's mean
        },
        abs=1e-12,
    )
    assert found["share"].sum() == pytest.approx(1.0)
    assert found.loc["A", "chance"] == pytest.approx(1 / 7)
    assert found["levels"].tolist()[:2] == [2, 2]


def test_an_interaction_by_hand():
    """y is 1 where A and B differ: no axis explains anything, the interaction everything."""
    runs = pd.DataFrame({"row": list("abcd"), "y": [0.0, 1.0, 1.0, 0.0]})
    levels = pd.DataFrame({"A": list("0011"), "B": list("0101")})
    found = importance_frame(runs, levels, "y").set_index("factor")
    assert found["share"].to_dict() == pytest.approx({"A": 0.0, "B": 0.0, "interactions": 1.0})


def test_importance_of_an_unbalanced_design_has_no_interactions():
    runs = pd.DataFrame({"row": list("abc"), "y": [0.0, 1.0, 2.0]})
    levels = pd.DataFrame({"A": list("001"), "B": list("010")})
    assert importance_frame(runs, levels, "y")["factor"].tolist() == ["A", "B"]


def test_axes_that_change_together_are_one_factor_and_constants_are_none():
    runs = pd.DataFrame({"row": list("aabb"), "y": [0.0, 1.0, 2.0, np.nan]})
    levels = pd.DataFrame({"A": list("0011"), "B": list("xxyy"), "C": list("cccc")})
    found = importance_frame(runs, levels, "y")
    assert found["factor"].tolist() == ["A+B", "seeds"]
    assert found["runs"].tolist() == [3, 3]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-1e6, 1e6), min_size=12, max_size=12))
def test_shares_of_a_balanced_design_sum_to_one(values):
    runs = pd.DataFrame({"row": np.repeat(list("abcdef"), 2), "y": values})
    levels = pd.DataFrame({"A": list("000000111111"), "B": list("001122001122")})
    shares = importance_frame(runs, levels, "y")["share"]
    if shares.notna().all():
        assert shares.sum() == pytest.approx(1.0, abs=1e-6)
        assert (shares >= 0).all()


def test_a_metric_that_does_not_vary_has_no_shares(grid_plan, grid_store):
    figure = FIGURES["importance"].make(grid_plan, grid_store, Options())
    dense = figure.frame[figure.frame["metric"] == "dense/token_error"]
    assert dense["share"].isna().all()
    assert "the metric does not vary" in svg_texts(figure.render("svg"))
    # 20² : 2² : 1², the squared distances of the level means and of the seeds from their means
    shares = figure.frame[figure.frame["metric"] == "in_dist/token_error"].set_index("factor")["share"]
    assert shares.to_dict() == pytest.approx(
        {"position": 400 / 405, "dim": 4 / 405, "interactions": 0, "seeds": 1 / 405}, abs=1e-9
    )


def test_many_numbers_are_cut_into_quantiles(store):
    plan = plan_of(grid={"train.lr": [0.001 * k for k in range(1, 13)]}, seeds=[0])
    for row in plan.rows:
        finish(store, row.runs[0], {"in_dist/token_error": 0.0 if row.runs[0].train.lr < 0.0061 else 10.0})
    found = FIGURES["importance"].make(plan, store, Options(metrics=("in_dist/token_error",))).frame
    assert found["factor"].tolist() == ["lr"]
    assert found["levels"].tolist()[0] == 4
    assert found["share"].tolist()[0] == pytest.approx(1.0)


def test_parallel_coordinates_by_hand(grid_plan, grid_store):
    figure = FIGURES["parallel"].make(grid_plan, grid_store, Options())
    assert figure.frame.drop(columns="row").values.tolist() == [
        [2, "CoPE", 0.0, "8", 0.0, 10.0],
        [2, "CoPE", 0.0, "16", 1.0, 14.0],
        [2, "none", 1.0, "8", 0.0, 50.0],
        [2, "none", 1.0, "16", 1.0, 54.0],
    ]
    with pytest.raises(FigureError, match="one metric"):
        FIGURES["parallel"].make(grid_plan, grid_store, Options(metrics=("in_dist/token_error", "dense/token_error")))


def test_coordinates_are_logarithmic_from_a_factor_of_eight():
    plan = plan_of(grid={"train.lr": [1e-4, 1e-3, 1e-2], "train.steps": [6, 12, 18]})
    rates, steps = coordinate(plan.rows, "train.lr"), coordinate(plan.rows, "train.steps")
    assert [rates[row.name] for row in plan.rows][::3] == pytest.approx([0.0, 0.5, 1.0])
    assert [steps[row.name] for row in plan.rows][:3] == pytest.approx([0.0, 0.5, 1.0])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.001, "0.001"), (512, "512"), (16384, "16384"), (180000, "180 k"), (3.2e6, "3.2 M"), (1e11, "100 G"), (-2.5, "-2.5")],
)  # fmt: skip
def test_numbers_at_ticks(value, text):
    assert number(value) == text


def test_the_styles_of_many_series_differ():
    styles = [series_style(index) for index in range(72)]
    assert len({(each["color"], each["marker"]) for each in styles}) == 72
    assert len({each["color"] for each in styles[:8]}) == 8
    assert {each["linestyle"] for each in styles[:8]} == {"-"}
    assert styles[8]["linestyle"] != "-"


def test_a_logarithmic_axis_keeps_zero_and_says_where_it_is_linear(store):
    plan = plan_of(metrics=[{"name": "in_dist/token_error", "label": "In-dist.", "unit": "%"}], seeds=[0])
    for run, value in zip(plan.runs, (0.0, 0.02, 50.0), strict=True):
        finish(store, run, {"in_dist/token_error": value})
    texts = svg_texts(FIGURES["summary"].make(plan, store, Options()).render("svg"))
    assert "(log; linear below 0.01)" in texts
    assert {"0", "0.01", "0.1", "1", "10"} <= set(texts)
    linear = svg_texts(FIGURES["summary"].make(plan, store, Options(log=False)).render("svg"))
    assert "token error (%)" in linear
    assert not any("log" in text for text in linear)


def test_thirty_one_rows_fit(store):
    plan = plan_of(grid={"train.lr": [1e-4 * k for k in range(1, 32)]}, seeds=[0])
    for run in plan.runs:
        finish(store, run, {"in_dist/token_error": 1e4 * run.train.lr})
    for kind in ("curves", "summary"):
        texts = " ".join(svg_texts(FIGURES[kind].make(plan, store, Options()).render("svg")))
        assert all(row.name in texts for row in plan.rows)
