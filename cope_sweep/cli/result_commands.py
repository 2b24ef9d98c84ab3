"""The commands `status` and `diff`: the state of sweeps and runs, and what differs between two."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from cope_sweep.api.questions import GetDiff, GetPlan, GetRun, GetSweep, ListSweeps
from cope_sweep.cli.options import SCALE, Json
from cope_sweep.cli.output import escaped, grid, make_console, print_json, print_table
from cope_sweep.cli.source import Source, argument, asks
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from cope_sweep.api.answers import Counts, RunCost, RunsDiff, SweepMember
    from cope_sweep.store import Store

MAX_SWEEPS = 100
"""Sweeps that `status` lists."""
BROKEN = ("failed", "damaged")


@asks(
    GetPlan, "sets", "ablations", scale=SCALE,
    name=argument(
        metavar="[ABLATION|RUN|SWEEP]",
        help="An ablation, or the id of a run or sweep. Default: the newest sweeps of this store.",
        default=None,
    ),
)  # fmt: skip
def status(question: GetPlan, source: Source, as_json: Json = False) -> None:
    """Show the status of sweeps and runs, and why runs failed, were stopped or are damaged.

    Example: `cope-sweep status quickstart`

    Example: `cope-sweep status 95199d1142de555d`
    """
    from cope_sweep.store.artifacts import RUN_ID
    from cope_sweep.store.index import IndexUnavailable
    from cope_sweep.store.sweeps import SWEEP_ID

    target: str | None = question.name and source.run_or_ablation(question.name)
    if not source.server:
        with contextlib.suppress(IndexUnavailable):  # then they read as interrupted
            source.store.end_expired()
    if target is None:
        _show_sweeps(source, as_json)
    elif RUN_ID.fullmatch(target):
        _show_run(source, target, as_json)
    elif SWEEP_ID.fullmatch(target):
        _show_sweep(source, target, as_json)
    else:
        found = source.ask(question)
        if as_json:
            print_json(found.model_dump())
        else:
            _print_runs(found.runs)


def _show_sweeps(source: Source, as_json: bool) -> None:
    page = source.ask(ListSweeps(limit=MAX_SWEEPS))
    oldest_first = page.sweeps[::-1]
    if as_json:
        print_json([sweep.model_dump() for sweep in oldest_first])
        return
    if not page.sweeps:
        make_console().print(f"no sweep in {source.location}; start one with: cope-sweep run quickstart")
        return
    table = grid("sweep", "ablation", "status", "executor", "runs")
    for sweep in oldest_first:
        cells = (sweep.sweep_id, sweep.ablation, sweep.status, sweep.executor, _counts_text(sweep.counts))
        table.add_row(*map(escaped, cells))
    console = make_console()
    if page.total > len(page.sweeps):
        console.print(f"the newest {len(page.sweeps)} of {page.total} sweeps:")
    print_table(table)
    if not source.server:
        _print_backlog(console, source.store)


def _print_backlog(console: Console, store: Store) -> None:
    """Say how much MLflow lacks, if the store is copied to one."""
    from cope_sweep.store.index.database import redacted
    from cope_sweep.tracking.sync import backlog_count
    from cope_sweep.tracking.uri import resolve_uri

    if "MLFLOW_TRACKING_URI" not in os.environ and not (store.root / "mlflow.db").exists():
        return
    uri = resolve_uri(store)
    if left := backlog_count(store, uri):
        text = f"MLflow at {redacted(uri)} lacks {left} runs and sweeps; `cope-sweep sync` sends them."
        console.print(escaped(text), style="yellow", soft_wrap=True)


def _show_sweep(source: Source, sweep_id: str, as_json: bool) -> None:
    sweep = source.ask(GetSweep(sweep_id))
    if as_json:
        print_json(sweep.model_dump())
        return
    console = make_console()
    console.print(escaped(f"{sweep.sweep_id}: {sweep.ablation}, {sweep.status}, {_counts_text(sweep.counts)}"))
    if sweep.error is not None:
        console.print(f"[red]{escaped(sweep.error)}[/red]")
    for note in sweep.notes:
        console.print(escaped(note))
    _print_runs(sweep.members)


def _show_run(source: Source, run_id: str, as_json: bool) -> None:
    run = source.ask(GetRun(run_id, curve=False))
    if run.state.get("status") is None and run.status == "pending":
        raise UserError(f"no run {run_id} in {source.location}; `cope-sweep plan ABLATION` lists the ids")
    document = run.model_dump(exclude={"curve", "values"})
    if as_json:
        print_json(document)
        return
    document["state"].pop("traceback", None)
    traceback = (document["failure"] or {}).pop("traceback", None)
    console = make_console()
    console.print_json(json.dumps(document))
    if traceback:
        console.print(traceback, style="red", markup=False, highlight=False)


def _print_runs(runs: Iterable[RunCost | SweepMember]) -> None:
    runs = list(runs)
    shapes = [getattr(run, "resources", "") for run in runs]
    shown = len(set(shapes)) > 1
    table = grid("run", "row", "seed", "status", "step", *["resources"] * shown, "worker", "message")
    for run, shape in zip(runs, shapes, strict=True):
        step = f"{run.step}/{run.steps}"
        cells = (run.run_id, run.row, run.seed, run.status, step, *[shape] * shown)
        cells += (run.worker_id or "", run.message or "")
        table.add_row(*map(escaped, cells), style="red" if run.status in BROKEN else "")
    print_table(table, ["worker", "resources"])


def _counts_text(counts: Counts) -> str:
    """`3 finished, 1 failed`."""
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items(), key=lambda each: -each[1]))


SIDE = argument(metavar="RUN|SWEEP")


@asks(GetDiff, left=SIDE, right=SIDE)
def diff(question: GetDiff, source: Source, as_json: Json = False) -> None:
    """Show what differs between two runs or two sweeps: values of their specs, facts, and metrics with a test.

    The metrics of two sweeps are compared row by row, over the finished runs, by exact permutation tests; p is
    corrected for all metrics shown (Holm). Differences are right minus left.

    Example: `cope-sweep diff 95199d1142de555d 0c51a9e3f6d2b874`

    Example: `cope-sweep diff 20260730-120000-abcd 20260731-090000-1234 --json`
    """
    found = source.ask(question)
    if as_json:
        print_json(found.model_dump())
    else:
        _print_diff(found)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _print_diff(found: RunsDiff) -> None:
    console = make_console()
    for name, total, finished in zip((found.left, found.right), found.runs, found.finished, strict=True):
        console.print(escaped(f"{name}: {finished} of {total} runs finished"))
    for title, changes in (("spec", found.spec), ("fact", found.facts)):
        table = grid(title, "left", "right")
        for change in changes:
            table.add_row(*(escaped("–" if text is None else text) for text in (change.key, change.left, change.right)))
        print_table(table) if changes else console.print(f"the same {title}s")
    table = grid("row", "metric", "left", "right", "difference", "interval (95 %)", "p (Holm)", "runs")
    for each in found.metrics:
        test = each.difference
        interval = "" if test.ci_low is None else f"{test.ci_low:+.4g} … {test.ci_high:+.4g}"
        numbers = (
            *(_number(value, ".6g") for value in (each.left, each.right)),
            _number(test.difference, "+.4g"),
            interval,
            _number(each.p_adjusted, ".3g"),
        )
        table.add_row(*map(escaped, (each.row, each.metric, *numbers, f"{test.n[0]}, {test.n[1]}")))
    print_table(table) if found.metrics else console.print("no metric that both have")
    for side, rows in (("left", found.only_left), ("right", found.only_right)):
        if rows:
            console.print(escaped(f"rows of the {side} sweep only: {', '.join(rows)}"))
