"""The commands that train: `run`, `retry`, `submit` and `stop`, on this machine, a Ray cluster, or by a service."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn
from urllib.parse import urlsplit

import typer

from cope_sweep.api.questions import GetPlan, GetSweep
from cope_sweep.cli.options import (
    ABLATION,
    ABLATIONS,
    STORE,
    Sets,
    Source,
    ablation_fields,
    asks,
    find_ablation,
    option,
    seconds_in,
)
from cope_sweep.cli.output import counts_text, duration, escaped, estimated_time, make_console
from cope_sweep.errors import NotFoundError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from cope_sweep.api.answers import SweepProgress, SweepState
    from cope_sweep.client import Client
    from cope_sweep.config import Plan, RunSpec
    from cope_sweep.store import Budget, Status, Store, Submission
    from cope_sweep.sweep.sweep import SweepOutcome

RAY_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets this environment variable for the driver of a job."""
INDEX_VARIABLE = "COPE_SWEEP_INDEX"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
TO_THE_END = "schedule.kind=none"
"""The `--set` with which no schedule stops a run."""
EXAMPLE_TEXT = "Of position, and of context."
MAX_EXAMPLE_TOKENS = 64
POLL_INTERVAL_S = 0.5
PROGRESS_INTERVAL_S = 10.0
"""Between two lines about a sweep in which no run has begun or ended."""
EXIT_CODES = {"finished": 0, "failed": 1, "interrupted": 130}
"""Exit codes by the status of a sweep at its end."""

LocalOpt = Annotated[bool, typer.Option("--local", help="Train in this process, without Ray.")]
RayAddressOpt = Annotated[
    str | None,
    typer.Option(
        envvar="RAY_ADDRESS", help="A running Ray cluster: `auto` or `HOST:6379`. Default: start Ray on this machine."
    ),
]
GroupsOpt = Annotated[
    int | None, typer.Option(min=1, help="Worker groups that train side by side. Default: as many as fit.")
]
TIME_BUDGET = option(
    "--time-budget",
    metavar="TIME",
    kind=str | None,
    help="Stop after this time (`90m`, `2h`, `1d`): runs in training write checkpoints.",
)
MlflowOpt = Annotated[
    str | None,
    typer.Option(
        "--mlflow",
        metavar="URI",
        envvar="MLFLOW_TRACKING_URI",
        help="MLflow's tracking server or database. Default: `sqlite:///STORE/mlflow.db`.",
    ),
]
NoMlflowOpt = Annotated[bool, typer.Option("--no-mlflow", help="Record in the store only.")]


# -- run and retry -----------------------------------------------------------------------------------------------------


@asks(
    GetPlan, "ablations", request="cope_sweep.store:Budget", remote=False, time_budget_s=TIME_BUDGET,
    name=ABLATION | {"default": None},
)  # fmt: skip
def run(
    *,
    question: GetPlan,
    sets: Sets = [],
    local: LocalOpt = False,
    address: RayAddressOpt = None,
    groups: GroupsOpt = None,
    keep_failed: Annotated[bool, typer.Option("--keep-failed", help="Do not try failed runs again.")] = False,
    mlflow: MlflowOpt = None,
    request: dict[str, Any],
    no_mlflow: NoMlflowOpt = False,
    submission: Annotated[
        str | None,
        typer.Option("--submission", metavar="SWEEP", hidden=True, help="Execute a submitted sweep: what a job does."),
    ] = None,
    source: Source,
) -> None:
    """Train the runs that are not finished, record them in the store and in MLflow, and print the table.

    Ctrl-C stops at any time: runs in training are checkpointed first. The same command continues from there.

    Exit codes: 0 all runs finished (or were stopped early, as the file's `schedule` says), 1 some runs failed and
    nothing is left, 2 bad input, 130 something is left: interrupted, or a budget was used up.

    Example: `cope-sweep run quickstart`

    Example: `cope-sweep run quickstart --time-budget 2h --max-failures 3`

    Example: `cope-sweep run quickstart --local --set seeds=[0,1,2,3,4]`
    """
    from cope_sweep.store import Budget

    name: str | None = question.name
    if submission is not None:
        _run_submission(submission, source, local=local, address=address)
    elif name is None:
        raise UserError("name an ablation; `cope-sweep list` shows them")
    else:
        _run(
            question, sets, source, local=local, address=address, groups=groups, mlflow=mlflow, no_mlflow=no_mlflow,
            budget=Budget(**_in_seconds(request)), leave_out={"failed"} if keep_failed else set(),
        )  # fmt: skip


