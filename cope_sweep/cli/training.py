"""Training for the commands `run`, `retry` and `submit`: in this process, on Ray, or as a job of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import typer
from rich.console import Console

from cope_sweep.api.ablations import PlanCost
from cope_sweep.api.sweeps import GetSweep
from cope_sweep.cli.files import NamedFiles, open_store
from cope_sweep.cli.options import STORE, TO_THE_END
from cope_sweep.cli.output import (
    escaped,
    estimated_time,
    make_console,
    print_json,
    print_note,
    print_steps,
    standard_output,
)
from cope_sweep.cli.progress import SENDING, progress_bar, progress_display
from cope_sweep.config import Plan, load_ablation
from cope_sweep.config.estimate import LOCAL_START_S, RAY_START_S
from cope_sweep.config.loading import names_a_file, option_words
from cope_sweep.config.rows import only_rows
from cope_sweep.config.source import ablations_folder
from cope_sweep.errors import NotFoundError, UserError, counted
from cope_sweep.read.queries import Queries, plan_cost, recorded_plan
from cope_sweep.read.queries.sweep_files import sweep_files
from cope_sweep.read.tables import table
from cope_sweep.redaction import is_ambiguous
from cope_sweep.store import ACTIVE, Budget, Status, Store, Submission, read_submission
from cope_sweep.store.store import INDEX_VARIABLE
from cope_sweep.sweep import jobs
from cope_sweep.sweep.changed_content import ChangedContent, changed_content, prepare_tasks
from cope_sweep.sweep.executor import Callbacks, Executor
from cope_sweep.sweep.local_executor import run_local
from cope_sweep.sweep.sweep import Sweep, SweepOutcome
from cope_sweep.tracking.check import check_uri
from cope_sweep.tracking.uri import TrackingError, resolve_uri

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Training:
    """The options that `run` and `retry` share: what is trained from, where, and whether MLflow records it."""

    ablations: Path
    """The folder of the ablation files."""
    store: str
    """The store's folder or URL."""
    index: str | None = None
    """The database of the store's index; None: its default."""
    as_json: bool = False
    """Print the outcome as JSON."""
    local: bool = False
    """Train in this process, without Ray."""
    address: str | None = None
    """The Ray cluster; None: one that is started on this machine."""
    groups: int | None = None
    """Worker groups that train side by side; None: as the file says."""
    mlflow: str | None = None
    """The address of MLflow; None: its default."""
    no_mlflow: bool = False
    """Record nothing in MLflow."""

    def open_store(self, *, create: bool = False) -> Store:
        """The store, with its index; with `create`, make it if it is missing. Raises StoreError."""
        return open_store(self.store, self.index, create=create)

    def like(self, submitted: Submission) -> Training:
        """These options, with the MLflow of a submission if they name none."""
        return replace(self, mlflow=self.mlflow or submitted.mlflow, no_mlflow=self.no_mlflow or submitted.no_mlflow)


def train_ablation(
    ablation: str,
    scale: str | None,
    sets: Sequence[str],
    rows: Sequence[str],
    options: Training,
    *,
    limits: dict[str, Any],
    leave_out: set[Status],
    to_the_end: bool = False,
) -> NoReturn:
    """Train runs of an ablation, show the table and exit.

    `rows` are the values of `--rows`, and `limits` fields of a `Budget`. Runs with the statuses `leave_out` are not
    trained. With `to_the_end` the file's schedule stops no run.
    """
    root = options.store
    if jobs.JOB_VARIABLE in os.environ and "://" not in root and not Path(root).is_absolute():
        raise UserError(
            f"in a Ray job the folder {Path.cwd()} is temporary, and the store {root} would be deleted with it; "
            "name a lasting folder that all nodes share: --store /shared/store",
            code="temporary_store",
            store=str(root),
        )
    queries = Queries(options.open_store(), NamedFiles(options.ablations))
    assignments = [*sets, TO_THE_END] if to_the_end else sets
    plan, file_text = only_rows(queries.planned(ablation, scale, assignments), rows), queries.text(ablation)
    store = options.open_store(create=True)
    _train(plan, store, options, file_text=file_text, leave_out=leave_out, budget=Budget(**limits))


