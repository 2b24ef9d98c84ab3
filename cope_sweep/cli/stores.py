"""The commands about whole stores: `store check` and `copy`, `delete`, `prune`, and `sync` to MLflow."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cope_sweep.api.question import Scale, Sets
from cope_sweep.cli.options import (
    ABLATIONS,
    STORE,
    AblationArg,
    AblationsDir,
    IndexOpt,
    JsonOpt,
    MlflowOpt,
    PlainGroup,
    StoreOpt,
)
from cope_sweep.cli.output import DAY_S, escaped, grid, make_console, print_json, print_table, size, writing_to
from cope_sweep.errors import UserError, counted
from cope_sweep.terminal import visible

if TYPE_CHECKING:
    from cope_sweep.store import RunRecord, Store
    from cope_sweep.tracking.mlflow import MLflowLogger

DIFFERENT = 1
"""The exit code of `store check` if something differs or is damaged."""
RESUMED_STATUSES = ("stopped", "failed", "interrupted")

app = typer.Typer(
    cls=PlainGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Check a store for damage and repair it; copy results from one store to another.",
)


def _existing_store(store: str, index: str | None) -> Store:
    """The store that `--store` and `--index` name. Raises StoreError, and UserError where no store is."""
    from cope_sweep.cli.files import open_store

    opened = open_store(store, index)
    if opened.objects is None and not (opened.root / "runs").is_dir():
        raise UserError(
            f"{opened.root} is not a store: it has no folder `runs`; choose another with --store",
            code="no_store",
            store=str(opened.root),
        )
    return opened


@app.command()
def check(
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Also read curves and checkpoints, and compare their SHA-256.")
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Rename damaged files to `NAME.damaged`, and rebuild the index from the run folders. "
            "Then repeat `cope-sweep run` to train again what is lost.",
        ),
    ] = False,
    store: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Compare the index with the files, and say what is damaged and what to do.

    Runs in training are skipped.

    Exit codes: 0 nothing differs, 1 something does, or did before `--repair`.

    Example: `cope-sweep store check --checksums`

    Example: `cope-sweep store check --repair`
    """
    from cope_sweep.cli.progress import INDEXING, progress_bar
    from cope_sweep.store import damage

    opened = _existing_store(store, index)
    display = make_console(stderr=True)
    differences = damage.mend_index(opened) if repair else []
    opened.end_expired()
    with progress_bar(display, "checking runs") as on_progress:
        differences += damage.find_differences(opened, checksums=checksums, on_progress=on_progress)
    if repair and differences:
        with progress_bar(display, INDEXING) as on_progress:
            damage.repair(opened, differences, on_progress)
    if as_json:
        print_json([difference.__dict__ for difference in differences])
    else:
        console = make_console()
        for difference in differences:  # one line each, whatever the width of the terminal
            console.print(
                escaped(f"{difference.item}: {difference.problem}"), style="red", soft_wrap=True, highlight=False
            )
            if not repair:
                console.print(escaped(f"    {difference.way_out}"), soft_wrap=True, highlight=False)
        if repair and differences:
            console.print("The index is rebuilt. Repeat `cope-sweep run` to train again what is lost.")
        if not differences:
            console.print("the store is in order: nothing differs, nothing is damaged")
    raise typer.Exit(DIFFERENT if differences else 0)


