"""The commands `run` and `retry`: execute a sweep on this machine or on a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cope_sweep.cli.options import (
    AblationArg,
    Json,
    ScaleOpt,
    Sets,
    find_ablation,
    load_plan,
    open_store,
    seconds_in,
)
from cope_sweep.cli.output import escaped, make_console, print_json
from cope_sweep.cli.remote import submit_remotely
from cope_sweep.cli.source import Source, asks, option
from cope_sweep.cli.sweep_output import plan_arguments, print_cost, print_next_steps, print_outcome
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from cope_sweep.config import Plan
    from cope_sweep.store import Budget, Status, Store, Submission
    from cope_sweep.sweep.sweep import SweepOutcome

RAY_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets this environment variable for the driver of a job."""

TO_THE_END = ["schedule.kind=none"]
"""The `--set` with which no schedule stops a run."""

LocalOpt = Annotated[bool, typer.Option("--local", help="Train in this process, without Ray.")]
RayAddressOpt = Annotated[
    str | None,
    typer.Option(
        envvar="RAY_ADDRESS",
        help="A running Ray cluster: `auto` or `HOST:6379`. Default: start Ray on this machine.",
        show_default=False,
    ),
]
GroupsOpt = Annotated[
    int | None,
    typer.Option(min=1, help="Worker groups that train side by side. Default: as many as fit.", show_default=False),
]
TIME_BUDGET = option(
    "--time-budget",
    metavar="TIME",
    kind=str | None,
    help="Stop after this time (`90m`, `2h`, `1d`): runs in training write checkpoints.",
)
KeepFailedOpt = Annotated[bool, typer.Option("--keep-failed", help="Do not try failed runs again.")]
MlflowOpt = Annotated[
    str | None,
    typer.Option(
        "--mlflow",
        metavar="URI",
        envvar="MLFLOW_TRACKING_URI",
        help="MLflow's tracking server or database. Default: `sqlite:///STORE/mlflow.db`.",
        show_default=False,
    ),
]
SubmissionOpt = Annotated[
    str | None,
    typer.Option("--submission", metavar="SWEEP", hidden=True, help="Execute a submitted sweep: what a job does."),
]


