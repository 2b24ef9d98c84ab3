"""The processes of a sweep on this machine: their kinds, their memory and their CPU time."""

from __future__ import annotations

import contextlib

import psutil

WORKER, BROKER, RAY, IDLE = "worker", "broker", "Ray", "idle"
TITLES = {"ray::BrokerActor": BROKER, "ray::Worker": WORKER, "ray::RunTrial": "trial", "ray::IDLE": IDLE}
"""How the titles of processes begin → their kind. Ray keeps idle processes ready."""


Usage = dict[str, dict[str, float]]
"""Kind of process → `processes` (their number), and sums of `rss` and `pss` in bytes and `cpu_s`."""


def usage_by_kind(driver: int, *, pss: bool = False) -> Usage:
    """What a driver and its descendants use, by kind.

    Args:
        driver: The process that was started; all that it starts belongs to it.
        pss: Whether to measure PSS, too, in which shared memory counts in equal parts for the processes that share it.
            It takes some milliseconds for each process.
    """
    found: Usage = {}
    for process in _processes_of(driver):
        with contextlib.suppress(psutil.Error):
            cpu = process.cpu_times()
            values = {"processes": 1, "rss": process.memory_info().rss, "cpu_s": cpu.user + cpu.system}
            if pss:
                values["pss"] = process.memory_full_info().pss
            sums = found.setdefault(_kind_of(process, driver), {})
            for name, value in values.items():
                sums[name] = sums.get(name, 0) + value
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
    return next((kind for start, kind in TITLES.items() if title.startswith(start)), RAY)