def _in_seconds(budget: dict[str, Any]) -> dict[str, Any]:
    """The fields of a budget, with the seconds of `--time-budget`. Raises UserError."""
    time = budget["time_budget_s"]
    return budget | {"time_budget_s": seconds_in(time, "--time-budget") if time else None}


@asks(
    GetPlan, "ablations", local=["local", "address", "groups", "mlflow", "no_mlflow"],
    name=ABLATION | {"metavar": "ABLATION|SWEEP", "help": f"{ABLATION['help']} Or the id of a submitted sweep."},
)  # fmt: skip
def retry(
    *,
    question: GetPlan,
    failed: Annotated[bool, typer.Option("--failed", help="Train failed runs again, from their last state.")] = False,
    stopped: Annotated[
        bool, typer.Option("--stopped", help="Train runs to their end that a schedule stopped early.")
    ] = False,
    sets: Sets = [],
    local: LocalOpt = False,
    address: RayAddressOpt = None,
    groups: GroupsOpt = None,
    mlflow: MlflowOpt = None,
    no_mlflow: NoMlflowOpt = False,
    source: Source,
) -> None:
    """Train runs again: those of an ablation that failed or were stopped early, or all that a sweep has left.

    A sweep is trained again as it was submitted, although its file may have changed since. `run` trains all runs of an
    ablation that are not finished.

    Example: `cope-sweep retry quickstart --failed`

    Example: `cope-sweep retry 20261124-101500-3f --server http://service:8000`
    """
    from cope_sweep.store import Budget
    from cope_sweep.store.sweeps import SWEEP_ID

    if SWEEP_ID.fullmatch(question.name):
        if failed or stopped or sets or question.scale:
            raise UserError(
                "a sweep is trained again as it was submitted; leave out --failed, --stopped, --set and --scale"
            )
        if source.client is None:
            _retry_sweep(
                question.name, source, local=local, address=address, groups=groups, mlflow=mlflow, no_mlflow=no_mlflow
            )
        with source.client as client:
            _show_submitted(client, client.retry(question.name), source)
    if not failed and not stopped:
        raise UserError("say which runs to train again: --failed, --stopped, or both")
    wanted = (["failed"] if failed else []) + (["stopped"] if stopped else [])
    if source.client is not None:
        sets = [*sets, TO_THE_END] if stopped else sets
        _submit_to(source.client, question, sets, source, only=wanted)
        return
    leave_out: set[Status] = {"pending", "interrupted", "failed", "stopped", "damaged"}
    _run(
        question, sets, source, local=local, address=address, groups=groups, mlflow=mlflow, no_mlflow=no_mlflow,
        budget=Budget(), leave_out={status for status in leave_out if status not in wanted}, to_the_end=stopped,
    )  # fmt: skip


def _run(question: GetPlan, sets: list[str], source: Source, *, to_the_end: bool = False, **options: Any) -> NoReturn:
    """Train runs of an ablation, show the table and exit.

    `options` are those of `_train`. With `to_the_end` the file's schedule stops no run.
    """
    name, scale, root = question.name, question.scale, source.root
    if RAY_JOB_VARIABLE in os.environ and "://" not in root and not Path(root).is_absolute():
        raise UserError(
            f"in a Ray job the folder {Path.cwd()} is temporary, and the store {root} would be deleted with it; "
            "name a lasting folder that all nodes share: --store /shared/store"
        )
    plan = replace(source, sets=[*sets, TO_THE_END] if to_the_end else sets).plan(name, scale)
    file_text = find_ablation(name, source.ablations).read_text(encoding="utf-8")
    other_store = ["--store", root] if Path(root) != Path(STORE) else []
    same_plan = shlex.join([name, *_overrides(scale, sets), *_other_folder(source.ablations), *other_store])
    _train(plan, source.open_store(create=True), source, same_plan, file_text=file_text, **options)


def _retry_sweep(sweep_id: str, source: Source, *, mlflow: str | None, no_mlflow: bool, **options: Any) -> NoReturn:
    """Train what a submitted sweep has left, as a sweep of its own, show the table and exit.

    `options` are those of `_train`.
    """
    from cope_sweep.store import read_submission
    from cope_sweep.sweep.jobs import submitted_plan

    sweep = source.ask(GetSweep(sweep_id))  # raises UserError for an unknown sweep
    if sweep_id in _active(source):
        raise UserError(f"sweep {sweep_id} is {sweep.status}; stop it first, or wait for its end")
    try:
        submitted = read_submission(source.store, sweep_id)
    except NotFoundError:
        raise UserError(
            f"sweep {sweep_id} was not submitted; the command that started it trains on: {shlex.join(sweep.command)}"
        ) from None
    _train(
        submitted_plan(submitted), source.store, source, shlex.join(submitted.command[2:]),
        file_text=submitted.file_text, mlflow=mlflow or submitted.mlflow, no_mlflow=no_mlflow or submitted.no_mlflow,
        leave_out=set(), budget=submitted, **options,
    )  # fmt: skip


