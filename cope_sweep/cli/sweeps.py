"""The commands that train: `run`, `retry`, `submit` and `stop`, on this machine, on a Ray cluster, or by a service."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from cope_sweep.api.question import Scale, Sets
from cope_sweep.cli.options import (
    ABLATION_HELP,
    ABLATIONS,
    STORE,
    AblationArg,
    AblationsDir,
    GroupsOpt,
    IndexOpt,
    JsonOpt,
    LocalOpt,
    MaxFailuresOpt,
    MaxRunsOpt,
    MlflowOpt,
    NoMlflowOpt,
    OptionalAblationArg,
    RayAddressOpt,
    Rows,
    StoreOpt,
    TimeBudgetOpt,
    conflict,
    is_on_command_line,
    seconds_in,
)
from cope_sweep.cli.output import escaped, make_console, print_json
from cope_sweep.errors import UserError

POLL_INTERVAL_S = 0.5

# -- run and retry -----------------------------------------------------------------------------------------------------


def run(
    ablation: OptionalAblationArg = None,
    scale: Scale = None,
    sets: Sets = [],
    rows: Rows = [],
    local: LocalOpt = False,
    address: RayAddressOpt = None,
    groups: GroupsOpt = None,
    keep_failed: Annotated[bool, typer.Option("--keep-failed", help="Do not try failed runs again.")] = False,
    time_budget: TimeBudgetOpt = None,
    max_runs: MaxRunsOpt = None,
    max_failures: MaxFailuresOpt = None,
    mlflow: MlflowOpt = None,
    no_mlflow: NoMlflowOpt = False,
    submission: Annotated[
        str | None,
        typer.Option("--submission", metavar="SWEEP", hidden=True, help="Execute a submitted sweep; used by its job."),
    ] = None,
    ablations: AblationsDir = ABLATIONS,
    store: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Train the runs that are not finished, record them in the store and in MLflow, and print the table.

    Press Ctrl-C or close the terminal at any time: runs in training write checkpoints first. Repeat the command to
    continue from there. With `nohup`, the command goes on without its terminal.

    Exit codes: 0 all runs finished (or were stopped early by the file's `schedule`), 1 some runs failed and no others
    are left, 2 bad input, 130 runs are left: interrupted, or a budget was used up.

    Example: `cope-sweep run quickstart`

    Example: `cope-sweep run quickstart --time-budget 2h --max-failures 3`

    Example: `cope-sweep run quickstart --local --set seeds=[0,1,2,3,4]`

    Example: `cope-sweep run flip_flop_architectures --rows "model.dim>=256" --set resources.gpus=1`
    """
    from cope_sweep.cli.training import Training, train_ablation, train_submission

    options = Training(
        ablations=ablations, store=store, index=index, as_json=as_json, local=local, address=address, groups=groups,
        mlflow=mlflow, no_mlflow=no_mlflow,
    )  # fmt: skip
    if submission is not None:
        train_submission(submission, options)
    if ablation is None:
        raise UserError("name an ablation; `cope-sweep list` shows them", code="name_one_ablation")
    limits = _limits(time_budget, max_runs, max_failures)
    train_ablation(
        ablation, scale, sets, rows, options, limits=limits, leave_out={"failed"} if keep_failed else set(),
    )  # fmt: skip


def _limits(time_budget: str | None, max_runs: int | None, max_failures: int | None) -> dict[str, Any]:
    """The fields of a `Budget`, with the seconds of `--time-budget`. Raises UserError."""
    seconds = seconds_in(time_budget, "--time-budget") if time_budget else None
    return {"time_budget_s": seconds, "max_runs": max_runs, "max_failures": max_failures}


