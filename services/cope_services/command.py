"""The command `cope-sweep serve`. The command line finds it through its entry point."""

from __future__ import annotations

from typing import Annotated

import typer

from cope_sweep.cli.options import ABLATIONS, STORE, AblationsDir, IndexOpt, StoreOpt


def serve(
    host: Annotated[str, typer.Option(envvar="COPE_SWEEP_HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="COPE_SWEEP_PORT", min=0, max=65535, help="The port to listen on.")
    ] = 8000,
    ablations: AblationsDir = ABLATIONS,
    root: StoreOpt = STORE,
    index: IndexOpt = None,
    ray_address: Annotated[
        str,
        typer.Option(
            envvar="COPE_SWEEP_RAY_ADDRESS",
            metavar="URL",
            help="Dashboard of the Ray cluster that trains submitted sweeps, as http://HOST:8265. Default: none.",
        ),
    ] = "",
) -> None:
    """Serve tables, runs, checkpoints, perplexity and probes over REST, with a web page.

    Ctrl-C stops the service. Its other settings are environment variables, which services/README.md lists.

    Example: `cope-sweep serve --port 8080`, then `curl http://127.0.0.1:8080/api/v1/ablations/quickstart/table?format=markdown`
    """
    from cope_services import server
    from cope_services.settings import Settings

    raise typer.Exit(
        server.serve(
            Settings(host=host, port=port, ablations=ablations, store=root, index=index or "", ray_address=ray_address)
        )
    )
