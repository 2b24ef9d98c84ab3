import math

import yaml

from cope_sweep.api.questions import GetFigure
from cope_sweep.read.figures import FIGURES
from cope_sweep.read.reports import evidence
from cope_sweep.read.tables import Results, Table
from cope_sweep.read.tables.best import conditions, tuned_rows
from cope_sweep.store import RunRecord
from tests.errors import raises
from tests.read.tables.ablations import CONTENT, plan_of

SEARCH = {
    "kind": "random",
    "samples": 5,
    "space": {"train.lr": {"log_uniform": [1e-4, 1e-2]}, "train.batch": {"choice": [4, 8]}},
}
METRIC = "in_dist/token_error"


def searched(score, status=lambda row, draw: "finished"):
    """The plan of a search with two seeds, and records with `score(row, draw)`, one higher for the second seed."""
    plan = plan_of(search=SEARCH)
    records = {}
    for row in plan.rows:
        name = row.labels["model.position"]
        draw = [each for each in plan.rows if each.labels["model.position"] == name].index(row)
        for run in row.runs:
            metrics = {METRIC: score(name, draw) + run.seed}
            records[run.run_id] = RunRecord(
                run_id=run.run_id, status=status(name, draw), seed=run.seed, metrics=metrics
            )
    return plan, records


def test_the_best_draw_of_each_row_by_the_mean_over_seeds():
    plan, records = searched(
        lambda row, draw: {"CoPE": [9, 3, 7, 1, 5], "None": [2, 2.5, 8, 8, 8]}.get(row, [4] * 5)[draw]
    )
    by_name = {each.name: each for each in tuned_rows(plan, records, METRIC, "min")}
    cope = by_name["CoPE"]
    assert [cope.best(first).score for first in (1, 2, 4, 5)] == [9.5, 3.5, 1.5, 1.5]
    assert by_name["None"].best().score == 2.5
    drawn = [row.runs[0].train.lr for row in plan.rows if row.labels["model.position"] == "CoPE"]
    assert cope.best().values["train.lr"] == drawn[3]
    assert by_name["None"].draws[3].values == cope.draws[3].values, "rows have other draws"


def test_the_greatest_is_best_where_the_goal_says_so():
    plan, records = searched(lambda row, draw: draw)
    assert all(each.best() is each.draws[4] for each in tuned_rows(plan, records, METRIC, "max"))


def test_draws_without_a_finite_mean_are_never_the_best():
    plan, records = searched(
        lambda row, draw: math.nan if draw == 0 else draw, lambda row, draw: "stopped" if draw == 1 else "finished"
    )
    for each in tuned_rows(plan, records, METRIC, "min"):
        assert each.best() is each.draws[2]
        assert not each.missing


def test_a_best_value_at_the_edge_of_what_was_tried_is_named():
    plan, _ = searched(lambda row, draw: 0)
    rates = [row.runs[0].train.lr for row in plan.rows if row.labels["model.position"] == "CoPE"]
    plan, records = searched(lambda row, draw: -rates[draw] if row == "CoPE" else abs(rates[draw] - sorted(rates)[2]))
    by_name = {each.name: each for each in tuned_rows(plan, records, METRIC, "min")}
    assert "train.lr" in by_name["CoPE"].at_edge
    assert "train.lr" not in by_name["None"].at_edge


def test_conditions_train_the_best_values_of_each_row_under_the_same_names():
    plan, records = searched(lambda row, draw: (draw - len(row)) ** 2)
    found = tuned_rows(plan, records, METRIC, "min")
    tuned = plan_of(seeds=[7], **yaml.safe_load(conditions(found)))
    assert [row.name for row in tuned.rows] == list(CONTENT["grid"]["model.position"])
    for row, each in zip(tuned.rows, found, strict=True):
        assert row.runs[0].train.lr == each.best().values["train.lr"]
        assert row.runs[0].train.batch == each.best().values["train.batch"]


def test_conditions_need_draws_that_have_ended():
    plan, records = searched(
        lambda row, draw: draw, lambda row, draw: "running" if (row, draw) == ("CoPE", 4) else "finished"
    )
    with raises("not_finished", rows=["CoPE"]):
        conditions(tuned_rows(plan, records, METRIC, "min"))


def test_a_report_shows_the_best_draws_and_tests_nothing():
    """The rows of a search are draws to choose from: 4 of 5 were worse by chance."""
    plan, records = searched(
        lambda row, draw: {"CoPE": [9, 3, 7, 1, 5], "None": [2, 1, 8, 8, 8]}.get(row, [4] * 5)[draw]
    )
    found = evidence(Results(plan, records))
    assert found.table.compare is None
    assert found.answer == Table(Results(plan, records)).model.answer
    assert (
        f"The best of 5 draws for each of {len(found.draws.rows)} rows, by {METRIC}: from 1.5 (CoPE, None) to "
        in found.answer
    )
    lines = {cells[0].text: [cell.text for cell in cells[1:5]] for cells in found.draws.rows}
    assert lines["CoPE"] == ["9.5", "3.5", "1.5", "1.5"]
    assert "### Best draws" in found.to_markdown({})
    (drawn,) = found.figures
    data = FIGURES["budget"].make(found.results, GetFigure(name="", figure="")).frame
    assert drawn.name == "budget"
    assert data[data["series"] == "CoPE"]["mean"].tolist() == [9.5, 3.5, 3.5, 1.5, 1.5]
    assert data["x"].tolist()[:5] == [1, 2, 3, 4, 5]


def test_other_searches_are_refused():
    with raises("not_a_random_search", search="grid"):
        tuned_rows(plan_of(), {}, METRIC, "min")
