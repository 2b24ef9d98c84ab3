"""How long a sweep takes to go on: after a worker was killed, and after a node was added.

python -m cope_benchmarks.sweep_recovery ablation.yaml --store store     prints the times as JSON
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from cope_benchmarks.emulated_nodes import EmulatedNodes, emulated_nodes
from cope_sweep.plan import expand
from cope_sweep.spec import load_ablation
from cope_sweep.store import Event, Store


class _Faults:
    """An event handler: kills the worker of the first run, then adds a node, and notes when training goes on."""

    def __init__(self, nodes: EmulatedNodes, runs: list[str]) -> None:
        self.nodes, self.runs = nodes, runs
        self.stop = threading.Event()
        self.pids: dict[str, int] = {}
        """Run → the process that trains it."""
        self.killed_s = self.added_s = self.alive_s = 0.0
        self.victim = 0
        self.found: dict[str, dict[str, float]] = {}

    def __call__(self, event: Event) -> None:
        if event.status != "running" or not event.step:
            return
        pid = int(event.worker_id.rpartition(":")[2])
        self.pids[event.run_id] = pid
        first, second, third = self.runs
        if not self.victim and first in self.pids and second in self.pids:
            self.victim, self.killed_s = self.pids[first], time.time()
            os.kill(self.victim, signal.SIGKILL)
        elif self.victim and not self.added_s and event.run_id == first and pid != self.victim:
            self.found["worker_killed"] = self._times(self.killed_s, pid)
            self.added_s = time.time()
            threading.Thread(target=self._add_node, daemon=True).start()
        elif self.alive_s and event.run_id == third:
            self.found["node_added"] = {"node_alive_s": round(self.alive_s - self.added_s, 2)}
            self.found["node_added"] |= self._times(self.alive_s, pid)
            self.stop.set()

    def _add_node(self) -> None:
        self.nodes.add()
        self.alive_s = time.time()

    def _times(self, since_s: float, pid: int) -> dict[str, float]:
        """Seconds from `since_s` to the first step, and of them to the start of the process that made it."""
        times = {"first_step_s": round(time.time() - since_s, 2)}
        with contextlib.suppress(psutil.Error):
            times["process_started_s"] = round(psutil.Process(pid).create_time() - since_s, 2)
        return times | {"load": round(psutil.getloadavg()[0], 2)}


def recovery(ablation: Path, root: Path) -> dict[str, dict[str, float]]:
    """The times on a cluster of two nodes, to which a third one is added."""
    from cope_sweep.sweep.schedule import run_on_ray

    plan = expand(load_ablation(ablation))
    with emulated_nodes(2) as nodes:
        faults = _Faults(nodes, [run.run_id for run in plan.runs[:3]])
        run_on_ray(
            plan.runs[:3],
            Store(root, create=True),
            plan.ablation.content.resources,
            sweep_id="recovery",
            on_event=faults,
            stop=faults.stop,
            address=nodes.address,
        )
    return faults.found


def _main() -> None:
    found: dict[str, Any] = recovery(Path(sys.argv[1]), Path(sys.argv[3]))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    _main()
