"""Benchmark of training steps of the paper's models on a GPU, in bfloat16: SDPA without positions, CoPE by each kernel.

Vocabularies and lengths are those of the paper's tasks; the data is selective copy's, which needs no corpus. Gradients of
a sequence are compared with the blocked path, in float32, before anything is timed. Rows are written as they come, and
the same command continues. With device `cpu` it is a dry run of tiny models.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch

from cope_benchmarks import step
from cope_benchmarks.gpu import why_not
from cope_benchmarks.gpu_timing import Deadline, Effort, Journal, facts, markdown, times
from cope_sweep.spec import RunSpec
from cope_sweep.train import Runtime, Trainer
from cope_sweep.train.hardware import model_flops_per_token, peak_flops_per_s

BUDGET_S = 540.0
RUN_STEPS = 10_000


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
FULL = [{"kind": "cope", "p_max": "full"}]
COMPILED = ", torch.compile"
ALTERNATIVES: dict[str, tuple[list[Any], step.AttendAs]] = {
    step.SDPA: ([], step.with_sdpa),
    "CoPE(64), triton": (step.COPE, step.attend_with("triton")),
    "CoPE(full), triton": (FULL, step.attend_with("triton")),
    step.SDPA + COMPILED: ([], step.with_sdpa),
    "CoPE(64), triton" + COMPILED: (step.COPE, step.attend_with("triton")),
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
    # In a dry run, compilation would take longer than all the rest.
    names = [name for name in ALTERNATIVES if device == "cuda" or not name.endswith(COMPILED)]
    todo = [(model, name) for model in models for name in names]
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


def table(measured: dict[str, Any]) -> str:
    """The measurement in Markdown."""
    if "skipped" in measured:
        return measured["skipped"] + "\n"  # type: ignore[no-any-return]
    of_sdpa = {
        row["model"]: row["step"]["median_ms"]
        for row in measured["rows"] if row["attention"] == step.SDPA and "step" in row
    }  # fmt: skip
    rows = []
    for row in measured["rows"]:
        if "failed" in row:
            rows.append([row["model"], row["attention"], f"failed: {row['failed']}", *[""] * 5])
            continue
        ms = row["step"]["median_ms"]
        rows.append([
            row["model"], row["attention"], f"{ms:.2f}",
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


def _row(model: dict[str, Any], name: str, device: str, device_name: str) -> dict[str, Any]:
    position, compute = ALTERNATIVES[name]
    run = RunSpec.model_validate_json(json.dumps(model | {"model": model["model"] | {"position": position}}))
    precision = "bf16" if device == "cuda" else "fp32"
    runtime = Runtime(
        device=device, precision=precision, threads=torch.get_num_threads(), compile=name.endswith(COMPILED)
    )
    trainer = Trainer(run, runtime)
    failure = step.failure(trainer, compute, "blocked")
    if failure:
        return {"failed": failure}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    effort = Effort(turns=5, turn_ms=400.0) if device == "cuda" else Effort(turns=1, turn_ms=0.0)
    measured = times({"step": step.step_of(trainer, compute)}, device, effort)["step"]
    peak_mib = round(torch.cuda.max_memory_allocated() / 2**20) if device == "cuda" else None
    tokens_per_s = 1e3 * run.train.batch * run.task.length("train") / measured["median_ms"]
    sizes = {parameter: x.numel() for parameter, x in trainer.model.named_parameters()}
    peak = peak_flops_per_s(device_name, precision)
    flops_per_s = tokens_per_s * model_flops_per_token(run, sizes)
    return {
        "step": measured,
        "batch": run.train.batch,
        "tokens_per_s": round(tokens_per_s, 1),
        "model_flops_per_s": flops_per_s,
        "mfu": round(flops_per_s / peak, 4) if peak else None,
        "peak_mib": peak_mib,
    }
