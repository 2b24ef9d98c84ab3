"""Access control: API keys and their scopes, and the hosts and origins from which requests are accepted.

A key is 256 random bits. The file has a line for each: its name, its scopes, and its SHA-256 digest. Whoever reads it
cannot use the keys. Nobody can guess 256 random bits, so a slow password hash would protect nothing more and cost every
request its time.

    lab infer,read 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08

`Authentication` refuses every request without a valid key, except for the open paths, before its body is read. The
route then asks whether the key has the scope that the route declares: `dependencies=[READ]`, `[INFER]` or `[SUBMIT]`.
Without keys, which is only allowed on loopback, every request may do everything.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from starlette.datastructures import Headers
from starlette.types import Scope

from cope_services.http.errors import NotReadyError, ServiceError, path_below
from cope_sweep.errors import UserError

KeyScope = Literal["read", "infer", "submit"]
SCOPES: tuple[KeyScope, ...] = get_args(KeyScope)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LINE = re.compile(rf"(?P<name>{NAME.pattern})\s+(?P<scopes>[a-z,]+)\s+(?P<sha256>[0-9a-f]{{64}})")
PREFIX = "cope_"
"""Begins every key, so that tools that search files for secrets can find one."""
MAX_KEY_LENGTH = 200
"""Characters of an `Authorization` header that are worth a digest."""
FileState = tuple[int, int, int]


class KeysError(UserError):
    """The keys file cannot be used; the message says why and what to do."""

    default_code = "damaged_keys"


@dataclass(frozen=True)
class ApiKey:
    """A key as it is stored: its name, what it may do, and its digest."""

    name: str
    scopes: tuple[KeyScope, ...]
    sha256: str


class KeysFile:
    """The keys in a file, which is read again whenever it changes.

    A file that has had keys since the server started never counts as absent: without it, no key is valid.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state: FileState | None = None
        self._keys: tuple[ApiKey, ...] = ()
        self._had_keys = False

    @property
    def protects(self) -> bool:
        """Whether there are keys, or were some since the server started. Raises KeysError."""
        self._read_if_changed()
        return self._had_keys

    def all(self) -> tuple[ApiKey, ...]:
        """All keys, in the order in which they were made. Raises KeysError."""
        self._read_if_changed()
        return self._keys

    def find(self, presented: str) -> ApiKey | None:
        """The stored key of what a client presents, or None. Raises KeysError.

        Every digest is compared, each in constant time, so the time of an answer says nothing about the keys.
        """
        digest = _digest(presented[:MAX_KEY_LENGTH])
        found = None
        for key in self.all():
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found

    def create(self, name: str, scopes: Sequence[KeyScope]) -> str:
        """Add a key and return it. It is not stored, so nobody can show it again. Raises KeysError."""
        if NAME.fullmatch(name) is None:
            raise KeysError(
                f"{name[:80]!r} cannot be the name of a key: use letters, digits, `.`, `_` and `-`, at most 64",
                code="invalid_name",
                name=name[:80],
            )
        if any(each.name == name for each in self.all()):
            raise KeysError(
                f"there is a key {name!r} in {self.path}; choose another name, or delete its line first",
                code="name_taken",
                name=name,
                file=str(self.path),
            )
        secret = PREFIX + secrets.token_urlsafe(32)
        try:
            with os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+b") as file:
                file.seek(0)
                begin = b"\n" if (file.read() or b"\n")[-1:] != b"\n" else b""  # an editor may leave out the last one
                file.write(begin + f"{name} {','.join(sorted({*scopes}))} {_digest(secret)}\n".encode())
        except OSError as error:
            raise KeysError(
                f"the keys file {self.path} cannot be written: {error.strerror}",
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
                f"the keys file {self.path} cannot be read: {error.strerror}", file=str(self.path)
            ) from error
        state = status.st_mtime_ns, status.st_size, status.st_ino
        if state != self._state:
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
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise KeysError(f"the keys file {self.path} cannot be read: {error}", file=str(self.path)) from error
        return tuple(self._parsed(number, line) for number, line in enumerate(lines, 1) if line.strip())

    def _parsed(self, number: int, line: str) -> ApiKey:
        found = LINE.fullmatch(line.strip())
        scopes = tuple(each for each in SCOPES if found and each in found["scopes"].split(","))
        if found is None or len(scopes) != len(found["scopes"].split(",")):
            raise KeysError(
                f"the keys file {self.path} is damaged: line {number} is not NAME SCOPES SHA256; delete it and make a "
                "new key",
                file=str(self.path),
                line=number,
            )
        return ApiKey(found["name"], scopes, found["sha256"])


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


OPEN_PATHS = frozenset({"/", "/docs", "/favicon.ico", "/health/live", "/health/ready", "/openapi.json"})
OPEN_FOLDERS = ("/docs/", "/static/")
"""Paths that need no key: health checks, and the files of the web page and of the documentation."""

API_KEY = HTTPBearer(auto_error=False, scheme_name="API key", description="`cope-sweep serve --new-key` makes one.")


class UnauthorizedError(ServiceError):
    """The request has no key, or one that is not valid."""

    status, default_code = 401, "unauthorized"


class MissingScopeError(ServiceError):
    """The key does not have the scope that the route needs."""

    status, default_code = 403, "missing_scope"