def _run_submission(sweep_id: str, source: Source, *, local: bool, address: str | None) -> NoReturn:
    """Execute a submitted sweep, show the table and exit. Where that cannot begin, the sweep is recorded as failed."""
    from cope_sweep.sweep.jobs import failing, job_submission

    store = source.open_store(create=True)
    with failing(store, sweep_id):
        submitted, plan = job_submission(store, sweep_id)
        _train(
            plan, store, source, shlex.join(submitted.command[2:]), local=local, address=address,
            file_text=submitted.file_text, mlflow=submitted.mlflow, no_mlflow=submitted.no_mlflow,
            leave_out=set(submitted.leave_out), budget=submitted, submission=submitted,
        )  # fmt: skip


def _train(
    plan: Plan,
    store: Store,
    source: Source,
    same_plan: str,
    *,
    file_text: str,
    local: bool,
    address: str | None,
    groups: int | None = None,
    mlflow: str | None,
    no_mlflow: bool,
    leave_out: set[Status],
    budget: Budget,
    submission: Submission | None = None,
) -> NoReturn:
    """Train runs of a plan with a display of its progress on standard error, show the table and exit.

    Args:
        plan: The plan.
        store: The store.
        source: What the options name.
        same_plan: The arguments that name the same plan and store in another command.
        file_text: The text of the ablation file.
        local: Whether to train in this process.
        address: The Ray cluster; None: one that is started on this machine.
        groups: Worker groups that train side by side; None: as the file says.
        mlflow: The address of MLflow; None: its default.
        no_mlflow: Whether nothing is recorded in MLflow.
        leave_out: Statuses of runs that are not trained.
        budget: What the sweep may use.
        submission: What was submitted, if a job executes the sweep.
    """
    from cope_sweep.cli.progress import SENDING, progress_bar, progress_display
    from cope_sweep.read.queries import recorded_plan
    from cope_sweep.read.tables import table
    from cope_sweep.sweep.sweep import sweep
    from cope_sweep.tracking.uri import check, resolve_uri

    uri = None if no_mlflow else resolve_uri(store, mlflow)
    if uri is not None:
        check(uri)
    plan = recorded_plan(plan, store)
    resources = plan.ablation.content.resources
    if groups is not None:
        resources = resources.model_copy(update={"groups": groups})
    if local:
        from cope_sweep.sweep.executor import run_local as executor
    else:
        from cope_sweep.sweep.ray_executor import run_on_ray

        executor = partial(run_on_ray, address=address)
    if local or address is None:
        # Texts are tokenised here, where the user sees the progress bar and errors. On a cluster the workers do it.
        finished = {run_id for run_id, status in store.index.statuses().items() if status == "finished"}
        runs = [*plan.runs, *(run for row in plan.examples for run in row.runs if plan.open_samples)]
        for task in {each.task for each in runs if each.run_id not in finished}:
            task.prepare()
    console = make_console(stderr=True)
    _print_cost(console, plan, store, leave_out=leave_out, max_runs=budget.max_runs)
    with contextlib.ExitStack() as stack, progress_bar(console, *SENDING) as bar:
        display = stack.enter_context(progress_display(plan, store, console, leave_out))

        def on_sending(sent: int, total: int) -> None:
            stack.close()  # the display of training has ended
            bar(sent, total)

        outcome = sweep(
            plan,
            store,
            executor,
            resources=resources,
            file_text=file_text,
            executor_name="local" if local else "ray",
            tracking_uri=uri,
            leave_out=leave_out,
            budget=budget,
            on_event=display,
            on_row=display.add,
            on_sending=on_sending,
            on_note=lambda text: console.print(f"[yellow]note:[/yellow] {escaped(text)}", soft_wrap=True),
            submission=submission,
        )
    for problem in outcome.tracking_errors:
        console.print(f"[yellow]MLflow:[/yellow] {escaped(problem)}")
    plan = recorded_plan(plan, store)
    results = table(plan, store)
    summary = {**outcome.__dict__, "exit_code": outcome.exit_code}
    if not source.printed({"sweep": summary, "table": results.to_json()}):
        console = make_console()
        console.print(results.to_rich())
        _print_outcome(console, outcome, same_plan, len(plan.runs))
        again = shlex.join(sys.argv[1:]) if submission is None else f"run {same_plan}"
        folder = _other_folder(source.ablations)
        _print_next_steps(console, plan, store, uri, same_plan, folder, again=again if outcome.left else None)
    raise typer.Exit(outcome.exit_code)