def train_rest(sweep_id: str, options: Training) -> NoReturn:
    """Finish a submitted sweep: train its unfinished runs as a new sweep, show the table and exit."""
    store = options.open_store()
    summary = Queries(store).ask(GetSweep(sweep_id=sweep_id))  # raises UserError for an unknown sweep
    if summary.status in ACTIVE:
        raise UserError(
            f"sweep {sweep_id} is {summary.status}; wait for its end, or stop it: cope-sweep stop {sweep_id}",
            code="not_ended",
            sweep_id=sweep_id,
            status=summary.status,
        )
    try:
        submitted = read_submission(store, sweep_id)
    except NotFoundError:
        raise UserError(
            f"sweep {sweep_id} was not submitted; repeat its command to continue: {shlex.join(summary.command)}",
            code="not_submitted",
            sweep_id=sweep_id,
        ) from None
    _train(
        jobs.submitted_plan(submitted), store, options.like(submitted),
        file_text=submitted.file_text, leave_out=set(), budget=submitted,
    )  # fmt: skip


def train_submission(sweep_id: str, options: Training) -> NoReturn:
    """Execute a submitted sweep, show the table and exit. If it cannot start, record it as failed."""
    store = options.open_store(create=True)
    with jobs.failing(store, sweep_id):
        submitted, plan = jobs.job_submission(store, sweep_id)
        _train(
            plan, store, options.like(submitted),
            file_text=submitted.file_text, leave_out=set(submitted.leave_out), budget=submitted, submission=submitted,
        )  # fmt: skip


def _train(
    plan: Plan,
    store: Store,
    options: Training,
    *,
    file_text: str,
    leave_out: set[Status],
    budget: Budget,
    submission: Submission | None = None,
) -> NoReturn:
    """Train runs of a plan with a display of its progress on standard error, show the table and exit.

    Args:
        plan: The plan.
        store: The store.
        options: Where the runs are trained.
        file_text: The text of the ablation file.
        leave_out: Statuses of runs that are not trained.
        budget: What the sweep may use.
        submission: What was submitted, if a job executes the sweep.
    """
    uri = None if options.no_mlflow else resolve_uri(store, options.mlflow)
    console = make_console(stderr=True)
    if uri is not None:
        try:
            note = check_uri(uri)
        except TrackingError as error:
            if submission is None or error.code != "no_server" or is_ambiguous(uri):
                raise
            note = str(error)  # nobody is there to correct it, and the runs are sent later
        if note:
            print_note(console, note)
    plan = recorded_plan(plan, store)
    resources = plan.ablation.content.resources
    if options.groups is not None:
        resources = resources.model_copy(update={"groups": options.groups})
    executor: Executor = run_local
    if not options.local:
        from cope_sweep.sweep.ray_executor import run_on_ray  # ray: `--local` trains where it is not installed

        executor = partial(run_on_ray, address=options.address)
    same_plan, same_rows = [*plan.ablation.arguments, *store.option], option_words(None, (), plan.chosen)
    notes: list[str] = []
    if options.local or options.address is None:
        # Texts are tokenised here, where the user sees the progress bar and errors. On a cluster the workers do it.
        changes = changed_content(plan, store, prepare_tasks(plan, store))
        notes = [_text_of_change(change, [*same_plan, *same_rows]) for change in changes]
    start_s, groups = (LOCAL_START_S, 1) if options.local else (RAY_START_S, options.groups)
    costs = plan_cost(plan, store, leave_out=leave_out, max_runs=budget.max_runs, start_s=start_s, groups=groups)
    _print_cost(console, costs)
    with contextlib.ExitStack() as stack, progress_bar(console, *SENDING) as bar:
        display = stack.enter_context(progress_display(plan, store, console, leave_out))

        def on_sending(sent: int, total: int) -> None:
            stack.close()  # the display of training has ended
            bar(sent, total)

        outcome = Sweep(
            plan,
            store,
            executor,
            executor_name="local" if options.local else "ray",
            resources=resources,
            file_text=file_text,
            tracking_uri=uri,
            files=partial(sweep_files, store),
            leave_out=leave_out,
            budget=budget,
            callbacks=Callbacks(
                on_event=display, on_note=partial(print_note, console), on_row=display.add, on_sending=on_sending
            ),
            submission=submission,
            notes=notes,
        ).run()
    for problem in outcome.tracking_errors:
        console.print(f"[yellow]MLflow:[/yellow] {escaped(problem)}")
    plan = recorded_plan(plan, store)
    results = table(plan, store)
    summary = {**outcome.__dict__, "exit_code": outcome.exit_code}
    if options.as_json:
        print_json({"sweep": summary, "table": results.to_json()})
    else:
        console = make_console()
        console.print(results.to_rich())
        _print_outcome(
            console, outcome, shlex.join(same_plan), shlex.join(same_rows), len(plan.runs),
            leaves_out_failed="failed" in leave_out,
        )  # fmt: skip
        command, folder = _command(), _other_folder(options.ablations)
        serve = shlex.join(["serve", *store.option, *folder])
        steps = [
            (f"{command} report {shlex.join(same_plan)}", "shows differences, verdicts, and what is missing"),
            (f"{command} {serve}", "shows curves and tables on a page at http://127.0.0.1:8000"),
        ]
        print_steps(console, steps)
    if outcome.stop_reasons:
        standard_output().flush()
        jobs.stop_own_job()
    raise typer.Exit(outcome.exit_code)


