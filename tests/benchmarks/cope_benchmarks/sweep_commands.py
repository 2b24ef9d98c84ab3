"""Executes the commands that the benchmark of the sweep compares, and reads times from the stores that they write."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from cope_benchmarks.sweep_processes import BROKER, Usage, usage_by_kind
from cope_sweep.store import RunFolder, Store

SAMPLE_INTERVAL_S = 0.5
TIMEOUT_S = 3600.0
WARM = 0.2
"""Share of the runs after which the growth of memory is measured."""


@dataclass
class Measured:
    """When a command was started, when it began and ended its runs, and how its memory grew."""

    start_s: float
    whole_s: float
    spans_s: list[tuple[float, float]]
    """Begin and end of each run, by time of day, in the order of their begins."""
    samples: list[tuple[int, Usage]] = field(default_factory=list)
    """Number of runs that had begun, and what the processes of the sweep used."""

    @property
    def ends_s(self) -> list[float]:
        """When runs ended, in order."""
        return sorted(end for _, end in self.spans_s)

    def gaps_s(self) -> list[float]:
        """The time from the end of each run to the begin of the next, on the only worker."""
        return [after[0] - before[1] for before, after in itertools.pairwise(self.spans_s)]

    def growth(self, name: str) -> dict[str, float]:
        """What each kind of process used per run, of `rss` or `cpu_s`, from a fifth of the runs to the end.

        Empty where there are too few samples.
        """
        found: dict[str, float] = {}
        samples = [sample for sample in self.samples if sample[0] >= WARM * len(self.spans_s)]
        for kind in samples[0][1] if samples else ():
            of_kind = [(number, usage[kind]) for number, usage in samples if kind in usage]
            most = max(used["processes"] for _, used in of_kind)  # a process that has ended would count as a loss
            known = [(number, used[name]) for number, used in of_kind if used["processes"] == most]
            (first, before), (last, after) = known[0], known[-1]
            if last > first:
                found[kind] = (after - before) / (last - first)
        return found


def execute(command: Sequence[str], store: Path, *, samples_usage: bool = False) -> Measured:
    """Execute a command that trains runs into a new store, and measure it.

    Args:
        command: The command. `--store STORE` is added.
        store: The folder of the store.
        samples_usage: Whether to sample memory and CPU time while the command trains.

    Raises:
        subprocess.CalledProcessError: The command failed. It holds the command's output.
    """
    opened = Store(store, create=True)
    samples: list[tuple[int, Usage]] = []
    start_s = time.time()
    with tempfile.TemporaryFile("w+") as output, started(command, store, output) as process:
        while process.poll() is None:
            if not samples_usage:
                process.wait(TIMEOUT_S)
                continue
            samples.append((len(os.listdir(store / "runs")), usage_by_kind(process.pid)))
            time.sleep(SAMPLE_INTERVAL_S)
        whole_s = time.time() - start_s
        check_returned(process, command, output)
    # Read now, because the store is in a temporary folder.
    spans_s = sorted(_span_s(folder) for folder in opened.files.run_folders())
    # When the sweep ends, its processes end before the driver.
    return Measured(start_s, whole_s, spans_s, [sample for sample in samples if BROKER in sample[1]])


def started(command: Sequence[str], store: Path, output: IO[str]) -> subprocess.Popen[str]:
    """Start a command on a store, in the environment of all that is compared."""
    return subprocess.Popen(
        [*command, "--store", str(store)], stdout=output, stderr=subprocess.STDOUT, text=True, env=environment()
    )


def check_returned(process: subprocess.Popen[str], command: Sequence[str], output: IO[str]) -> None:
    """Raise CalledProcessError, with its output, if a command failed."""
    if process.returncode:
        output.seek(0)
        error = subprocess.CalledProcessError(process.returncode, list(command), output.read())
        error.add_note(str(error.output)[-3000:])
        raise error


def output_of(command: Sequence[str]) -> dict[str, Any]:
    """The JSON object that a command prints. Raises CalledProcessError."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment())
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def environment() -> dict[str, str]:
    """The environment of the commands: compiled modules are kept, and Ray does not ask for a token.

    Without compiled modules each new process would compile those that it imports, which takes longer than the runs.
    """
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONDONTWRITEBYTECODE", "RAY_ADDRESS")}
    if "PYTHONDONTWRITEBYTECODE" in os.environ:
        kept.setdefault("PYTHONPYCACHEPREFIX", f"{tempfile.gettempdir()}/cope-sweep-pycache-{os.getuid()}")
    return kept | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


def _span_s(folder: RunFolder) -> tuple[float, float]:
    """Begin and end of a run, by time of day."""
    spec, result = folder.spec, folder.result
    if spec is None or result is None:
        raise RuntimeError(f"{folder.path}: the run is not finished; look into its state.json")
    return spec["created_ms"] / 1000, result["ended_ms"] / 1000
