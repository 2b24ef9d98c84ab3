"""Kills random processes of a sweep and compares what is left with an undisturbed sweep.

    python -m tests.chaos --seeds 5 --kills 6

Each seed is one store. The command `cope-sweep run` is started; after a random time a random process below it, or the
command itself, gets SIGKILL; where the command has ended it is started again. After the last kill it runs to its end,
and `cope-sweep sync` sends what is missing in MLflow: the last victim may have been the command, which sends. Then the
store has to hold what an undisturbed sweep leaves: the same runs, curves to the bit, the same table, and in MLflow every
point of every metric once.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ABLATION = """
title: Short runs for fault tests
seeds: [0, 1, 2]
metrics: [{name: in_dist/token_error, label: Error}]
base:
  task: {kind: selective_copy, tokens: 4, blanks: 4, dense_blanks: 2, sparse_blanks: 8, vocabulary: 6}
  model: {layers: 1, dim: 16, heads: 2}
  train: {steps: 2500, batch: 8}
  evaluate: {every: 250, sequences: 8, final_sequences: 16}
grid:
  model.position:
    CoPE: [{kind: cope, p_max: 4}]
    RoPE: [rope]
resources: {groups: 2, checkpoint_every_s: 0.5, max_failures: 50}
"""
COMMAND = [sys.executable, "-m", "cope_sweep.cli"]
MIN_DELAY_S, MAX_DELAY_S = 4.0, 20.0
"""The time before a process is killed. Ray needs about 10 s to start."""
END_TIMEOUT_S = 300.0


@dataclass
class Trial:
    """One store under random kills."""

    folder: Path
    seed: int
    kills: int
    victims: Counter[str] = field(default_factory=Counter)
    starts: int = 0

    def run(self) -> None:
        """Start the sweep, kill `kills` processes, and let the sweep end. Raises AssertionError if it does not."""
        chance = random.Random(self.seed)
        process = self._start()
        for _ in range(self.kills):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(chance.uniform(MIN_DELAY_S, MAX_DELAY_S))
            if process.poll() is None:
                self._kill_one(process, chance)
            if process.poll() is not None:
                process = self._start()
        for _ in range(3):  # a victim may have been what the command cannot do without
            if process.wait(END_TIMEOUT_S) == 0:
                break
            process = self._start()
        assert process.wait(END_TIMEOUT_S) == 0, self._output()
        assert self._start("sync").wait(END_TIMEOUT_S) == 0, self._output()

    def _output(self) -> str:
        return (self.folder / "output.txt").read_text()[-3000:]

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """The command with these arguments; by default the sweep's."""
        self.starts += not arguments
        with (self.folder / "output.txt").open("a") as output:
            output.write(f"\n--- start {self.starts}\n")
            output.flush()
            return subprocess.Popen(
                [*COMMAND, *(arguments or ("run", "chaos"))],
                stdout=output, stderr=output, cwd=self.folder, start_new_session=True,
                env=os.environ | {"RAY_AUTH_MODE": "disabled"},
            )  # fmt: skip

    def _kill_one(self, process: subprocess.Popen[bytes], chance: random.Random) -> None:
        """Kill a random process of the sweep, each kind with the same probability."""
        kinds: dict[str, list[psutil.Process]] = {}
        for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                kinds.setdefault(kind_of(each), []).append(each)
        kind = chance.choice(sorted(kinds))
        victim = chance.choice(kinds[kind])
        with contextlib.suppress(psutil.Error):
            victim.send_signal(signal.SIGKILL)
            self.victims[kind] += 1
        if victim.pid == process.pid:
            process.wait()


def kind_of(process: psutil.Process) -> str:
    """What a process is, for the report."""
    line = " ".join(process.cmdline())
    if line.startswith("ray::"):
        return line.split()[0].split("(")[0]
    for name in ("gcs_server", "raylet", "dashboard", "agent"):
        if name in line:
            return name
    return "driver" if "cope_sweep.cli" in line else process.name()


def prepare(folder: Path) -> Path:
    """A folder with the ablation file, in which commands find it and the store."""
    (folder / "ablations").mkdir(parents=True)
    (folder / "ablations" / "chaos.yaml").write_text(ABLATION)
    return folder


def undisturbed(folder: Path) -> None:
    """The sweep that nobody disturbs."""
    subprocess.run([*COMMAND, "run", "chaos", "--local"], cwd=prepare(folder), check=True, capture_output=True)


def results(folder: Path) -> dict[str, object]:
    """What a sweep leaves: statuses, curves, table, and the points in MLflow."""
    from cope_sweep.config import expand, load_ablation
    from cope_sweep.read.tables import table
    from cope_sweep.store import Store

    store = Store(folder / "store")
    plan = expand(load_ablation(folder / "ablations" / "chaos.yaml"))
    document = json.loads(json.dumps(table(plan, store).to_json()))
    return {
        "statuses": store.index.statuses(),
        "curves": {run.run_id: store.run(run.run_id).curve() for run in plan.runs},
        "table": document["rows"],
        "mlflow": mlflow_points(store.root),
    }


def mlflow_points(root: Path) -> dict[str, list[tuple[str, int, float]]]:
    """Run id → its points in MLflow: metric, step and value, with repetitions, without those of time and memory."""
    import sqlite3

    with contextlib.closing(sqlite3.connect(root / "mlflow.db")) as database:
        rows = database.execute(
            "SELECT t.value, m.key, m.step, m.value FROM metrics m JOIN tags t ON t.run_uuid = m.run_uuid "
            "WHERE t.key = 'cope_sweep.run_id' AND m.key NOT LIKE 'system/%' ORDER BY 1, 2, 3"
        ).fetchall()
    points: dict[str, list[tuple[str, int, float]]] = {}
    for run_id, key, step, value in rows:
        points.setdefault(run_id, []).append((key, step, value))
    return points


def disturb(folder: Path, seed: int, kills: int) -> Trial:
    """One disturbed sweep, which has ended."""
    trial = Trial(prepare(folder), seed, kills)
    trial.run()
    time.sleep(1)
    return trial
