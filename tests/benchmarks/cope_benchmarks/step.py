"""Benchmark of training steps (forward, backward, clipping and AdamW) with positions and without.

On a CPU: `cope-sweep bench step`. On a GPU: the stage `step` of `make gpu`, with models of the sizes of the paper's tasks, in
bfloat16. Before anything is timed, the gradients of one sequence are compared with those of another implementation; an
alternative that fails is not timed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import cope_sweep.model.attention as model_attention
from cope_benchmarks import peers
from cope_benchmarks.report import OF_SDPA, Measured, Row, Rows, add_ratios
from cope_benchmarks.timing import Run, one_line, resumed, times
from cope_sweep.config import RunSpec
from cope_sweep.kernels import Implementation, Inputs, Positions, using
from cope_sweep.model import next_token_loss
from cope_sweep.train import Runtime, Trainer

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
    return F.scaled_dot_product_attention(inputs.q_BHTK, inputs.k_BHSK, inputs.v_BHSK, is_causal=True)


def with_listing(inputs: Inputs, positions: Positions, dropout: float, seeds_B: Tensor | None) -> Tensor:
    """CoPE by the paper's listing."""
    table = positions[0].parameters["e"]
    return peers.listing({"q": inputs.q_BHTK, "k": inputs.k_BHSK, "v": inputs.v_BHSK, "e": table})


COPE: list[Any] = [{"kind": "cope", "p_max": 64}]
SDPA, COMPILED = "SDPA, no positions", ", torch.compile"
Alternatives = Mapping[str, tuple[list[Any], AttendAs | Implementation, Implementation]]
"""By name: the encodings, the implementation or function that computes attention, and the one that it is compared with."""
ALTERNATIVES: Alternatives = {
    SDPA: ([], with_sdpa, "reference"),
    "CoPE, native": (COPE, "native", "reference"),
    "CoPE, blocked": (COPE, "blocked", "reference"),
    "CoPE, the paper's listing": (COPE, with_listing, "reference"),
    "CoPE-MLP(64), native": ([{"kind": "cope_mlp", "hidden": 64}], "native", "blocked"),
}
GPU_ALTERNATIVES: Alternatives = {  # compared with the blocked path, whose memory is small
    SDPA: ([], with_sdpa, "blocked"),
    "CoPE, triton": (COPE, "triton", "blocked"),
    SDPA + COMPILED: ([], with_sdpa, "blocked"),
    "CoPE, triton" + COMPILED: (COPE, "triton", "blocked"),
    "CoPE, the paper's listing": (COPE, with_listing, "blocked"),
}


def measure(repetitions: int, models: Mapping[str, Model] | None = None) -> Measured:
    """The time of a step of every alternative, and its ratio to that of the same model with SDPA and no positions."""
    rows = Rows("step")
    for name, model in (models or MODELS).items():
        rows.add_rows(name, measure_model(model, ALTERNATIVES, "cpu", repetitions))
    return rows.measured(repetitions=repetitions)


def measure_gpu(folder: Path, device: str, budget_s: float) -> Measured:
    """The same on a GPU, into `step.json` and `step.md`.

    With device `cpu`, a dry run of a tiny model, without torch.compile, which would take longer than all the rest.
    """
    models = GPU_MODELS if device == "cuda" else TINY
    chosen = {name: each for name, each in GPU_ALTERNATIVES.items() if device == "cuda" or not name.endswith(COMPILED)}
    measure_one = partial(measure_model, alternatives=chosen, device=device)
    return resumed(folder / "step.json", device, budget_s, models, measure_one)


def measure_model(model: Model, alternatives: Alternatives, device: str, repetitions: int = 5) -> dict[str, Row]:
    """By alternative: the time of a step, and its ratio to SDPA's; or why it is not timed."""
    found: dict[str, Row] = {}
    trainers: list[Trainer] = []
    steps: dict[str, Run] = {}
    precision = "bf16" if device == "cuda" else "fp32"
    for name, (position, compute, expected_from) in alternatives.items():
        runtime = Runtime(
            device=device, precision=precision, threads=torch.get_num_threads(), compile=name.endswith(COMPILED)
        )
        spec = model | {"model": model["model"] | {"position": position}}
        trainers.append(Trainer(RunSpec.model_validate_json(json.dumps(spec)), runtime))
        try:
            failed = failure(trainers[-1], compute, expected_from)
            step = step_of(trainers[-1], compute)
            step()
        except Exception as error:  # out of memory, for example
            failed = one_line(error)
        found[name] = {"failed": failed} if failed else {}
        if not failed:
            steps[name] = step
    taken = times(steps, repetitions, device, turn_ms=400.0)
    for trainer in trainers:
        trainer.close()
    for name, each in taken.items():
        found[name]["a step, ms"] = each
    add_ratios(found, "a step, ms", SDPA, OF_SDPA)
    return found


def step_of(trainer: Trainer, compute: AttendAs | Implementation) -> Run:
    """A training step with this attention. What cannot be compiled raises, and is not measured uncompiled under this name."""

    def step() -> None:
        with attention_by(compute), torch._dynamo.config.patch(suppress_errors=False):
            trainer.train_step()

    return step


def failure(trainer: Trainer, compute: AttendAs | Implementation, expected_from: Implementation) -> str | None:
    """The first error in the gradients of the first sequence; None: they are correct."""
    with attention_by(compute):
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


def attention_by(compute: AttendAs | Implementation) -> AbstractContextManager[Any]:
    """Let the model compute attention with this implementation or function within a `with` block."""
    return using(compute) if isinstance(compute, str) else mock.patch.object(model_attention, "attend", compute)
