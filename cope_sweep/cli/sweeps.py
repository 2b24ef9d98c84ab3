"""The commands that train: `run`, `retry`, `submit` and `stop`, on this machine, a Ray cluster, or by a service."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from cope_sweep.api.questions import GetPlan, GetSweep
from cope_sweep.cli.options import ABLATION, TO_THE_END, Sets, Source, ablation_fields, asks, option, seconds_in
from cope_sweep.cli.output import counts_text, duration, escaped, make_console
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from cope_sweep.api.answers import SweepProgress, SweepState
    from cope_sweep.client import Client
    from cope_sweep.store import Status

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
    from cope_sweep.cli.training import Trainer, train_ablation, train_submission

    name: str | None = question.name
    if submission is not None:
        train_submission(submission, source, Trainer(local, address))
    if name is None:
        raise UserError("name an ablation; `cope-sweep list` shows them")
    trainer = Trainer(local, address, groups, mlflow, no_mlflow)
    leave_out: set[Status] = {"failed"} if keep_failed else set()
    train_ablation(question, sets, source, trainer, limits=_in_seconds(request), leave_out=leave_out)


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
    from cope_sweep.store.sweeps import SWEEP_ID

    is_sweep = SWEEP_ID.fullmatch(question.name) is not None
    if is_sweep and (failed or stopped or sets or question.scale):
        raise UserError(
            "a sweep is trained again as it was submitted; leave out --failed, --stopped, --set and --scale"
        )
    if not (is_sweep or failed or stopped):
        raise UserError("say which runs to train again: --failed, --stopped, or both")
    wanted = (["failed"] if failed else []) + (["stopped"] if stopped else [])
    if source.client is not None and is_sweep:
        with source.client as client:
            _show_submitted(client, client.retry(question.name), source)
    if source.client is not None:
        _submit_to(source.client, question, [*sets, TO_THE_END] if stopped else sets, source, only=wanted)
        return
    from cope_sweep.cli.training import Trainer, train_ablation, train_rest

    trainer = Trainer(local, address, groups, mlflow, no_mlflow)
    if is_sweep:
        train_rest(question.name, source, trainer)
    leave_out: set[Status] = {"pending", "interrupted", "failed", "stopped", "damaged"}
    leave_out = {status for status in leave_out if status not in wanted}
    train_ablation(question, sets, source, trainer, limits={}, leave_out=leave_out, to_the_end=stopped)


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
    limits = _in_seconds(request)
    if source.client is not None:
        _submit_to(source.client, question, sets, source, follow=follow, **limits)
        return
    from cope_sweep.cli.training import submit_job

    submit_job(
        question, sets, source, limits, address=address, working_dir=working_dir, store=store, mlflow=mlflow,
        follow=follow,
    )  # fmt: skip


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
    timeout_s: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Maximum time to wait.")] = 120.0,
) -> None:
    """Stop a sweep on whatever machine it runs: its runs write checkpoints, and the same `run` command continues.

    Exit codes: 0 stopped, 1 not stopped within the timeout, 2 no such sweep.

    Example: `cope-sweep stop 20261121-101500-3f2a`
    """
    active = _active(source)
    if sweep != "all" and sweep not in active:
        source.ask(GetSweep(sweep_id=sweep))  # raises UserError for an unknown sweep
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
