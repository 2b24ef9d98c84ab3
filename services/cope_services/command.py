"""The command `cope-sweep serve`. The command line finds it through its entry point."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cope_sweep.cli.options import ABLATIONS, STORE, AblationsDir, IndexOpt, StoreOpt
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from cope_services.http.access import KeysFile


def serve(
    host: Annotated[str, typer.Option(envvar="COPE_SWEEP_HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="COPE_SWEEP_PORT", min=0, max=65535, help="The port to listen on.")
    ] = 8000,
    allow_host: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            help="A name by which clients may call the service, besides its address. May be repeated.",
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
            help="Dashboard of the Ray cluster that trains submitted sweeps, as http://HOST:8265. Default: none.",
        ),
    ] = "",
    keys_file: Annotated[
        Path, typer.Option(envvar="COPE_SWEEP_KEYS_FILE", metavar="FILE", help="File of the API keys.")
    ] = Path("keys.json"),
    new_key: Annotated[
        str | None, typer.Option(metavar="NAME", help="Make an API key, print it, and end.", show_default=False)
    ] = None,
    scope: Annotated[
        list[str],
        typer.Option(
            metavar="SCOPE",
            help="Scope of the new key: `read`, `infer` (ask models), `submit` (sweeps). May be repeated. "
            "Default: read.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 - Typer copies it
    keys: Annotated[bool, typer.Option("--keys", help="List the API keys and end.")] = False,
    revoke: Annotated[
        str | None, typer.Option(metavar="NAME", help="Revoke an API key and end.", show_default=False)
    ] = None,
) -> None:
    """Serve tables, runs, checkpoints, perplexity and probes over REST, with a web page.

    Ctrl-C stops the service. Beyond this machine, as with `--host 0.0.0.0`, it needs an API key. Its other settings are
    environment variables, which services/README.md lists.

    Example: `cope-sweep serve --port 8080`, then `curl http://127.0.0.1:8080/api/v1/ablations/quickstart/table?format=markdown`
    """
    if new_key or keys or revoke or scope:
        from cope_services.http.access import KeysFile

        _manage_keys(KeysFile(keys_file), new_key, scope, revoke)
        return
    from cope_services.http import server
    from cope_services.http.settings import load_settings

    values = {"host": host, "port": port, "ablations": ablations, "store": root, "index": index or ""}
    values["ray_address"] = ray_address
    if allow_host:
        values["allow_hosts"] = ",".join(allow_host)
    raise typer.Exit(server.serve(load_settings(**values, keys_file=keys_file)))


def _manage_keys(file: KeysFile, new_key: str | None, scopes: list[str], revoke: str | None) -> None:
    """Make, revoke or list keys. Raises UserError."""
    from cope_services.http.access import SCOPES

    if scopes and not new_key:
        raise UserError("--scope is of a new key; give its name, too: --new-key NAME")
    if new_key and revoke:
        raise UserError("--new-key and --revoke are two commands; give one of them")
    if unknown := [scope for scope in scopes if scope not in SCOPES]:
        raise UserError(f"there is no scope {unknown[0]!r}; the scopes are {', '.join(SCOPES)}")
    if new_key:
        secret = file.create(new_key, [each for each in SCOPES if each in (scopes or ["read"])])
        typer.echo(secret)
        typer.echo(f"{file.path} has its digest only: this is the only time that it is shown", err=True)
    elif revoke:
        file.revoke(revoke)
        left = len(file.all())
        typer.echo(f"revoked {revoke}; {file.path} has {left} key{'s' * (left != 1)}")
    else:
        for key in file.all():
            typer.echo(f"{key.name}  {', '.join(key.scopes)}  made {key.created}")
        if not file.all():
            typer.echo(f"there are no keys in {file.path}; make one with --new-key NAME --scope read", err=True)