@asks("cope_sweep.store:Budget", "ablations", remote=False, time_budget_s=TIME_BUDGET)
def run(
    *,
    ablation: Annotated[
        str | None,
        typer.Argument(
            metavar="ABLATION",
            help="Name of an ablation (see `cope-sweep list`) or path of its file.",
            show_default=False,
        ),
    ] = None,
    scale: ScaleOpt = None,
    sets: Sets = [],
    local: LocalOpt = False,
    address: RayAddressOpt = None,
    groups: GroupsOpt = None,
    keep_failed: KeepFailedOpt = False,
    mlflow: MlflowOpt = None,
    request: dict[str, Any],
    no_mlflow: Annotated[bool, typer.Option("--no-mlflow", help="Record in the store only.")] = False,
    submission: SubmissionOpt = None,
    source: Source,
    as_json: Json = False,
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

    if submission is not None:
        _run_submission(submission, source, as_json, local=local, address=address)
    if ablation is None:
        raise UserError("name an ablation; `cope-sweep list` shows them")
    _run(
        ablation, scale, sets, source, as_json,
        local=local, address=address, groups=groups, budget=Budget(**in_seconds(request)), mlflow=mlflow,
        no_mlflow=no_mlflow, leave_out={"failed"} if keep_failed else set(),
    )  # fmt: skip


def in_seconds(budget: dict[str, Any]) -> dict[str, Any]:
    """The fields of a budget, with the seconds of `--time-budget`. Raises UserError."""
    time = budget["time_budget_s"]
    return budget | {"time_budget_s": seconds_in(time, "--time-budget") if time else None}


@asks(None, "ablations", local=["local", "address", "groups", "mlflow", "no_mlflow"])
def retry(
    *,
    ablation: AblationArg,
    failed: Annotated[bool, typer.Option("--failed", help="Train failed runs again, from their last state.")] = False,
    stopped: Annotated[
        bool, typer.Option("--stopped", help="Train runs to their end that a schedule stopped early.")
    ] = False,
    scale: ScaleOpt = None,
    sets: Sets = [],
    local: LocalOpt = False,
    address: RayAddressOpt = None,
    groups: GroupsOpt = None,
    mlflow: MlflowOpt = None,
    no_mlflow: Annotated[bool, typer.Option("--no-mlflow", help="Record in the store only.")] = False,
    source: Source,
    as_json: Json = False,
) -> None:
    """Train only the runs of an ablation that failed, or were stopped early; `run` trains all that are not finished.

    Example: `cope-sweep retry quickstart --failed`
    """
    from cope_sweep.store import Budget

    if not failed and not stopped:
        raise UserError("say which runs to train again: --failed, --stopped, or both")
    wanted = (["failed"] if failed else []) + (["stopped"] if stopped else [])
    if source.client is not None:
        sets = [*sets, *TO_THE_END] if stopped else sets
        submit_remotely(source.client, ablation, scale=scale, sets=sets, follow=True, as_json=as_json, only=wanted)
        return
    leave_out: set[Status] = {"pending", "interrupted", "failed", "stopped", "damaged"}
    _run(
        ablation, scale, sets, source, as_json,
        local=local, address=address, groups=groups, budget=Budget(), mlflow=mlflow, no_mlflow=no_mlflow,
        leave_out={status for status in leave_out if status not in wanted}, to_the_end=stopped,
    )  # fmt: skip


def _run(
    ablation: str,
    scale: str | None,
    sets: list[str],
    source: Source,
    as_json: bool,
    *,
    local: bool,
    address: str | None,
    groups: int | None,
    budget: Budget,
    mlflow: str | None,
    no_mlflow: bool,
    leave_out: set[Status],
    to_the_end: bool = False,
) -> None:
    """Train runs of an ablation, show the table and exit.

    `leave_out` are statuses of runs that are not trained; with `to_the_end` the file's schedule stops none.
    """
    root = source.root
    if RAY_JOB_VARIABLE in os.environ and "://" not in root and not Path(root).is_absolute():
        raise UserError(
            f"in a Ray job the folder {Path.cwd()} is temporary, and the store {root} would be deleted with it; "
            "name a lasting folder that all nodes share: --store /shared/store"
        )
    plan = load_plan(ablation, source.ablations, scale, [*sets, *TO_THE_END] if to_the_end else sets)
    store = open_store(root, source.index, create=True)
    uri = _checked_uri(store, mlflow, no_mlflow)
    outcome = _execute(
        plan,
        store,
        file_text=find_ablation(ablation, source.ablations).read_text(encoding="utf-8"),
        local=local,
        address=address,
        groups=groups,
        leave_out=leave_out,
        budget=budget,
        tracking_uri=uri,
    )
    _show_and_exit(outcome, plan, store, uri, plan_arguments(ablation, scale, sets, root), as_json)


def _run_submission(sweep_id: str, source: Source, as_json: bool, *, local: bool, address: str | None) -> None:
    """Execute a submitted sweep, show the table and exit. Where that cannot begin, the sweep is recorded as failed."""
    from cope_sweep.sweep.jobs import failing, job_submission

    store = open_store(source.root, source.index, create=True)
    with failing(store, sweep_id):
        submitted, plan = job_submission(store, sweep_id)
        uri = _checked_uri(store, submitted.mlflow, submitted.no_mlflow)
        outcome = _execute(
            plan,
            store,
            file_text=submitted.file_text,
            local=local,
            address=address,
            groups=None,
            leave_out=set(submitted.leave_out),
            budget=submitted,
            tracking_uri=uri,
            submission=submitted,
        )
    _show_and_exit(outcome, plan, store, uri, shlex.join(submitted.command[2:]), as_json)


def _checked_uri(store: Store, mlflow: str | None, no_mlflow: bool) -> str | None:
    """The MLflow store, which was asked whether it answers; None for no copy in MLflow. Raises UserError."""
    from cope_sweep.tracking.uri import check, resolve_uri

    if no_mlflow:
        return None
    uri = resolve_uri(store, mlflow)
    check(uri)
    return uri


def _show_and_exit(
    outcome: SweepOutcome, plan: Plan, store: Store, uri: str | None, same_plan: str, as_json: bool
) -> None:
    from cope_sweep.read.queries import recorded_plan
    from cope_sweep.read.tables import table

    for problem in outcome.tracking_errors:
        make_console(stderr=True).print(f"[yellow]MLflow:[/yellow] {escaped(problem)}")
    results = table(recorded_plan(plan, store), store)
    if as_json:
        print_json({"sweep": {**outcome.__dict__, "exit_code": outcome.exit_code}, "table": results.to_json()})
    else:
        console = make_console()
        console.print(results.to_rich())
        print_outcome(console, outcome, same_plan)
        submitted = "--submission" in sys.argv
        again = f"run {same_plan}" if submitted else shlex.join(sys.argv[1:])
        left = again if outcome.left else None
        print_next_steps(console, recorded_plan(plan, store), store, uri, same_plan, again=left)
    raise typer.Exit(outcome.exit_code)


def _execute(
    plan: Plan,
    store: Store,
    *,
    file_text: str,
    local: bool,
    address: str | None,
    groups: int | None,
    leave_out: set[Status],
    budget: Budget,
    tracking_uri: str | None,
    submission: Submission | None = None,
) -> SweepOutcome:
    """Execute the plan with a display of its progress on standard error."""
    from cope_sweep.cli.progress import progress_display
    from cope_sweep.cli.sending import SendingBar
    from cope_sweep.read.queries import recorded_plan
    from cope_sweep.sweep.sweep import sweep

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
    print_cost(console, plan, store, leave_out=leave_out, max_runs=budget.max_runs)
    with contextlib.ExitStack() as stack, SendingBar(console) as bar:
        display = stack.enter_context(progress_display(plan, store, console, leave_out))

        def on_sending(sent: int, total: int) -> None:
            stack.close()  # the display of training has ended
            bar(sent, total)

        return sweep(
            plan,
            store,
            executor,
            resources=resources,
            file_text=file_text,
            executor_name="local" if local else "ray",
            tracking_uri=tracking_uri,
            leave_out=leave_out,
            budget=budget,
            on_event=display,
            on_row=display.add,
            on_sending=on_sending,
            on_note=lambda text: console.print(f"[yellow]note:[/yellow] {escaped(text)}", soft_wrap=True),
            submission=submission,
        )
