"""The commands that show runs and sweeps: status, runs and logs.

Questions about runs are made by `model_construct`: a path may be longer than the name of an ablation in a request.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from cope_sweep.api.ablations import RunCost
from cope_sweep.api.question import Scale, Sets
from cope_sweep.api.runs import (
    STATUS,
    Descending,
    ExportRuns,
    Filters,
    GetLog,
    GetRun,
    Limit,
    ListRuns,
    LoggedValues,
    OfAblation,
    Offset,
    OfSweep,
    RunDetail,
    RunsFormat,
    Search,
    SortRuns,
)
from cope_sweep.api.sweeps import GetSweep, ListSweeps, SweepMember
from cope_sweep.cli.options import (
    ABLATIONS,
    STORE,
    AblationsDir,
    IndexOpt,
    JsonOpt,
    RunStatus,
    StoreOpt,
    check_effect,
    conflict,
    is_on_command_line,
)
from cope_sweep.cli.output import escaped, grid, make_console, print_json, print_table, save, sweep_counts, with_columns
from cope_sweep.errors import NotFoundError, UserError
from cope_sweep.read.numbers import significant
from cope_sweep.terminal import visible

if TYPE_CHECKING:
    from cope_sweep.config import Plan
    from cope_sweep.read.queries import Queries
    from cope_sweep.store import RunRecord

MAX_SWEEPS = 100
"""Sweeps that `status` lists."""
SPEC = ("task.", "model.", "train.", "evaluate.")
"""Prefixes of the keys of a spec."""
POLL_INTERVAL_S = 0.5
MAX_SHOWN_ATTEMPTS = 5
"""The last attempts that `status RUN` shows."""
LOG_LINES = 200
"""Lines of a log in `--json`, unless `--tail` says how many."""


# -- status -----------------------------------------------------------------------------------------------------------


def status(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[ABLATION|RUN|SWEEP]",
            help="An ablation, or the id of a run or sweep. Default: the newest sweeps of this store.",
            show_default=False,
        ),
    ] = None,
    scale: Scale = None,
    sets: Sets = [],
    ablations: AblationsDir = ABLATIONS,
    store: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Show the status of sweeps and runs, and why runs failed or were stopped.

    Example: `cope-sweep status quickstart`

    Example: `cope-sweep status 95199d1142de555d`
    """
    from cope_sweep.cli.files import find_run_id, open_queries
    from cope_sweep.read.queries import check_no_values, plan_cost
    from cope_sweep.store import SWEEP_ID
    from cope_sweep.store.artifacts import RUN_ID
    from cope_sweep.store.index import IndexUnavailable

    queries = open_queries(store, index, ablations)
    with contextlib.suppress(IndexUnavailable):  # then they read as interrupted
        queries.store.end_expired()
    if target is None:
        check_no_values(scale, sets, "name it")
        _show_sweeps(queries, as_json=as_json)
        return
    name = find_run_id(queries, target, scale, sets)
    if RUN_ID.fullmatch(name):
        _show_run(queries, name, as_json=as_json)
    elif SWEEP_ID.fullmatch(name):
        check_no_values(scale, sets)
        _show_sweep(queries, name, as_json=as_json)
    else:
        planned = queries.planned(name, scale, sets)
        costs = plan_cost(planned, queries.store)
        if as_json:
            print_json(costs)
            return
        _print_runs(costs.runs)
        if not costs.finished:
            _print_other_values(queries, planned)


def _print_other_values(queries: Queries, plan: Plan) -> None:
    """Say which other values finished runs of the ablation have, if there are any."""
    if others := queries.other_values(plan):
        make_console().print(escaped(others), soft_wrap=True, highlight=False)


def _show_sweeps(queries: Queries, *, as_json: bool) -> None:
    from cope_sweep.cli.files import NamedFiles

    page = queries.ask(ListSweeps(limit=MAX_SWEEPS))
    oldest_first = page.sweeps[::-1]
    if as_json:
        print_json(oldest_first)
        return
    console = make_console()
    if not page.sweeps:
        console.print(
            escaped(f"no sweeps in the store {queries.store.location}; start one with: cope-sweep run quickstart")
        )
        return
    table = grid("sweep", "ablation", "values", "status", "executor", "runs")
    for sweep in oldest_first:
        values = NamedFiles.written(sweep.scale, sweep.sets)
        cells = (
            sweep.sweep_id,
            sweep.ablation,
            values,
            sweep.status,
            sweep.executor,
            sweep_counts(sweep),
        )
        table.add_row(*map(escaped, cells))
    if page.total > len(page.sweeps):
        console.print(f"the newest {len(page.sweeps)} of {page.total} sweeps:")
    print_table(with_columns(table, lambda column: column.header != "values" or any(column.cells)))


