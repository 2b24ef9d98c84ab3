"""Removes secrets from texts before they leave the process: from URLs, and those that this process was given.

`redacted_url` is for one URL, `redacted_command` for the arguments of a command, `redacted` for any text. What cannot
be told apart from a secret is removed, too: of a URL with a `/` or an `@` in its password, only the scheme is shown.

A library may print a part of a URL, or decode it. So `remember` keeps the secrets of a URL that this process uses, and
all three functions remove these wherever they stand.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import quote, quote_plus, unquote, unquote_plus

HIDDEN = "***"
SECRET_KEY = re.compile(r"pass|pwd|token|secret|key|credential|auth|sig", re.IGNORECASE)
"""Keys of a query whose values are secret: `password`, `sslkey`, `access_token`, `X-Amz-Signature`, …"""
URL_OPTIONS = ("--index", "--mlflow", "--store", "--address", "--server", "--ray-address")
PATH_SCHEMES = ("sqlite", "file")
"""Schemes of URLs without a server: `sqlite:////home/me@work/index.db` has no user."""

_SCHEME = r"[A-Za-z][A-Za-z0-9+.\-]*"
_ANY_URL = re.compile(rf"({_SCHEME})://")
_RUN = re.compile(rf"{_SCHEME}://\S*")
# PORT is in the forms that messages propose. PostgreSQL's URLs may name several hosts.
_HOST = r"(?:\[[0-9A-Fa-f:.%]+\]|[^/?#@:,\[\]\s]*)(?::(?:\d*|PORT))?"
# No part may have an `@`: it may be the end of a password with `/` or `?`, and then nothing is shown but the scheme.
_SERVER = re.compile(
    rf"(?P<user>[^/?#@\[\]]*@)?(?P<hosts>{_HOST}(?:,{_HOST})*)(?P<path>/[^?#@]*)?(?P<query>[?#][^@]*)?"
)
_PATH = re.compile(r"(?P<path>/[^?#]*)(?P<query>[?#].*)?", re.DOTALL)
_QUOTES = "\"'`<>"
_PUNCTUATION = re.compile(rf"[{_QUOTES}.,;:!?…)}}\]]*$")

MIN_KNOWN = 4
"""Shorter secrets are removed from URLs alone: they would be found in any text."""
MIN_INSIDE = 8
"""Shorter secrets are removed only where they are a word: the password `cope` stays in `cope-sweep`."""


# -- URLs, commands, and texts -----------------------------------------------------------------------------------------


def redacted_url(url: str) -> str:
    """A URL without its user and password, and without its query if a key of it names a secret.

    Of a URL that cannot be parsed, only the scheme is left; of `user:password@host` without a scheme, nothing. Other
    texts, such as paths, stay as they are.
    """
    return _without_known(_url(url))


def has_secrets(url: str) -> bool:
    """The URL has a part that `redacted_url` removes."""
    return redacted_url(url) != url


def is_ambiguous(url: str) -> bool:
    """The URL has characters that were not escaped, so that parts of a secret may be read as host, port or path.

    Then errors of whoever reads it may name these parts.
    """
    return redacted_url(url).endswith(f"://{HIDDEN}")


def redacted(text: str) -> str:
    """A text whose URLs are redacted, without the secrets that this process knows."""
    return _without_known(_RUN.sub(_shown_run, text) if "://" in text else text)


def redacted_command(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command without secrets. A URL in an argument ends with the argument."""
    shown, option = [], ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if option in URL_OPTIONS:
            shown.append(redacted_url(argument))
        elif equals and name in URL_OPTIONS:
            shown.append(f"{name}={redacted_url(value)}")
        elif (found := _ANY_URL.search(argument)) is not None:
            shown.append(_without_known(argument[: found.start()] + _url(argument[found.start() :])))
        else:
            shown.append(_without_known(argument))
        option = argument
    return shown


