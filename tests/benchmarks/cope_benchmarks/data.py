"""Benchmark of the data: sequences per second that each task generates, and that its training step consumes.

At the paper's sizes. Sequences are generated in one thread, as in training; the step uses the device, or all cores. The
model has learned absolute positions: the fastest row of each table, which consumes most.
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
from cope_sweep.config import Resources, RunSpec
from cope_sweep.config.estimate import step_flops
from cope_sweep.errors import UserError
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
"""By task: the model and training of its ablation in `ablations/`. The default batch is 64 sequences."""
GENERATE_S = 1.0
STEPS = 3
CPU_STEP_FLOPS = 5e11
"""Limit of the floating-point operations of a step on a CPU. Its batch is reduced to this, but not below 1."""
MIN_GENERATED_PER_TRAINED = 10
"""Sequences generated per sequence trained on. With fewer, training could wait for data."""


def measure() -> dict[str, Any]:
    """Measure every task: about two minutes on two cores, and one more if a text has to be tokenised."""
    runtime = Runtime.of(Resources(cpus=len(os.sched_getaffinity(0))), worker_id="bench")
    with wikitext_or_stand_in() as wikitext:
        tasks = {kind: wikitext if kind == "wikitext" else cls(kind=kind) for kind, cls in TASKS.items()}
        return {
            "tasks": {kind: _measured(task, runtime) for kind, task in tasks.items()},
            "min_ratio": MIN_GENERATED_PER_TRAINED,
            "device": runtime.device,
            "machine": machine(),
        }


def _measured(task: Task, runtime: Runtime) -> dict[str, Any]:
    run = RunSpec.model_validate_json(
        RunSpec.model_construct(**{"task": task, **_with_positions(PAPER[task.kind])}).model_dump_json(warnings=False)
    )
    task.prepare()
    generated = generated_per_s(task, run.train.batch)
    sequences = run.train.batch
    if runtime.device == "cpu":
        sequences = max(1, min(sequences, int(sequences * CPU_STEP_FLOPS / step_flops(run, Resources()))))
    trained = trained_per_s(run, runtime, sequences)
    return {
        "tokens": task.length("train"),
        "corpus": getattr(task, "corpus", None),
        "generated_per_s": round(generated, 1),
        "trained_per_s": round(trained, 3),
        "ratio": round(generated / trained, 1),
        "step_sequences": sequences,
    }


def _with_positions(rest: dict[str, Any]) -> dict[str, Any]:
    return rest | {"model": rest["model"] | {"position": ["absolute"]}}


def generated_per_s(task: Task, batch: int) -> float:
    """Sequences generated per second, in batches, for `GENERATE_S` after a first batch."""
    task.sequences("train", 0, 0, batch)
    start_s, generated = time.perf_counter(), 0
    while (elapsed_s := time.perf_counter() - start_s) < GENERATE_S:
        generated += len(task.sequences("train", 0, batch + generated, batch))
    return generated / elapsed_s


def trained_per_s(run: RunSpec, runtime: Runtime, sequences: int) -> float:
    """Sequences trained on per second, without their generation: the median of a few steps after a first one."""
    trainer = Trainer(run.model_copy(update={"train": run.train.model_copy(update={"batch": sequences})}), runtime)
    steps_s = []
    for step in range(STEPS + 1):
        start_s = time.perf_counter()
        trainer.spec.task.sequences("train", run.seed, step * sequences, sequences)
        generation_s = time.perf_counter() - start_s
        start_s = time.perf_counter()
        trainer.train_step()
        trainer.wait()
        steps_s.append(time.perf_counter() - start_s - generation_s)
    del trainer
    if runtime.device == "cuda":
        torch.cuda.empty_cache()
    return sequences / statistics.median(steps_s[1:])


@contextlib.contextmanager
def wikitext_or_stand_in() -> Iterator[WikiText]:
    """WikiText-103 with GPT-2's tokenizer if this machine has both; else Python's own files, as the corpus `stand-in`."""
    task = WikiText()
    try:
        task.prepare()
    except UserError:
        with tempfile.TemporaryDirectory(prefix="cope-sweep-bench-") as name:
            for split, files in Code().files().items():
                with (Path(name) / f"{split}.txt").open("wb") as joined_file:
                    for path in files.paths:
                        with path.open("rb") as file:
                            shutil.copyfileobj(file, joined_file)
            yield WikiText(corpus="stand-in", folder=name, tokenizer="bpe")
    else:
        yield task
