"""Sweeps that a service executes: submitted with `--server`, and followed to their end."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from cope_sweep.cli.output import duration, escaped, make_console, print_json
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from cope_sweep.api.answers import SweepProgress
    from cope_sweep.client import Client

PROGRESS_INTERVAL_S = 10.0
"""Between two lines about a sweep in which no run has begun or ended."""
EXIT_CODES = {"finished": 0, "failed": 1, "interrupted": 130}
"""Exit codes by the status of a sweep at its end."""


def submit_remotely(
    client: Client,
    ablation: str,
    *,
    sets: list[str],
    follow: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Submit a sweep to a service, show its progress and exit with the code of the sweep.

    `ablation` is a name that the service knows, or the path of a file, whose text is sent. `options` are fields of a
    `SweepRequest`; None: not given.
    """
    path = Path(ablation)
    body: dict[str, Any] = {"ablation": ablation}
    if path.suffix in (".yaml", ".yml") or path.is_file():
        try:
            body = {"name": path.stem, "spec": path.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: {error}") from error
    with client:
        state = client.submit(**body, set=sets, **{name: value for name, value in options.items() if value is not None})
        if not follow:
            if as_json:
                print_json(state.model_dump())
            else:
                make_console().print(escaped(f"sweep {state.sweep_id}: {state.runs} runs, {state.status}"))
            return
        end = _followed(client, state.sweep_id)
        table = client.sweep(state.sweep_id).table
    if as_json:
        print_json({"sweep": end.model_dump(), "table": (table or {}).get("json")})
    else:
        console = make_console()
        if table is not None:
            console.print(table["markdown"], markup=False, highlight=False, soft_wrap=True)
        console.print(escaped(f"sweep {end.sweep_id}: {end.status}"))
        for each in end.failures:
            console.print(escaped(f"{each.run_id} {each.row}: {each.message or 'failed'}"), style="red", soft_wrap=True)
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
                if key != shown or time.monotonic() - shown_s > PROGRESS_INTERVAL_S:
                    console.print(escaped(_line(progress)), highlight=False, soft_wrap=True)
                    shown, shown_s = key, time.monotonic()
            return progress
        except KeyboardInterrupt:
            console.print("stopping the sweep: its runs write checkpoints first")
            client.stop(sweep_id)


def _line(progress: SweepProgress) -> str:
    """`3 finished, 1 running; 2 worker groups on 1 machine; 120 steps/s; about 3 min 20 s left`."""
    counts = sorted(progress.counts.items(), key=lambda each: -each[1])
    parts = [", ".join(f"{number} {status}" for status, number in counts) or progress.status]
    if progress.groups:
        machines = f" on {progress.nodes} machine{'s' * (progress.nodes != 1)}" if progress.nodes else ""
        parts.append(f"{progress.groups} worker group{'s' * (progress.groups != 1)}{machines}")
    if progress.steps_per_s:
        parts.append(f"{progress.steps_per_s:.3g} steps/s")
    if progress.eta_s is not None:
        parts.append(f"about {duration(progress.eta_s)} left")
    return "; ".join(parts)
