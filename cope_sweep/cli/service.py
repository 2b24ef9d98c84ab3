"""Sweeps that a service executes, for the command `submit --server`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer

from cope_sweep.api.question import API
from cope_sweep.api.sweeps import SweepState
from cope_sweep.cli.output import counts_text, duration, escaped, make_console, print_json, print_steps
from cope_sweep.cli.progress import LINE_INTERVAL_S
from cope_sweep.client import KEY_VARIABLE, Client
from cope_sweep.config.loading import names_a_file
from cope_sweep.errors import UserError, counted
from cope_sweep.store import SweepProgress

EXIT_CODES = {"finished": 0, "failed": 1, "interrupted": 130}
"""Exit codes by the status of a sweep at its end."""


def submit_to_service(
    server: str,
    ablation: str,
    scale: str | None,
    sets: Sequence[str],
    limits: dict[str, Any],
    *,
    follow: bool,
    as_json: bool,
) -> None:
    """Submit an ablation to a service: one that it knows, or a file here, whose text is sent.

    With `follow`, its progress is shown, and the command exits with the sweep's code. `limits` are the fields of a
    `Budget`. Raises UserError.
    """
    with Client(server) as client:
        state = client.submit(**_named(ablation), scale=scale, set=list(sets), **limits)
        if follow:
            _show_progress(client, state, as_json=as_json)
        elif as_json:
            print_json(state)
        else:
            console = make_console()
            console.print(escaped(f"sweep {state.sweep_id}: {state.runs} runs, {state.status}"))
            curl = 'curl -H "Authorization: Bearer $COPE_SWEEP_KEY"' if os.environ.get(KEY_VARIABLE) else "curl"
            url = f"{server.rstrip('/')}{API}/sweeps/{state.sweep_id}"
            steps = [(f"{curl} {url}", "shows its progress"), (f"{curl} -N {url}/events", "follows its progress")]
            stop = (f"{curl} -X POST {url}/stop", "stops it; runs write checkpoints first")
            print_steps(console, [*steps, stop])


def _named(ablation: str) -> dict[str, Any]:
    """The fields of a request for an ablation: a name that the service knows, or the text of a file here."""
    if not names_a_file(ablation):
        return {"ablation": ablation}
    path = Path(ablation)
    try:
        return {"name": path.stem, "spec": path.read_text(encoding="utf-8-sig")}
    except (OSError, UnicodeDecodeError) as error:
        code = "no_such_file" if isinstance(error, FileNotFoundError) else "unreadable_file"
        raise UserError(f"{path}: {error}", code=code, file=str(path)) from error


def _show_progress(client: Client, state: SweepState, *, as_json: bool) -> NoReturn:
    """Show the progress of a sweep of a service, and exit with the code of the sweep."""
    end = _followed(client, state.sweep_id)
    if as_json:
        print_json({"sweep": end})
    else:
        console = make_console()
        console.print(escaped(f"sweep {end.sweep_id}: {end.status}"))
        for failure in end.failures:
            console.print(
                escaped(f"{failure.run_id} {failure.row}: {failure.message or 'failed'}"), style="red", soft_wrap=True
            )
    raise typer.Exit(EXIT_CODES.get(end.status, 1))


def _followed(client: Client, sweep_id: str) -> SweepProgress:
    """The progress of a sweep at its end. Lines on standard error show it. Ctrl-C stops the sweep."""
    console = make_console(stderr=True)
    console.print(escaped(f"sweep {sweep_id}; Ctrl-C stops it"), style="dim")
    shown: object = None
    shown_s = -math.inf
    while True:
        try:
            for progress in client.events(sweep_id):
                key = (progress.status, progress.counts)
                if key != shown or time.monotonic() - shown_s > LINE_INTERVAL_S:
                    console.print(escaped(_line(progress)), highlight=False, soft_wrap=True)
                    shown, shown_s = key, time.monotonic()
            return progress
        except KeyboardInterrupt:
            console.print("stopping the sweep; runs write checkpoints first")
            client.stop(sweep_id)


def _line(progress: SweepProgress) -> str:
    """`3 finished, 1 running; 2 worker groups on 1 machine; 120 steps/s; about 3 min 20 s left`."""
    parts = [counts_text(progress.counts) or progress.status]
    if progress.groups:
        machines = f" on {counted(progress.nodes, 'machine')}" if progress.nodes else ""
        parts.append(f"{counted(progress.groups, 'worker group')}{machines}")
    if progress.steps_per_s:
        parts.append(f"{progress.steps_per_s:.3g} steps/s")
    if progress.eta_s is not None:
        parts.append(f"about {duration(progress.eta_s)} left")
    return "; ".join(parts)