def _show_sweep(queries: Queries, sweep_id: str, *, as_json: bool) -> None:
    sweep = queries.ask(GetSweep(sweep_id=sweep_id))
    if as_json:
        print_json(sweep)
        return
    console = make_console()
    console.print(escaped(f"{sweep.sweep_id}: {sweep.ablation}, {sweep.status}, {sweep_counts(sweep)}"))
    if sweep.error is not None:
        console.print(f"[red]{escaped(sweep.error)}[/red]")
    for note in sweep.notes:
        console.print(escaped(note))
    _print_runs(sweep.members)
    if sweep.to_suggest:
        rows = "1 row is" if sweep.to_suggest == 1 else f"{sweep.to_suggest} rows are"
        console.print(f"{rows} not chosen yet: the search chooses by the results so far")


def _show_run(queries: Queries, run_id: str, *, as_json: bool) -> None:
    run = queries.ask(GetRun(run_id=run_id, curve=False))
    if not run.revision:
        raise NotFoundError(f"run {run_id} has not started: {run.row} of {run.ablations[0]}", run_id=run_id)
    if as_json:
        print_json(run.model_dump(exclude={"curve", "values"}))
        return
    console = make_console()
    style = "red" if run.status == "failed" else ""
    console.print(escaped(f"{run.run_id}: {run.status}, step {run.step} of {run.steps}"), style=style)
    if run.message:
        console.print(escaped(run.message), style=style)
    for title, text in _paragraphs(run):
        console.print(f"[bold]{title}[/bold]  {escaped(text)}", highlight=False)
    if run.metrics:
        table = grid("metric", "value")
        for name, value in run.metrics.items():
            table.add_row(escaped(name), _text(value))
        print_table(table)
    if run.failure is not None and run.failure.traceback:
        console.print(run.failure.traceback, style="red", markup=False, highlight=False)
    console.print(f"Log: cope-sweep logs {run.run_id}. All details: cope-sweep status {run.run_id} --json")


def _paragraphs(run: RunDetail) -> list[tuple[str, str]]:
    """What the store knows of a run, as titles and texts."""
    from cope_sweep.config.keys import flatten

    seed = "" if run.seed is None else f", seed {run.seed}"
    texts = {
        "row": f"{run.row}{seed}, in {', '.join(run.ablations)}" if run.row else "",
        "sweeps": ", ".join(run.sweeps),
        "worker": run.worker_id or "",
        "started": _time(run.created_ms),
        "last change": _time(run.updated_ms),
        "attempts": "; ".join(f"{attempt.began} {attempt.text}" for attempt in run.attempts[-MAX_SHOWN_ATTEMPTS:]),
        "MLflow": run.mlflow_url or "",
    }
    for section, content in (run.spec or {}).items():
        texts[section] = _listed(dict(flatten(content)) if isinstance(content, Mapping) else {})
    texts["facts"] = _listed(run.facts)
    return [(title, text) for title, text in texts.items() if text]


def _listed(values: Mapping[str, Any]) -> str:
    """`layers 2, dim 64`: numbers and texts by their names."""
    shown = {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str))}
    return ", ".join(f"{name} {_text(value)}" for name, value in shown.items())


def _time(time_ms: int | None) -> str:
    return "" if time_ms is None else f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _print_runs(runs: Iterable[RunCost | SweepMember]) -> None:
    runs = list(runs)
    table = grid("run", "row", "seed", "status", "step", "worker", "message")
    for run in runs:
        step = f"{run.step}/{run.steps}"
        texts = (run.message, run.reason if isinstance(run, SweepMember) else None)
        message = "; ".join(text for text in texts if text)
        cells = (run.run_id, run.row, run.seed, run.status, step, run.worker_id or "", message)
        table.add_row(*map(escaped, cells), style="red" if run.status == "failed" else "")
    print_table(table, ["worker"])


# -- runs -------------------------------------------------------------------------------------------------------------


ExportOpt = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="Export all matching runs with all their values: parquet, csv or json. Default: by the suffix of "
        "--output.",
    ),
]


