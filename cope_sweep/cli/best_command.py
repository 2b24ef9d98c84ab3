"""The command `best`: the best draw of each row of a random search, also as conditions of the reported ablation."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cope_sweep.cli.options import (
    ABLATIONS,
    STORE,
    AblationArg,
    AblationsDir,
    IndexOpt,
    Json,
    ScaleOpt,
    Sets,
    StoreOpt,
    load_plan,
    open_store,
)
from cope_sweep.cli.output import escaped, grid, make_console, print_json
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from cope_sweep.read.tables.best import Tuned


def best(
    ablation: AblationArg,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            "-m",
            help="What draws are compared by. Default: the primary metric, on the validation set where there is one.",
            show_default=False,
        ),
    ] = None,
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="Print the best values as `when:` of an ablation file.")
    ] = False,
    scale: ScaleOpt = None,
    sets: Sets = [],
    ablations: AblationsDir = ABLATIONS,
    root: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: Json = False,
) -> None:
    """Show the best draw of each row of an ablation with `search: random`, which tries the same draws for every row.

    Columns `of 1`, `of 2`, `of 4`, … are the best values of the first so many draws: whether more would help. A value
    marked `edge` is the least or greatest of those that were tried: a wider space may have a better one.

    The best values train fresh seeds where `--yaml` puts them into the ablation that is reported.

    Example: `cope-sweep best encodings_tuning --yaml`
    """
    from cope_sweep.config.checks import validation_metric
    from cope_sweep.read.tables.best import conditions, tuned_rows
    from cope_sweep.read.tables.runs import read_runs

    if as_yaml and as_json:
        raise UserError("--yaml and --json are two forms of the answer; leave one out")
    plan = load_plan(ablation, ablations, scale, sets)
    name = metric or validation_metric(plan.ablation, plan.runs)
    goals = {each.name: each.goal for each in plan.ablation.content.metrics}
    goal = goals.get(name, plan.ablation.content.primary_metric.goal)
    if unknown := next((run for run in plan.runs if name not in run.metrics), None):
        raise UserError(f"--metric {name}: the task {unknown.task.kind} has no such metric")
    found = tuned_rows(plan, read_runs(plan, open_store(root, index)), name, goal)
    if as_yaml:
        sys.stdout.write(conditions(found))
        return
    if as_json:
        print_json({"metric": name, "goal": goal, "rows": [_as_dict(each) for each in found]})
        return
    budgets = list(_budgets(len(found[0].draws)))
    table = grid("row", *(f"of {each}" for each in budgets), "best draw", "edge", "not ended")
    for each in found:
        cells = [each.name, *(_score(each, first) for first in budgets)]
        chosen = each.best()
        drawn = ", ".join(f"{key}={json.dumps(value)}" for key, value in chosen.values.items()) if chosen else ""
        table.add_row(*map(escaped, (*cells, drawn, ", ".join(each.at_edge), each.missing or "")))
    console = make_console()
    console.print(table)
    console.print(escaped(f"{name}, mean over seeds {plan.ablation.content.seeds}, {goal} is best"), highlight=False)


def _budgets(draws: int) -> Iterator[int]:
    """1, 2, 4, … and the number of draws."""
    number = 1
    while number < draws:
        yield number
        number *= 2
    yield draws


def _score(row: Tuned, first: int) -> str:
    found = row.best(first)
    return "" if found is None else f"{found.score:.4g}"


def _as_dict(row: Tuned) -> dict[str, Any]:
    def plain(draw: Any) -> dict[str, Any] | None:
        return None if draw is None else {"values": dict(draw.values), "score": draw.score}

    return {
        "labels": dict(row.labels),
        "best": plain(row.best()),
        "at_edge": list(row.at_edge),
        "not_ended": row.missing,
        "draws": [plain(draw) for draw in row.draws],
    }
