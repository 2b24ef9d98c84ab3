import math
import re
from dataclasses import replace

import pytest
import yaml

from cope_sweep.api.figures import GetFigure
from cope_sweep.config import expand, plan_of_recorded, row_of, with_overrides
from cope_sweep.config.loading import validate
from cope_sweep.config.points import parameters_of
from cope_sweep.config.source import parse_source
from cope_sweep.read.figures.available import draw_figure
from cope_sweep.read.reports import evidence
from cope_sweep.read.tables import Results, Table
from cope_sweep.read.tables.best import rank_rows, yaml_of_best
from cope_sweep.store import RunRecord, Store
from tests.helpers.errors import raises
from tests.helpers.finished_runs import CONTENT, plan_of
from tests.helpers.tiny import TINY

SEARCH = {
    "kind": "random",
    "samples": 5,
    "space": {"train.lr": {"log_uniform": [1e-4, 1e-2]}, "train.batch": {"choice": [4, 8]}},
}
METRIC = "in_dist/token_error"
NOWHERE = Store("nowhere")
"""A store that nothing is read from: its records are given."""


def searched(score, status=lambda row, draw: "finished", **changes):
    """The plan of a search with two seeds, and records with `score(row, draw)`, one higher for the second seed."""
    plan = plan_of(**{"search": SEARCH} | changes)
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
    by_name = {each.name: each for each in rank_rows(Results(plan, records, NOWHERE), METRIC).groups}
    cope = by_name["CoPE"]
    assert [cope.best(first).score for first in (1, 2, 4, 5)] == [9.5, 3.5, 1.5, 1.5]
    assert by_name["None"].best().score == 2.5
    drawn = [row.runs[0].train.lr for row in plan.rows if row.labels["model.position"] == "CoPE"]
    assert cope.best().values["train.lr"] == drawn[3]
    assert by_name["None"].candidates[3].values == cope.candidates[3].values, "rows have other draws"


def test_the_greatest_is_best_where_the_goal_says_so():
    plan, records = searched(lambda row, draw: draw, metrics=[{"name": METRIC, "goal": "max"}])
    assert all(each.best() is each.candidates[4] for each in rank_rows(Results(plan, records, NOWHERE)).groups)


@pytest.mark.parametrize("at", ["", "@2x"])
def test_equal_scores_are_decided_by_the_loss_on_the_same_test_set_at_the_same_length(at):
    base = TINY | {"evaluate": TINY["evaluate"] | {"lengths": [2]}}
    plan, records = searched(lambda row, draw: 0, base=base)
    for row in plan.rows:
        for run in row.runs:
            metrics = records[run.run_id].metrics
            metrics |= {f"{METRIC}@2x": 1.0, "in_dist/loss": 1.0, "in_dist/loss@2x": 1.0} | {
                f"in_dist/loss{at}": run.train.lr
            }
    for each in rank_rows(Results(plan, records, NOWHERE), METRIC + at).groups:
        assert each.best().values["train.lr"] == min(draw.values["train.lr"] for draw in each.candidates)


def test_rows_whose_best_draws_are_equal_have_no_range():
    plan, records = searched(lambda row, draw: 3 if draw else 9)
    assert f"rows, by {METRIC}: 3.5. For " in rank_rows(Results(plan, records, NOWHERE), METRIC).answer


def test_draws_without_a_finite_mean_are_never_the_best():
    plan, records = searched(
        lambda row, draw: math.nan if draw == 0 else draw, lambda row, draw: "stopped" if draw == 1 else "finished"
    )
    for each in rank_rows(Results(plan, records, NOWHERE), METRIC).groups:
        assert each.best() is each.candidates[2]
        assert not each.missing


def test_a_best_value_at_the_edge_of_what_was_tried_is_named():
    plan, _ = searched(lambda row, draw: 0)
    rates = [row.runs[0].train.lr for row in plan.rows if row.labels["model.position"] == "CoPE"]
    plan, records = searched(lambda row, draw: -rates[draw] if row == "CoPE" else abs(rates[draw] - sorted(rates)[2]))
    by_name = {each.name: each for each in rank_rows(Results(plan, records, NOWHERE), METRIC).groups}
    assert "train.lr" in by_name["CoPE"].at_edge
    assert "train.lr" not in by_name["None"].at_edge


def test_a_value_of_a_choice_is_not_at_an_edge():
    """Of three values, two are the smallest or the largest."""
    space = {"train.lr": {"log_uniform": [1e-4, 1e-2]}, "train.batch": {"choice": [4, 6, 8]}}
    plan, _ = searched(lambda row, draw: 0, search=SEARCH | {"space": space, "samples": 9})
    batches = [row.runs[0].train.batch for row in plan.rows if row.labels["model.position"] == "CoPE"]
    assert set(batches) == {4, 6, 8}
    plan, records = searched(lambda row, draw: batches[draw], search=plan.ablation.content.search.model_dump())
    (cope,) = (each for each in rank_rows(Results(plan, records, NOWHERE), METRIC).groups if each.name == "CoPE")
    assert cope.best().values["train.batch"] == 4
    assert "train.batch" not in cope.at_edge


