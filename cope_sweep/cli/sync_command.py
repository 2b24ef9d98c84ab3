"""The command `sync`: sends to MLflow what it lacks of the store."""

from __future__ import annotations

from typing import Annotated

import typer

from cope_sweep.cli.options import STORE, IndexOpt, Json, StoreOpt, open_store
from cope_sweep.cli.output import escaped, make_console, print_json
from cope_sweep.cli.run_commands import MlflowOpt
from cope_sweep.errors import UserError


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
    is sent by this command. Nothing is sent twice. Ctrl-C ends it after the run that is being sent.

    Exit codes: 0 MLflow has everything, 1 something is left, 2 bad input, 130 interrupted.

    Example: `cope-sweep sync`

    Example: `cope-sweep sync --mlflow http://mlflow.example:5000`
    """
    from cope_sweep.cli.sending import SendingBar, stopping
    from cope_sweep.store.index.database import redacted
    from cope_sweep.tracking.sync import RETRY_INTERVAL_S, MirrorReport, MirrorSession, backlog_count
    from cope_sweep.tracking.translate import TrackingError
    from cope_sweep.tracking.uri import check, resolve_uri

    store = open_store(root, index)
    if not store.root.is_dir():
        raise UserError(f"no store in {store.location}; choose the folder with --store")
    uri = resolve_uri(store, mlflow)
    store.end_expired()
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
    with stopping() as stop:
        try:
            check(uri)
            with MirrorSession(store, uri) as session, SendingBar(make_console(stderr=True), silent=as_json) as bar:
                tries = max(1, round(timeout_s / RETRY_INTERVAL_S))
                report = session.send_all(tries=tries, interrupted=stop.is_set, on_sending=bar)
        except TrackingError as error:
            if not uri.startswith("http"):
                raise
            report = MirrorReport(0, [str(error)], before)
    sent = max(0, before - report.left)
    if as_json:
        print_json({"uri": redacted(uri), "sent": sent, "left": report.left, "errors": report.errors})
    else:
        console.print(f"Sent {sent} of {before} runs and sweeps to {escaped(redacted(uri))}.")
        hint = "; the same command sends the rest" if stop.is_set() else ""
        for reason in report.errors:
            make_console(stderr=True).print(f"[yellow]not sent:[/yellow] {escaped(reason + hint)}", soft_wrap=True)
    raise typer.Exit(0 if not report.errors else 130 if stop.is_set() else 1)
