"""Benchmark of training steps (forward, backward, clipping and AdamW) with positions and without, on a CPU or a GPU.

Before anything is timed, the gradients of one sequence are compared with the reference (of CoPE-MLP, and on a GPU, with
the blocked path, whose memory is small); an alternative that fails is not timed. On a GPU, models have the sizes of the
paper's tasks, in bfloat16; rows are written as they come, and the same command continues.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

import cope_sweep.model.attention as model_attention
from cope_benchmarks import peers
from cope_benchmarks.gpu_timing import facts, first_line, resumed, times
from cope_benchmarks.report import interleaved, machine, markdown
from cope_sweep.config import RunSpec
from cope_sweep.kernels import Implementation, Inputs, Positions, attend, using
from cope_sweep.model import Transformer, next_token_loss
from cope_sweep.train import Runtime, Trainer
from cope_sweep.train.compiled import mode_of
from cope_sweep.train.facts import model_flops_per_token, peak_flops_per_s

MEAN_ERROR = 2e-3
"""Limit of a gradient's mean error, relative to its largest entry: rounding in float32 can move positions across integers."""

AttendAs = Callable[[Inputs, Positions, float, Tensor | None], Tensor]
Model = dict[str, dict[str, Any]]

FLIP_FLOP: Model = {
    "task": {"kind": "flip_flop", "pairs": 256}, "model": {"layers": 4, "dim": 256, "heads": 4}, "train": {"batch": 16},
}  # fmt: skip
MODELS: dict[str, Model] = {
    "4 layers × 256, T 511": FLIP_FLOP | {"task": FLIP_FLOP["task"] | {"loss": "all"}},
    "a layer of GPT-2's, T 1023": {
        "task": {"kind": "flip_flop", "pairs": 512, "loss": "all"},
        "model": {"layers": 1, "dim": 768, "heads": 12},
        "train": {"batch": 2},
    },
}


