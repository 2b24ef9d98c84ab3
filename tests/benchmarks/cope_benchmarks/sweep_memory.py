"""The memory of the processes of a sweep, by kind.

python -m cope_benchmarks.sweep_memory ablation.yaml 4 --store store     a sweep on a head and 4 nodes of one CPU
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from cope_benchmarks.emulated_nodes import emulated_nodes
from cope_benchmarks.sweep_commands import check_returned, started
from cope_benchmarks.sweep_processes import IDLE, RAY, WORKER, usage_by_kind
from cope_sweep.plan import expand
from cope_sweep.spec import load_ablation
from cope_sweep.store import Store

START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 120.0
SETTLE_S = 3.0
"""From the first step of the last group to the measurement."""
POLL_INTERVAL_S = 0.5
HEAD_FILE = "head.pid"


def footprint(command: Sequence[str], store: Path, groups: int) -> dict[str, Any]:
    """Start a sweep, wait until all groups train, measure the memory of its processes, and stop it.

    Returns:
        `kinds`: number of processes, RSS and PSS in bytes by kind, summed; `of_one_process`: their means; `head`: the
        kinds that are on the head node. PSS counts memory that processes share in equal parts.

    Raises:
        subprocess.CalledProcessError: The sweep ended by itself. It holds the command's output.
        TimeoutError: The groups did not start.
    """
    opened = Store(store, create=True)
    with tempfile.TemporaryFile("w+") as output, started(command, store, output) as process:
        try:
            until = time.monotonic() + START_TIMEOUT_S
            while sum(bool(folder.curve()) for folder in opened.files.run_folders()) < groups:
                if process.poll() is not None:
                    check_returned(process, command, output)
                if time.monotonic() > until or process.returncode is not None:
                    raise TimeoutError(f"{groups} groups have not started within {START_TIMEOUT_S:g} s")
                time.sleep(POLL_INTERVAL_S)
            time.sleep(SETTLE_S)
            load = round(psutil.getloadavg()[0], 2)
            kinds = usage_by_kind(process.pid, pss=True)
            head = usage_by_kind(int((store / HEAD_FILE).read_text()), pss=True)
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
            process.kill()
    means = {
        kind: {name: round(part[name] / part["processes"]) for name in ("rss", "pss")} for kind, part in kinds.items()
    }
    on_head = {kind: round(part["processes"]) for kind, part in head.items() if kind in ("worker", "trial", "broker")}
    return {"groups": groups, "kinds": kinds, "of_one_process": means, "head": on_head, "load": load}


def difference(measured: Sequence[dict[str, Any]]) -> dict[str, int]:
    """RSS and PSS in bytes that each further worker needs besides itself, from the fewest to the most groups.

    This is everything but the workers and Ray's own processes: trials, driver and broker. Ray has its own processes
    once on each node; here each worker has a node.
    """
    least, most = measured[0], measured[-1]
    return {
        name: round((_beside(most, name) - _beside(least, name)) / max(1, most["groups"] - least["groups"]))
        for name in ("rss", "pss")
    }


def _beside(measured: dict[str, Any], name: str) -> int:
    return sum(part[name] for kind, part in measured["kinds"].items() if kind not in (WORKER, RAY, IDLE))


def _sweep(ablation: Path, groups: int, root: Path) -> None:
    """Train an ablation on a new cluster of a head and `groups` nodes, until SIGTERM."""
    from cope_sweep.sweep.ray_executor import run_on_ray
    from cope_sweep.sweep.sweep import sweep

    plan = expand(load_ablation(ablation))
    with emulated_nodes(groups) as nodes:
        (root / HEAD_FILE).write_text(str(nodes.head_pid))
        sweep(
            plan,
            Store(root),
            partial(run_on_ray, address=nodes.address),
            resources=plan.ablation.content.resources,
            executor_name="ray",
            tracking_uri=None,
        )


if __name__ == "__main__":
    _sweep(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[4]))
