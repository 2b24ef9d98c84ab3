"""Who may ask what: API keys and their scopes, and the hosts and origins from which requests are accepted.

`Authentication` refuses every request without a valid key, except for the open paths, before its body is read. The
route then asks whether the key has the scope that the route declares: `dependencies=[READ]`, `[INFER]` or `[SUBMIT]`.
Without keys, which is only allowed on loopback, every request may do everything.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from starlette.types import ASGIApp, Receive, Scope, Send

from cope_services.http.errors import NotReadyError, ServiceError, error_response
from cope_services.http.keys import ApiKey, KeysError, KeysFile

OPEN_PATHS = frozenset({"/", "/docs", "/favicon.ico", "/health/live", "/health/ready", "/openapi.json"})
OPEN_FOLDERS = ("/docs/", "/static/")
"""Paths that need no key: health checks, and the files of the web page and of the documentation."""

API_KEY = HTTPBearer(auto_error=False, scheme_name="API key", description="`cope-sweep serve --new-key` makes one.")


class UnauthorizedError(ServiceError):
    """The request has no key, or one that is not valid."""

    status, code = 401, "unauthorized"

    def __init__(self, message: str, challenge: str = "") -> None:
        super().__init__(message)
        self.challenge = challenge

    @property
    def headers(self) -> Mapping[str, str]:
        return {"www-authenticate": f'Bearer realm="cope-sweep"{self.challenge}'}


class MissingScopeError(ServiceError):
    """The key does not have the scope that the route needs."""

    status, code = 403, "missing_scope"

    def __init__(self, message: str, scopes: Sequence[str]) -> None:
        super().__init__(message)
        self.scopes = scopes

    @property
    def headers(self) -> Mapping[str, str]:
        needed = " ".join(self.scopes)
        return {"www-authenticate": f'Bearer realm="cope-sweep", error="insufficient_scope", scope="{needed}"'}


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
            needed,
        )


READ = Security(_authorize, scopes=["read"])
INFER = Security(_authorize, scopes=["infer"])
SUBMIT = Security(_authorize, scopes=["submit"])


@dataclass(frozen=True)
class Authentication:
    """ASGI middleware that answers 401 to requests without a valid key."""

    app: ASGIApp
    keys: KeysFile
    always: bool
    """Whether a key is needed even if there are none: the service listens beyond this machine."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_open(scope["path"]):
            try:
                scope["cope_key"] = self._key(scope)
            except ServiceError as error:
                response = error_response(scope, error.status, error.code, str(error), error.headers)
                return await response(scope, receive, send)
        return await self.app(scope, receive, send)

    def _key(self, scope: Scope) -> ApiKey | None:
        """The key of a request; None where none is needed. Raises UnauthorizedError, NotReadyError."""
        try:
            if not (self.always or self.keys.protects):
                return None
            presented = [value for name, value in scope["headers"] if name == b"authorization"]
            if len(presented) != 1:
                raise UnauthorizedError("this needs an API key; send `Authorization: Bearer KEY`")
            kind, _, secret = presented[0].decode("latin-1").partition(" ")
            key = self.keys.find(secret.strip()) if kind.lower() == "bearer" else None
        except KeysError as error:
            raise NotReadyError(str(error)) from error
        if key is None:
            raise UnauthorizedError("the API key is not valid; it may have been revoked", ', error="invalid_token"')
        return key


def is_open(path: str) -> bool:
    """Whether a path needs no key."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)


class AllowedHosts:
    """ASGI middleware that refuses requests for other hosts, and changes and computations for pages of other origins.

    A page of an attacker can make a browser send requests to this service: directly, which its origin shows, or by
    changing the address of its own name to this machine's (DNS rebinding), which the `Host` header shows.
    """

    def __init__(self, app: ASGIApp, host: str, more: Sequence[str] = ()) -> None:
        self.app = app
        self.names = frozenset(map(_bare, ("localhost", "127.0.0.1", "::1", host, *more))) - {""}
        self.any_address = is_wildcard(host)
        if self.any_address:
            self.names |= {socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            self._check(scope)
        except ServiceError as error:
            return await error_response(scope, error.status, error.code, str(error))(scope, receive, send)
        return await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raise UnknownHostError or CrossOriginError."""
        hosts, headers = [], {}
        for name, value in scope["headers"]:
            headers[name] = value.decode("latin-1")
            if name == b"host":
                hosts.append(headers[name])
        host = _bare(hosts[0]) if len(hosts) == 1 else ""
        if not (host in self.names or (self.any_address and _is_address(host))):
            raise UnknownHostError(
                f"this service is not {host[:200]!r}; if it should be, start it with `--allow-host NAME` for this name"
            )
        origin = headers.get(b"origin")
        is_change = scope["method"] not in ("GET", "HEAD")
        if is_change and origin is not None and not _is_same_origin(origin, hosts[0], scope.get("scheme", "http")):
            raise CrossOriginError(f"a page of {origin[:200]} must not ask this service for changes")
        # Browsers send no origin with a picture of another page, but this. An address that is opened is a navigation.
        site, mode = headers.get(b"sec-fetch-site"), headers.get(b"sec-fetch-mode")
        is_embedded = site in ("cross-site", "same-site") and mode != "navigate"
        if is_embedded and not is_open(scope["path"]) and b"authorization" not in headers:
            raise CrossOriginError("a page of another origin must not have this service compute without a key")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`. The answer for other names is no."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_wildcard(host: str) -> bool:
    """Whether `host` means every interface of the machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


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
