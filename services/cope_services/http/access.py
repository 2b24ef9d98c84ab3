"""Access control: API keys, and the hosts and origins from which requests are accepted.

A key is 256 random bits. The file has one line per key: name, right, and SHA-256 digest. Reading the file does not
reveal the keys. Random keys of 256 bits cannot be guessed, so a slow password hash would only slow down every request.

    # of the lab's notebooks
    lab read 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08

`read` allows all that changes nothing; this includes asking models, whose cost has its own limits. `submit` allows
sweeps as well. `Authentication` refuses every request without a valid key before its body is read, except on open
paths, so routes with `dependencies=[READ]` need no other check; those with `[SUBMIT]` do. Without keys, which is only
allowed on loopback, every request may do everything.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers
from starlette.types import Scope

from cope_services.http.errors import HttpError, NotReadyError, path_below
from cope_sweep.errors import UserError

LOG = logging.getLogger("cope_services.access")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LINE = re.compile(rf"(?P<name>{NAME.pattern})\s+(?P<right>read|submit)\s+(?P<sha256>[0-9a-f]{{64}})")
PREFIX = "cope_"
"""Start of every key: tools that search files for secrets can find it."""


class KeysError(UserError):
    """The keys file is missing, damaged or not usable."""

    default_code = "damaged_keys"


@dataclass(frozen=True)
class ApiKey:
    """A stored key: its name, whether it may submit sweeps besides reading, and its digest."""

    name: str
    may_submit: bool
    sha256: str


class KeysFile:
    """The keys in a file, which is read again whenever it changes.

    If the file had keys since the server started and is then removed, no key is valid.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state: tuple[int, int, int] | None = None
        self._keys: tuple[ApiKey, ...] = ()
        self._had_keys = False

    @property
    def protects(self) -> bool:
        """The file has keys, or had some since the server started. Raises KeysError."""
        self._read_if_changed()
        return self._had_keys

    def all(self) -> tuple[ApiKey, ...]:
        """All keys, in the order of the file. Raises KeysError."""
        self._read_if_changed()
        return self._keys

    def find(self, presented: str) -> ApiKey | None:
        """The stored key that matches a client's key, or None. Raises KeysError.

        Every digest is compared in constant time, so response times reveal nothing about the keys.
        """
        digest = _digest(presented[:200])  # a header may be long, and a key has 48 characters
        match = None
        for key in self.all():
            if hmac.compare_digest(key.sha256, digest):
                match = key
        return match

    def create(self, name: str, *, may_submit: bool = False) -> str:
        """Add a key and return it. Only its digest is stored, so it cannot be shown again. Raises KeysError."""
        if NAME.fullmatch(name) is None:
            raise KeysError(
                f"{name[:80]!r} cannot be the name of a key; use at most 64 letters, digits, `.`, `_` and `-`",
                code="invalid_name",
                name=name[:80],
            )
        if any(key.name == name for key in self.all()):
            raise KeysError(
                f"{self.path} has a key {name!r} already; choose another name, or delete its line first",
                code="name_taken",
                name=name,
                file=str(self.path),
            )
        secret = PREFIX + secrets.token_urlsafe(32)
        try:
            # Appended: of two commands that make keys at once, neither overwrites the line of the other.
            with os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+b") as file:
                file.seek(0)
                ends_with_newline = (file.read() or b"\n").endswith(b"\n")  # an editor may leave out the last newline
                separator = b"" if ends_with_newline else b"\n"
                file.write(separator + f"{name} {'submit' if may_submit else 'read'} {_digest(secret)}\n".encode())
        except OSError as error:
            raise KeysError(
                f"cannot write the keys file {self.path}: {error.strerror}; choose another with --keys-file",
                code="not_writable",
                file=str(self.path),
            ) from error
        return secret

    def _read_if_changed(self) -> None:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            self._state, self._keys = None, ()
            return
        except OSError as error:
            raise KeysError(
                f"cannot read the keys file {self.path}: {error.strerror}; make it readable for the service, or choose "
                "another with --keys-file",
                file=str(self.path),
            ) from error
        state = status.st_mtime_ns, status.st_size, status.st_ino
        if state != self._state:
            # Its state is noted afterwards, so that a file with an error is one for each request until it is corrected.
            self._keys = self._read(status)
            self._state = state
            self._had_keys = self._had_keys or bool(self._keys)

    def _read(self, status: os.stat_result) -> tuple[ApiKey, ...]:
        if not stat.S_ISREG(status.st_mode):
            raise KeysError(
                f"the keys file {self.path} is not a regular file; choose another with --keys-file",
                code="not_a_file",
                file=str(self.path),
            )
        if os.name == "posix" and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise KeysError(
                f"other users may write to the keys file {self.path}; run `chmod 600 {self.path}`",
                code="writable_by_others",
                file=str(self.path),
            )
        try:
            lines = self.path.read_text(encoding="utf-8-sig").splitlines()  # Windows' editors write a byte order mark
        except (OSError, UnicodeDecodeError) as error:
            raise KeysError(
                f"cannot read the keys file {self.path}: {error}; choose another with --keys-file", file=str(self.path)
            ) from error
        numbered = [(number, line.strip()) for number, line in enumerate(lines, 1)]
        return tuple(self._parsed(number, line) for number, line in numbered if line and not line.startswith("#"))

    def _parsed(self, number: int, line: str) -> ApiKey:
        match = LINE.fullmatch(line)
        if match is None:
            raise KeysError(
                f"{self.path}, line {number}: not a line of the form NAME read SHA256 or NAME submit SHA256; delete it "
                "and make a new key with `cope-sweep serve --new-key NAME`",
                file=str(self.path),
                line=number,
            )
        return ApiKey(match["name"], match["right"] == "submit", match["sha256"])


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