def test_conditions_train_the_best_values_of_each_row_under_the_same_names():
    plan, records = searched(lambda row, draw: (draw - len(row)) ** 2)
    found = rank_rows(Results(plan, records, NOWHERE), METRIC).groups
    tuned = plan_of(seeds=[7], **yaml.safe_load(yaml_of_best(rank_rows(Results(plan, records, NOWHERE), METRIC))))
    assert [row.name for row in tuned.rows] == list(CONTENT["grid"]["model.position"])
    for row, each in zip(tuned.rows, found, strict=True):
        assert row.runs[0].train.lr == each.best().values["train.lr"]
        assert row.runs[0].train.batch == each.best().values["train.batch"]


def test_conditions_need_draws_that_have_ended():
    plan, records = searched(
        lambda row, draw: draw, lambda row, draw: "running" if (row, draw) == ("CoPE", 4) else "finished"
    )
    with raises("not_finished", rows=["CoPE"]):
        yaml_of_best(rank_rows(Results(plan, records, NOWHERE), METRIC))


def test_a_task_without_the_metric_has_no_best_draw():
    tasks = {"Copy": {"kind": "selective_copy", "tokens": 4, "blanks": 4}, "Text": {"kind": "code", "tokens": 16}}
    search = SEARCH | {"samples": 3, "space": {"train.lr": {"log_uniform": [1e-4, 1e-2]}}}
    base = {key: TINY[key] for key in ("model", "train")}
    plan = plan_of(base=base, search=search, grid={"task": tasks}, metrics=[{"name": METRIC}])
    results = results_of(plan, lambda run: 5.0)
    records = results.records | {
        run.run_id: RunRecord(run_id=run.run_id, status="finished", seed=run.seed, metrics={"test/loss": 1.0})
        for row in plan.rows
        if row.labels["task"] == "Text"
        for run in row.runs
    }
    table = Table.of(replace(results, records=records))
    assert "by in_dist/token_error: 5" in table.model.answer
    ranking = rank_rows(table.results)
    assert [group.best() is None for group in ranking.groups] == [False, True]
    with raises("no_value", rows=["Text"]):
        yaml_of_best(ranking)
    with raises("unknown_metric", metric="sparse/los"):
        rank_rows(results, "sparse/los")


def test_a_report_shows_the_best_draws_and_tests_nothing():
    """The rows of a search are draws to choose from: 4 of 5 were worse by chance."""
    plan, records = searched(
        lambda row, draw: {"CoPE": [9, 3, 7, 1, 5], "None": [2, 1, 8, 8, 8]}.get(row, [4] * 5)[draw]
    )
    found = evidence(Results(plan, records, NOWHERE))
    assert found.table.compare is None
    assert found.answer == Table.of(Results(plan, records, NOWHERE)).model.answer
    assert (
        f"The best of 5 draws for each of {len(found.draws.rows)} rows, by {METRIC}: from 1.5 (CoPE, None) to "
        in found.answer
    )
    lines = {cells[0].text: [cell.text for cell in cells[1:5]] for cells in found.draws.rows}
    assert lines["CoPE"] == ["9.5", "3.5", "1.5", "1.5"]
    text = found.to_markdown({})
    assert "| CoPE | " in re.sub(" +", " ", text)
    assert "| 9.5 |" in re.sub(" +", " ", text)
    assert "All draws: `cope-sweep table copying`." in text
    assert "### Until" not in text, "draws are no rows to learn something about"
    lines = [line for line in text.splitlines() if line.startswith("| CoPE ")]
    assert len(lines) == 1, "only the best draw of each row"
    (drawn,) = found.figures
    data = draw_figure(found.results, GetFigure(name="", figure="budget")).frame
    assert drawn.name == "budget"
    assert data[data["series"] == "CoPE"]["best"].tolist() == [9.5, 3.5, 3.5, 1.5, 1.5]
    assert data["x"].tolist()[:5] == [1, 2, 3, 4, 5]


# -- searches by suggestions, and grids --


def results_of(plan, score, left_out=()):
    """Results with `score(run)` for each finished run; those of rows with a number in `left_out` are stopped."""
    records = {}
    for number, row in enumerate(plan.rows):
        for run in row.runs:
            status = "stopped" if number in left_out else "finished"
            records[run.run_id] = RunRecord(
                run_id=run.run_id, status=status, seed=run.seed, metrics={METRIC: score(run)}
            )
    return Results(plan, records, NOWHERE)


