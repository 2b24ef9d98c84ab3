"""Files in an object store, through pyarrow's file systems: `s3://bucket/prefix`, `gs://bucket/prefix`.

Credentials and region come from where the vendor's tools have them (environment, files, the machine's role). An
S3-compatible server is named by $AWS_ENDPOINT_URL, or in the URL: `s3://bucket/prefix?endpoint_override=HOST:PORT&scheme=http`.
An object appears whole or not at all. There is no append and no rename.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from cope_sweep.redaction import remember
from cope_sweep.store.errors import StoreError, StoreUnreachable

T = TypeVar("T")
log = logging.getLogger(__name__)
SCHEMES = ("s3", "gs")
OUTAGE_S = 60.0
"""How long a sweep waits for an object store that does not answer any more."""
RETRY_INTERVAL_S = 1.0


def is_object_url(root: str) -> bool:
    """Whether a store's root is the URL of an object store. Raises StoreError for URLs of other kinds."""
    scheme, separator, _ = root.partition("://")
    if not separator:
        return False
    if scheme not in SCHEMES:
        raise StoreError(
            f"{root!r}: a store is a folder, or the URL of an object store: s3://… or gs://…",
            code="unsupported_store",
            store=str(root),
        )
    return True


class ObjectFolder:
    """A prefix of an object store. Names are relative to it: `runs/<run id>/result.json`."""

    def __init__(self, url: str) -> None:
        """Open the prefix; nothing is read. Raises StoreError."""
        from pyarrow.fs import FileSystem

        remember(url)
        self.url = url
        self.patience_s = 0.0
        """How long a request is repeated, in seconds. pyarrow itself repeats it for about 6 s."""
        try:
            self._files, self._prefix = FileSystem.from_uri(_with_endpoint(url))
        except (OSError, ValueError) as error:
            raise StoreError(f"{url}: {error}", code="unsupported_store", store=url) from error
        self._prefix = self._prefix.rstrip("/")

    def __reduce__(self) -> tuple[Any, ...]:
        # Each process opens the file system itself, with the credentials that it finds on its machine.
        return ObjectFolder, (self.url,)

    def read(self, name: str, size: int = -1) -> bytes | None:
        """The content of an object, or its first `size` bytes; None if there is none. Raises StoreError."""

        def read() -> bytes:
            with self._files.open_input_stream(self._path(name)) as stream:
                return bytes(stream.read(size if size >= 0 else None))

        try:
            return self._ask(read)
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write an object. Raises StoreError."""

        def write() -> None:
            with self._files.open_output_stream(self._path(name)) as stream:
                stream.write(content)

        self._ask(write)

    def upload(self, path: Path, name: str) -> None:
        """Copy a local file. Raises StoreError."""

        # Not with pyarrow's `copy_files`, which ignores the error of the close, with which a small object is sent.
        def copy() -> None:
            with path.open("rb") as file, self._files.open_output_stream(self._path(name)) as stream:
                shutil.copyfileobj(file, stream, 1 << 20)

        self._ask(copy)

    def download(self, name: str, path: Path) -> None:
        """Copy an object, if there is one, to a local file. Raises StoreError."""
        from pyarrow.fs import LocalFileSystem, copy_files

        with contextlib.suppress(FileNotFoundError):
            self._ask(lambda: copy_files(self._path(name), str(path), self._files, LocalFileSystem()))

    def names(self, folder: str) -> list[str]:
        """The names directly below a folder, sorted; none if it does not exist. Raises StoreError."""
        from pyarrow.fs import FileSelector

        selector = FileSelector(self._path(folder), allow_not_found=True)
        return sorted(info.base_name for info in self._ask(lambda: self._files.get_file_info(selector)))

    def delete(self, name: str) -> None:
        """Delete an object, if there is one. Raises StoreError."""
        with contextlib.suppress(FileNotFoundError):
            self._ask(lambda: self._files.delete_file(self._path(name)))

    def delete_folder(self, name: str) -> None:
        """Delete all objects below a name, if there are any. Raises StoreError."""
        with contextlib.suppress(FileNotFoundError):
            self._ask(lambda: self._files.delete_dir(self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _ask(self, request: Callable[[], T]) -> T:
        """The result of a request, which is repeated while `patience_s` lasts.

        Raises FileNotFoundError: there is no such object; StoreUnreachable.
        """
        began_s = time.monotonic()
        is_noted = False
        while True:
            try:
                return request()
            except FileNotFoundError:
                raise
            except OSError as error:
                reason = " ".join(str(error).split())
                is_local = error.errno is not None  # of a file of this machine: it does not pass
                if is_local or time.monotonic() - began_s >= self.patience_s:
                    raise StoreUnreachable(f"the store {self.url}: {reason}", store=self.url) from error
            if not is_noted:
                log.warning("the store %s does not answer: waiting up to %g s (%s)", self.url, self.patience_s, reason)
                is_noted = True
            time.sleep(RETRY_INTERVAL_S)


def _with_endpoint(url: str) -> str:
    """The URL with pyarrow's options: how it writes, and $AWS_ENDPOINT_URL, which it does not read."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    if parts.scheme != "s3":
        return url
    # Else each object, however small, is a multipart upload of three requests.
    options.setdefault("allow_delayed_open", "true")
    if endpoint and "endpoint_override" not in options:
        server = urlsplit(endpoint)
        options |= {"endpoint_override": server.netloc, "scheme": server.scheme}
    return urlunsplit(parts._replace(query=urlencode(options)))
