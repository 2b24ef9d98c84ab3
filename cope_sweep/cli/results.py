"""The commands that compare runs and rows: diff, tried and best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cope_sweep.api.question import Committed, Scale, Sets
from cope_sweep.api.runs import DiffSide, GetDiff, ListTried, TriedFilters, TriedMetric
from cope_sweep.cli.options import (
    ABLATIONS,
    STORE,
    AblationArg,
    AblationsDir,
    IndexOpt,
    JsonOpt,
    StoreOpt,
    check_effect,
    conflict,
)
from cope_sweep.cli.output import escaped, grid, make_console, print_json, print_table, standard_output, with_columns
from cope_sweep.read.numbers import MISSING, significant

if TYPE_CHECKING:
    from cope_sweep.read.tables.best import Candidate, Group


# -- diff -------------------------------------------------------------------------------------------------------------


DIFF_COLUMNS = {
    "difference": "right minus left",
    "interval": "95 % interval of the difference",
    "p": "from an exact permutation test, corrected for all metrics here (Holm)",
    "runs": "finished runs, left and right",
}
"""Column → its meaning."""


def diff(
    left: DiffSide,
    right: DiffSide,
    scale: Scale = None,
    sets: Sets = [],
    ablations: AblationsDir = ABLATIONS,
    store: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Show what differs between two runs or two sweeps: values of their specs, facts, and metrics with a test.

    The metrics of two sweeps are compared row by row, over the finished runs.

    Example: `cope-sweep diff 95199d1142de555d 0c51a9e3f6d2b874`

    Example: `cope-sweep diff quickstart/CoPE quickstart/RoPE --set train.steps=100`

    Example: `cope-sweep diff 20260730-120000-abcd 20260731-090000-1234 --json`
    """
    from cope_sweep.cli.files import open_queries

    question = GetDiff(left=left, right=right, scale=scale, set=sets)
    comparison = open_queries(store, index, ablations).ask(question)
    if as_json:
        print_json(comparison)
        return
    console = make_console()
    for name, total, finished in zip(
        (comparison.left, comparison.right), comparison.runs, comparison.finished, strict=True
    ):
        console.print(escaped(f"{name}: {finished} of {total} runs finished"))
    for title, changes in (("spec", comparison.spec), ("fact", comparison.facts)):
        table = grid(title, "left", "right")
        for change in changes:
            table.add_row(*(escaped("–" if text is None else text) for text in (change.key, change.left, change.right)))
        print_table(table) if changes else console.print(f"no {title} differs")
    table = grid("row", "metric", "left", "right", "difference", "interval", "p", "runs")
    for metric in comparison.metrics:
        test = metric.difference
        ends = (significant(end, signed=True) for end in (test.ci_low, test.ci_high) if end is not None)
        values = ((metric.left, 6), (metric.right, 6), (metric.p_adjusted, 3))
        left_text, right_text, p = ("" if value is None else significant(value, digits) for value, digits in values)
        difference = "" if test.difference is None else significant(test.difference, signed=True)
        numbers = (left_text, right_text, difference, " … ".join(ends), p)
        table.add_row(*map(escaped, (metric.row, metric.metric, *numbers, f"{test.n[0]}, {test.n[1]}")))
    if comparison.metrics:
        for column in table.columns:
            column.no_wrap = column.header != "row"
        table = with_columns(table, lambda column: any(column.cells))  # two runs have no row and no p
        print_table(table)
        names = {column.header for column in table.columns}
        explained = (f"{name}: {meaning}" for name, meaning in DIFF_COLUMNS.items() if name in names)
        console.print("; ".join(explained), style="dim", highlight=False)
    else:
        console.print("no metric in common")
    for side, rows in (("left", comparison.only_left), ("right", comparison.only_right)):
        if rows:
            console.print(escaped(f"rows of the {side} sweep only: {', '.join(rows)}"))


# -- tried ------------------------------------------------------------------------------------------------------------


