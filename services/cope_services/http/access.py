"""Access control: API keys and their scopes, and the hosts and origins from which requests are accepted.

A key is 256 random bits. The file has only SHA-256 digests of keys: whoever reads it cannot use them. Nobody can guess
256 random bits, so a slow password hash would protect nothing more and cost every request its time.

    {"version": 1, "keys": [{"name": "lab", "scopes": ["infer", "read"], "sha256": "9f86…", "created": "2026-01-31T…"}]}

`Authentication` refuses every request without a valid key, except for the open paths, before its body is read. The
route then asks whether the key has the scope that the route declares: `dependencies=[READ]`, `[INFER]` or `[SUBMIT]`.
Without keys, which is only allowed on loopback, every request may do everything.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import Headers
from starlette.types import Scope

from cope_services.http.errors import NotReadyError, ServiceError
from cope_sweep.errors import UserError

KeyScope = Literal["read", "infer", "submit"]
SCOPES: tuple[KeyScope, ...] = get_args(KeyScope)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PREFIX = "cope_"
"""Begins every key, so that tools that search files for secrets can find one."""
MAX_KEY_LENGTH = 200
"""Characters of an `Authorization` header that are worth a digest."""
WAIT_S = 5.0
"""Time for which a change of the file waits for another one."""
FileState = tuple[int, int, int]


class KeysError(UserError):
    """The keys file cannot be used; the message says why and what to do."""


class ApiKey(BaseModel):
    """A key as it is stored: its name, what it may do, and its digest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
    scopes: tuple[KeyScope, ...]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    created: str


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    keys: list[ApiKey] = []


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
                f"{name[:80]!r} cannot be the name of a key: use letters, digits, `.`, `_` and `-`, at most 64"
            )
        secret = PREFIX + secrets.token_urlsafe(32)
        created = datetime.now(UTC).isoformat(timespec="seconds")
        key = ApiKey(name=name, scopes=tuple(sorted(set(scopes))), sha256=_digest(secret), created=created)

        def add(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
            if any(each.name == name for each in keys):
                raise KeysError(f"there is a key {name!r} in {self.path}; choose another name, or revoke it first")
            return (*keys, key)

        self._change(add)
        return secret

    def revoke(self, name: str) -> None:
        """Remove a key. A running server refuses it from its next request. Raises KeysError."""

        def remove(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
            kept = tuple(key for key in keys if key.name != name)
            if len(kept) == len(keys):
                known = ", ".join(key.name for key in keys) or "none"
                raise KeysError(f"there is no key {name[:80]!r} in {self.path}; its keys: {known}")
            return kept

        self._change(remove)

    def _read_if_changed(self) -> None:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            self._state, self._keys = None, ()
            return
        except OSError as error:
            raise KeysError(f"the keys file {self.path} cannot be read: {error.strerror}") from error
        state = status.st_mtime_ns, status.st_size, status.st_ino
        if state != self._state:
            self._keys = self._read(status)
            self._state = state
            self._had_keys = self._had_keys or bool(self._keys)

    def _read(self, status: os.stat_result) -> tuple[ApiKey, ...]:
        if not stat.S_ISREG(status.st_mode):
            raise KeysError(f"the keys file {self.path} is not a regular file; choose another with --keys-file")
        if os.name == "posix" and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise KeysError(f"other users may write to the keys file {self.path}; run `chmod 600 {self.path}`")
        try:
            document = _Document.model_validate_json(self.path.read_bytes())
        except OSError as error:
            raise KeysError(f"the keys file {self.path} cannot be read: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            raise KeysError(
                f"the keys file {self.path} is damaged: {place}: {first['msg']}; delete it and make new keys"
            ) from error
        return tuple(document.keys)

    def _change(self, change: Callable[[tuple[ApiKey, ...]], tuple[ApiKey, ...]]) -> None:
        """Replace the file as a whole. The new file is also the lock: only one process at a time can create it."""
        new = self.path.with_name(f"{self.path.name}.new")
        descriptor = self._create_new(new)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                document = _Document(keys=list(change(self.all())))
                json.dump(document.model_dump(), file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            new.unlink()
            raise
        new.replace(self.path)

    def _create_new(self, new: Path) -> int:
        deadline_s = time.monotonic() + WAIT_S
        while True:
            try:
                return os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                if time.monotonic() > deadline_s:
                    raise KeysError(
                        f"another command is changing {self.path}; if none is, delete {new}, which one left behind"
                    ) from None
                time.sleep(0.02)
            except OSError as error:
                raise KeysError(f"the keys file {new} cannot be written: {error.strerror}") from error


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


OPEN_PATHS = frozenset({"/", "/docs", "/favicon.ico", "/health/live", "/health/ready", "/openapi.json"})
OPEN_FOLDERS = ("/docs/", "/static/")
"""Paths that need no key: health checks, and the files of the web page and of the documentation."""

API_KEY = HTTPBearer(auto_error=False, scheme_name="API key", description="`cope-sweep serve --new-key` makes one.")


class UnauthorizedError(ServiceError):
    """The request has no key, or one that is not valid."""

    status, code = 401, "unauthorized"


class MissingScopeError(ServiceError):
    """The key does not have the scope that the route needs."""

    status, code = 403, "missing_scope"


class CrossOriginError(ServiceError):
    """A page of another origin sent the request."""

    status, code = 403, "cross_origin"


class UnknownHostError(ServiceError):
    """The request is for a host that is not this service."""

    status, code = 421, "unknown_host"


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
        if is_open(scope["path"]):
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
            raise CrossOriginError(f"a page of {origin[:200]} must not ask this service for changes")
        # Browsers send no origin with a picture of another page, but this. An address that is opened is a navigation.
        site, mode = headers.get("sec-fetch-site"), headers.get("sec-fetch-mode")
        is_embedded = site in ("cross-site", "same-site") and mode != "navigate"
        if is_embedded and not is_open(scope["path"]) and "authorization" not in headers:
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