class CrossOriginError(ServiceError):
    """A page of another origin sent the request."""

    status, default_code = 403, "cross_origin"


class UnknownHostError(ServiceError):
    """The request is for a host that is not this service."""

    status, default_code = 421, "unknown_host"


async def _authorize(
    request: Request,
    needed: SecurityScopes,
    _: Annotated[HTTPAuthorizationCredentials | None, Security(API_KEY)],
) -> None:
    """Raise MissingScopeError unless the request's key has the scopes of the route."""
    check_scopes(request, needed.scopes)


def check_scopes(request: Request, needed: Sequence[str]) -> None:
    """Raise MissingScopeError unless the request's key, which `Authentication` has found, has these scopes."""
    key: ApiKey | None = request.scope.get("cope_key")
    if key is None:  # no keys are needed
        return
    if missing := [scope for scope in needed if scope not in key.scopes]:
        raise MissingScopeError(
            f"the key {key.name!r} has the scopes {', '.join(key.scopes)}, and this needs {', '.join(missing)}; "
            f"make a key with it: cope-sweep serve --new-key NAME --scope {missing[0]}",
            _challenge(error="insufficient_scope", scope=" ".join(needed)),
        )


def _challenge(**about: str) -> dict[str, str]:
    """The header of a refusal, with what is wrong with the key."""
    return {"www-authenticate": ", ".join(['Bearer realm="cope-sweep"', *(f'{k}="{v}"' for k, v in about.items())])}


READ = Security(_authorize, scopes=["read"])
INFER = Security(_authorize, scopes=["infer"])
SUBMIT = Security(_authorize, scopes=["submit"])


@dataclass(frozen=True)
class Authentication:
    """Finds the key of each request."""

    keys: KeysFile
    always: bool
    """Whether a key is needed even if there are none: the service listens beyond this machine."""

    def check(self, scope: Scope) -> None:
        """Note the key of a request in its scope. Raises UnauthorizedError, NotReadyError."""
        if is_open(path_below(scope)):
            return
        try:
            if not (self.always or self.keys.protects):
                return
            presented = Headers(scope=scope).getlist("authorization")
            if len(presented) != 1:
                raise UnauthorizedError("this needs an API key; send `Authorization: Bearer KEY`", _challenge())
            kind, _, secret = presented[0].partition(" ")
            key = self.keys.find(secret.strip()) if kind.lower() == "bearer" else None
        except KeysError as error:
            raise NotReadyError(str(error)) from error
        if key is None:
            raise UnauthorizedError(
                "the API key is not valid; it may have been revoked", _challenge(error="invalid_token")
            )
        scope["cope_key"] = key


def is_open(path: str) -> bool:
    """Whether a path needs no key."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)


class AllowedHosts:
    """Refuses requests for other hosts, and changes and computations for pages of other origins.

    A page of an attacker can make a browser send requests to this service: directly, which its origin shows, or by
    changing the address of its own name to this machine's (DNS rebinding), which the `Host` header shows.
    """

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
                f"this service is not {host[:200]!r}; if it should be, start it with `--allow-host NAME` for this name"
            )
        origin = headers.get("origin")
        is_change = scope["method"] not in ("GET", "HEAD")
        if is_change and origin is not None and not _is_same_origin(origin, hosts[0], scope.get("scheme", "http")):
            raise CrossOriginError(
                f"a page of {origin[:200]} must not ask {hosts[0][:200]} for changes; if it is this service's page, "
                "the reverse proxy has to pass on the Host of its requests (nginx: `proxy_set_header Host $http_host`)"
            )
        # Browsers send no origin with a picture of another page, but this. An address that is opened is a navigation.
        site, mode = headers.get("sec-fetch-site"), headers.get("sec-fetch-mode")
        is_embedded = site in ("cross-site", "same-site") and mode != "navigate"
        if is_embedded and not is_open(path_below(scope)) and "authorization" not in headers:
            raise CrossOriginError("a page of another origin must not have this service compute without a key")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`. The answer for other names is no."""
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def is_wildcard(host: str) -> bool:
    """Whether `host` means every interface of the machine."""
    address = _address(host)
    return not host if address is None else address.is_unspecified


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address, or None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


@lru_cache(maxsize=256)
def _bare(host: str) -> str:
    """A `Host` header in lower case, without its port and the brackets of an IPv6 address; "" if it is none."""
    if host.startswith("["):
        name, closed, rest = host[1:].partition("]")
        return name.lower() if closed and (not rest or rest.startswith(":")) else ""
    if host.count(":") > 1:  # an IPv6 address as a setting
        return host.lower()
    return host.partition(":")[0].lower().removesuffix(".")


def _is_same_origin(origin: str, host: str, scheme: str) -> bool:
    """Whether the `Origin` of a request has the scheme, name and port of its `Host`.

    A proxy that ends TLS in front of this service leaves `http` as the scheme of a request from an `https` page.
    """
    try:
        parts = urlsplit(origin)
        usual = {"http": 80, "https": 443}[parts.scheme]
        ours = urlsplit(f"//{host}").port
        theirs = parts.port
    except (KeyError, ValueError):
        return False
    is_downgraded = scheme == "https" and parts.scheme == "http"
    return not is_downgraded and parts.hostname == _bare(host) and (theirs or usual) == (ours or usual)
