"""The log of a run: its last lines, and the attempts that it tells of."""

from __future__ import annotations

import re

from cope_sweep.api.answers import Attempt, RunLog
from cope_sweep.store import RunFolder
from cope_sweep.store.artifacts import LOG_FILE
from cope_sweep.store.files import check_no_link, read_tail

MAX_LOG_BYTES = 1 << 20
"""Bytes that are read of a log, from its end."""
MAX_ATTEMPTS = 100
ATTEMPT = re.compile(
    r"(?P<began>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)  (?P<text>attempt (?P<number>\d{1,9}) on (?P<worker_id>\S+) .*)"
)
"""Line that training writes at the start of an attempt."""


def run_log(folder: RunFolder, tail: int) -> RunLog:
    """The last `tail` lines of a run's log, of its last MAX_LOG_BYTES. Bytes that are no text are replaced by �.

    Raises DamagedError.
    """
    lines, cut = _lines(folder)
    return RunLog(run_id=folder.run_id, lines=lines[-tail:] if tail else [], truncated=cut or len(lines) > tail)


def attempts(folder: RunFolder) -> list[Attempt]:
    """The last attempts of a run, oldest first. Raises DamagedError."""
    found = [match for line in _lines(folder)[0] if (match := ATTEMPT.fullmatch(line))]
    return [Attempt.model_validate(match.groupdict()) for match in found[-MAX_ATTEMPTS:]]


def _lines(folder: RunFolder) -> tuple[list[str], bool]:
    """The lines at the end of the log, and whether there are more before them."""
    content, cut = _tail(folder)
    if cut:  # the first line has lost its beginning
        content = content.partition(b"\n")[2]
    text = content.decode(errors="replace")
    return text.removesuffix("\n").split("\n") if text else [], cut


def _tail(folder: RunFolder) -> tuple[bytes, bool]:
    """The last MAX_LOG_BYTES of the log, and whether there are more before them. Raises DamagedError."""
    if folder.objects:
        content = folder.content(LOG_FILE) or b""
        return content[-MAX_LOG_BYTES:], len(content) > MAX_LOG_BYTES
    check_no_link(folder.path)
    return read_tail(folder.path / LOG_FILE, MAX_LOG_BYTES) or (b"", False)
