"""`run` and `submit`: here, or on a cluster."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from cope_sweep.cli.options import (
    ABLATIONS,
    STORE,
    AblationArg,
    AblationsDir,
    Json,
    ScaleOpt,
    Sets,
    Store,
    escaped,
    find_ablation,
    load_plan,
    make_console,
    print_json,
)
from cope_sweep.errors import UserError

IN_A_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets this variable for the driver of a job."""

if TYPE_CHECKING:
    from rich.console import Console

    from cope_sweep.plan import Plan
    from cope_sweep.record import Ledger
    from cope_sweep.sweep.sweep import SweepOutcome


def run(
    ablation: AblationArg,
    scale: ScaleOpt = None,
    sets: Sets = [],
    local: Annotated[bool, typer.Option("--local", help="Train in this process, without Ray.")] = False,
    address: Annotated[
        str | None,
        typer.Option(
            envvar="RAY_ADDRESS",
            help="A running Ray cluster, as `auto` or `HOST:6379`; none: start one here.",
            show_default=False,
        ),
    ] = None,
    groups: Annotated[
        int | None,
        typer.Option(min=1, help="Worker groups that train side by side; none: as many as fit.", show_default=False),
    ] = None,
    keep_failed: Annotated[
        bool, typer.Option("--keep-failed", help="Leave failed runs as they are; else they are tried again.")
    ] = False,
    mlflow: Annotated[
        str | None,
        typer.Option(
            "--mlflow",
            metavar="URI",
            envvar="MLFLOW_TRACKING_URI",
            help="MLflow's tracking server or database; none: `sqlite:///STORE/mlflow.db`.",
            show_default=False,
        ),
    ] = None,
    no_mlflow: Annotated[bool, typer.Option("--no-mlflow", help="Record in the store only.")] = False,
    ablations: AblationsDir = ABLATIONS,
    store: Store = STORE,
    as_json: Json = False,
) -> None:
    """Train what is not finished, record it in the store and in MLflow, and print the table.

    Stop it with Ctrl-C whenever you like: runs in training are checkpointed, and the same command goes on from there.

    Exit code: 0 all finished, 1 some runs failed, 2 bad input, 130 stopped.

    Example: `cope-sweep run quickstart`

    Example: `cope-sweep run quickstart --local --set seeds=[0,1,2,3,4]`
    """
    from cope_sweep.cli.progress import progress
    from cope_sweep.record import Ledger
    from cope_sweep.record.preflight import check, resolve_uri
    from cope_sweep.sweep.sweep import sweep

    if IN_A_RAY_JOB in os.environ and not store.is_absolute():
        raise UserError(
            f"in a Ray job the folder {Path.cwd()} is temporary, and the store {store} would vanish with it; "
            "name one that lasts, and that all nodes share: --store /shared/store"
        )
    planned = load_plan(ablation, ablations, scale, sets)
    ledger = Ledger(store, create=True)
    uri = None if no_mlflow else resolve_uri(ledger, mlflow)
    if uri:
        check(uri)
    resources = planned.ablation.content.resources
    if groups is not None:
        resources = resources.model_copy(update={"groups": groups})
    if local:
        from cope_sweep.sweep.local import run_local as executor
    else:
        from functools import partial

        from cope_sweep.sweep.schedule import run_on_ray

        executor = partial(run_on_ray, address=address)
    if local or address is None:
        # Texts are read here, with a bar and an error that all can see; elsewhere, the workers read them.
        for task in {run.task for run in planned.runs if ledger.run(run.run_id).status != "finished"}:
            task.prepare()
    with progress(planned, ledger, make_console(stderr=True)) as show:
        outcome = sweep(
            planned,
            ledger,
            executor,
            resources=resources,
            file_text=find_ablation(ablation, ablations).read_text(encoding="utf-8"),
            executor_name="local" if local else "ray",
            tracking_uri=uri,
            retry_failed=not keep_failed,
            on_event=show,
        )
    for problem in outcome.tracking_errors:
        make_console(stderr=True).print(f"[yellow]MLflow:[/yellow] {escaped(problem)}")
    from cope_sweep.results import table

    shown = table(planned, ledger)
    if as_json:
        print_json({"sweep": {**outcome.__dict__, "exit_code": outcome.exit_code}, "table": shown.to_json()})
    else:
        console = make_console()
        console.print(shown.to_rich())
        again = [ablation, *(["--scale", scale] if scale else [])]
        again += [part for value in sets for part in ("--set", value)]
        again += ["--store", str(store)] if store != STORE else []
        _next_steps(console, planned, ledger, outcome, uri, shlex.join(again))
    raise typer.Exit(outcome.exit_code)


