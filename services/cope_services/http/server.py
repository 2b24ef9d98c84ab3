"""Runs the service with uvicorn until it receives a signal that asks for an end (`cope_sweep.signals`)."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import sys
import warnings
from contextlib import suppress

import uvicorn
from pydantic.warnings import UnsupportedFieldAttributeWarning
from starlette.types import ASGIApp

from cope_services.http.access import KeysFile, is_loopback, is_wildcard
from cope_services.http.app import create_app
from cope_services.http.metrics import ACCESS
from cope_services.http.protocol import LimitedHttpProtocol
from cope_services.http.settings import Settings, load_settings
from cope_sweep.errors import UserError
from cope_sweep.signals import TERMINATION, handling

SWITCH_S = 0.0005
"""Time for which a thread keeps Python's interpreter lock while others wait for it.

A thread that computes a model needs the lock after each operation. With Python's default of 5 ms, a busy event loop
would make the model wait 5 ms hundreds of times per batch.
"""


class BindError(Exception):
    """The server cannot listen on the address. The message names the reason and an alternative."""


def serve(settings: Settings) -> int:
    """Serve until SIGINT; return the exit code: 0 after SIGINT, 1 if the address cannot be used.

    After SIGTERM, SIGHUP and SIGUSR1, uvicorn finishes open requests and then ends the process with SIGTERM (code 143
    in a shell).
    Raises UserError if the service would listen beyond this machine without keys.
    """
    try:
        listener = listen(settings.host, settings.port)
    except BindError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    with listener:
        check_api_keys(settings)  # nothing is answered yet
        url = browser_url(settings.host, listener.getsockname()[1])
        sys.stdout.write(f"{url}  (API: {url}/docs; stop with Ctrl-C)\n")
        sys.stdout.flush()
        if settings.access_log:
            _log_requests()
        sys.setswitchinterval(SWITCH_S)
        # FastAPI ignores this one while it makes routes. Models that pydantic compiles at their first use warn later.
        warnings.simplefilter("ignore", UnsupportedFieldAttributeWarning)
        run_until_signal(create_app(settings), listener)
    return 0


def run_until_signal(app: ASGIApp, listener: socket.socket) -> None:
    """Answer requests until a signal asks for an end: return after SIGINT; otherwise end the process with SIGTERM."""
    server = uvicorn.Server(configuration(app))
    others = [signum for signum in TERMINATION if signum != signal.SIGTERM]
    terminating = handling(others, lambda signum, frame: signal.raise_signal(signal.SIGTERM))
    with terminating, suppress(KeyboardInterrupt):  # uvicorn stops gracefully, and then raises the signal again
        server.run(sockets=[listener])


def browser_url(host: str, port: int) -> str:
    """The URL of the page. Browsers cannot open wildcard addresses, so those become the loopback address."""
    is_ipv6 = ":" in host
    if is_wildcard(host):
        host = "::1" if is_ipv6 else "127.0.0.1"
    return f"http://[{host}]:{port}" if is_ipv6 else f"http://{host}:{port}"


def configuration(app: ASGIApp) -> uvicorn.Config:
    """Uvicorn's configuration, with uvloop except on Windows."""
    return uvicorn.Config(
        app,
        loop="auto",
        http=LimitedHttpProtocol,
        ws="none",
        log_level="warning",
        access_log=False,  # uvicorn would log queries, which may contain secrets; `Measurement` writes the log
        proxy_headers=False,  # any client can send them
        timeout_graceful_shutdown=5,  # seconds that open requests have after a signal
        server_header=False,
    )


def _log_requests() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    ACCESS.addHandler(handler)
    ACCESS.setLevel(logging.INFO)


def check_api_keys(settings: Settings) -> None:
    """Raise UserError if the keys file is damaged, or if keys are required and there are none."""
    keys = KeysFile(settings.keys_file)
    if keys.protects or is_loopback(settings.host):
        return
    raise UserError(
        f"a service that listens on {settings.host} needs API keys, but {settings.keys_file.absolute()} has none; make "
        "one with `cope-sweep serve --new-key NAME`, or listen on this machine only with `--host 127.0.0.1`",
        code="no_key",
        host=settings.host,
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Port 0 chooses a free port. Raises BindError.

    uvicorn could bind the address itself, but it would log failures without the port or an alternative.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise BindError(_explain(error, host, port)) from error


def _explain(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        with listen(host, 0) as free:
            other = free.getsockname()[1]
        return (
            f"port {port} on {host} is in use; stop the program that uses it, or choose another port: "
            f"--port {other}, or COPE_SWEEP_PORT={other}"
        )
    if error.errno == errno.EACCES:
        return f"port {port} requires privileges; choose a port from 1024: --port 8000, or COPE_SWEEP_PORT=8000"
    # create_server raises the codes of getaddrinfo as OSError.
    if error.errno in (errno.EADDRNOTAVAIL, socket.EAI_NONAME, socket.EAI_AGAIN, socket.EAI_FAIL):
        return f"this machine has no address {host!r}; choose another: --host 127.0.0.1, or COPE_SWEEP_HOST=127.0.0.1"
    reason = os.strerror(error.errno) if error.errno else error
    return f"cannot listen on {host}:{port}: {reason}; choose another address with --host and --port"


def main() -> int:
    """Serve with settings from the environment; return the exit code."""
    try:
        return serve(load_settings())
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
