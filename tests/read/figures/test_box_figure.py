"""Boxes over seeds, by hand."""

import pytest

from cope_sweep.read.figures.available import declared_figures, draw_declared
from cope_sweep.read.tables import read_results
from tests.helpers.figure_files import made, svg_texts
from tests.helpers.finished_runs import finish, plan_of

ERROR = "in_dist/token_error"


def test_the_data_are_the_final_values_of_each_run(grid_plan, grid_store):
    frame = made("box", grid_plan, grid_store, metric=[ERROR]).frame
    assert frame.groupby("row")["value"].agg(list).tolist() == [[13.0, 15.0], [9.0, 11.0], [53.0, 55.0], [49.0, 51.0]]


def test_a_file_declares_it(store):
    plan = plan_of(figures=[{"kind": "box", "metrics": [ERROR], "title": "Spread"}])
    for run in plan.runs:
        finish(store, run, {ERROR: 1.0 + run.seed})
    drawn = draw_declared(read_results(plan, store), declared_figures(plan)[0])
    assert "Spread" in svg_texts(drawn.render("svg"))


@pytest.mark.parametrize("log", [False, True])
def test_an_axis_has_the_unit_of_the_metric(store, log):
    """Shares that the file prints as percentages: ticks at 20 %, not at 0.2 %."""
    metrics = [{"name": ERROR, "unit": "%", "scale": 100}]
    plan = plan_of(metrics=metrics)
    for run in plan.runs:
        finish(store, run, {ERROR: 0.1 + 0.8 * run.seed})
    drawing = made("box", plan, store, metric=[ERROR], log=log).draw()
    (panel,) = drawing.axes
    drawing.figure.canvas.draw()
    low, high = panel.get_ylim()
    ticks = {place: text.get_text() for place, text in zip(panel.get_yticks(), panel.get_yticklabels(), strict=True)}
    shown = {place: text for place, text in ticks.items() if low <= place <= high}
    assert {float(text): pytest.approx(place * 100) for place, text in shown.items()} == {
        float(text): float(text) for text in shown.values()
    }
    assert {"20", "50"} & set(shown.values())
    assert 0.9 < high < 1.5
