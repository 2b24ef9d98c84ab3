"""Names of the processes that hold leases, and whether such a process is gone.

An owner is `<sweep id>@<host>/<machine>:<pid>:<start>`. On its own machine a dead owner is recognised at once; from
another one its leases end when they expire.
"""

from __future__ import annotations

import functools
import os
import platform
import re
from pathlib import Path

import psutil

_OWNER = re.compile(r"(?P<name>[^@]*)@(?P<host>[^/]*)/(?P<machine>[^:]*):(?P<pid>\d+):(?P<start>\d+)")


def new_owner(name: str) -> str:
    """The owner that this process is, under the name of its sweep."""
    return f"{name}@{platform.node()}/{_machine()}:{os.getpid()}:{_start(os.getpid())}"


def owner_name(owner: str) -> str:
    """The name that the owner gave itself: the id of its sweep."""
    return owner.partition("@")[0]


def is_gone(owner: str) -> bool:
    """Whether the owner was a process of this machine that has ended. False where that cannot be known."""
    match = _OWNER.fullmatch(owner)
    if match is None or match["machine"] != _machine():
        return False
    try:
        return _start(int(match["pid"])) != int(match["start"])
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _start(pid: int) -> int:
    """The time at which a process started, in hundredths of a second. Raises psutil.NoSuchProcess."""
    process = psutil.Process(pid)
    if process.status() == psutil.STATUS_ZOMBIE:
        raise psutil.NoSuchProcess(pid)
    return round(process.create_time() * 100)


@functools.cache
def _machine() -> str:
    """The running kernel and the namespace of process ids: only within both do ids mean the same processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "unknown-" + platform.node()
    return f"{boot[:8]}-{re.sub(r'[^0-9]', '', namespace)}"
