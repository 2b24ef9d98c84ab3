"""Benchmark of the data: sequences per second that each task generates, and that its training step consumes.

At the sizes of the ablations of the paper. Sequences are generated in one thread, as in training; the step uses the
device, or all cores. The model has learned absolute positions: the fastest row of each table, which consumes most.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

from cope_benchmarks.report import Measured, Rows
from cope_sweep.config import Resources, RunSpec, load_ablation, with_overrides
from cope_sweep.config.estimate import step_flops
from cope_sweep.errors import UserError
from cope_sweep.tasks import TASKS, Task
from cope_sweep.train import Runtime, Trainer

ABLATIONS = Path(__file__).resolve().parents[3] / "ablations"
GENERATE_S = 1.0
STEPS = 3
CPU_STEP_FLOPS = 5e11
"""Limit of the floating-point operations of a step on a CPU. Its batch is reduced to this, but not below 1."""


def measure() -> Measured:
    """Measure every task whose text, if it needs one, is on this machine: about a minute on two cores."""
    rows, ratios = Rows("data"), {}
    runtime = Runtime.of(Resources(cpus=len(os.sched_getaffinity(0))), worker_id="bench")
    for kind in TASKS:
        run = run_of(kind)
        try:
            run.task.prepare()
        except UserError:  # a text that is not on this machine
            continue
        sequences = run.train.batch
        generated = generated_per_s(run.task, sequences)
        if runtime.device == "cpu":
            sequences = max(1, min(sequences, int(sequences * CPU_STEP_FLOPS / step_flops(run, Resources()))))
        trained = trained_per_s(run, runtime, sequences)
        ratios[kind] = generated / trained
        more = f" ÷ {trained:,.2f} trained on = {ratios[kind]:,.0f}"
        rows.add(f"{kind}, {run.task.length('train')} tokens", generated, " sequences/s generated", more)
    least = min(ratios, key=ratios.__getitem__)
    rows.add("sequences generated per sequence trained on, the least", ratios[least], more=f" ({least})")
    return rows.measured(device=runtime.device)


def run_of(kind: str) -> RunSpec:
    """The first run of the task's ablation at the paper's size, with absolute positions; without one, the defaults."""
    if not (ABLATIONS / f"{kind}.yaml").exists():
        return RunSpec.model_validate({"task": {"kind": kind}, "model": {"position": ["absolute"]}})
    ablation = load_ablation(ABLATIONS / f"{kind}.yaml")
    scale = "paper" if "paper" in ablation.content.scales else None
    base: dict[str, Any] = with_overrides(ablation, scale=scale).content.base
    fields = {**base, "model": {**base["model"], "position": ["absolute"]}}
    return RunSpec.model_validate(fields)


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
    trainer.close()
    return sequences / statistics.median(steps_s[1:])
