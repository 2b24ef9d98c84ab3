"""Boxes over seeds, by hand."""

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