def suggested(*rates, **changes):
    """The plan of a search by Optuna that has suggested CoPE with these learning rates, and no encoding with the last."""
    space = {"train.lr": {"log_uniform": [1e-4, 1e-1]}, "model.position.cope.p_max": {"int_uniform": [2, 9]}}
    search = {"kind": "optuna", "samples": 9, "space": space} | changes.pop("search", {})
    grid = {"model.position": {"CoPE": ["cope"], "None": []}}
    plan = plan_of(search=search, grid=grid, published=[], **changes)
    labels = [{"model.position": "CoPE", "train.lr": str(rate), "model.position.cope.p_max": "4"} for rate in rates]
    labels.append({"model.position": "None", "train.lr": str(rates[-1])})
    rows = [row_of(plan.ablation, parameters_of(plan.ablation, each)) for each in labels]
    pairs = [(run.run_id, each) for row, each in zip(rows, labels, strict=True) for run in row.runs]
    return plan_of_recorded(plan.ablation, pairs)


def at_its_best_scale(plan, text):
    """The rows of the plan at the scale that `yaml_of_best` prints."""
    source = plan.ablation.source
    data = yaml.safe_load(yaml.safe_dump(plain(source.data))) | yaml.safe_load(text)
    loaded = validate(parse_source(yaml.safe_dump(data), "test.yaml"), plan.name)
    (scale,) = yaml.safe_load(text)["scales"]
    return expand(with_overrides(loaded, scale=scale)).rows


def plain(value):
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


PLANS = {
    "optuna": lambda: suggested(0.01, 0.003, 0.05),
    "random": lambda: plan_of(search=SEARCH, grid={}, base=TINY | {"model": TINY["model"] | {"position": ["cope"]}}),
    "grid": plan_of,
}


@pytest.mark.parametrize("kind", PLANS)
def test_the_best_rows_by_the_mean_over_seeds_whatever_chose_them(kind):
    plan = PLANS[kind]()
    found = rank_rows(results_of(plan, lambda run: abs(run.train.lr - 0.003) + run.seed, left_out=[0]))
    (group,) = found.groups
    assert len(group.ranked()) == len(plan.rows) - 1
    assert [each.score for each in group.ranked()] == sorted(each.score for each in group.ranked())
    drawn = found.layout(2)
    assert len(drawn.rows) == min(2, len(plan.rows) - 1)
    assert "stopped" in drawn.note
    best = group.best()
    (row,) = at_its_best_scale(plan, yaml_of_best(found))
    assert row.runs[0].model_copy(update={"seed": 0}) == best.row.runs[0].model_copy(update={"seed": 0})
    assert not {run.seed for run in row.runs} & set(plan.ablation.content.seeds)


def test_a_row_without_the_encoding_of_a_field_is_pasted_without_the_field():
    plan = suggested(0.01, 0.003)
    found = rank_rows(results_of(plan, lambda run: len(run.model.position)))
    assert found.groups[0].best().row.labels["model.position"] == "None"
    (row,) = at_its_best_scale(plan, yaml_of_best(found))
    assert row.runs[0].model.position == ()


def test_values_at_the_edge_of_a_search_by_suggestions():
    found = rank_rows(results_of(suggested(0.01, 0.02, 0.05), lambda run: -run.train.lr))
    assert found.groups[0].at_edge == ("train.lr",)
    assert "train.lr" in found.layout().note


@pytest.mark.parametrize("kind", ["budget", "values"])
def test_figures_of_a_search_by_suggestions(kind):
    plan = suggested(0.01, 0.003, 0.05, 0.0004, 0.02, 0.001)
    results = results_of(plan, lambda run: abs(run.train.lr - 0.003), left_out=[2])
    figure = draw_figure(results, GetFigure(name="", figure=kind, x="train.lr" if kind == "values" else None))
    assert not figure.empty
    axes = figure.draw().axes
    if kind == "budget":
        assert figure.frame["best"].is_monotonic_decreasing
        assert figure.frame["value"].isna().tolist() == [False, False, True, False, False, False, False]
    if kind == "values":
        assert axes[0].get_xscale() == "log"
        assert {line.get_linestyle() for line in axes[0].lines} == {"None"}, "draws of different rows are joined"


def test_the_order_of_a_grid_is_no_history():
    with raises("not_a_search"):
        draw_figure(results_of(plan_of(), lambda run: 1.0), GetFigure(name="", figure="budget"))


def test_many_rows_of_a_search_are_grey_beside_their_best_and_their_median():
    """24 lines in eight colours lie on one another and cannot be told apart."""
    many = {f"p{p_max}": [{"kind": "cope", "p_max": p_max}] for p_max in range(2, 17)}
    plan, records = searched(lambda row, draw: float(row[1:]) - draw / 10, grid={"model.position": many})
    figure = draw_figure(Results(plan, records, NOWHERE), GetFigure(name="", figure="budget"))
    drawing = figure.draw()
    [legend] = drawing.legends
    assert [text.get_text() for text in legend.get_texts()] == ["best of all", "median of all", "each of 15 rows"]
    ends = [line.get_ydata()[-1] for line in drawing.axes[0].get_lines() if len(line.get_xdata()) == 5]
    assert len(ends) == 15 + 2
    assert sorted(ends[15:]) == pytest.approx([2 - 0.4 + 0.5, 9 - 0.4 + 0.5]), "means of two seeds"
