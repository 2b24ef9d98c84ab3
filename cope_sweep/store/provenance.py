"""Where the numbers of a sweep come from: commit, versions of libraries, processor and its cores."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path

import cope_sweep


def versions() -> dict[str, str]:
    """Version by name: this package, Python, and the libraries that influence results, if they are installed."""
    versions_found = {"cope_sweep": cope_sweep.__version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "ray", "mlflow"):
        with suppress(importlib.metadata.PackageNotFoundError):  # `run --local --no-mlflow` needs no Ray or MLflow
            versions_found[name] = importlib.metadata.version(name)
    return versions_found


def git_commit() -> str | None:
    """The commit of the working tree, with the suffix `-dirty` if there are uncommitted changes.

    None where this package is not in a Git working tree, or in one that does not contain it: installed in the
    environment of another project.
    """
    known = _git("ls-files", Path(__file__).name)
    return (known and _git("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")) or None


def _git(*arguments: str) -> str:
    """What Git prints in this folder; nothing where it fails."""
    try:
        process = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout.strip()


def processor() -> str | None:
    """The model of the processor, as `AMD EPYC 7B13`; None where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(names, None) or platform.processor() or None


def usable_cpus() -> int:
    """The number of CPUs that this process may use: by its affinity, and by the quota of its container."""
    usable = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota_us, period_us = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota_us != "max":
            usable = min(usable, max(1, int(quota_us) // int(period_us)))
    return usable
