"""The command `cope-sweep mcp`. The command line finds it through its entry point."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cope_sweep.cli.options import ABLATIONS, MAX_COUNT, STORE, AblationsDir, IndexOpt, NoMlflowOpt, StoreOpt
from cope_sweep.errors import UserError


def mcp(
    ablations: AblationsDir = ABLATIONS,
    root: StoreOpt = STORE,
    index: IndexOpt = None,
    allow_training: Annotated[
        bool, typer.Option("--allow-training", help="Also offer the tools `run` and `stop`, within the budget.")
    ] = False,
    max_runs: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_COUNT, help="Runs that agents may train until the server ends.", show_default=False
        ),
    ] = None,
    max_cpu_minutes: Annotated[
        float | None,
        typer.Option(min=0.01, help="CPU minutes that training may use until the server ends.", show_default=False),
    ] = None,
    no_mlflow: NoMlflowOpt = False,
    http: Annotated[
        bool, typer.Option("--http", help="Serve streamable HTTP at /mcp instead of standard input and output.")
    ] = False,
    host: Annotated[str, typer.Option(help="http: the address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="http: the port to listen on.")] = 8001,
    keys_file: Annotated[
        Path,
        typer.Option(
            envvar="COPE_SWEEP_KEYS_FILE", metavar="FILE", help="http: the API keys, as `cope-sweep serve` makes them."
        ),
    ] = Path("keys.txt"),
) -> None:
    """Serve coding agents over the Model Context Protocol: questions about the store, and training within a budget.

    An agent's client starts it. It reads one store and one folder of ablation files, and trains nothing unless
    `--allow-training` and both limits of the budget are given. The extra `mcp` brings the protocol's SDK.

    Example: `cope-sweep mcp --store store`

    Example: `cope-sweep mcp --allow-training --max-runs 40 --max-cpu-minutes 60`

    Example: `cope-sweep mcp --http --port 8001`
    """
    if allow_training and (max_runs is None or max_cpu_minutes is None):
        raise UserError(
            "--allow-training needs a budget: --max-runs N --max-cpu-minutes N",
            code="missing_option",
            option="--max-runs" if max_runs is None else "--max-cpu-minutes",
        )
    if not allow_training and (max_runs is not None or max_cpu_minutes is not None):
        raise UserError(
            "a budget is for training; add --allow-training", code="missing_option", option="--allow-training"
        )
    try:
        import mcp as _  # noqa: F401 - the SDK, which has the name of this function
    except ModuleNotFoundError:
        raise UserError(
            "`cope-sweep mcp` needs the protocol's SDK; install it, in a checkout: pip install -e '.[mcp]'",
            code="not_installed",
            package="mcp",
        ) from None
    from cope_services.http.server import BindError
    from cope_services.http.settings import load_settings
    from cope_services.mcp.server import AgentServer
    from cope_services.mcp.training import Allowance

    allowance = Allowance(max_runs, max_cpu_minutes) if max_runs is not None and max_cpu_minutes is not None else None
    values = {"ablations": ablations, "store": root, "index": index or "", "host": host, "port": port}
    server = AgentServer(load_settings(**values, keys_file=keys_file), allowance, no_mlflow=no_mlflow)
    if not http:
        server.serve_stdio()
        return
    try:
        server.serve_http()
    except BindError as error:
        raise UserError(str(error), code="cannot_listen", host=host, port=port) from error