def _print_cost(
    console: Console, plan: Plan, store: Store, *, leave_out: Collection[Status] = (), max_runs: int | None = None
) -> None:
    """Say how many runs a sweep will train, and how long that takes, before it starts.

    `leave_out` are further statuses of runs that it does not train, and `max_runs` is how many it trains at most.
    """
    from cope_sweep.read.queries import plan_cost

    ended: list[Status] = ["finished"] if plan.schedule is None else ["finished", "stopped"]
    costs = plan_cost(plan, store, leave_out={*ended, *leave_out}, max_runs=max_runs)
    if costs.to_do:
        time = estimated_time(costs.estimated_s, costs.least_s, lacks_gpu=costs.lacks_gpu)
        text = f"{_runs(costs.to_do)} to train: about {time} ({costs.basis})"
        console.print(escaped(text), soft_wrap=True, style="dim")


def _other_folder(ablations: Path) -> list[str]:
    """The option that names a folder of ablation files, unless it is that of commands without one."""
    from cope_sweep.config.source import ablations_folder

    return [] if ablations == ablations_folder() else ["--ablations", str(ablations)]


def _overrides(scale: str | None, sets: list[str]) -> list[str]:
    """The arguments that change an ablation's file as `scale` and `sets` do."""
    return [*(["--scale", scale] if scale else []), *(part for value in sets for part in ("--set", value))]


def _print_outcome(console: Console, outcome: SweepOutcome, same_plan: str, total: int) -> None:
    """How the sweep ended, and what to do about runs that are not finished. `total` is the number of all runs."""
    if outcome.sweep_id is None and not outcome.failed:
        rest = f"{outcome.reused} of {total} runs are finished, and none of the others is to be trained"
        console.print(f"Nothing to train: {f'all {total} runs are finished' if outcome.reused == total else rest}.")
    if outcome.failed:
        command = f"{_command('cope-sweep')} status {same_plan}"
        console.print(
            f"[red]{_runs(outcome.failed)} failed[/red]. {escaped(command)} shows the errors; "
            "the same `run` command tries them again, unless it has --keep-failed.",
            soft_wrap=True,
        )
    if outcome.stopped:
        command = f"{_command('cope-sweep')} retry {same_plan} --stopped"
        text = f"{_runs(outcome.stopped)} stopped early by the schedule; {command} trains them on."
        console.print(escaped(text), soft_wrap=True)
    if outcome.left:
        reason = "".join(f": {escaped(each)}" for each in outcome.stop_reasons[:1])
        console.print(
            f"[yellow]Interrupted[/yellow] with {_runs(outcome.left)} to do{reason}; the same command continues from "
            "there.",
            soft_wrap=True,
        )


def _runs(number: int) -> str:
    return f"{number} run{'s' * (number != 1)}"


def _command(name: str) -> str:
    """A command of this installation as one can type it: by its name, its path, or as a module of this Python."""
    script = Path(sys.executable).with_name(name)
    if shutil.which(name):
        return name
    return shlex.quote(str(script)) if script.exists() else f"{shlex.quote(sys.executable)} -m {MODULES[name]}"


MODULES = {"cope-sweep": "cope_sweep.cli", "mlflow": "mlflow"}
"""Command → the module that is run as it."""