def _copy(tokens: int, vocabulary: int) -> dict[str, Any]:
    """Data of the size of a text, which needs no corpus."""
    return {"kind": "selective_copy", "vocabulary": vocabulary, "tokens": tokens // 2, "blanks": 0}


GPU_MODELS: dict[str, Model] = {
    "Flip-Flop: 4 layers × 256, T 511": FLIP_FLOP,
    "WikiText: 12 layers × 768, T 1024": {
        "task": _copy(1024, 50_257), "model": {"layers": 12, "dim": 768, "heads": 12}, "train": {"batch": 16},
    },
    "code: 4 layers × 256, T 4096": {
        "task": _copy(4096, 32_000),
        "model": {"family": "llama", "layers": 4, "dim": 256, "heads": 8, "ffn_dim": 768, "tied": False},
        "train": {"batch": 16},
    },
}  # fmt: skip
TINY: dict[str, Model] = {
    "tiny": {
        "task": {"kind": "flip_flop", "pairs": 9}, "model": {"layers": 1, "dim": 16, "heads": 1}, "train": {"batch": 1},
    },
}  # fmt: skip
"""For a dry run on a CPU."""


def with_sdpa(inputs: Inputs, positions: Positions, dropout: float, seeds_B: Tensor | None) -> Tensor:
    """Attention without positions."""
    return peers.sdpa({"q": inputs.q_BHTK, "k": inputs.k_BHSK, "v": inputs.v_BHSK})


def with_listing(inputs: Inputs, positions: Positions, dropout: float, seeds_B: Tensor | None) -> Tensor:
    """CoPE by the paper's listing."""
    table = positions[0].parameters["e"]
    return peers.listing({"q": inputs.q_BHTK, "k": inputs.k_BHSK, "v": inputs.v_BHSK, "e": table})


def attend_with(implementation: Implementation) -> AttendAs:
    """Attention by one of our implementations."""
    return lambda inputs, positions, dropout, seeds_B: attend(inputs, positions, dropout, seeds_B, implementation)


COPE: list[Any] = [{"kind": "cope", "p_max": 64}]
SDPA, COMPILED = "SDPA, no positions", ", torch.compile"
ALTERNATIVES: dict[str, tuple[list[Any], AttendAs, Implementation]] = {
    SDPA: ([], with_sdpa, "reference"),
    "CoPE, native": (COPE, attend_with("native"), "reference"),
    "CoPE, blocked": (COPE, attend_with("blocked"), "reference"),
    "CoPE, the paper's listing": (COPE, with_listing, "reference"),
    "CoPE-MLP(64), native": ([{"kind": "cope_mlp", "hidden": 64}], attend_with("native"), "blocked"),
    "relative, native": (["relative"], attend_with("native"), "reference"),
    "RoPE, auto": (["rope"], attend_with("auto"), "reference"),
}
"""By name: the encodings, the function that computes attention, and the implementation that it is compared with."""
GPU_ALTERNATIVES: dict[str, tuple[list[Any], AttendAs, Implementation]] = {
    SDPA: ([], with_sdpa, "blocked"),
    "CoPE(64), triton": (COPE, attend_with("triton"), "blocked"),
    "CoPE(full), triton": ([{"kind": "cope", "p_max": "full"}], attend_with("triton"), "blocked"),
    SDPA + COMPILED: ([], with_sdpa, "blocked"),
    "CoPE(64), triton" + COMPILED: (COPE, attend_with("triton"), "blocked"),
    "CoPE(64), blocked": (COPE, attend_with("blocked"), "blocked"),
    "CoPE(64), the paper's listing": (COPE, with_listing, "blocked"),
}


def run_of(model: Model, position: list[Any]) -> RunSpec:
    return RunSpec.model_validate_json(json.dumps(model | {"model": model["model"] | {"position": position}}))


# On this CPU ----------------------------------------------------------------------------------------------------------


def measure(repetitions: int) -> dict[str, Any]:
    """The time of a step of every alternative in ms, and its ratio to that of the same model with SDPA and no positions."""
    models = [_model(name, rest, repetitions) for name, rest in MODELS.items()]
    return {"machine": machine(), "repetitions": repetitions, "models": models}


def _model(name: str, model: Model, repetitions: int) -> dict[str, Any]:
    runtime = Runtime(threads=torch.get_num_threads())
    steps: dict[str, list[Callable[[], Any]]] = {}
    failures: dict[str, str | None] = {}
    for alternative, (position, compute, expected_from) in ALTERNATIVES.items():
        trainer = Trainer(run_of(model, position), runtime)
        failures[alternative] = failure(trainer, compute, expected_from)
        if failures[alternative] is None:
            steps[alternative] = [step_of(trainer, compute)]
    taken = interleaved(steps, repetitions)
    rows: list[dict[str, Any]] = []
    for alternative, failed in failures.items():
        if failed is not None:
            rows.append({"attention": alternative, "failed": failed})
            continue
        step = taken[alternative][0]
        ratio = step["median_ms"] / taken[SDPA][0]["median_ms"]
        rows.append({"attention": alternative, "step": step, "of_sdpa": round(ratio, 3)})
    return {"model": name, "batch": model["train"]["batch"], "rows": rows}


def table(measured: dict[str, Any]) -> str:
    """The measurement on a CPU in Markdown."""
    rows = []
    for model in measured["models"]:
        for row in model["rows"]:
            found = ["", row["failed"]] if "failed" in row else [
                f"{row['step']['median_ms']:.0f} ± {row['step']['spread_ms']:.0f}", f"{row['of_sdpa']:.2f}"
            ]  # fmt: skip
            rows.append([model["model"], row["attention"], *found])
    return markdown(("model", "attention", "ms a step", "this ÷ SDPA"), rows, left=2)


def numbers(measured: dict[str, Any]) -> dict[str, float]:
    """The ratios to SDPA, by the names of the goals."""
    return {
        f"{model['model']}: {row['attention']} ÷ SDPA": row["of_sdpa"]
        for model in measured["models"]
        for row in model["rows"]
        if "of_sdpa" in row
    }


def step_of(trainer: Trainer, compute: AttendAs) -> Callable[[], None]:
    """A training step with this attention."""

    def step() -> None:
        with _attention_replaced(compute):
            trainer.train_step()

    return step


def failure(trainer: Trainer, compute: AttendAs, expected_from: Implementation) -> str | None:
    """The first error in the gradients of the first sequence; None: they are correct."""
    with _attention_replaced(compute):
        got = _gradients(trainer)
    with using(expected_from):
        wanted = _gradients(trainer)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, expected in wanted.items():
        # The gradient of what adds the same to all scores of a row is 0 except for rounding: relative to the other gradients.
        off = (got[name] - expected).abs().mean() / expected.abs().max().clamp(min=1e-3 * largest)
        if not off <= MEAN_ERROR:
            return f"{name} is off by {off:.1e} of its largest"
    return None


def _gradients(trainer: Trainer) -> dict[str, Tensor]:
    spec, model = trainer.spec, trainer.model
    batch = spec.task.sequences("train", 0, 0, 1)
    inputs_NT, targets_NT = (torch.from_numpy(x).to(trainer.device) for x in (batch.inputs_NT, batch.targets_NT))
    loss = next_token_loss(model(inputs_NT), targets_NT)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss / batch.inputs_NT.size, parameters)
    return {"loss": loss.detach(), **dict(zip(names, gradients, strict=True))}


