"""Benchmark of training steps of the paper's models on a GPU, in bfloat16: SDPA without positions, CoPE by each kernel.

With torch.compile, a small model runs as CUDA graphs. The smallest is trained by several processes at once, too: then a
step's time is that of all processes ÷ their steps.

Vocabularies and lengths are those of the paper's tasks; the data is selective copy's, which needs no corpus. Gradients of
a sequence are compared with the blocked path, in float32, before anything is timed. Rows are written as they come, and
the same command continues. With device `cpu` it is a dry run of tiny models.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from cope_benchmarks import step
from cope_benchmarks.gpu import why_not
from cope_benchmarks.gpu_timing import Deadline, Effort, Journal, facts, markdown, times
from cope_benchmarks.step_shared import together
from cope_sweep.config import RunSpec
from cope_sweep.model import Transformer
from cope_sweep.train import Runtime, Trainer
from cope_sweep.train.compiled import mode_of
from cope_sweep.train.hardware import model_flops_per_token, peak_flops_per_s

BUDGET_S = 540.0
RUN_STEPS = 10_000
PROCESSES = {"cuda": 4, "cpu": 2}
"""So many train on one device at once, in the alternatives that say so."""
SHARED_S = 10.0
PRECISION = {"cuda": "bf16", "cpu": "fp32"}


def _copy(tokens: int, vocabulary: int) -> dict[str, Any]:
    return {"kind": "selective_copy", "vocabulary": vocabulary, "tokens": tokens // 2, "blanks": 0}


LLAMA = {"family": "llama", "layers": 4, "dim": 256, "heads": 8, "ffn_dim": 768, "tied": False}
MODELS: dict[str, dict[str, Any]] = {
    "Flip-Flop: 4 layers × 256, T 511": {
        "task": {"kind": "flip_flop", "pairs": 256},
        "model": {"layers": 4, "dim": 256, "heads": 4},
        "train": {"batch": 16},
    },
    "WikiText: 12 layers × 768, T 1024": {
        "task": _copy(1024, 50_257),
        "model": {"layers": 12, "dim": 768, "heads": 12},
        "train": {"batch": 16},
    },
    "code: 4 layers × 256, T 4096": {"task": _copy(4096, 32_000), "model": LLAMA, "train": {"batch": 16}},
}
TINY: dict[str, dict[str, Any]] = {
    "tiny": {
        "task": {"kind": "flip_flop", "pairs": 9},
        "model": {"layers": 1, "dim": 16, "heads": 1},
        "train": {"batch": 1},
    },
}
SMALL = (next(iter(MODELS)), *TINY)
FULL = [{"kind": "cope", "p_max": "full"}]
COMPILED = ", torch.compile"
TRITON = "CoPE(64), triton"
ALTERNATIVES: dict[str, tuple[list[Any], step.AttendAs]] = {
    step.SDPA: ([], step.with_sdpa),
    TRITON: (step.COPE, step.attend_with("triton")),
    "CoPE(full), triton": (FULL, step.attend_with("triton")),
    step.SDPA + COMPILED: ([], step.with_sdpa),
    TRITON + COMPILED: (step.COPE, step.attend_with("triton")),
    "CoPE(64), blocked": (step.COPE, step.attend_with("blocked")),
    "CoPE(64), the paper's listing": (step.COPE, step.with_listing),
}


def measure(folder: Path | None = None, device: str = "cuda", budget_s: float = BUDGET_S) -> dict[str, Any]:
    """Milliseconds a step, tokens/s, model FLOP utilisation and memory; `{"skipped": reason}` without a GPU.

    Results are written to `step.jsonl`, `step.json` and `step.md` in `folder`. Raises ValueError if it has results of
    another machine.
    """
    skipped = why_not(device)
    if skipped:
        return {"skipped": skipped, "rows": []}
    models = MODELS if device == "cuda" else TINY
    journal = Journal(folder / "step.jsonl" if folder else None, facts(device))
    deadline = Deadline(budget_s)
    todo = _todo(list(models), device)
    for model, name in todo:
        key = f"{model}; {name}"
        if key in journal.rows:
            continue
        if not deadline.allows_another():
            break
        try:
            row = _row(models[model], name, device, journal.header["device"])
        except Exception as error:  # out of memory, for example
            row = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        journal.add({"key": key, "model": model, "attention": name, **row})
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    left = [f"{model}; {name}" for model, name in todo if f"{model}; {name}" not in journal.rows]
    measured = {**journal.header, "rows": list(journal.rows.values()), "left": left}
    if folder:
        (folder / "step.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
        (folder / "step.md").write_text(table(measured), encoding="utf-8")
    return measured


def names_of(model: str, device: str) -> list[str]:
    """The alternatives of a model. The smallest model is also trained by several processes at once."""
    # In a dry run, compilation would take longer than all the rest.
    alone = [name for name in ALTERNATIVES if device == "cuda" or not name.endswith(COMPILED)]
    if model not in SMALL:
        return alone
    return alone + [name + _together(device) for name in alone if name in (TRITON, TRITON + COMPILED)]


def _todo(models: list[str], device: str) -> list[tuple[str, str]]:
    """Models and alternatives: the first alternatives of all models before the others, for the time may end."""
    names = list(dict.fromkeys(name for model in models for name in names_of(model, device)))
    return [(model, name) for name in names for model in models if name in names_of(model, device)]


def table(measured: dict[str, Any]) -> str:
    """The measurement in Markdown."""
    if "skipped" in measured:
        return measured["skipped"] + "\n"  # type: ignore[no-any-return]
    of_sdpa = {
        row["model"]: row["step"]["median_ms"]
        for row in measured["rows"] if row["attention"] == step.SDPA and "step" in row
    }  # fmt: skip
    rows = []
    models = list(dict.fromkeys(row["model"] for row in measured["rows"]))
    for row in sorted(measured["rows"], key=lambda row: models.index(row["model"])):
        if "failed" in row:
            rows.append([row["model"], row["attention"], f"failed: {row['failed']}", *[""] * 5])
            continue
        ms = row["step"]["median_ms"]
        rows.append([
            row["model"], row["attention"] + _how_compiled(row), f"{ms:.2f}",
            f"{ms / of_sdpa[row['model']]:.2f}" if row["model"] in of_sdpa else "–", f"{row['tokens_per_s']:,.0f}",
            "–" if row["mfu"] is None else f"{row['mfu']:.1%}",
            "–" if row["peak_mib"] is None else f"{row['peak_mib']:,.0f}", f"{ms * RUN_STEPS / 1e3:,.0f}",
        ])  # fmt: skip
    heads = (
        "model", "attention", "ms a step", "this ÷ SDPA", "tokens/s", "model FLOP utilisation", "peak MiB",
        f"s for {RUN_STEPS:,} steps",
    )  # fmt: skip
    left = f"\nNot measured yet: {', '.join(measured['left'])}.\n" if measured["left"] else ""
    return (
        f"{measured['device']}, torch {measured['torch']}, Triton {measured['triton']}\n\n{markdown(heads, rows)}{left}"
    )


def _how_compiled(row: dict[str, Any]) -> str:
    """What torch.compile made of the model, in brackets."""
    compiled = row.get("compiled")
    if compiled is None:
        return ""
    found = ["CUDA graphs"] if compiled["mode"] == "reduce-overhead" else []
    found += [f"{number} {what.replace('_', ' ')}" for what, number in compiled.items() if what != "mode" and number]
    return f" ({', '.join(found)})" if found else ""


def _row(model: dict[str, Any], name: str, device: str, device_name: str) -> dict[str, Any]:
    position, _ = ALTERNATIVES[_alone(name)]
    run = RunSpec.model_validate_json(json.dumps(model | {"model": model["model"] | {"position": position}}))
    processes = PROCESSES[device]
    if name.endswith(_together(device)):
        make = partial(training_step, run, _alone(name), device)
        per_s, peak_mib = together(make, processes, device, SHARED_S if device == "cuda" else 0.0)
        measured: dict[str, Any] = {"step": {"median_ms": round(1e3 / per_s, 4)}, "processes": processes}
    else:
        measured, peak_mib = _measured(run, name, device)
        if "failed" in measured:
            return measured
    tokens_per_s = 1e3 * run.train.batch * run.task.length("train") / measured["step"]["median_ms"]
    peak = peak_flops_per_s(device_name, PRECISION[device])
    sizes = {parameter: x.numel() for parameter, x in Transformer(run).named_parameters()}
    flops_per_s = tokens_per_s * model_flops_per_token(run, sizes)
    return {
        **measured,
        "batch": run.train.batch,
        "tokens_per_s": round(tokens_per_s, 1),
        "model_flops_per_s": flops_per_s,
        "mfu": round(flops_per_s / peak, 4) if peak else None,
        "peak_mib": None if peak_mib is None else round(peak_mib),
    }


def _together(device: str) -> str:
    return f", {PROCESSES[device]} processes"


def _alone(name: str) -> str:
    """The alternative that the processes train."""
    return re.sub(r", \d+ processes$", "", name)


def training_step(run: RunSpec, name: str, device: str) -> Callable[[], None]:
    """A training step of an alternative, in this process."""
    return step.step_of(_trainer(run, name, device), ALTERNATIVES[name][1])


def _trainer(run: RunSpec, name: str, device: str) -> Trainer:
    runtime = Runtime(
        device=device, precision=PRECISION[device], threads=torch.get_num_threads(), compile=name.endswith(COMPILED)
    )
    return Trainer(run, runtime)


def _measured(run: RunSpec, name: str, device: str) -> tuple[dict[str, Any], float | None]:
    """The time of a step, how it was compiled, and the peak memory in MiB."""
    trainer, compute = _trainer(run, name, device), ALTERNATIVES[name][1]
    try:
        failure = step.failure(trainer, compute, "blocked")
        if failure:
            return {"failed": failure}, None
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        effort = Effort(turns=5, turn_ms=400.0) if device == "cuda" else Effort(turns=1, turn_ms=0.0)
        found: dict[str, Any] = {}
        counters.clear()
        # In training, what cannot be compiled runs uncompiled; here, that would be measured under a wrong name.
        with torch._dynamo.config.patch(suppress_errors=False):
            found["step"] = times({"step": step.step_of(trainer, compute)}, device, effort)["step"]
        if name.endswith(COMPILED):
            found["compiled"] = {
                "mode": mode_of(trainer.model),
                "graph_breaks": sum(counters["graph_break"].values()),
                "skipped_cuda_graphs": counters["inductor"]["cudagraph_skips"],
            }
    finally:
        trainer.close()
    return found, torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None