def _print_next_steps(
    console: Console,
    plan: Plan,
    store: Store,
    uri: str | None,
    same_plan: str,
    folder: Sequence[str],
    *,
    again: str | None,
) -> None:
    """Commands that are useful after a sweep; `again` are the words after `cope-sweep` that continue it.

    `folder` are the words that name another folder of ablation files.
    """
    own = _command("cope-sweep")
    at_store = [] if store.root == Path(STORE).absolute() else ["--store", str(store.root)]
    steps = [] if again is None else [(f"{own} {again}", "continues with the runs that are left")]
    steps.append((f"{own} table {same_plan} --format latex", "the table in LaTeX"))
    if uri and uri.startswith("sqlite:"):
        mlflow = f"{_command('mlflow')} ui --backend-store-uri {uri}"
        steps.append((mlflow, "curves, parameters and files of every run"))
    serve = f"{own} {shlex.join(['serve', *at_store, *folder])}"
    steps.append((serve, "the REST service, and a page at http://127.0.0.1:8000"))
    statuses = store.index.statuses(each.run_id for each in plan.runs)
    finished = next((each for each in plan.runs if statuses.get(each.run_id) == "finished"), None)
    if finished and (example := _example_input(finished, store)):
        words = shlex.join(["perplexity", finished.run_id, *example, *at_store])
        steps.append((f"{own} {words}", "the perplexity of token ids or a text under a checkpoint"))
    console.print("Next:", style="bold")
    for command, description in steps:
        # One line each, whatever the width of the terminal, so that it can be copied.
        line = f"  [bold cyan]{escaped(command)}[/bold cyan]   [dim]{description}[/dim]"
        console.print(line, soft_wrap=True, highlight=False)


def _example_input(run: RunSpec, store: Store) -> list[str]:
    """Arguments of `perplexity` that fit the run's task: a text, or a test sequence if it is short; else none."""
    if (store.run(run.run_id).checkpoint / "tokenizer.json").exists():
        return ["--text", EXAMPLE_TEXT]
    if run.task.length(run.task.TESTS[0]) > MAX_EXAMPLE_TOKENS:
        return []
    tokens = run.task.sequences(run.task.TESTS[0], 0, 0, 1).whole()[0]
    return ["--tokens", " ".join(map(str, tokens))]


# -- submit ------------------------------------------------------------------------------------------------------------


