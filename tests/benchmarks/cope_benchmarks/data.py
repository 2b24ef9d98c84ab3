"""Benchmark of the data: sequences per second that each task generates, and that its training step consumes.

At the sizes of the ablations of the paper. Sequences are generated in one thread, as in training; the step uses the
device, or all cores. The model has learned absolute positions: the fastest row of each table, which consumes most.
"""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

from cope_benchmarks.report import Measured, Rows
from cope_benchmarks.timing import times
from cope_sweep.config import ModelSpec, Resources, RunSpec, expand, load_ablation, with_overrides
from cope_sweep.config.estimate import step_flops
from cope_sweep.errors import UserError
from cope_sweep.tasks import TASKS
from cope_sweep.train import Runtime, Trainer

ABLATIONS = Path(__file__).resolve().parents[3] / "ablations"
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
        if runtime.device == "cpu":
            sequences = max(1, min(sequences, int(sequences * CPU_STEP_FLOPS / step_flops(run, Resources()))))
        generated, trained = sequences_per_s(run, runtime, sequences)
        ratios[kind] = generated / trained
        rates = {"sequences trained on/s": round(trained, 3), "ratio": round(ratios[kind], 1)}
        rows.add(f"{kind}, {run.task.length('train')} tokens", generated, "sequences generated/s", **rates)
    least = min(ratios, key=ratios.__getitem__)
    rows.add("sequences generated per sequence trained on, the least", ratios[least], least)
    return rows.measured(device=runtime.device)


def run_of(kind: str) -> RunSpec:
    """The first run of the task's ablation at the paper's size, with absolute positions; without one, the defaults."""
    if not (ABLATIONS / f"{kind}.yaml").exists():
        return RunSpec.model_validate({"task": {"kind": kind}, "model": {"position": ["absolute"]}})
    ablation = load_ablation(ABLATIONS / f"{kind}.yaml")
    scale = "paper" if "paper" in ablation.content.scales else None
    run = expand(with_overrides(ablation, scale=scale)).rows[0].runs[0]
    position = ModelSpec.model_validate({"position": ["absolute"]}).position
    return run.model_copy(update={"model": run.model.model_copy(update={"position": position})})


def sequences_per_s(run: RunSpec, runtime: Runtime, sequences: int) -> tuple[float, float]:
    """Sequences generated per second, in batches of training, and trained on, in batches of so many."""
    trainer = Trainer(run.model_copy(update={"train": run.train.model_copy(update={"batch": sequences})}), runtime)
    batch, batches = run.train.batch, count(0, run.train.batch)

    def train() -> None:
        trainer.train_step()
        trainer.wait()

    generate = {"generate": lambda: run.task.sequences("train", run.seed, next(batches), batch)}
    generation_ms = times(generate, 10 * STEPS)["generate"]["median_ms"]
    step_ms = times({"train": train}, STEPS)["train"]["median_ms"]  # the next batch is generated beside it
    trainer.close()
    return 1e3 * batch / generation_ms, 1e3 * sequences / step_ms