OPEN_PATHS = frozenset({"/", "/docs", "/documents", "/favicon.ico", "/health/live", "/health/ready", "/openapi.json"})
OPEN_FOLDERS = ("/docs/", "/documents/", "/static/")
"""Paths that need no key: health checks, and the files of the web page, the documentation and the documents."""

API_KEY = HTTPBearer(auto_error=False, scheme_name="API key", description="`cope-sweep serve --new-key` makes one.")


class UnauthorizedError(HttpError):
    """The request has no key, or an invalid one."""

    status, default_code = 401, "unauthorized"


class ReadOnlyKeyError(HttpError):
    """The key may only read, and the route changes something."""

    status, default_code = 403, "missing_scope"


class CrossOriginError(HttpError):
    """The request comes from a page of another origin."""

    status, default_code = 403, "cross_origin"


class UnknownHostError(HttpError):
    """The request is for another host."""

    status, default_code = 421, "unknown_host"


async def _require_submit(
    request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Security(API_KEY)]
) -> None:
    check_may_submit(request.scope)


def check_may_submit(scope: Scope) -> None:
    """Raise ReadOnlyKeyError unless the key that `Authentication` noted in the request may submit sweeps."""
    key: ApiKey | None = scope.get("cope_key")
    if key is not None and not key.may_submit:  # None: no keys are needed
        raise ReadOnlyKeyError(
            f"the key {key.name!r} may only read, but this request needs a key that may submit sweeps; make one with "
            "`cope-sweep serve --new-key NAME --submit`",
            _challenge(error="insufficient_scope", scope="submit"),
        )


def _challenge(**about: str) -> dict[str, str]:
    return {"www-authenticate": ", ".join(['Bearer realm="cope-sweep"', *(f'{k}="{v}"' for k, v in about.items())])}


READ = Security(API_KEY, scopes=["read"])  # only documents the route: `Authentication` has checked that there is a key
SUBMIT = Security(_require_submit, scopes=["submit"])


@dataclass(frozen=True)
class Authentication:
    """Finds the key of each request."""

    keys: KeysFile
    always: bool
    """Require a key even if the file has none: the service listens beyond this machine."""

    def check(self, scope: Scope) -> None:
        """Note the key of a request in its scope. Raises UnauthorizedError, NotReadyError."""
        if is_open(path_below(scope)):
            return
        try:
            if not (self.always or self.keys.protects):
                return
            presented = Headers(scope=scope).getlist("authorization")
            if len(presented) != 1:
                raise UnauthorizedError(
                    "this request needs an API key; send the header `Authorization: Bearer KEY`", _challenge()
                )
            kind, _, secret = presented[0].partition(" ")
            key = self.keys.find(secret.strip()) if kind.lower() == "bearer" else None
        except KeysError as error:
            LOG.warning("%s", error)  # the file is the operator's: clients learn neither its path nor what is in it
            raise NotReadyError("the keys of this service cannot be read; the server's log has the reason") from error
        if key is None:
            raise UnauthorizedError(
                "the API key is not valid, or was revoked; ask the operator of the service for a new one",
                _challenge(error="invalid_token"),
            )
        scope["cope_key"] = key