def submit(
    ablation: AblationArg,
    address: Annotated[
        str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="The cluster's dashboard.")
    ] = "http://127.0.0.1:8265",
    scale: ScaleOpt = None,
    sets: Sets = [],
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Stream the job's log, and exit with its code.")
    ] = True,
    working_dir: Annotated[Path, typer.Option(help="The tree to send: this project's checkout.")] = Path(),
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            help="The store, as the cluster sees it; none: ./store, on a cluster that runs here.",
            show_default=False,
        ),
    ] = None,
    mlflow: Annotated[
        str | None, typer.Option("--mlflow", metavar="URI", help="MLflow, as the cluster sees it.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the ablation as a Ray job on a cluster: `ray job submit`, in one word.

    With token authentication on, the token comes from RAY_AUTH_TOKEN or from Ray's token file, as for Ray's own client.

    Example: `cope-sweep submit quickstart --address http://head:8265`
    """
    from cope_sweep.sweep.submit import submit as submit_job

    load_plan(ablation, working_dir / ABLATIONS, scale, sets)  # a bad file fails here, not on the cluster
    if store is None:
        if urlsplit(address if "://" in address else f"//{address}").hostname not in ("127.0.0.1", "localhost", "::1"):
            raise UserError(
                f"{address} is elsewhere: name the store as the cluster sees it, with --store /shared/store"
            )
        store = str(STORE.absolute())
    arguments = ["run", ablation, "--store", store]
    arguments += [part for value in sets for part in ("--set", value)]
    arguments += ["--scale", scale] if scale else []
    arguments += ["--mlflow", mlflow] if mlflow else []
    console = make_console(stderr=True)
    outcome = submit_job(
        arguments,
        address=address,
        working_dir=working_dir,
        follow=follow,
        on_line=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
    )
    if as_json:
        print_json(outcome.__dict__)
    else:
        make_console().print(f"job {outcome.job_id}: {outcome.status}")
    raise typer.Exit(outcome.exit_code)


def _next_steps(
    console: Console, planned: Plan, ledger: Ledger, outcome: SweepOutcome, uri: str | None, again: str
) -> None:
    """What came of the sweep, and what to do with it; `again` are the arguments that mean the same plan."""
    here = "" if shutil.which("cope-sweep") else f"{Path(sys.argv[0]).parent}/"
    store = [] if ledger.root == STORE.absolute() else ["--store", str(ledger.root)]
    if outcome.sweep_id is None and not outcome.failed:
        console.print(f"Nothing to train: all {outcome.reused} runs were finished before.")
    if outcome.failed:
        hint = f"why: {here}cope-sweep status {again}; the same command tries them again"
        console.print(f"[red]{outcome.failed} runs failed[/red]; {hint}")
    if outcome.interrupted:
        hint = "the same command goes on from there"
        console.print(f"[yellow]stopped[/yellow], {outcome.interrupted} runs still to do; {hint}")
    console.print("Next:", style="bold")
    steps = [(f"{here}cope-sweep report {again} --format latex", "the table, for a paper")]
    if uri and uri.startswith("sqlite:"):
        steps.append((f"{here}mlflow ui --backend-store-uri {uri}", "every run's curves, parameters and files"))
    steps.append((shlex.join([f"{here}cope-sweep", "serve", *store]), "REST, and a page at http://127.0.0.1:8000"))
    finished = next((run for run in planned.runs if ledger.run(run.run_id).status == "finished"), None)
    if finished:
        if (ledger.run(finished.run_id).checkpoint / "tokenizer.json").exists():
            asked = ["--text", "Of position, and of context."]
        else:
            tokens = finished.task.sequences(finished.task.TESTS[0], 0, 0, 1).inputs_NT[0, :8]
            asked = ["--tokens", " ".join(map(str, tokens))]
        words = [f"{here}cope-sweep", "perplexity", finished.run_id, *asked, *store]
        steps.append((shlex.join(words), "a checkpoint at work"))
    for command, what in steps:
        console.print(f"  [bold cyan]{command}[/bold cyan]   [dim]{what}[/dim]", soft_wrap=True, highlight=False)
