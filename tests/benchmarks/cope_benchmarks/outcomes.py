"""A pytest plugin that writes the outcome of each test to a file of JSON lines, and runs those that have not passed.

    python -m pytest -p cope_benchmarks.outcomes …      with COPE_SWEEP_OUTCOMES=FILE and COPE_SWEEP_SHARD=0/8

Several processes may write to one file: each runs the tests of its shard. After an error of CUDA, all that a process
computes fails, so it ends; with COPE_SWEEP_OUTCOMES_NEW=1, another process runs the tests that have no outcome yet. A test
whose outcome is `begun` did not end.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FILE, SHARD, NEW = "COPE_SWEEP_OUTCOMES", "COPE_SWEEP_SHARD", "COPE_SWEEP_OUTCOMES_NEW"
BEGUN = "begun"
CUDA_ERROR = "CUDA error"
"""In the message of an exception after which the process cannot use the GPU."""
_sessions: list[Any] = []


def read_outcomes(path: Path) -> dict[str, dict[str, Any]]:
    """The last outcome of each test, by its id."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = {}
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # a process ended while it wrote the line
            continue
        found[row["test"]] = row
    return found


def pytest_sessionstart(session: Any) -> None:
    _sessions.append(session)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep this shard's tests that have not passed."""
    shard, shards = (int(number) for number in os.environ.get(SHARD, "0/1").split("/"))
    outcomes = read_outcomes(Path(os.environ[FILE]))
    done = {test for test, row in outcomes.items() if row["outcome"] == "passed" or os.environ.get(NEW)}
    wanted = [item for index, item in enumerate(items) if index % shards == shard and item.nodeid not in done]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = wanted


def pytest_runtest_logstart(nodeid: str) -> None:
    _write({"test": nodeid, "outcome": BEGUN})


def pytest_runtest_logreport(report: Any) -> None:
    """Write the outcome of a test: that of its body, or of a fixture that failed or skipped it."""
    if report.when != "call" and report.outcome == "passed":
        return
    row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
    if report.outcome != "passed":
        row["message"] = str(report.longrepr[2] if report.skipped else report.longrepr)[-2000:]
    _write(row)
    if report.failed and CUDA_ERROR in str(report.longrepr):
        _sessions[-1].shouldstop = "an error of CUDA: this process cannot use the GPU any more"


def _write(row: dict[str, Any]) -> None:
    with Path(os.environ[FILE]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
