"""The commands `stop`, `logs` and `prune`: they work from any machine that reaches the store."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cope_sweep.api.questions import GetLog
from cope_sweep.cli.options import ABLATIONS, STORE, AblationsDir, IndexOpt, Json, StoreOpt, open_store
from cope_sweep.cli.output import escaped, grid, make_console, print_json, print_table, size
from cope_sweep.cli.source import Source, argument, asks, option
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from cope_sweep.client import Client
    from cope_sweep.store import Store

POLL_INTERVAL_S = 0.5
DAY_S = 86400.0
TAIL_CHARACTERS = 2000
"""Number of characters of a shown log by which its end is found again."""
MAX_LINES = 10_000
"""Lines of a log that a service is asked for."""
RESUMED_STATUSES = ("finished", "stopped", "failed", "interrupted")


@asks(None)
def stop(
    sweep: Annotated[
        str, typer.Argument(metavar="SWEEP", help="Id of a sweep, as `cope-sweep status` lists them; `all`: every one.")
    ],
    source: Source,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the sweep has ended.")] = True,
    timeout_s: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="How long to wait.")] = 120.0,
    as_json: Json = False,
) -> None:
    """Stop a sweep on whatever machine it runs: its runs write checkpoints, and the same `run` command continues.

    Exit codes: 0 stopped, 1 not stopped within the timeout, 2 no such sweep.

    Example: `cope-sweep stop 20261121-101500-3f2a`
    """
    sweeps = RemoteSweeps(source.client) if source.client else StoreSweeps(source.store)
    active = sweeps.active()
    if sweep != "all" and sweep not in active:
        sweeps.check(sweep)
    wanted = active if sweep == "all" else active & {sweep}
    for each in wanted:
        sweeps.stop(each)
    until = time.monotonic() + timeout_s
    while wait and (left := sweeps.active() & wanted) and time.monotonic() < until:
        time.sleep(POLL_INTERVAL_S)
    left = sweeps.active() & wanted if wait else set()
    if as_json:
        print_json({"stopped": sorted(wanted - left), "running": sorted(left)})
    else:
        console = make_console()
        if not wanted:
            console.print("nothing to stop: the sweep has ended" if sweep != "all" else "no sweep is running")
        for each in sorted(wanted):
            state = f"still running after {timeout_s:g} s" if each in left else "stopped" if wait else "asked to stop"
            console.print(escaped(f"{each}: {state}"))
    raise typer.Exit(1 if left else 0)


class StoreSweeps:
    """The sweeps of a store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def active(self) -> set[str]:
        """The sweeps that were submitted or are executed."""
        from cope_sweep.read.queries.progress import ACTIVE

        return {each.sweep_id for each in self.store.index.sweeps() if each.status in ACTIVE}

    def check(self, sweep_id: str) -> None:
        """Raise UserError for an unknown sweep."""
        if self.store.index.sweep(sweep_id) is None:
            raise UserError(f"no sweep {sweep_id!r} in the store {self.store.root}; `cope-sweep status` lists them")

    def stop(self, sweep_id: str) -> None:
        """Ask a sweep to end."""
        self.store.request_stop(sweep_id)


