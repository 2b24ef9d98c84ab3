"""Proxies of the environment (`HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY`, `NO_PROXY`): which requests go through them.

All clients that send requests of ours (httpx, requests in Ray's and MLflow's clients) read these variables, and send
requests to this machine through a proxy, too, which cannot reach it.
"""

from __future__ import annotations

import ipaddress
import os
from urllib.parse import urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from cope_sweep.redaction import remember


def is_this_machine(host: str) -> bool:
    """The host is this machine by its address: `localhost`, 127.0.0.0/8, ::1, 0.0.0.0 or ::."""
    name = host.strip("[]").lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def bypass_proxies_here(url: str) -> None:
    """Let requests of this process to `url` go without a proxy if it is on this machine; call it before the first one.

    The host is added to NO_PROXY, which all clients read.
    """
    host, proxies = urlsplit(url).hostname or "", getproxies()
    if proxies and is_this_machine(host) and not proxy_bypass(host):
        exceptions = f"{proxies['no']},{host}" if proxies.get("no") else host
        # Where both are set, urllib reads the one in lower case, so both get the value.
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = exceptions


def proxy_of(url: str) -> str | None:
    """The proxy through which requests to `url` go, without user and password; None without a proxy."""
    try:
        parts = urlsplit(url)
    except ValueError:  # not a URL
        return None
    host, proxies = parts.hostname or "", getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if parts.scheme not in ("http", "https") or not proxy or is_this_machine(host) or proxy_bypass(host):
        return None
    remember(proxy)
    proxy_parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return urlunsplit(proxy_parts._replace(netloc=proxy_parts.netloc.rpartition("@")[2]))


def through_proxy(url: str) -> str:
    """The end of a message about a failed request to `url`: the proxy and what to do about it; "" if there is none."""
    proxy = proxy_of(url)
    if proxy is None:
        return ""
    return f" (through the proxy {proxy}; if it is reached without one, add {urlsplit(url).hostname} to NO_PROXY)"


def proxy_data(url: str) -> dict[str, str]:
    """The data `proxy` of the error of a failed request to `url`; empty if there is none."""
    proxy = proxy_of(url)
    return {} if proxy is None else {"proxy": proxy}