def _text_of_change(change: ChangedContent, arguments: Sequence[str]) -> str:
    """What has changed since runs were trained, and how to train on it. `arguments` name the plan in a command."""
    runs = "a finished run was" if change.runs == 1 else f"{change.runs} finished runs were"
    text = f"{change.place} has changed since {runs} trained on it; they are not trained again. To train on its present"
    if not change.is_of_all:
        keys = ", ".join(f"{name}: {value}" for name, value in change.renamed.items())
        return f"{text} content, give it another name in the file, in its task: {keys}"
    sets = option_words(None, (f"task.{name}={value}" for name, value in change.renamed.items()))
    return f"{text} content, give it another name: {_command()} {shlex.join(['run', *arguments, *sets])}"


def _print_cost(console: Console, costs: PlanCost) -> None:
    """Say how many runs a sweep will train, and how long that takes, before it starts."""
    if costs.to_do:
        time = estimated_time(costs.estimated_s, costs.least_s, lacks_gpu=costs.lacks_gpu)
        text = f"{counted(costs.to_do, 'run')} to train: {time} ({costs.basis})"
        console.print(escaped(text), soft_wrap=True, style="dim")


def submit_ablation(
    files: NamedFiles,
    ablation: str,
    scale: str | None,
    sets: Sequence[str],
    rows: Sequence[str],
    limits: dict[str, Any],
    *,
    address: str,
    store: str | None,
    index: str | None,
    mlflow: str | None,
    working_dir: Path,
    follow: bool,
    as_json: bool,
) -> NoReturn:
    """Run an ablation as a job of a Ray cluster and exit.

    `files` are the ablations of the folder that is sent. `limits` are the fields of a `Budget`. Raises UserError.
    """
    # What is wrong with the file or with `--rows` fails here, not on the cluster.
    plan = only_rows(files.load(ablation, scale, sets), rows)
    is_here = _host(address) in LOOPBACK
    if store is None:
        if not is_here:
            raise UserError(
                f"{address} is another machine; give the store's path on the cluster, as in --store /shared/store",
                code="missing_option",
                option="--store",
                address=address,
            )
        store = str(Path(STORE).absolute())
    console = make_console(stderr=True)
    _print_cost(console, plan_cost(plan, open_store(store, index), max_runs=limits["max_runs"]))

    def on_line(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    environment = {INDEX_VARIABLE: index} if index else {}  # may hold a password
    cluster = jobs.Cluster(address, working_dir, environment=environment)
    cluster, mlflow_option = jobs.job_options(cluster, {"--mlflow": mlflow})
    opened: Store | None = None
    is_reachable = is_here or "://" in store or Path(store).is_dir()
    if is_reachable:
        path = files.file(ablation)
        typed = [ablation] if names_a_file(ablation) else [ablation, *_other_folder(path.parent)]
        submission = jobs.new_submission(
            load_ablation(path), typed=typed, file_text=path.read_text(encoding="utf-8-sig"), scale=scale, sets=sets,
            rows=list(rows), mlflow=mlflow if mlflow_option else None, **limits,
        )  # fmt: skip
        jobs.check_cluster(cluster)  # before anything is written
        opened = open_store(store, index, create=True)
        jobs.record_submission(submission, recorded_plan(plan, opened), opened)
        outcome = jobs.start_submission(submission, opened, cluster, follow=follow, on_line=on_line)
    else:
        # Only the cluster can reach the store: the job reads the ablation from the folder that is sent.
        options = {f"--{name.removesuffix('_s').replace('_', '-')}": value for name, value in limits.items()}
        given = [word for flag, value in options.items() if value is not None for word in (flag, str(value))]
        cluster, store_option = jobs.job_options(cluster, {"--store": store})
        arguments = ["run", ablation, *store_option, *option_words(scale, sets, rows), *given, *mlflow_option]
        outcome = jobs.submit_job(arguments, cluster, follow=follow, on_line=on_line, name=plan.name)
    if as_json:
        print_json(outcome.__dict__)
    else:
        message = f" ({outcome.message})" if outcome.message else ""
        console = make_console()
        console.print(escaped(f"job {outcome.job_id}: {outcome.status}{message}"), soft_wrap=True)
        if not follow:
            print_steps(console, _steps_of_job(outcome.job_id, address, opened))
    raise typer.Exit(outcome.exit_code)


def _host(address: str) -> str | None:
    """The host in the address of a dashboard; None where there is none."""
    try:
        return urlsplit(address if "://" in address else f"//{address}").hostname
    except ValueError:
        return None


def _steps_of_job(job_id: str, address: str, store: Store | None) -> list[tuple[str, str]]:
    """Commands that are useful while a job runs. `store` has its sweep, with this id; None: out of reach."""
    steps = [(f"ray job logs {job_id} --address {address} --follow", "follows its log")]
    if store is None:
        return [*steps, (f"ray job stop {job_id} --address {address}", "stops it; runs write checkpoints first")]
    command, at_store = _command(), store.option
    return [
        (f"{command} {shlex.join(['status', job_id, *at_store])}", "shows its progress, and why runs failed"),
        (f"{command} {shlex.join(['stop', job_id, *at_store])}", "stops it; runs write checkpoints first"),
        *steps,
    ]


def _other_folder(ablations: Path) -> list[str]:
    """The `--ablations` that names this folder; none for the default folder."""
    return [] if ablations == ablations_folder() else ["--ablations", str(ablations)]


def _print_outcome(
    console: Console, outcome: SweepOutcome, same_plan: str, same_rows: str, total: int, *, leaves_out_failed: bool
) -> None:
    """Print how the sweep ended, and what to do about unfinished runs.

    `same_rows` are the `--rows` of the sweep. `total` is the number of all runs. With `leaves_out_failed`, repeating
    the command would not try failed runs again.
    """
    if outcome.sweep_id is None and not outcome.failed:
        rest = f"{outcome.reused} of {total} runs are finished, and the options leave out the others"
        console.print(f"Nothing to train: {f'all {total} runs are finished' if outcome.reused == total else rest}.")
    if outcome.failed:
        command = _command()
        again = "repeat the command to try them again"
        if leaves_out_failed:
            again = f"{command} retry {same_plan} --failed {same_rows}".rstrip() + " tries them again"
        text = f"{command} status {same_plan} shows the errors; {again}."
        console.print(f"[red]{counted(outcome.failed, 'run')} failed[/red]. {escaped(text)}", soft_wrap=True)
    if outcome.stopped:
        command = f"{_command()} retry {same_plan} --stopped {same_rows}".rstrip()
        text = f"{counted(outcome.stopped, 'run')} stopped early by the schedule; {command} trains them to the end."
        console.print(escaped(text), soft_wrap=True)
    if outcome.left:
        reason = f": {escaped(outcome.stop_reasons[0])}" if outcome.stop_reasons else ""
        console.print(
            f"[yellow]Interrupted[/yellow] with {counted(outcome.left, 'run')} to do{reason}; repeat the command to "
            "continue from there.",
            soft_wrap=True,
        )


def _command() -> str:
    """How to type `cope-sweep` of this installation: its name, its path, or as a module of this Python."""
    name = "cope-sweep"
    script = Path(sys.executable).with_name(name)
    if shutil.which(name):
        return name
    return shlex.quote(str(script)) if script.exists() else f"{shlex.quote(sys.executable)} -m cope_sweep.cli"