def redacted_value(value: Any) -> Any:
    """A value of JSON with all its texts redacted."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {key: redacted_value(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(redacted_value(item) for item in value)
    return [redacted_value(item) for item in value] if isinstance(value, list) else value


def _url(url: str) -> str:
    found = _ANY_URL.search(url)
    if found is None:
        # `user:password@host/name`, or the form `password=…` of PostgreSQL's library
        may_have_secret = "@" in url or any(SECRET_KEY.search(key) for key in re.findall(r"([^\s=]+)\s*=", url))
        return HIDDEN if may_have_secret else url
    before, scheme, rest = url[: found.start()], found[1], url[found.end() :]
    has_path_only = scheme.partition("+")[0] in PATH_SCHEMES and rest.startswith("/")
    parsed = (_PATH if has_path_only else _SERVER).fullmatch(rest)
    if "@" in before or parsed is None:
        return f"{'' if '@' in before else before}{scheme}://{HIDDEN}"
    parts = parsed.groupdict("")
    user = f"{HIDDEN}@" if parts.get("user") else ""
    query = parts["query"]
    if any(SECRET_KEY.search(unquote(part.partition("=")[0])) for part in re.split("[?&;#]", query)):
        # A value may have an `&` that was not escaped: nothing after it can be told apart.
        query = query[0] + HIDDEN
    return f"{before}{scheme}://{user}{parts.get('hosts', '')}{parts['path']}{query}"


def _shown_run(match: re.Match[str]) -> str:
    """What is shown of a URL in a text and of what follows it up to a blank."""
    run = match[0]
    ends = len(run)
    # A password may have quotes. Only where no password can be, a quote ends the URL.
    if "@" not in run:
        ends = min((run.find(quote_) for quote_ in _QUOTES if quote_ in run), default=ends)
    url, after = run[:ends], run[ends:]
    tail = _PUNCTUATION.search(url)
    # A `]` after a `[` closes an IPv6 address.
    if tail and not ("[" in url and tail[0].startswith("]")):
        url, after = url[: tail.start()], tail[0] + after
    shown = _url(url)
    if shown != url and not _PUNCTUATION.fullmatch(after):
        return shown  # the rest may belong to the secret
    return shown + redacted(after)


# -- secrets that this process knows -----------------------------------------------------------------------------------


class _Known:
    """The secrets that this process knows, and the pattern that finds them."""

    def __init__(self) -> None:
        self.secrets: set[str] = set()
        self.pattern: re.Pattern[str] | None = None
        self.lock = threading.Lock()


_known = _Known()


def remember(url: str) -> None:
    """Remove the secrets of a URL from every text that is redacted from now on, escaped or not.

    From the first secret on, tracebacks that Python prints and everything that is logged in this process are redacted.
    """
    found = {form for secret in _secrets(url) for form in _forms(secret) if len(form) >= MIN_KNOWN} - {HIDDEN}
    with _known.lock:
        if found <= _known.secrets:
            return
        if not _known.secrets:
            _redact_logs_and_tracebacks()
        _known.secrets |= found
        parts = []
        # Longest first: of a secret that begins with another one, the rest would stay.
        for secret in sorted(_known.secrets, key=len, reverse=True):
            text = re.escape(secret)
            parts.append(text if len(secret) >= MIN_INSIDE else rf"(?<![\w-]){text}(?![\w-])")
        _known.pattern = re.compile("|".join(parts))


def _without_known(text: str) -> str:
    return text if _known.pattern is None else _known.pattern.sub(HIDDEN, text)


def _secrets(url: str) -> Iterator[str]:
    """What may be a secret in a URL, by each way to read it."""
    found = _ANY_URL.search(url)
    if found is None:
        return
    rest = url[found.end() :]
    # An `@` that was not escaped may stand in the password or behind the host. Libraries read it in either way.
    for end in {rest.find("@"), rest.rfind("@")} - {-1}:
        user, colon, password = rest[:end].partition(":")
        if colon:
            yield password
        elif found[1] in ("http", "https") and "/" not in user:
            yield user  # a token
    for part in re.split("[?&;#]", rest)[1:]:
        key, equals, value = part.partition("=")
        if equals and SECRET_KEY.search(unquote(key)):
            yield value


def _forms(secret: str) -> set[str]:
    """A secret as it is, decoded, and escaped in the ways in which messages show it."""
    plain = {secret, unquote(secret), unquote_plus(secret)}
    escaped = {form for text in plain for form in (quote(text, safe=""), quote(text), quote_plus(text))}
    return plain | escaped | {form for text in plain for form in (repr(text)[1:-1], json.dumps(text)[1:-1])}


@functools.cache  # once
def _redact_logs_and_tracebacks() -> None:
    make_record = logging.getLogRecordFactory()

    # A factory of records, and no filter: it also holds for loggers and handlers that libraries add later.
    def make_redacted(*args: Any, **options: Any) -> logging.LogRecord:
        record = make_record(*args, **options)
        try:
            message = record.getMessage()
            if (shown := redacted(message)) != message:
                record.msg, record.args = shown, ()
            if record.exc_info and record.exc_info[0] is not None:
                # Formatters print `exc_text`, where it is set, instead of formatting the exception again.
                record.exc_text = redacted("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
        except (TypeError, ValueError):  # the arguments do not fit the message, which logging reports by itself
            pass
        return record

    logging.setLogRecordFactory(make_redacted)
    # A hook that somebody else has set stays.
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_traceback
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _print_traceback_of_thread


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(redacted("".join(traceback.format_exception(kind, error, trace))))


def _print_traceback_of_thread(args: threading.ExceptHookArgs) -> None:
    # SystemExit is silent, as in Python's own hook.
    if args.exc_type is not SystemExit and args.exc_value is not None:
        sys.stderr.write(f"Exception in thread {args.thread.name if args.thread else '?'}:\n")
        _print_traceback(args.exc_type, args.exc_value, args.exc_traceback)
