"""The command `cope-sweep serve`. The command line finds it through its entry point."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cope_sweep.cli.options import ABLATIONS, STORE, AblationsDir, IndexOpt, StoreOpt
from cope_sweep.errors import UserError


def serve(
    host: Annotated[str, typer.Option(envvar="COPE_SWEEP_HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="COPE_SWEEP_PORT", min=0, max=65535, help="The port to listen on.")
    ] = 8000,
    allow_host: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            help="A host name that clients may use besides the address. May be repeated.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 - Typer copies it
    ablations: AblationsDir = ABLATIONS,
    root: StoreOpt = STORE,
    index: IndexOpt = None,
    ray_address: Annotated[
        str,
        typer.Option(
            envvar="COPE_SWEEP_RAY_ADDRESS",
            metavar="URL",
            help="Dashboard of the Ray cluster that trains submitted sweeps: `http://HOST:8265`. Default: none.",
        ),
    ] = "",
    keys_file: Annotated[
        Path,
        typer.Option(
            envvar="COPE_SWEEP_KEYS_FILE",
            metavar="FILE",
            help="File with the digests of the API keys. Delete a key's line to revoke it.",
        ),
    ] = Path("keys.txt"),
    new_key: Annotated[
        str | None, typer.Option(metavar="NAME", help="Make an API key, print it, and exit.", show_default=False)
    ] = None,
    submit: Annotated[
        bool,
        typer.Option(
            "--submit",
            help="The new key may also submit, stop and retry sweeps. Without it: read, and query models.",
        ),
    ] = False,
) -> None:
    """Serve tables, runs, checkpoints, perplexity and probes over REST, with a web page.

    Ctrl-C stops the service. To serve other machines (`--host 0.0.0.0`), make an API key first. More settings are
    environment variables, listed in docs/reference/environment.md.

    Example: `cope-sweep serve --port 8080`, then `curl http://127.0.0.1:8080/api/v1/ablations/quickstart/table?format=markdown`
    """
    if new_key is not None or submit:
        _make_key(keys_file, new_key, may_submit=submit)
        return
    from cope_services.http import server
    from cope_services.http.settings import load_settings

    values = {"host": host, "port": port, "ablations": ablations, "store": root, "index": index or ""}
    values["ray_address"] = ray_address
    if allow_host:
        values["allow_hosts"] = ",".join(allow_host)
    raise typer.Exit(server.serve(load_settings(**values, keys_file=keys_file)))


def _make_key(path: Path, name: str | None, *, may_submit: bool) -> None:
    from cope_services.http.access import KeysFile

    if name is None:
        raise UserError("--submit needs a new key; add --new-key NAME", code="missing_option", option="--new-key")
    typer.echo(KeysFile(path).create(name, may_submit=may_submit))
    rights = "submit, stop and retry sweeps, read, and query models" if may_submit else "read and query models"
    typer.echo(
        f"Copy the key now. Only its digest was written, to {path}, so it cannot be shown again.\n"
        f"The key {name!r} may {rights}. Clients send it as a header: `Authorization: Bearer KEY`.\n"
        f"To revoke it, delete its line in {path}.",
        err=True,
    )
