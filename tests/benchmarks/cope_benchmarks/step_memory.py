"""Peak memory and time of a training step of GPT-2's size, with the loss in chunks and as it was before.

python -m cope_benchmarks.step_memory chunks 3     three steps in this process, as JSON

Each alternative has processes of its own, because a process keeps memory that was freed. They take turns.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from cope_benchmarks.timing import machine
from cope_sweep.config import RunSpec
from cope_sweep.families import base
from cope_sweep.model import next_token_loss
from cope_sweep.train import Runtime, Trainer
from cope_sweep.train.batches import Part
from cope_sweep.train.memory import peak_bytes, reset_peak

VOCABULARY, TOKENS = 50_257, 1024
RUN: dict[str, Any] = {
    "task": {"kind": "selective_copy", "vocabulary": VOCABULARY, "tokens": TOKENS // 2, "blanks": 0},
    "model": {"layers": 12, "dim": 768, "heads": 12, "position": ["cope"]},
    "train": {"batch": 4, "steps": 100},
}
ALTERNATIVES = {
    "whole": "logits of all tokens, all activations stored",
    "chunks": "loss in chunks, norm and GELU computed again",
}
GOAL = 0.6


def measure(turns: int = 2, steps: int = 1) -> dict[str, Any]:
    """Peak memory in bytes, and seconds of wall-clock and CPU time a step, of each alternative."""
    processes: dict[str, list[dict[str, Any]]] = {name: [] for name in ALTERNATIVES}
    for _ in range(turns):
        for name, results in processes.items():
            results.append(_in_a_process(name, steps, torch.get_num_threads()))
    rows = []
    for name, results in processes.items():
        peak = max(result["peak_bytes"] for result in results)
        seconds = {key: round(statistics.median(s for r in results for s in r[key]), 3) for key in ("wall_s", "cpu_s")}
        rows.append({"loss": name, "peak_bytes": peak, "loss_value": results[0]["loss"], **seconds})
    return {"machine": machine(), "run": RUN, "turns": turns, "steps": steps, "rows": rows}


def table(measured: dict[str, Any]) -> Table:
    """The measurement as a table."""
    result = Table(title="A step of GPT-2's size", title_justify="left")
    for head in (
        "step of 4 × 1,024 tokens, vocabulary 50,257",
        "peak memory",
        "of the first",
        "s a step",
        "CPU s a step",
    ):
        result.add_column(head, justify="left" if head.startswith("step") else "right")
    first = measured["rows"][0]["peak_bytes"]
    for row in measured["rows"]:
        peak = f"{row['peak_bytes'] / 1e9:.2f} GB"
        share = f"{row['peak_bytes'] / first:.1%}"
        result.add_row(ALTERNATIVES[row["loss"]], peak, share, f"{row['wall_s']:.1f}", f"{row['cpu_s']:.1f}")
    return result


def _in_a_process(name: str, steps: int, threads: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "cope_benchmarks.step_memory", name, str(steps), str(threads)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _steps(name: str, steps: int, threads: int) -> dict[str, Any]:
    """Train in this process. The first step is not timed: it allocates the optimiser's state."""
    if name == "whole":
        base.RECOMPUTED_ELEMENTS = sys.maxsize
        Trainer._backward = _backward_of_whole_logits  # type: ignore[method-assign, assignment]
    reset_peak("cpu")
    trainer = Trainer(RunSpec.model_validate_json(json.dumps(RUN)), Runtime(threads=threads))
    wall_s, cpu_s = [], []
    for turn in range(steps + 1):
        started_s, cpu_started_s = time.perf_counter(), time.process_time()
        trainer.train_step()
        if turn:
            wall_s.append(time.perf_counter() - started_s)
            cpu_s.append(time.process_time() - cpu_started_s)
    return {"peak_bytes": peak_bytes("cpu"), "wall_s": wall_s, "cpu_s": cpu_s, "loss": trainer.mean_loss()}


def _backward_of_whole_logits(trainer: Trainer, part: Part, targets: float, *, last: bool) -> Tensor:
    """The former backward pass of one worker: the logits exist until it ends."""
    inputs_NT, targets_NT, _ = part
    logits_NTV = trainer.model(inputs_NT)
    loss = next_token_loss(logits_NTV, targets_NT) / targets
    torch.autograd.backward(loss)
    return loss.detach()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_steps(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