@asks(
    GetPlan, request="cope_sweep.store:Budget", local=["address", "store", "mlflow", "working_dir"], without=["root"],
    time_budget_s=TIME_BUDGET, name=ABLATION,
)  # fmt: skip
def submit(
    *,
    question: GetPlan,
    address: Annotated[
        str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="The dashboard of the Ray cluster.")
    ] = "http://127.0.0.1:8265",
    sets: Sets = [],
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Stream the job's log, and exit with its code.")
    ] = True,
    working_dir: Annotated[Path, typer.Option(help="The folder to send: a checkout of this project.")] = Path(),
    store: Annotated[
        str | None,
        typer.Option(
            "--store", help="Path of the store on the cluster. Default: ./store, if the cluster runs on this machine."
        ),
    ] = None,
    mlflow: Annotated[
        str | None, typer.Option("--mlflow", metavar="URI", help="MLflow's address as the cluster sees it.")
    ] = None,
    request: dict[str, Any],
    source: Source,
) -> None:
    """Run the ablation as a Ray job on a cluster, as `ray job submit` does; with `--server`, on that of a service.

    With token authentication, the token is read from RAY_AUTH_TOKEN or Ray's token file, as Ray's own client does.

    Example: `cope-sweep submit quickstart --address http://head:8265`

    Example: `cope-sweep submit quickstart --server http://service:8000`
    """
    from cope_sweep.config import load_ablation
    from cope_sweep.sweep.jobs import (
        Cluster,
        check_cluster,
        new_submission,
        record_submission,
        start_submission,
        submit_job,
    )

    limits, name, scale = _in_seconds(request), question.name, question.scale
    if source.client is not None:
        _submit_to(source.client, question, sets, source, follow=follow, **limits)
        return
    folder = working_dir / ABLATIONS
    # A faulty file fails here, not on the cluster.
    plan = replace(source, ablations=folder, sets=sets).plan(name, scale)
    is_here = urlsplit(address if "://" in address else f"//{address}").hostname in LOOPBACK
    if store is None:
        if not is_here:
            raise UserError(
                f"{address} is another machine; name the store's path on the cluster, as in --store /shared/store"
            )
        store = str(Path(STORE).absolute())
    shared = replace(source, root=store)
    console = make_console(stderr=True)
    _print_cost(console, plan, shared.open_store(), max_runs=limits["max_runs"])

    def on_line(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    environment = {INDEX_VARIABLE: source.index} if source.index else {}  # may hold a password
    cluster = Cluster(address, working_dir, environment=environment)
    if is_here or "://" in store or Path(store).is_dir():
        path = find_ablation(name, folder)
        submission = new_submission(
            load_ablation(path), file_text=path.read_text(encoding="utf-8"), scale=scale, sets=sets, mlflow=mlflow,
            **limits,
        )  # fmt: skip
        check_cluster(cluster)  # before anything is written
        opened = shared.open_store(create=True)
        record_submission(submission, plan, opened)
        outcome = start_submission(submission, opened, cluster, follow=follow, on_line=on_line)
    else:
        # Only the cluster can reach the store: the job reads the ablation from the folder that is sent.
        options = {"--time-budget": limits["time_budget_s"], "--max-runs": limits["max_runs"]}
        options |= {"--max-failures": limits["max_failures"], "--mlflow": mlflow}
        given = [word for flag, value in options.items() if value is not None for word in (flag, str(value))]
        arguments = ["run", name, "--store", store, *_overrides(scale, sets), *given]
        outcome = submit_job(arguments, cluster, follow=follow, on_line=on_line)
    if not source.printed(outcome.__dict__):
        message = f" ({outcome.message})" if outcome.message else ""
        make_console().print(escaped(f"job {outcome.job_id}: {outcome.status}{message}"), soft_wrap=True)
    raise typer.Exit(outcome.exit_code)


def _submit_to(
    client: Client, question: GetPlan, sets: list[str], source: Source, *, follow: bool = True, **options: Any
) -> None:
    """Submit a sweep to a service, and show it. `options` are fields of a `SweepRequest`; None: not given."""
    options |= {"scale": question.scale, "set": sets, **ablation_fields(question.name)}
    with client:
        state = client.submit(**{name: value for name, value in options.items() if value is not None})
        if follow:
            _show_submitted(client, state, source)
        elif not source.printed(state):
            make_console().print(escaped(f"sweep {state.sweep_id}: {state.runs} runs, {state.status}"))


def _show_submitted(client: Client, state: SweepState, source: Source) -> NoReturn:
    """Show the progress of a sweep of a service and its table, and exit with the code of the sweep."""
    end = _followed(client, state.sweep_id)
    table = client.sweep(state.sweep_id).table
    if not source.printed({"sweep": end, "table": (table or {}).get("json")}):
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
    parts = [counts_text(progress.counts) or progress.status]
    if progress.groups:
        machines = f" on {progress.nodes} machine{'s' * (progress.nodes != 1)}" if progress.nodes else ""
        parts.append(f"{progress.groups} worker group{'s' * (progress.groups != 1)}{machines}")
    if progress.steps_per_s:
        parts.append(f"{progress.steps_per_s:.3g} steps/s")
    if progress.eta_s is not None:
        parts.append(f"about {duration(progress.eta_s)} left")
    return "; ".join(parts)


# -- stop --------------------------------------------------------------------------------------------------------------


@asks(None)
def stop(
    sweep: Annotated[
        str, typer.Argument(metavar="SWEEP", help="Id of a sweep, as `cope-sweep status` lists them; `all`: every one.")
    ],
    source: Source,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the sweep has ended.")] = True,
    timeout_s: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="How long to wait.")] = 120.0,
) -> None:
    """Stop a sweep on whatever machine it runs: its runs write checkpoints, and the same `run` command continues.

    Exit codes: 0 stopped, 1 not stopped within the timeout, 2 no such sweep.

    Example: `cope-sweep stop 20261121-101500-3f2a`
    """
    active = _active(source)
    if sweep != "all" and sweep not in active:
        source.ask(GetSweep(sweep))  # raises UserError for an unknown sweep
    wanted = active if sweep == "all" else active & {sweep}
    for each in wanted:
        if source.client is not None:
            source.client.stop(each)
        else:
            source.store.index.request_stop(each)
    until = time.monotonic() + timeout_s
    while wait and (left := _active(source) & wanted) and time.monotonic() < until:
        time.sleep(POLL_INTERVAL_S)
    left = _active(source) & wanted if wait else set()
    if not source.printed({"stopped": sorted(wanted - left), "running": sorted(left)}):
        console = make_console()
        if not wanted:
            console.print("nothing to stop: the sweep has ended" if sweep != "all" else "no sweep is running")
        for each in sorted(wanted):
            state = f"still running after {timeout_s:g} s" if each in left else "stopped" if wait else "asked to stop"
            console.print(escaped(f"{each}: {state}"))
    raise typer.Exit(1 if left else 0)


def _active(source: Source) -> set[str]:
    """The sweeps that were submitted or are executed; of a service, those of its 1,000 newest ones."""
    from cope_sweep.read.queries.progress import ACTIVE

    sweeps = source.client.sweep_page(limit=1000).sweeps if source.client else source.store.index.sweeps()
    return {each.sweep_id for each in sweeps if each.status in ACTIVE}