@contextmanager
def _attention_replaced(compute: AttendAs) -> Iterator[None]:
    """Let the model compute attention with this function within a `with` block."""
    original = model_attention.attend
    model_attention.attend = compute  # type: ignore[assignment] # `attend` has a further argument, which the model does not use
    try:
        yield
    finally:
        model_attention.attend = original


# On a GPU: the stage `step` of `make gpu` -----------------------------------------------------------------------------


def measure_gpu(folder: Path, device: str, budget_s: float) -> dict[str, Any]:
    """Milliseconds a step, tokens/s, model FLOP utilisation and memory, in `step.jsonl`, `step.json` and `step.md`.

    The first alternatives of all models come before the others, for the time may end. With device `cpu`, it is a dry run
    of a tiny model, without torch.compile, which would take longer than all the rest.
    """
    models = GPU_MODELS if device == "cuda" else TINY
    names = [name for name in GPU_ALTERNATIVES if device == "cuda" or not name.endswith(COMPILED)]

    def measure_one(what: tuple[str, str]) -> dict[str, Any]:
        model, name = what
        try:
            row = _row(models[model], name, device)
        except Exception as error:  # out of memory, for example
            row = {"failed": first_line(error)}
        return {"model": model, "attention": name, **row}

    todo = {f"{model}; {name}": (model, name) for name in names for model in models}
    return resumed(folder / "step.jsonl", device, budget_s, todo, measure_one, gpu_table)


def gpu_table(measured: dict[str, Any]) -> str:
    """The measurement on a GPU in Markdown."""
    of_sdpa = {
        row["model"]: row["step"]["median_ms"]
        for row in measured["rows"] if row["attention"] == SDPA and "step" in row
    }  # fmt: skip
    rows = []
    models = list(dict.fromkeys(row["model"] for row in measured["rows"]))
    for row in sorted(measured["rows"], key=lambda row: models.index(row["model"])):
        if "failed" in row:
            rows.append([row["model"], row["attention"], f"failed: {row['failed']}", *[""] * 4])
            continue
        ms, compiled = row["step"]["median_ms"], row.get("compiled", {})
        how = ["CUDA graphs"] if compiled.get("mode") == "reduce-overhead" else []
        how += [f"{n} {what.replace('_', ' ')}" for what, n in compiled.items() if what != "mode" and n]
        rows.append([
            row["model"], row["attention"] + (f" ({', '.join(how)})" if how else ""), f"{ms:.2f}",
            f"{ms / of_sdpa[row['model']]:.2f}" if row["model"] in of_sdpa else "–", f"{row['tokens_per_s']:,.0f}",
            "–" if row["mfu"] is None else f"{row['mfu']:.1%}",
            "–" if row["peak_mib"] is None else f"{row['peak_mib']:,.0f}",
        ])  # fmt: skip
    heads = ("model", "attention", "ms a step", "this ÷ SDPA", "tokens/s", "model FLOP utilisation", "peak MiB")
    return markdown(heads, rows)


def _row(model: Model, name: str, device: str) -> dict[str, Any]:
    position, compute, expected_from = GPU_ALTERNATIVES[name]
    run, precision = run_of(model, position), "bf16" if device == "cuda" else "fp32"
    compiles = name.endswith(COMPILED)
    trainer = Trainer(
        run, Runtime(device=device, precision=precision, threads=torch.get_num_threads(), compile=compiles)
    )
    try:
        if failed := failure(trainer, compute, expected_from):
            return {"failed": failed}
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        counters.clear()
        # In training, what cannot be compiled runs uncompiled; here, that would be measured under a wrong name.
        with torch._dynamo.config.patch(suppress_errors=False):
            step = times({"step": step_of(trainer, compute)}, device, turns=5, turn_ms=400.0)["step"]
        compiled = {
            "mode": mode_of(trainer.model),
            "graph_breaks": sum(counters["graph_break"].values()),
            "skipped_cuda_graphs": counters["inductor"]["cudagraph_skips"],
        }
    finally:
        trainer.close()
    tokens_per_s = 1e3 * run.train.batch * run.task.length("train") / step["median_ms"]
    sizes = {parameter: x.numel() for parameter, x in Transformer(run).named_parameters()}
    flops_per_s = tokens_per_s * model_flops_per_token(run, sizes)
    peak = peak_flops_per_s(facts(device)["device"], precision)
    return {
        "step": step,
        **({"compiled": compiled} if compiles else {}),
        "batch": run.train.batch,
        "tokens_per_s": round(tokens_per_s, 1),
        "model_flops_per_s": flops_per_s,
        "mfu": round(flops_per_s / peak, 4) if peak else None,
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20) if device == "cuda" else None,
    }