def is_open(path: str) -> bool:
    """The path needs no key."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)


class AllowedHosts:
    """Refuses requests for other hosts, and requests by pages of other origins to change or compute something.

    An attacker's page can make a browser send requests to this service: directly, which the `Origin` header reveals, or
    by pointing the attacker's host name at this machine (DNS rebinding), which the `Host` header reveals.
    """

    # Starlette's TrustedHostMiddleware compares names only, but a service that listens on 0.0.0.0 has addresses that it
    # does not know: Kubernetes' probes and Prometheus name that of the pod. And it refuses with 400 in plain text,
    # without the code `unknown_host` and what to do.

    def __init__(self, host: str, more: Sequence[str] = ()) -> None:
        self.names = frozenset(map(_bare, ("localhost", "127.0.0.1", "::1", host, *more))) - {""}
        self.any_address = is_wildcard(host)
        if self.any_address:
            self.names |= {socket.gethostname().lower()}

    def check(self, scope: Scope) -> None:
        """Raise UnknownHostError or CrossOriginError."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        host = _bare(hosts[0]) if len(hosts) == 1 else ""
        if not (host in self.names or (self.any_address and _address(host) is not None)):
            raise UnknownHostError(
                f"this service does not accept requests for the host {host[:200]!r}; to accept them, start it with "
                "`--allow-host NAME`"
            )
        origin = headers.get("origin")
        is_change = scope["method"] not in ("GET", "HEAD")
        if is_change and origin is not None and not _is_same_origin(origin, hosts[0], scope.get("scheme", "http")):
            raise CrossOriginError(
                f"a page of {origin[:200]} may not change anything on {hosts[0][:200]}; if it is this service's page "
                "behind a reverse proxy, let the proxy pass on the Host header (nginx: `proxy_set_header Host "
                "$http_host`)"
            )
        # For an image that another page embeds, browsers send Sec-Fetch-Site, but no Origin. A link is a navigation.
        site, mode = headers.get("sec-fetch-site"), headers.get("sec-fetch-mode")
        is_embedded = site in ("cross-site", "same-site") and mode != "navigate"
        if is_embedded and not is_open(path_below(scope)) and "authorization" not in headers:
            raise CrossOriginError("a page of another origin may not use this service without a key")


def is_loopback(host: str) -> bool:
    """A server that listens on `host` is reachable from this machine only. False for unknown names."""
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def is_wildcard(host: str) -> bool:
    """`host` means every interface of the machine."""
    address = _address(host)
    return not host if address is None else address.is_unspecified


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _bare(host: str) -> str:
    """A `Host` header in lower case, without port and without the brackets of an IPv6 address; "" if malformed."""
    if host.startswith("["):
        name, closed, rest = host[1:].partition("]")
        return name.lower() if closed and (not rest or rest.startswith(":")) else ""
    if host.count(":") > 1:  # an IPv6 address as a setting
        return host.lower()
    return host.partition(":")[0].lower().removesuffix(".")


def _is_same_origin(origin: str, host: str, scheme: str) -> bool:
    """The `Origin` of a request has the scheme, name and port of its `Host`.

    Behind a proxy that terminates TLS, the scheme of a request from an `https` page is `http`.
    """
    try:
        parts = urlsplit(origin)
        default_port = {"http": 80, "https": 443}[parts.scheme]
        host_port = urlsplit(f"//{host}").port
        origin_port = parts.port
    except (KeyError, ValueError):
        return False
    is_downgraded = scheme == "https" and parts.scheme == "http"
    return (
        not is_downgraded
        and parts.hostname == _bare(host)
        and (origin_port or default_port) == (host_port or default_port)
    )