def tried(
    values: Annotated[str, typer.Argument(metavar="KEY=VALUE,VALUE", help="A key and its values; a key alone: all.")],
    conditions: TriedFilters = [],
    metric: TriedMetric = None,
    limit: Annotated[int, typer.Option(help="Maximum number of groups.", min=1, max=1000)] = 50,
    committed: Committed = False,
    ablations: AblationsDir = ABLATIONS,
    store: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Show what was already tried: all runs with some values of a key, in whichever ablation.

    Runs are grouped by the settings that differ otherwise: a group has the mean ± standard deviation and the number of
    seeds of each value. It is an overview and no test; `table --compare` tests.

    Example: `cope-sweep tried model.position=cope,rope --filter task.kind=flip_flop`

    Example: `cope-sweep tried train.lr --filter model.position=cope --metric in_dist/token_error`
    """
    from cope_sweep.cli.files import open_queries
    from cope_sweep.config.keys import short_names

    question = ListTried.model_construct(values=values, filter=conditions, metric=metric, offset=0, limit=limit)
    answer = open_queries(store, index, ablations, committed=committed).ask(question)
    if as_json:
        print_json(answer)
        return
    console = make_console()
    if not answer.groups:
        console.print(
            escaped("No run matches. `cope-sweep runs` lists all; conditions are written as in its --filter.")
        )
        return
    table = grid(answer.key, answer.metric or "metric", "ablations", "settings that differ")
    names = {name for group in answer.groups for name in group.settings}
    short = short_names(names)
    above: dict[str, str] = {}
    for group in answer.groups:
        # Of runs of many ablations dozens of settings differ: a group shows those that differ from the group above.
        new = {name: value for name, value in group.settings.items() if above.get(name) != value}
        new = new or dict.fromkeys(sorted(above.keys() - group.settings.keys()), MISSING)
        settings = ", ".join(f"{short[name]}={value}" for name, value in new.items())
        are_more = bool(above.items() & group.settings.items())
        first, above = [", ".join(group.ablations), f"… {settings}" if are_more else settings], group.settings
        for each in group.values:
            unfinished = f" +{each.unfinished}" if each.unfinished else ""
            table.add_row(*map(escaped, (each.value, each.text + unfinished, *first)))
            first = ["", ""]
        table.add_section()
    print_table(table)
    shown = f"{answer.metric}: mean ± standard deviation (finished seeds); +: runs that are not finished; …: as above"
    console.print(escaped(f"{answer.runs:,} runs. {shown}"), style="dim", soft_wrap=True, highlight=False)
    if answer.next is not None:
        console.print(escaped(f"{answer.total - len(answer.groups):,} more groups: --limit, or --filter"), style="dim")


# -- best -------------------------------------------------------------------------------------------------------------


TOP = 10
"""Rows of the table of `best`."""


def best(
    ablation: AblationArg,
    scale: Scale = None,
    sets: Sets = [],
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            "-m",
            help="Compare rows by this metric. Default: what the search optimises, or else the primary metric, on the "
            "validation set if there is one.",
        ),
    ] = None,
    top: Annotated[
        int | None, typer.Option(min=1, help=f"Show only the best rows. Default: {TOP}; with --json: all.")
    ] = None,
    as_yaml: Annotated[
        bool,
        typer.Option(
            "--yaml",
            help="Print YAML to paste into your ablation: a scale that trains the best row with new seeds, so that the "
            "seeds of the search are not reported; after a random search in a grid, `when:` entries with the best "
            "values of each row.",
        ),
    ] = False,
    ablations: AblationsDir = ABLATIONS,
    store: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Show the best rows of an ablation by its primary metric: after an Optuna search, random draws, or a grid.

    Rows are ranked by the mean over their seeds, once all seeds are finished.

    A random search tries the same draws for every row of its grid, so each row has a line. Columns `of 1`, `of 2`,
    `of 4`, … show the best value of the first 1, 2, 4, … draws: if they still improve, more draws may help. A value
    marked `edge` is the smallest or largest that was tried: a wider space may have a better one. Values of a search's
    `choice` are not marked.

    Example: `cope-sweep best axes --top 5`

    Example: `cope-sweep best encodings_tuning --scale small --yaml`
    """
    if as_yaml and as_json:
        raise conflict("--yaml and --json both set the format; leave one out", "--yaml", "--json")
    from cope_sweep.cli.files import open_queries
    from cope_sweep.read.tables.best import rank_rows, yaml_of_best
    from cope_sweep.store.index.database import sqlite_url
    from cope_sweep.store.store import STUDY_FILE

    queries = open_queries(store, index, ablations)
    results = queries.results(ablation, scale, sets)
    planned, opened = results.plan, results.store
    ranking = rank_rows(results, metric)
    if as_yaml or (len(ranking.groups) > 1 and not as_json):
        check_effect({"top": top}, "is for rows of a table or of --json; leave it out")
    if as_yaml:
        standard_output().write(yaml_of_best(ranking))
        return
    if as_json:
        print_json({"metric": ranking.metric, "goal": ranking.goal, "seeds": ranking.seeds,
                    "rows": [_as_dict(group, top) for group in ranking.groups]})  # fmt: skip
        return
    layout = ranking.layout(top or TOP)
    table = grid(*(header.text for header in layout.headers))
    for cells in layout.rows:
        table.add_row(*(escaped(cell.text) for cell in cells))
    print_table(table)
    notes = [layout.note]
    if not ranking.answer:
        notes.append(f"No row is finished yet; train with: {results.training}")
    if planned.search and (opened.root / STUDY_FILE).exists():
        notes.append(f"Open the study in Optuna's dashboard: optuna-dashboard {sqlite_url(opened.root / STUDY_FILE)}")
    for note in notes:
        make_console().print(escaped(note), style="dim", soft_wrap=True, highlight=False)


def _as_dict(group: Group, top: int | None) -> dict[str, Any]:
    """A group of rows as JSON: all in the order of the plan, or the `top` best."""
    shown = group.candidates if top is None else group.ranked()[:top]

    def plain(candidate: Candidate | None) -> dict[str, Any] | None:
        if candidate is None:
            return None
        run_ids = [run.run_id for run in candidate.row.runs]
        return {
            "row": candidate.row.name, "values": dict(candidate.values), "score": candidate.score, "run_ids": run_ids,
        }  # fmt: skip

    return {
        "labels": dict(group.labels),
        "best": plain(group.best()),
        "at_edge": list(group.at_edge),
        "not_ended": group.missing,
        "draws": [plain(candidate) for candidate in shown],
    }
