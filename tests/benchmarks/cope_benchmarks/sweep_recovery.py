"""How long a sweep takes to go on: after a worker was killed, and after a node was added.

python -m cope_benchmarks.sweep_recovery ablation.yaml --store store     prints the times as JSON
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from cope_benchmarks.emulated_nodes import emulated_nodes
from cope_sweep.plan import expand
from cope_sweep.spec import load_ablation
from cope_sweep.store import Event, Store

TIMEOUT_S = 900.0
POLL_INTERVAL_S = 0.02


class _Events:
    """Remembers which process trains each run."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        if event.status == "running" and event.step:
            self.pids[event.run_id] = int(event.worker_id.rpartition(":")[2])

    def wait_for(self, run_id: str, other_than: int = 0) -> int:
        """The process that trains a run, as soon as it has made a step, and is not the one of this number."""
        until = time.monotonic() + TIMEOUT_S
        while self.pids.get(run_id, other_than) == other_than:
            if time.monotonic() > until:
                raise TimeoutError(f"{run_id} is not trained")
            time.sleep(POLL_INTERVAL_S)
        return self.pids[run_id]


def recovery(ablation: Path, root: Path) -> dict[str, dict[str, float]]:
    """The times on a cluster of two nodes, to which a third one is added.

    Raises TimeoutError.
    """
    from cope_sweep.sweep.ray_executor import run_on_ray

    plan = expand(load_ablation(ablation))
    first, second, third = (run.run_id for run in plan.runs[:3])
    events, stop = _Events(), threading.Event()
    with emulated_nodes(2) as nodes:
        arguments = (plan.runs[:3], Store(root, create=True), plan.ablation.content.resources)
        settings = {"sweep_id": "recovery", "on_event": events, "stop": stop, "address": nodes.address}
        # Here nodes are started, which Ray allows only in the main thread.
        sweep = threading.Thread(target=run_on_ray, args=arguments, kwargs=settings)
        sweep.start()
        try:
            victim = events.wait_for(first)
            events.wait_for(second)
            os.kill(victim, signal.SIGKILL)
            killed_s = time.time()
            found = {"worker_killed": _times(killed_s, events.wait_for(first, other_than=victim))}
            nodes.add()
            added_s = time.time()
            found["node_added"] = _times(added_s, events.wait_for(third))
        finally:
            stop.set()
            sweep.join()
    return found


def _times(since_s: float, pid: int) -> dict[str, float]:
    """Seconds from `since_s` to now, the first step, and to the start of the process that made it; its CPU time."""
    process = psutil.Process(pid)
    cpu = process.cpu_times()
    return {
        "first_step_s": round(time.time() - since_s, 2),
        "process_started_s": round(process.create_time() - since_s, 2),
        "process_cpu_s": round(cpu.user + cpu.system, 2),
        "load": round(psutil.getloadavg()[0], 2),
    }


def _main() -> None:
    found: dict[str, Any] = recovery(Path(sys.argv[1]), Path(sys.argv[3]))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    _main()
