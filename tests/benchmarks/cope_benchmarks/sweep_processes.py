"""The processes of a sweep on this machine: their kinds and their memory."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

import psutil

WORKER = "worker"
TITLES = {"ray::BrokerActor": "broker", "ray::Worker": WORKER, "ray::RunTrial": "trial", "ray::IDLE": "idle"}
"""How the titles of processes begin → their kind. Ray keeps idle processes ready."""


def memory_by_kind(
    driver: int, kinds: Collection[str] | None = None, *, pss: bool = False
) -> dict[str, dict[str, int]]:
    """Number of processes and resident memory in bytes of a driver and its descendants, by kind.

    Args:
        driver: The process that was started; all that it starts belongs to it.
        kinds: The kinds to measure; None: all.
        pss: Whether to measure PSS, too, in which shared memory counts in equal parts for the processes that share it.
            It takes some milliseconds for each process.
    """
    found: dict[str, dict[str, int]] = {}
    for process in _processes_of(driver):
        kind = _kind_of(process, driver)
        if kinds is not None and kind not in kinds:
            continue
        with contextlib.suppress(psutil.Error):
            memory = process.memory_full_info() if pss else process.memory_info()
            sums = found.setdefault(kind, {"processes": 0, "rss": 0} | ({"pss": 0} if pss else {}))
            sums["processes"] += 1
            sums["rss"] += int(memory.rss)
            if pss:
                sums["pss"] += int(memory.pss)
    return found


def _processes_of(pid: int) -> list[psutil.Process]:
    """A process and all its descendants; those that have ended are left out."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def _kind_of(process: psutil.Process, driver: int) -> str:
    """driver, broker, worker, trial, idle, or Ray (its own processes)."""
    if process.pid == driver:
        return "driver"
    title = ""
    with contextlib.suppress(psutil.Error, IndexError):
        title = process.cmdline()[0]
    return next((kind for start, kind in TITLES.items() if title.startswith(start)), "Ray")
