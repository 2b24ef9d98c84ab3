"""API keys: made, listed, revoked, and found again by what a client presents.

A key is 256 random bits. The file has only SHA-256 digests of keys: whoever reads it cannot use them. Nobody can guess
256 random bits, so a slow password hash would protect nothing more and cost every request its time.

    {"version": 1, "keys": [{"name": "lab", "scopes": ["infer", "read"], "sha256": "9f86…", "created": "2026-01-31T…"}]}
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

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
