"""Whether data keeps up with training: every task's sequences per second, beside what its training step consumes.

At the paper's sizes, on this machine. Sequences are made in one thread, as training makes them; the step has the
device, or all cores. Its model has learned absolute positions, the cheapest row of its table, and so the hungriest.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cope_benchmarks.timing import machine
from cope_sweep.errors import UserError
from cope_sweep.plan.estimate import step_flops
from cope_sweep.spec import Resources, RunSpec
from cope_sweep.tasks import TASKS, Code, Task, WikiText
from cope_sweep.train import Runtime, Trainer

PAPER: dict[str, dict[str, Any]] = {
    "flip_flop": {"model": {"layers": 4, "dim": 256, "heads": 4}, "train": {"batch": 16}},
    "selective_copy": {"model": {"layers": 2, "dim": 64, "heads": 2}},
    "counting": {"model": {"family": "post_norm", "layers": 4, "dim": 256, "heads": 4, "dropout": 0.1}},
    "last_sentence": {"model": {"layers": 4, "dim": 256, "heads": 4}},
    "wikitext": {"model": {"layers": 12, "dim": 768, "heads": 12, "dropout": 0.1}},
    "code": {"model": {"family": "llama", "layers": 4, "dim": 256, "heads": 8, "ffn_dim": 768, "tied": False}},
}
"""Task → the rest of its run, as in `ablations/`; the batch is 64 where none is said."""
GENERATE_S = 1.0
STEPS = 3
CPU_STEP_FLOPS = 5e11
"""A CPU takes steps of as many sequences as this allows, one at least, and a step's sequences cost alike."""
ENOUGH = 10
"""Times what training consumes: less, and data could come to be what training waits for."""


def measure() -> dict[str, Any]:
    """Every task; about two minutes on two cores, and a minute more where a text is tokenised for the first time."""
    runtime = Runtime.of(Resources(cpus=len(os.sched_getaffinity(0))), worker_id="bench")
    with _text() as wikitext:
        tasks = {kind: wikitext if kind == "wikitext" else cls(kind=kind) for kind, cls in TASKS.items()}
        return {
            "tasks": {kind: _measured(task, runtime) for kind, task in tasks.items()},
            "enough": ENOUGH,
            "device": runtime.device,
            "machine": machine(),
        }


def _measured(task: Task, runtime: Runtime) -> dict[str, Any]:
    run = RunSpec.model_validate_json(
        RunSpec.model_construct(**{"task": task, **_with_positions(PAPER[task.kind])}).model_dump_json(warnings=False)
    )
    task.prepare()
    made_per_s = _made_per_s(task, run.train.batch)
    sequences = run.train.batch
    if runtime.device == "cpu":
        sequences = max(1, min(sequences, int(sequences * CPU_STEP_FLOPS / step_flops(run, Resources()))))
    used_per_s = _used_per_s(run, runtime, sequences)
    return {
        "tokens": task.length("train"),
        "corpus": getattr(task, "corpus", None),
        "made_per_s": round(made_per_s, 1),
        "used_per_s": round(used_per_s, 3),
        "ratio": round(made_per_s / used_per_s, 1),
        "step_sequences": sequences,
    }


def _with_positions(rest: dict[str, Any]) -> dict[str, Any]:
    return rest | {"model": rest["model"] | {"position": ["absolute"]}}


def _made_per_s(task: Task, batch: int) -> float:
    """Sequences of training, a batch at a time, for `GENERATE_S` after a first one."""
    task.sequences("train", 0, 0, batch)
    began_s, made = time.perf_counter(), 0
    while (taken_s := time.perf_counter() - began_s) < GENERATE_S:
        made += len(task.sequences("train", 0, batch + made, batch))
    return made / taken_s


def _used_per_s(run: RunSpec, runtime: Runtime, sequences: int) -> float:
    """Sequences that the training step takes, their making left out: the median of a few steps after a first one."""
    trainer = Trainer(run.model_copy(update={"train": run.train.model_copy(update={"batch": sequences})}), runtime)
    steps_s = []
    for step in range(STEPS + 1):
        began_s = time.perf_counter()
        trainer.spec.task.sequences("train", run.seed, step * sequences, sequences)
        making_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        trainer.train_step()
        trainer.wait()
        steps_s.append(time.perf_counter() - began_s - making_s)
    del trainer
    if runtime.device == "cuda":
        torch.cuda.empty_cache()
    return sequences / statistics.median(steps_s[1:])


@contextlib.contextmanager
def _text() -> Iterator[WikiText]:
    """WikiText-103 where this machine has it, else the standard library's files in its place, as `stand-in`."""
    task = WikiText()
    try:
        task.prepare()
    except UserError:
        with tempfile.TemporaryDirectory(prefix="cope-sweep-bench-") as name:
            for split, files in Code().files().items():
                with (Path(name) / f"{split}.txt").open("wb") as joined:
                    for path in files.paths:
                        with path.open("rb") as file:
                            shutil.copyfileobj(file, joined)
            yield WikiText(corpus="stand-in", folder=name)
    else:
        yield task
