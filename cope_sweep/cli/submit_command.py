"""The command `submit`: executes a sweep as a Ray job on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from cope_sweep.cli.options import (
    ABLATIONS,
    STORE,
    AblationArg,
    Json,
    ScaleOpt,
    Sets,
    find_ablation,
    load_plan,
    open_store,
)
from cope_sweep.cli.output import escaped, make_console, print_json
from cope_sweep.cli.remote import submit_remotely
from cope_sweep.cli.run_commands import TIME_BUDGET, in_seconds
from cope_sweep.cli.source import Source, asks
from cope_sweep.cli.sweep_output import overrides, print_cost
from cope_sweep.errors import UserError

INDEX_VARIABLE = "COPE_SWEEP_INDEX"
LOOPBACK = ("127.0.0.1", "localhost", "::1")

DashboardOpt = Annotated[str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="The dashboard of the Ray cluster.")]


@asks(
    "cope_sweep.store:Budget",
    local=["address", "store", "mlflow", "working_dir"],
    without=["root"],
    time_budget_s=TIME_BUDGET,
)
def submit(
    *,
    ablation: AblationArg,
    address: DashboardOpt = "http://127.0.0.1:8265",
    scale: ScaleOpt = None,
    sets: Sets = [],
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Stream the job's log, and exit with its code.")
    ] = True,
    working_dir: Annotated[Path, typer.Option(help="The folder to send: a checkout of this project.")] = Path(),
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            help="Path of the store on the cluster. Default: ./store, if the cluster runs on this machine.",
            show_default=False,
        ),
    ] = None,
    mlflow: Annotated[
        str | None,
        typer.Option("--mlflow", metavar="URI", help="MLflow's address as the cluster sees it.", show_default=False),
    ] = None,
    request: dict[str, Any],
    source: Source,
    as_json: Json = False,
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

    limits, index = in_seconds(request), source.index
    if source.client is not None:
        submit_remotely(source.client, ablation, scale=scale, sets=sets, follow=follow, as_json=as_json, **limits)
        return
    plan = load_plan(ablation, working_dir / ABLATIONS, scale, sets)  # a faulty file fails here, not on the cluster
    is_here = urlsplit(address if "://" in address else f"//{address}").hostname in LOOPBACK
    if store is None:
        if not is_here:
            raise UserError(
                f"{address} is another machine; name the store's path on the cluster, as in --store /shared/store"
            )
        store = str(Path(STORE).absolute())
    console = make_console(stderr=True)
    print_cost(console, plan, open_store(store, index), max_runs=limits["max_runs"])

    def on_line(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    options: dict[str, Any] = {**limits, "mlflow": mlflow}
    cluster = Cluster(address, working_dir, environment={INDEX_VARIABLE: index} if index else {})  # may hold a password
    if is_here or "://" in store or Path(store).is_dir():
        path = find_ablation(ablation, working_dir / ABLATIONS)
        submission = new_submission(
            load_ablation(path), file_text=path.read_text(encoding="utf-8"), scale=scale, sets=sets, **options
        )
        shared = open_store(store, index, create=True)
        check_cluster(cluster)  # before anything is written
        record_submission(submission, plan, shared)
        outcome = start_submission(submission, shared, cluster, follow=follow, on_line=on_line)
    else:
        # Only the cluster can reach the store: the job reads the ablation from the folder that is sent.
        arguments = ["run", ablation, "--store", store, *overrides(scale, sets), *_options(options)]
        outcome = submit_job(arguments, cluster, follow=follow, on_line=on_line)
    if as_json:
        print_json(outcome.__dict__)
    else:
        message = f" ({outcome.message})" if outcome.message else ""
        make_console().print(escaped(f"job {outcome.job_id}: {outcome.status}{message}"), soft_wrap=True)
    raise typer.Exit(outcome.exit_code)


def _options(fields: dict[str, Any]) -> list[str]:
    """The options of `run` for fields of a Submission."""
    names = {"time_budget_s": "--time-budget", "max_runs": "--max-runs", "max_failures": "--max-failures"}
    names |= {"mlflow": "--mlflow"}
    return [word for key, value in fields.items() if value is not None for word in (names[key], str(value))]
