"""The service as a process."""

from __future__ import annotations

import errno
import socket
import sys

import uvicorn

from cope_services.app import create_app
from cope_services.settings import Settings

GRACE_S = 5
"""How long open requests may go on after Ctrl-C."""


class BindError(Exception):
    """The address cannot be listened on; the message says why, and the way out."""


def serve(settings: Settings) -> int:
    """Serve until Ctrl-C or SIGTERM; the exit code: 0 once stopped, 1 where the port cannot be had."""
    try:
        listener = bind(settings.host, settings.port)
    except BindError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    host, port = settings.host, listener.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    config = uvicorn.Config(
        create_app(settings),
        log_level="info" if settings.access_log else "warning",
        access_log=settings.access_log,
        timeout_graceful_shutdown=GRACE_S,
        server_header=False,
    )
    sys.stdout.write(f"http://{shown}:{port}  (the API: http://{shown}:{port}/docs; stop with Ctrl-C)\n")
    sys.stdout.flush()
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        # uvicorn has closed everything in order, and then repeats the signal.
        pass
    finally:
        listener.close()
    return 0


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, before anything else starts. Raises BindError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise BindError(
            f"{host!r} is no address of this machine ({error.strerror}); try 127.0.0.1 or 0.0.0.0"
        ) from error
    listener = socket.socket(family, kind, protocol)
    # Only waits of a server stopped just now are overridden: a port where one listens stays refused.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise BindError(_why(error, host, port)) from error
    return listener


def _why(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        free = next((other for other in range(port + 1, min(port + 100, 65536)) if _is_free(host, other)), 0)
        return (
            f"port {port} on {host} is in use; stop what listens there, or take another: "
            f"--port {free}, or COPE_SWEEP_PORT={free}" + ("" if free else " (0: any free one)")
        )
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges; take one from 1024 up: --port 8000, or COPE_SWEEP_PORT=8000"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine; try 127.0.0.1 or 0.0.0.0"
    return f"cannot listen on {host}:{port}: {error.strerror}"


def _is_free(host: str, port: int) -> bool:
    try:
        bind(host, port).close()
    except BindError:
        return False
    return True


def main() -> int:
    """`python -m services`: settings from the environment."""
    from pydantic import ValidationError

    from cope_sweep.errors import UserError

    try:
        return serve(Settings())
    except UserError as error:
        message = str(error)
    except ValidationError as error:
        message = "; ".join(
            f"COPE_SWEEP_{'_'.join(map(str, item['loc'])).upper()}: {item['msg']}" for item in error.errors()
        )
    sys.stderr.write(f"error: {message}\n")
    return 2
