"""Measures the peak memory of training steps on a CPU, and compares it with the estimates of `plan`.

Each model trains a few steps in a process of its own, a fork of one that has loaded torch: that saves seconds each time.
Run it on one thread:

    OMP_NUM_THREADS=1 python -m cope_benchmarks.memory           # about 20 min
    OMP_NUM_THREADS=1 python -m cope_benchmarks.memory path      # the rows of the table whose name has `path`
"""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cope_sweep.positions.registered import ENCODINGS

STEPS = 3
"""The first steps leave holes in the heap that later ones can need: a second or third one takes up to 7 % more."""
MODEL: dict[str, Any] = {"layers": 4, "dim": 128, "heads": 4}
FAMILIES = ("gpt2", "post_norm", "llama")
SHAPES = {"127": (111, 64), "1,023": (1007, 8)}
"""Number of tokens → blanks of the task, and batch size: about 8,150 tokens a step."""
ROWS: dict[str, dict[str, Any]] = {
    "none": {"position": []},
    **{kind: {"position": [kind]} for kind in ENCODINGS},
    "fox, rope": {"position": ["fox", "rope"]},
    "cope, `gate: separate`": {"position": [{"kind": "cope", "gate": "separate"}]},
    "rope, `dropout: 0.1`": {"position": ["rope"], "dropout": 0.1},
    "cope, `dropout: 0.1`": {"position": ["cope"], "dropout": 0.1},
    "none, `output_gate: channel`": {"position": [], "output_gate": "channel"},
    "none, `output_gate: head`": {"position": [], "output_gate": "head"},
    "none, `qk_norm: true`": {"position": [], "qk_norm": True},
}


def configuration(model: dict[str, Any], blanks: int, batch: int) -> dict[str, Any]:
    """The spec of a run with this model."""
    return {
        "task": {"kind": "selective_copy", "tokens": 8, "blanks": blanks, "vocabulary": 32},
        "model": MODEL | model,
        "train": {"steps": STEPS, "batch": batch},
        "evaluate": {"sequences": 1, "final_sequences": 1},
    }


def train(content: dict[str, Any]) -> dict[str, int]:
    """Train the steps. Bytes of this process: at the peak, those of files at the end; and as `plan` estimates the peak."""
    from cope_sweep.config import Resources, RunSpec
    from cope_sweep.config.estimate import memory_bytes
    from cope_sweep.train.facts import peak_bytes, reset_peak
    from cope_sweep.train.runtime import Runtime
    from cope_sweep.train.trainer import Trainer

    run = RunSpec.model_validate_json(json.dumps(content))
    resources = Resources(device="cpu")
    runtime = Runtime.of(resources, worker_id="memory")
    reset_peak("cpu")
    with runtime.applied():
        trainer = Trainer(run, runtime)
        for _ in range(STEPS):
            trainer.train_step()
        trainer.close()
    files = re.search(r"RssFile:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert files is not None
    return {"peak": peak_bytes("cpu"), "files": 1024 * int(files[1]), "estimated": memory_bytes(run, resources)}


def forked(content: dict[str, Any]) -> dict[str, int]:
    """`train` in a fork of this process."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(there, train, content))
    process.start()
    there.close()
    found: dict[str, int] = here.recv()
    process.join()
    return found


def _send(to: Connection, function: Callable[[dict[str, Any]], dict[str, int]], content: dict[str, Any]) -> None:
    to.send(function(content))


def in_own_process(content: dict[str, Any]) -> dict[str, int]:
    """`train` in a new process."""
    command = [sys.executable, "-m", "cope_benchmarks.memory", "--one", json.dumps(content)]
    found: dict[str, int] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def load() -> None:
    """Load what training needs, without a step: torch computes no gradients in a fork of a process that has computed some."""
    from cope_sweep.config import Resources, RunSpec
    from cope_sweep.train.runtime import Runtime
    from cope_sweep.train.trainer import Trainer

    runtime = Runtime.of(Resources(device="cpu"), worker_id="memory")
    with runtime.applied():
        run = RunSpec.model_validate_json(json.dumps(configuration({"layers": 1, "dim": 16}, 8, 1)))
        Trainer(run, runtime).close()


def main(wanted: str = "") -> None:
    """Print a line of the table for each row whose name contains `wanted`."""
    load()
    columns = [(family, tokens) for family in FAMILIES for tokens in SHAPES]
    # A fork has none of the pages of libraries until it needs them, and then fewer than a process that has loaded them.
    files = in_own_process(configuration({"layers": 1, "dim": 16}, 8, 1))["files"]
    _write_row("", [f"{family}, {tokens}" for family, tokens in columns])
    _write_row("---", ["--:" for _ in columns])
    for name, model in ROWS.items():
        if wanted not in name:
            continue
        cells = []
        for family, tokens in columns:
            found = forked(configuration(model | {"family": family}, *SHAPES[tokens]))
            measured = found["peak"] - found["files"] + files
            cells.append(f"{measured / 1e6:.0f}: {found['estimated'] / measured:.2f}")
        _write_row(name, cells)


def _write_row(name: str, cells: list[str]) -> None:
    sys.stdout.write(f"| {name} | {' | '.join(cells)} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        sys.stdout.write(json.dumps(train(json.loads(sys.argv[2]))) + "\n")
    else:
        main(*sys.argv[1:])
