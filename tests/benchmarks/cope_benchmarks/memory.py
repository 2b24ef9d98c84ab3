"""Measures the peak memory of training steps on a CPU, and compares it with the estimates of `plan`.

Each configuration trains a few steps in a process of its own, and reports its peak as the facts of a run do. Run it on
one thread:

    OMP_NUM_THREADS=1 python -m cope_benchmarks.memory           # about 20 min
    OMP_NUM_THREADS=1 python -m cope_benchmarks.memory path      # the configurations whose name has `path`
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

STEPS = 3

BASE: dict[str, Any] = {
    "task": {"kind": "selective_copy", "tokens": 8, "blanks": 1007, "vocabulary": 32},
    "model": {"family": "gpt2", "layers": 4, "dim": 256, "heads": 4},
    "train": {"steps": STEPS, "batch": 8},
    "evaluate": {"sequences": 1, "final_sequences": 1},
}


def _model(**fields: Any) -> dict[str, Any]:
    return BASE | {"model": BASE["model"] | fields}


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    **{
        f"{family}, {name}": _model(family=family, position=position)
        for family in ("gpt2", "post_norm", "llama")
        for name, position in {"none": [], "rope": ["rope"], "cope": ["cope"], "path": ["path"]}.items()
    },
    **{
        f"gpt2, {position}": _model(position=[position])
        for position in (
            "absolute", "sinusoidal", "relative", "alibi", "t5", "cope_mlp", "cope_alibi", "fox", "stick_breaking",
            "tra", "grape_ap", "darope", "selective_rope", "fire", "kerple", "dape", "xpos", "short_convolution",
        )
    },
    "gpt2, fox and rope": _model(position=["fox", "rope"]),
    "gpt2, cope separate": _model(position=[{"kind": "cope", "gate": "separate"}]),
    "gpt2, cope dropout": _model(position=["cope"], dropout=0.1),
    "post_norm, cope dropout": _model(family="post_norm", position=["cope"], dropout=0.1),
    "llama, rope dropout": _model(family="llama", position=["rope"], dropout=0.1),
}  # fmt: skip


def measure(configuration: dict[str, Any]) -> dict[str, int]:
    """Bytes before the model exists (`process`), at the peak (`measured`), and as `plan` estimates it (`estimated`)."""
    from cope_sweep.config import Resources, RunSpec
    from cope_sweep.config.estimate import memory_bytes
    from cope_sweep.train.facts import peak_bytes, reset_peak
    from cope_sweep.train.runtime import Runtime
    from cope_sweep.train.trainer import Trainer

    run = RunSpec.model_validate_json(json.dumps(configuration))
    resources = Resources(device="cpu")
    runtime = Runtime.of(resources, worker_id="memory")
    reset_peak("cpu")
    process = peak_bytes("cpu")
    with runtime.applied():
        trainer = Trainer(run, runtime)
        for _ in range(STEPS):
            trainer.train_step()
        trainer.close()
    return {"process": process, "measured": peak_bytes("cpu"), "estimated": memory_bytes(run, resources)}


def main(wanted: str = "") -> None:
    """Print a line of the table for each configuration whose name contains `wanted`."""
    sys.stdout.write("| model | process (MB) | measured (MB) | estimated (MB) | estimated ÷ measured |" + "\n")
    sys.stdout.write("| --- | --: | --: | --: | --: |" + "\n")
    for name, configuration in CONFIGURATIONS.items():
        if wanted not in name:
            continue
        command = [sys.executable, "-m", "cope_benchmarks.memory", "--one", json.dumps(configuration)]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        process, measured, estimated = (found[key] for key in ("process", "measured", "estimated"))
        sizes = " | ".join(f"{size / 1e6:.0f}" for size in (process, measured, estimated))
        sys.stdout.write(f"| {name} | {sizes} | {estimated / measured:.2f} |" + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        sys.stdout.write(json.dumps(measure(json.loads(sys.argv[2]))) + "\n")
    else:
        main(*sys.argv[1:])