@app.command()
def copy(
    ablation: AblationArg,
    to: Annotated[
        Path,
        typer.Option(
            "--to", metavar="DIR", help="A folder of results, as `cope-sweep report --out` writes it, or a new one."
        ),
    ],
    scale: Scale = None,
    sets: Sets = [],
    ablations: AblationsDir = ABLATIONS,
    store: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Copy an ablation's finished runs to a folder of results: with curves, measures of heads and provenance.

    Use it if the runs were trained in several stores. The folder's own finished runs stay as they are. It is an error
    if the ablation file no longer has all of them. Checkpoints are not copied. Afterwards, write the report again:
    `cope-sweep report ABLATION --store DIR --out DIR`.

    If `--store` is a folder of results, runs of any ablation in it are copied: name the same folder twice to bring the
    seeds of one configuration together.

    Example: `cope-sweep store copy flip_flop --scale small --store other/store --to ablations/results`

    Example: `cope-sweep store copy flip_flop --scale small --store ablations/results --to ablations/results`
    """
    from cope_sweep.cli.files import open_queries
    from cope_sweep.config.loading import option_words
    from cope_sweep.read.queries import recorded_plan
    from cope_sweep.read.reports.files import copy_runs, results_anywhere
    from cope_sweep.store import ParquetStore
    from cope_sweep.store.results_file import is_results

    queries, target = open_queries(store, index, ablations), ParquetStore(to)
    if to.exists() and any(to.iterdir()) and not is_results(to):
        raise UserError(
            f"{to} is not a folder of results; name one that `cope-sweep report --out` has written, or a new one",
            code="no_results",
            folder=str(to),
        )
    plan = recorded_plan(queries.load(ablation, scale, sets), target)  # with the `--set` of the results there
    with writing_to(to, "--to"):
        done = copy_runs(results_anywhere(plan, queries.store), target)
    if as_json:
        files = [str(to / path.name) for path in done.files]
        print_json({"files": files, "copied": done.copied, "finished": done.finished, "planned": done.planned})
        return
    text = f"{done.copied} runs copied; {to} has {done.finished} of {done.planned} finished runs of {plan.name}"
    if done.copied:
        named = [*(plan.ablation.typed or (plan.name,)), *option_words(plan.ablation.scale, ())]
        words = [*named, "--store", str(to), "--out", str(to)]
        text += f". Write its report again: cope-sweep report {shlex.join(words)}"
    make_console().print(escaped(text), soft_wrap=True, highlight=False)


def prune(
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it, only show what would go.")] = False,
    older_than: Annotated[
        float,
        typer.Option("--older-than", metavar="DAYS", min=0, help="Keep files that changed in the last DAYS days."),
    ] = 1.0,
    ended: Annotated[
        list[str],
        typer.Option(
            "--states",
            metavar="STATUS",
            help="Also delete the resume files of runs that are `stopped`, `failed` or `interrupted`: their next "
            "attempt starts at the first step. May be repeated.",
        ),
    ] = [],
    orphans: Annotated[
        bool,
        typer.Option(
            "--orphans",
            help="Also delete runs that no file in `--ablations` contains, at any scale: also those of files "
            "elsewhere. Runs of its searches and of `--set` stay.",
        ),
    ] = False,
    ablations: AblationsDir = ABLATIONS,
    store: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Free disk space: temporary and damaged files, old logs, resume files of finished runs. Options also delete resume
    files of other runs, or whole runs.

    It never touches runs in training. Results, checkpoints and curves stay, except with `--orphans`. Of a store in an
    object store, whole runs are deleted there, and everything else, also copies of checkpoints, on this machine only.

    Example: `cope-sweep prune --states stopped --older-than 7 --yes`
    """
    from cope_sweep.store.prune import delete, waste

    if unknown := [status for status in ended if status not in RESUMED_STATUSES]:
        raise UserError(
            f"--states {unknown[0]}: choose from {', '.join(RESUMED_STATUSES)}",
            code="invalid_option",
            option="--states",
            value=unknown[0],
            allowed=list(RESUMED_STATUSES),
        )
    opened = _existing_store(store, index)
    if opened.objects and ended:
        raise UserError(
            f"--states: the resume files of {opened.location} are in an object store, where prune deletes whole runs "
            "only; delete a run with `cope-sweep delete RUN`, or `runs/RUN/resume.safetensors` with the tools of that "
            "object store",
            code="invalid_option",
            option="--states",
            store=opened.location,
        )
    opened.end_expired()
    planned = _planned_runs(ablations, opened) if orphans else None
    items = list(waste(opened, older_than_s=older_than * DAY_S, statuses=ended, planned_runs=planned))  # type: ignore[arg-type]
    if yes:
        items = delete(opened, items)
    total = sum(item.size_bytes for item in items)
    paths = [{"path": str(item.path), "reason": item.reason, "bytes": item.size_bytes} for item in items]
    if as_json:
        print_json({"deleted": yes, "bytes": total, "found": paths})
        return
    table = grid("file", "reason", "size")
    for item in items:
        table.add_row(escaped(item.path.relative_to(opened.root)), escaped(item.reason), size(item.size_bytes))
    console = make_console()
    if items:
        print_table(table)
    hint = "" if yes or not items else "; add --yes to delete"
    console.print(f"{size(total)} in {len(items)} files and folders {'deleted' if yes else 'can be deleted'}{hint}")


def _planned_runs(folder: Path, store: Store) -> set[str]:
    """The ids of the runs of all ablations of a folder, at all scales. Raises UserError for a faulty file.

    Which runs a search or `--set` has added only the sweeps know: theirs are included.
    """
    from cope_sweep.config import expand, load_ablation, with_overrides
    from cope_sweep.config.loading import ablation_files
    from cope_sweep.config.source import DEFAULT_FOLDER, composed, packaged_ablations

    if folder == packaged_ablations():
        raise UserError(
            f"--orphans: there is no folder {DEFAULT_FOLDER} here, and runs that the installed files do not contain "
            "may be those of your own; name the folder of your files: --ablations FOLDER",
            code="invalid_option",
            option="--orphans",
        )
    run_ids, names, searched = set[str](), set[str](), set[str]()
    files = ablation_files(folder)
    if not files:
        raise UserError(
            f"no ablation files (*.yaml, *.yml) in {folder.absolute()}: all runs would be deleted",
            code="no_ablations",
            folder=str(folder.absolute()),
        )
    for file in files.values():
        ablation = load_ablation(file)
        for scale in (None, *ablation.content.scales):
            plan = expand(with_overrides(ablation, scale=scale))
            run_ids |= {run.run_id for run in plan.runs}
            names.add(composed(plan.name))
            if plan.search is not None:
                searched.add(composed(plan.name))
    sweeps = store.index.sweeps()
    sweep_ids = {sweep.sweep_id for sweep in sweeps if composed(sweep.ablation) in (names if sweep.sets else searched)}
    for sweep_id in sweep_ids:
        run_ids |= store.index.sweep_rows(sweep_id).keys()
    # Also those that a search has trained and its record has lost: the next sweep records them again.
    records = store.index.records(store.index.statuses(), values=False)
    return run_ids | {run_id for run_id, record in records.items() if record.sweep_id in sweep_ids}


def delete(
    names: Annotated[
        list[str], typer.Argument(metavar="RUN", help="Ids of runs, or their first digits: four or more.")
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    mlflow: MlflowOpt = None,
    no_mlflow: Annotated[bool, typer.Option("--no-mlflow", help="Leave MLflow as it is.")] = False,
    store: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Delete runs: their folders with curves and checkpoints, their rows in the index, and their runs in MLflow.

    Their ablations then show them as pending, and `cope-sweep run` trains them again. Runs in training are refused.
    Ctrl-C stops after the current run, and says which are left. An unknown id is an error before anything is deleted.
    MLflow moves its runs to its trash, which `mlflow gc` empties.

    Exit codes: 0 deleted, 1 you answered no, 2 bad input, 130 interrupted.

    Example: `cope-sweep delete 95199d1142de555d`

    Example: `cope-sweep delete 95199d11 3f2a9c07 --yes`
    """
    from cope_sweep.cli.files import open_store
    from cope_sweep.read.queries.runs import full_ids
    from cope_sweep.read.queries.unknown import no_run
    from cope_sweep.signals import stopping_on_signals
    from cope_sweep.store.index import in_training

    opened = open_store(store, index)
    opened.end_expired()
    run_ids = list(dict.fromkeys(full_ids(opened, names)))
    records = opened.index.records(run_ids, values=False)
    for run_id in run_ids:
        if run_id not in records:
            raise no_run(opened, run_id)
        if records[run_id].status == "running":
            raise in_training(run_id, records[run_id].sweep_id)
    if not yes:
        _show_runs(opened, list(records.values()))
        copies = "curves and checkpoints" if no_mlflow else "curves, checkpoints and MLflow's copies"
        question = f"Delete {counted(len(run_ids), 'run')}, with {copies}?"
        typer.confirm(question, abort=True, err=True)
    tracker = None if no_mlflow else _existing_tracker(opened, mlflow)
    stop, deleted = threading.Event(), list[str]()
    problem: UserError | None = None
    with stopping_on_signals(stop), nullcontext() if tracker is None else closing(tracker):
        for run_id in run_ids:
            if stop.is_set():
                break
            try:
                if tracker is not None:  # first: of a run that is still in the store, the same command finds the rest
                    tracker.delete_run(run_id)
                opened.delete_run(run_id)
            except UserError as error:
                problem = error
                break
            deleted.append(run_id)
    left = run_ids[len(deleted) :]
    if problem is not None:
        raise UserError(
            f"{problem}. {counted(len(deleted), 'run')} deleted; {counted(len(left), 'run')} left: {' '.join(left)}",
            code=problem.code,
            **{**problem.data, "deleted": deleted, "left": left},
        ) from problem
    if as_json:
        print_json({"deleted": deleted, "left": left})
    else:
        hint = f"; {counted(len(left), 'run')} left: {' '.join(left)}" if left else ""
        make_console().print(f"{counted(len(deleted), 'run')} deleted{hint}", highlight=False)
    raise typer.Exit(130 if left else 0)


def _show_runs(opened: Store, records: Sequence[RunRecord]) -> None:
    """Print on standard error what will be deleted."""
    from cope_sweep.read.queries.runs import run_places

    found = run_places(opened, [record.run_id for record in records])
    for record in records:
        where = "".join(f"  {place.ablation}/{place.row}" for place in found.get(record.run_id, [])[:1])
        typer.echo(visible(f"{record.run_id}  {record.status}{where}, seed {record.seed}"), err=True)


def _existing_tracker(opened: Store, mlflow: str | None) -> MLflowLogger | None:
    """The logger of the MLflow that may have runs of a store; None: its SQLite file was never made."""
    from cope_sweep.store.index.database import sqlite_file
    from cope_sweep.tracking.check import check_uri
    from cope_sweep.tracking.sync import mlflow_logger
    from cope_sweep.tracking.uri import resolve_uri

    uri = resolve_uri(opened, mlflow)
    database = sqlite_file(uri)
    if database is not None and not database.exists():
        return None
    check_uri(uri)
    return mlflow_logger(opened, uri)


def sync(
    mlflow: MlflowOpt = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show how much would be sent.")] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds to wait for an MLflow server that does not answer.")
    ] = 60.0,
    store: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Upload runs and sweeps that MLflow is missing, or has in an older state.

    `run` does this while it trains. Use `sync` for what is missing afterwards, because MLflow did not answer or a
    process was killed. Nothing is sent twice. Ctrl-C stops after the run that is being sent.

    Exit codes: 0 MLflow has everything, 1 something is left to send, 2 bad input, 130 interrupted.

    Example: `cope-sweep sync`

    Example: `cope-sweep sync --mlflow http://mlflow.example:5000`
    """
    from cope_sweep.cli.progress import SENDING, progress_bar
    from cope_sweep.read.queries.sweep_files import sweep_files
    from cope_sweep.redaction import redacted_url
    from cope_sweep.signals import stopping_on_signals
    from cope_sweep.tracking import sync as sending
    from cope_sweep.tracking.check import check_uri
    from cope_sweep.tracking.uri import TrackingError, resolve_uri

    opened = _existing_store(store, index)
    # That of an object store is on this machine, which may not have used it; logs and MLflow's file go there.
    opened.root.mkdir(parents=True, exist_ok=True)
    uri = resolve_uri(opened, mlflow)
    opened.end_expired()
    display = make_console(stderr=True)
    display.quiet = as_json
    stop = threading.Event()
    with stopping_on_signals(stop):
        try:
            check_uri(uri)
            with progress_bar(display, *SENDING) as bar:
                outcome = sending.sync(
                    opened, uri, bar, timeout_s=timeout_s, interrupted=stop.is_set, dry_run=dry_run,
                    files=partial(sweep_files, opened),
                )  # fmt: skip
        except TrackingError as error:
            if not uri.startswith("http"):
                raise
            outcome = sending.Synced(0, None, [str(error)])
    shown_uri = redacted_url(uri)
    if as_json:
        print_json({"uri": shown_uri, "sent": outcome.sent, "left": outcome.left, "errors": outcome.reasons})
    else:
        console, warnings = make_console(), make_console(stderr=True)
        if outcome.sent or outcome.reasons:
            total = "" if outcome.left is None else f" of {outcome.sent + outcome.left}"
            console.print(escaped(f"Sent {outcome.sent}{total} runs and sweeps to {shown_uri}."))
        elif outcome.left:
            console.print(escaped(f"{outcome.left} runs and sweeps are not in MLflow at {shown_uri} yet."))
        else:
            console.print(escaped(f"MLflow at {shown_uri} has everything."))
        hint = "; repeat the command to send the rest" if stop.is_set() else ""
        for reason in outcome.reasons:
            warnings.print(f"[yellow]not sent:[/yellow] {escaped(reason + hint)}", soft_wrap=True)
    if not (outcome.left or outcome.reasons):
        raise typer.Exit(0)
    raise typer.Exit(130 if stop.is_set() else 1)