class RemoteSweeps:
    """The sweeps of a service."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def active(self) -> set[str]:
        """The newest sweeps that were submitted or are executed."""
        from cope_sweep.read.queries.progress import ACTIVE

        return {each.sweep_id for each in self.client.sweep_page(limit=1000).sweeps if each.status in ACTIVE}

    def check(self, sweep_id: str) -> None:
        """Raise UserError for an unknown sweep."""
        self.client.sweep(sweep_id)

    def stop(self, sweep_id: str) -> None:
        """Ask a sweep to end."""
        self.client.stop(sweep_id)


@asks(
    GetLog, run_id=argument(metavar="RUN"),
    tail=option("--tail", kind=int | None, default=None, help="Only so many lines from the end; with --json 200."),
)  # fmt: skip
def logs(
    question: GetLog,
    source: Source,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    as_json: Json = False,
) -> None:
    """Print the log of a run: its attempts, evaluations, and errors with their tracebacks.

    Example: `cope-sweep logs 95199d1142de555d --follow`

    Example: `cope-sweep logs 95199d1142de555d --tail 20 --json`
    """
    if as_json and follow:
        raise UserError("--json is one document; leave out --follow")
    run, tail = source.run_id(question.run_id), question.tail
    if as_json:
        asked = GetLog(run) if tail is None else question
        print_json(source.ask(asked).model_dump())
        return
    read = _remote_log(source.client, run) if source.client else _log(source.store, run)
    shown = ""
    for turn in itertools.count():
        text, running = read()
        if turn == 0 and not text and not running:
            raise UserError(f"run {run} has no log: it was trained by an older version")
        if turn == 0 and tail is not None:
            lines = text.splitlines(keepends=True)
            shown = "".join(lines[: max(0, len(lines) - tail)])
        typer.echo(_new_part(text, shown), nl=False)
        shown = text
        if not follow or not running:
            return
        time.sleep(POLL_INTERVAL_S)


def _new_part(text: str, shown: str) -> str:
    """The new part of a log. A service sends only the end of a long one, which begins later each time."""
    if text.startswith(shown):
        return text[len(shown) :]
    end = shown[-TAIL_CHARACTERS:]
    found = text.rfind(end)
    return text if found < 0 else text[found + len(end) :]


def _log(store: Store, run: str) -> Callable[[], tuple[str, bool]]:
    """Reads the log of a run, and whether it is in training."""
    folder = store.run(run)
    if store.status(run) == "pending":
        raise UserError(f"run {run} was not begun in the store {store.root}; `cope-sweep plan ABLATION` lists the ids")

    def read() -> tuple[str, bool]:
        running = store.status(run) == "running"  # before the log, so that nothing of it is missed
        return folder.log_text(), running

    return read


def _remote_log(client: Client, run: str) -> Callable[[], tuple[str, bool]]:
    """Reads the end of the log of a run from a service, and whether it is in training."""

    def read() -> tuple[str, bool]:
        running = client.run(run, curve=False).status == "running"
        lines = client.logs(run, tail=MAX_LINES).lines
        return "".join(f"{line}\n" for line in lines), running

    return read


def prune(
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it, only show what would be deleted.")] = False,
    older_than: Annotated[
        float, typer.Option("--older-than", metavar="DAYS", min=0, help="Keep what was changed in these last days.")
    ] = 1.0,
    ended: Annotated[
        list[str],
        typer.Option(
            "--states",
            metavar="STATUS",
            help="Delete the training states of runs that are `finished`, `stopped`, `failed` or `interrupted`: they "
            "cannot be continued any more. May be repeated.",
            show_default=False,
        ),
    ] = [],
    orphans: Annotated[
        bool, typer.Option("--orphans", help="Delete runs that no ablation file has, at any scale.")
    ] = False,
    ablations: AblationsDir = ABLATIONS,
    root: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: Json = False,
) -> None:
    """Delete what nobody needs: temporary and damaged files, states of runs that ended, logs of old sweeps.

    Results, checkpoints and curves of runs are kept, except those of `--orphans`. Runs in training are not touched.

    Example: `cope-sweep prune --states stopped --older-than 7 --yes`
    """
    from cope_sweep.store.prune import delete, waste

    if unknown := [status for status in ended if status not in RESUMED_STATUSES]:
        raise UserError(f"--states {unknown[0]}: choose from {', '.join(RESUMED_STATUSES)}")
    store = open_store(root, index)
    if not store.root.is_dir():
        raise UserError(f"no store at {store.root}")
    store.end_expired()
    kept = _planned_runs(ablations) if orphans else None
    found = list(waste(store, older_than_s=older_than * DAY_S, statuses=ended, kept=kept))  # type: ignore[arg-type]
    total = sum(each.size_bytes for each in found)
    if yes:
        delete(store, found)
    if as_json:
        paths = [{"path": str(each.path), "reason": each.reason, "bytes": each.size_bytes} for each in found]
        print_json({"deleted": yes, "bytes": total, "found": paths})
        return
    table = grid("file", "reason", "size")
    for each in found:
        table.add_row(escaped(each.path.relative_to(store.root)), escaped(each.reason), size(each.size_bytes))
    console = make_console()
    if found:
        print_table(table)
    hint = "" if yes or not found else "; --yes deletes it"
    console.print(f"{size(total)} in {len(found)} files and folders {'deleted' if yes else 'can be deleted'}{hint}")


def _planned_runs(folder: Path) -> set[str]:
    """The ids of the runs of all ablations of a folder, at all scales. Raises UserError for a faulty file."""
    from cope_sweep.config import expand, load_ablation, with_overrides

    found: set[str] = set()
    paths = sorted(folder.glob("*.yaml"))
    if not paths:
        raise UserError(f"no ablation files (*.yaml) in {folder.absolute()}: all runs would be deleted")
    for path in paths:
        ablation = load_ablation(path)
        for scale in (None, *ablation.content.scales):
            found |= {run.run_id for run in expand(with_overrides(ablation, scale=scale)).runs}
    return found
