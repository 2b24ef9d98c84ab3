"""A pytest plugin that writes the outcome of each test to a journal, and runs those that have not passed.

    python -m pytest -p cope_benchmarks.outcomes …      with COPE_SWEEP_OUTCOMES=FILE and COPE_SWEEP_SHARD=0/8

Several processes may write to one journal: each runs the tests of its shard, those without an outcome first. After an error
of CUDA, all that a process computes fails, so it ends. A test whose outcome is `begun` did not end.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cope_benchmarks.gpu_timing import Journal, facts

FILE, SHARD = "COPE_SWEEP_OUTCOMES", "COPE_SWEEP_SHARD"
BEGUN = "begun"
CUDA_ERROR = "CUDA error"
"""In the message of an exception after which the process cannot use the GPU."""
_journals: list[Journal] = []


def journal_of(path: Path) -> Journal:
    """The outcomes on this machine, by test."""
    import torch

    return Journal(path, facts("cuda" if torch.cuda.is_available() else "cpu"))


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep this shard's tests that have not passed."""
    _journals[:] = [journal_of(Path(os.environ[FILE]))]
    outcomes = {test: row["outcome"] for test, row in _journals[0].rows.items()}
    shard, shards = (int(number) for number in os.environ.get(SHARD, "0/1").split("/"))
    wanted = [item for item in items[shard::shards] if outcomes.get(item.nodeid) != "passed"]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = sorted(wanted, key=lambda item: item.nodeid in outcomes)


def pytest_runtest_logstart(nodeid: str) -> None:
    _journals[0].add({"key": nodeid, "outcome": BEGUN})


def pytest_runtest_logreport(report: Any) -> None:
    """Write the outcome of a test: that of its body, or of a fixture that failed or skipped it."""
    if report.when != "call" and report.outcome == "passed":
        return
    row = {"key": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
    if report.outcome != "passed":
        row["message"] = str(report.longrepr[2] if report.skipped else report.longrepr)[-2000:]
    _journals[0].add(row)
    if report.failed and CUDA_ERROR in str(report.longrepr):
        pytest.exit("an error of CUDA: this process cannot use the GPU any more", returncode=1)