def retry(
    ablation: Annotated[
        str,
        typer.Argument(
            metavar="ABLATION|SWEEP", help=f"{ABLATION_HELP} Or the id of a submitted sweep.", show_default=False
        ),
    ],
    scale: Scale = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Train failed runs again, from their last checkpoint.")
    ] = False,
    stopped: Annotated[
        bool, typer.Option("--stopped", help="Train runs that a schedule stopped early to their last step.")
    ] = False,
    sets: Sets = [],
    rows: Rows = [],
    local: LocalOpt = False,
    address: RayAddressOpt = None,
    groups: GroupsOpt = None,
    mlflow: MlflowOpt = None,
    no_mlflow: NoMlflowOpt = False,
    ablations: AblationsDir = ABLATIONS,
    store: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Train failed or stopped runs of an ablation again, or finish a submitted sweep.

    A submitted sweep is finished as it was submitted, even if its file has changed since. To train all unfinished runs
    of an ablation, use `run`.

    Example: `cope-sweep retry quickstart --failed`

    Example: `cope-sweep retry 20261124-101500-3f2a`
    """
    from cope_sweep.cli.training import Training, train_ablation, train_rest
    from cope_sweep.store import SWEEP_ID, Status

    is_sweep = SWEEP_ID.fullmatch(ablation) is not None
    if is_sweep and (failed or stopped or sets or scale or rows):
        flags = ("--failed", "--stopped", "--set", "--scale", "--rows")
        raise conflict(f"a sweep is finished as it was submitted; leave out {', '.join(flags)}", *flags)
    if not (is_sweep or failed or stopped):
        raise UserError(
            "choose the runs to train again: --failed, --stopped, or both", code="missing_option", option="--failed"
        )
    options = Training(
        ablations=ablations, store=store, index=index, as_json=as_json, local=local, address=address, groups=groups,
        mlflow=mlflow, no_mlflow=no_mlflow,
    )  # fmt: skip
    if is_sweep:
        train_rest(ablation, options)
    leave_out: set[Status] = {"pending", "interrupted"}
    if not failed:
        leave_out.add("failed")
    if not stopped:
        leave_out.add("stopped")
    train_ablation(ablation, scale, sets, rows, options, limits={}, leave_out=leave_out, to_the_end=stopped)


# -- submit ------------------------------------------------------------------------------------------------------------


CLUSTER = "http://127.0.0.1:8265"
"""The dashboard of a Ray cluster on this machine."""
OF_A_CLUSTER = {
    "address": "--address",
    "working_dir": "--working-dir",
    "store": "--store",
    "index": "--index",
    "mlflow": "--mlflow",
}
"""Parameter → option of `submit` that a service does not take: it has its own cluster and store."""


def submit(
    context: typer.Context,
    ablation: AblationArg,
    scale: Scale = None,
    address: Annotated[
        str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="The dashboard of the Ray cluster.")
    ] = CLUSTER,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            metavar="URL",
            envvar="COPE_SWEEP_SERVER",
            help="Submit to this cope-sweep service instead; put its API key into COPE_SWEEP_KEY.",
        ),
    ] = None,
    sets: Sets = [],
    rows: Rows = [],
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Stream the job's log, and exit with the sweep's code.")
    ] = True,
    time_budget: TimeBudgetOpt = None,
    max_runs: MaxRunsOpt = None,
    max_failures: MaxFailuresOpt = None,
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
    index: IndexOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Run an ablation on a Ray cluster or, with `--server`, on the cluster of a cope-sweep service.

    If the cluster uses token authentication, put its token into RAY_AUTH_TOKEN or Ray's token file.

    Example: `cope-sweep submit quickstart --address http://head:8265`

    Example: `cope-sweep submit quickstart --server http://service:8000`

    Example: `cope-sweep submit flip_flop_architectures --rows "model.dim>=256" --set resources.gpus=1`
    """
    limits = _limits(time_budget, max_runs, max_failures)
    cluster_options = [flag for name, flag in OF_A_CLUSTER.items() if is_on_command_line(context, name)]
    if server and cluster_options and is_on_command_line(context, "server"):
        raise conflict(
            f"{cluster_options[0]} is for a cluster, but --server {server} is a service; leave out one of them",
            cluster_options[0],
            "--server",
        )
    if server and not cluster_options:
        if rows:
            raise conflict("a service trains all rows of an ablation; leave out --rows", "--rows", "--server")
        from cope_sweep.cli.service import submit_to_service

        submit_to_service(server, ablation, scale, sets, limits, follow=follow, as_json=as_json)
        return
    from cope_sweep.cli.files import NamedFiles
    from cope_sweep.cli.training import submit_ablation

    submit_ablation(
        NamedFiles(working_dir / ABLATIONS), ablation, scale, sets, rows, limits, address=address, store=store,
        index=index, mlflow=mlflow, working_dir=working_dir, follow=follow, as_json=as_json,
    )  # fmt: skip


# -- stop --------------------------------------------------------------------------------------------------------------


def stop(
    sweep: Annotated[str, typer.Argument(metavar="SWEEP", help="Id of a sweep (see `cope-sweep status`), or `all`.")],
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the sweep has ended.")] = True,
    timeout_s: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Maximum time to wait.")] = 120.0,
    store: StoreOpt = STORE,
    index: IndexOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Stop a sweep, whatever machine it runs on. Runs write checkpoints first; repeat `run` to continue.

    A submitted sweep whose job has not started ends at once, and its job executes it no more.

    Exit codes: 0 stopped, 1 not stopped within the timeout, 2 no such sweep.

    Example: `cope-sweep stop 20261121-101500-3f2a`
    """
    from cope_sweep.cli.files import open_store
    from cope_sweep.read.queries import Queries
    from cope_sweep.store import ACTIVE
    from cope_sweep.sweep.jobs import stop_sweep

    opened = open_store(store, index)

    def active_sweeps() -> set[str]:
        return {summary.sweep_id for summary in opened.index.sweeps(ACTIVE)}

    active = active_sweeps()
    if sweep != "all" and sweep not in active:
        Queries(opened).sweep_summary(sweep)  # raises UserError for an unknown sweep
    wanted = active if sweep == "all" else active & {sweep}
    for sweep_id in wanted:
        stop_sweep(opened, sweep_id)
    until = time.monotonic() + timeout_s
    while wait and active_sweeps() & wanted and time.monotonic() < until:
        time.sleep(POLL_INTERVAL_S)
    still_active = active_sweeps() & wanted
    if as_json:
        print_json({"stopped": sorted(wanted - still_active), "running": sorted(still_active)})
    else:
        console = make_console()
        if not wanted:
            console.print("nothing to stop: the sweep has ended" if sweep != "all" else "no sweep is running")
        for sweep_id in sorted(wanted):
            running = f"still running after {timeout_s:g} s" if wait else "asked to stop"
            console.print(escaped(f"{sweep_id}: {running if sweep_id in still_active else 'stopped'}"))
    raise typer.Exit(1 if wait and still_active else 0)
