"""The command `sync`: sends to MLflow what it lacks of the store."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from cope_sweep.cli.options import STORE, IndexOpt, Json, StoreOpt, open_store
from cope_sweep.cli.output import escaped, make_console, print_json
from cope_sweep.cli.run_commands import MlflowOpt
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from cope_sweep.store import Store
    from cope_sweep.store.mlflow_mirror import MirrorReport


def sync(
    mlflow: MlflowOpt = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show how much would be sent.")] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds to wait for an MLflow server that does not answer.")
    ] = 60.0,
    root: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: Json = False,
) -> None:
    """Send to MLflow the runs and sweeps of the store that it does not have, or not as they are now.

    `run` does this while it trains. What is missing afterwards, because MLflow did not answer or a process was killed,
    is sent by this command. Nothing is sent twice.

    Exit codes: 0 MLflow has everything, 1 something is left, 2 bad input.

    Example: `cope-sweep sync`

    Example: `cope-sweep sync --mlflow http://mlflow.example:5000`
    """
    from cope_sweep.store.mlflow_mirror import MirrorReport
    from cope_sweep.store.preflight import check, redacted, resolve_uri
    from cope_sweep.store.tracker_sync import backlog_count
    from cope_sweep.store.tracking import TrackingError

    store = open_store(root, index)
    if not store.root.is_dir():
        raise UserError(f"no store in {store.location}; choose the folder with --store")
    uri = resolve_uri(store, mlflow)
    store.settle()
    before = backlog_count(store, uri)
    console = make_console()
    if dry_run or not before:
        if as_json:
            print_json({"uri": redacted(uri), "sent": 0, "left": before, "errors": []})
        elif before:
            console.print(f"{before} runs and sweeps are not in MLflow at {escaped(redacted(uri))} yet.")
        else:
            console.print(f"MLflow at {escaped(redacted(uri))} has everything.")
        raise typer.Exit(0)
    try:
        check(uri)
        report = _send(store, uri, before, timeout_s, silent=as_json)
    except TrackingError as error:
        if not uri.startswith("http"):
            raise
        report = MirrorReport(0, [str(error)], before)
    if as_json:
        sent = before - report.left
        print_json({"uri": redacted(uri), "sent": sent, "left": report.left, "errors": report.errors})
    else:
        console.print(f"Sent {before - report.left} of {before} runs and sweeps to {escaped(redacted(uri))}.")
        for reason in report.errors:
            make_console(stderr=True).print(f"[yellow]not sent:[/yellow] {escaped(reason)}", soft_wrap=True)
    raise typer.Exit(1 if report.errors else 0)


def _send(store: Store, uri: str, total: int, timeout_s: float, *, silent: bool) -> MirrorReport:
    """Send the backlog, and show a progress bar on standard error; give up after `timeout_s` without progress."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from cope_sweep.store.mirror_session import RETRY_INTERVAL_S, MirrorSession
    from cope_sweep.store.mlflow_mirror import report_of

    columns = (TextColumn("sending to MLflow"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=make_console(stderr=True), disable=silent)
    with bar, MirrorSession(store, uri) as session:
        task = bar.add_task("", total=total)

        def on_progress(done: int, left: int) -> None:
            bar.update(task, total=max(total, left), completed=max(total, left) - left)

        tries = max(1, round(timeout_s / RETRY_INTERVAL_S))
        complete = session.sync_until(math.inf, tries=tries, on_progress=on_progress)
        if complete:
            bar.update(task, completed=total)
        return report_of(session, complete=complete)