def runs(
    context: typer.Context,
    conditions: Filters = [],
    search: Search = "",
    status: Annotated[list[RunStatus], *STATUS] = [],
    sweep: OfSweep = None,
    ablation: OfAblation = None,
    scale: Scale = None,
    sets: Sets = [],
    sort: SortRuns = None,
    descending: Descending = False,
    limit: Limit = 100,
    offset: Offset = 0,
    export: ExportOpt = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Export to this file.")] = None,
    curves: LoggedValues = False,
    ablations: AblationsDir = ABLATIONS,
    store: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """List the runs of the store, filtered and sorted by any of their values.

    The list shows the values that you filter and sort by, and those in which runs of the same row and seed differ.

    An export has one line for each run: its configuration by dotted keys, seed, sweeps, metrics, and facts such as
    versions and durations. It contains every matching run, however many there are.

    Example: `cope-sweep runs --filter "model.layers>=4" --sort in_dist/token_error`

    Example: `cope-sweep runs --status finished --filter "model.position=cope" -o runs.parquet`

    Example: `cope-sweep runs --sweep 20260730-120000-abcd --curves --format csv -o curves.csv`
    """
    from cope_sweep.cli.files import open_queries

    queries = open_queries(store, index, ablations)
    selected: dict[str, Any] = {
        "filter": conditions, "search": search, "status": list(map(str, status)), "sweep": sweep,
        "ablation": ablation, "scale": scale, "set": sets, "sort": sort, "descending": descending,
    }  # fmt: skip
    if export is not None or output is not None:
        typed = {name: is_on_command_line(context, name) or None for name in ("limit", "offset")}
        check_effect(typed, "is for lists: an export has all matching runs; leave it out")
        _export(queries, selected, export, output, curves=curves, as_json=as_json)
        return
    if curves:
        raise UserError(
            "--curves is for exports; name a file with --output FILE, or a format with --format",
            code="missing_option",
            option="--output",
        )
    page = queries.ask(ListRuns.model_construct(**selected, limit=limit, offset=offset))
    if as_json:
        print_json(page)
        return
    _print_page(queries, page.runs)
    if ablation is not None and all(run.status == "pending" for run in page.runs):
        _print_other_values(queries, queries.planned(ablation, scale, sets))
    if page.total > len(page.runs):
        shown = f"runs {offset + 1} to {offset + len(page.runs)}" if page.runs else "none"
        make_console().print(f"{shown} of {page.total}; use --limit and --offset to see others")


def _print_page(queries: Queries, shown: Sequence[RunRecord]) -> None:
    """Print runs with the values by which they were filtered and sorted, and those in which they differ."""
    differing = _distinguishing(queries, shown)
    values_of = {run.run_id: differing.get(run.run_id, {}) | run.values for run in shown}
    keys = dict.fromkeys(key for values in values_of.values() for key in values)
    columns = [key for key in keys if key not in ("status", "seed", "step")]
    table = grid("run", "ablation", "row", "seed", "status", "step", *columns, "message")
    for run in shown:
        start = (run.run_id, ", ".join(run.ablations), run.row or "", run.seed, run.status, f"{run.step}/{run.steps}")
        values = (_text(values_of[run.run_id].get(key)) for key in columns)
        style = "red" if run.status == "failed" else ""
        table.add_row(*map(escaped, (*start, *values, run.message or "")), style=style)
    left_out = print_table(table, ["step", "message", "ablation"])
    if "message" in left_out and any(run.message for run in shown):
        make_console().print("To see why a run failed: cope-sweep status RUN")


def _distinguishing(queries: Queries, shown: Sequence[RunRecord]) -> dict[str, dict[str, Any]]:
    """Run id → the values of its spec in which it differs from other runs of the same row and seed."""
    groups: dict[Any, list[str]] = {}
    for run in shown:
        groups.setdefault((*run.ablations, run.row, run.seed), []).append(run.run_id)
    groups = {key: run_ids for key, run_ids in groups.items() if len(run_ids) > 1}
    if not groups:
        return {}
    exported = queries.ask(ExportRuns(run=[run_id for run_ids in groups.values() for run_id in run_ids], format="json"))
    specs = {
        record["run_id"]: {key: value for key, value in record.items() if key.startswith(SPEC)}
        for record in json.loads(exported)
    }
    differing_values: dict[str, dict[str, Any]] = {}
    for run_ids in groups.values():
        specs_of_group = {
            run_id: specs[run_id] for run_id in run_ids if run_id in specs
        }  # others were deleted meanwhile
        keys = dict.fromkeys(key for spec in specs_of_group.values() for key in spec)
        differing = [key for key in keys if len({spec.get(key) for spec in specs_of_group.values()}) > 1]
        differing_values |= {
            run_id: {key: spec.get(key) for key in differing} for run_id, spec in specs_of_group.items()
        }
    return differing_values


def _export(
    queries: Queries, selected: dict[str, Any], name: str | None, output: Path | None, *, curves: bool, as_json: bool
) -> None:
    """Write all matching runs, or their curves, to a file or standard output, a few at a time."""
    if as_json and output is None:
        raise conflict(
            "--format prints the runs themselves; leave out --json, or name a file with --output", "--json", "--format"
        )
    chosen = name or (output.suffix.removeprefix(".") if output else "")
    if chosen not in get_args(RunsFormat):
        origin = f"--format {name}" if name else f"--output {output}: its suffix"
        raise UserError(
            f"{origin} is not a format of runs; choose one with --format: {', '.join(get_args(RunsFormat))}",
            code="unknown_format",
            allowed=list(get_args(RunsFormat)),
        )
    question = ExportRuns.model_construct(**selected, format=cast(RunsFormat, chosen), curves=curves)
    save(output, chosen, lambda file: queries.export(question, file))
    if as_json:
        print_json({"file": str(output), "format": chosen})
    elif output is not None:
        make_console().print(escaped(f"all matching {'logged values' if curves else 'runs'} are in {output}"))


def _text(value: object) -> str:
    if value is None:
        return ""
    return significant(value, 6) if isinstance(value, float) else str(value)


# -- logs -------------------------------------------------------------------------------------------------------------


def logs(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|SWEEP",
            help="Id of a run, or its first digits (at least four, unique in the store); ABLATION/ROW for the row's "
            "best finished run; or the id of a sweep.",
            show_default=False,
        ),
    ],
    tail: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=10_000,
            help=f"Print only this many lines from the end. Default: all; with --json: {LOG_LINES}.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing until the run or the sweep ends.")
    ] = False,
    scale: Scale = None,
    sets: Sets = [],
    ablations: AblationsDir = ABLATIONS,
    store: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Print the log of a run (attempts, evaluations, errors with their tracebacks), or the log of a sweep's driver.

    The log of a sweep says when and where its runs started and ended, and what else went wrong.

    Example: `cope-sweep logs 95199d1142de555d --follow`

    Example: `cope-sweep logs 95199d1142de555d --tail 20 --json`

    Example: `cope-sweep logs 20261124-101500-3f2a`
    """
    if as_json and follow:
        raise conflict("--json is one document; leave out --follow", "--json", "--follow")
    from cope_sweep.cli.files import find_one_run, open_queries
    from cope_sweep.read.queries import check_no_values
    from cope_sweep.store import SWEEP_ID

    queries = open_queries(store, index, ablations)
    is_sweep = SWEEP_ID.fullmatch(target) is not None
    if is_sweep:
        check_no_values(scale, sets)
    name = target if is_sweep else find_one_run(queries, target, scale, sets)
    read_log = partial(_read_sweep_log if is_sweep else _read_log, queries, name)
    if as_json:
        last = LOG_LINES if tail is None else tail
        if is_sweep:
            lines = read_log()[0].splitlines()
            shown = lines[-last:] if last else []
            print_json({"sweep_id": name, "lines": shown, "truncated": len(lines) > len(shown)})
        else:
            print_json(queries.ask(GetLog(run_id=name, tail=last)))
        return
    printed = 0
    for turn in itertools.count():
        text, running = read_log()
        if turn == 0 and not text and not running:
            kind = "sweep" if is_sweep else "run"
            raise UserError(
                f"{kind} {name} has no log: it was trained by an older version", code="no_log", **{f"{kind}_id": name}
            )
        if turn == 0 and tail is not None:
            lines = text.splitlines(keepends=True)
            printed = len("".join(lines[: max(0, len(lines) - tail)]))
        typer.echo(visible(text[printed:]), nl=False)
        printed = len(text)
        if not follow or not running:
            return
        time.sleep(POLL_INTERVAL_S)


def _read_sweep_log(queries: Queries, sweep_id: str) -> tuple[str, bool]:
    """The log of a sweep's driver, and whether the sweep is active. Raises NotFoundError for an unknown sweep."""
    from cope_sweep.redaction import redacted
    from cope_sweep.store import ACTIVE
    from cope_sweep.sweep.driver_log import driver_log_name

    status = queries.sweep_summary(sweep_id).status  # first: nothing of the log is missed
    content = queries.store.read(driver_log_name(sweep_id)) or b""
    return redacted(content.decode(errors="replace")), status in ACTIVE


def _read_log(queries: Queries, run_id: str) -> tuple[str, bool]:
    """The log of a run, and whether it is in training. Raises UserError for a run that has not started."""
    store = queries.store
    folder, status = store.run(run_id), store.status(run_id)  # status first: nothing of the log is missed
    if status == "pending":
        raise NotFoundError(
            f"run {run_id} has not started in the store {store.location}; `cope-sweep plan ABLATION` lists the ids",
            run_id=run_id,
        )
    return folder.log_text(), status == "running"
