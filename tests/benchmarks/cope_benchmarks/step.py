"""Benchmark of training steps: forward, backward, clipping and AdamW, with positions and without.

Two models: 4 layers of dim 256 at 511 tokens, and one layer of GPT-2's size at 1023. Loss and gradients are checked
before anything is timed: they are compared on one sequence with the reference (CoPE-MLP, whose reference would need
gigabytes, with the blocked path). An alternative that fails is not timed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import cope_sweep.model.attention as model_attention
from cope_benchmarks import peers
from cope_benchmarks.timing import interleaved, machine
from cope_sweep.config import RunSpec
from cope_sweep.kernels import Implementation, Inputs, Positions, attend, using
from cope_sweep.model import next_token_loss
from cope_sweep.train import Runtime, Trainer

if TYPE_CHECKING:
    from rich.table import Table

REPETITIONS = 9
MEAN_ERROR = 2e-3
"""Limit of a gradient's mean error, relative to its largest entry: rounding in float32 can move positions across integers."""

AttendAs = Callable[[Inputs, Positions, float, Tensor | None], Tensor]

MODELS: dict[str, dict[str, Any]] = {
    "4 layers × 256, T 511": {
        "task": {"kind": "flip_flop", "pairs": 256, "loss": "all"},
        "model": {"layers": 4, "dim": 256, "heads": 4},
        "train": {"batch": 16},
    },
    "a layer of GPT-2's, T 1023": {
        "task": {"kind": "flip_flop", "pairs": 512, "loss": "all"},
        "model": {"layers": 1, "dim": 768, "heads": 12},
        "train": {"batch": 2},
    },
}
SDPA = "SDPA, no positions"


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
MLP: list[Any] = [{"kind": "cope_mlp", "hidden": 64}]
ALTERNATIVES: dict[str, tuple[list[Any], AttendAs, Implementation]] = {
    SDPA: ([], with_sdpa, "reference"),
    "CoPE, native": (COPE, attend_with("native"), "reference"),
    "CoPE, blocked": (COPE, attend_with("blocked"), "reference"),
    "CoPE, the paper's listing": (COPE, with_listing, "reference"),
    "CoPE-MLP(64), native": (MLP, attend_with("native"), "blocked"),
    "relative, native": (["relative"], attend_with("native"), "reference"),
    "RoPE, auto": (["rope"], attend_with("auto"), "reference"),
}
"""By name: the encodings, the function that computes attention, and the implementation that it is compared with."""


def measure(repetitions: int = REPETITIONS) -> dict[str, Any]:
    """The time of a step of every alternative in ms, and its ratio to that of the same model with SDPA and no positions."""
    return {
        "machine": machine(),
        "repetitions": repetitions,
        "models": [_model(name, rest, repetitions) for name, rest in MODELS.items()],
    }


def table(measured: dict[str, Any]) -> Table:
    """The measurement as a table."""
    from rich.table import Table  # a machine that measures on a GPU may lack it

    result = Table(title="Training steps (median, and spread of the middle half)", title_justify="left")
    for head in ("model", "attention", "ms a step", "this ÷ SDPA"):
        result.add_column(head, justify="left" if head in ("model", "attention") else "right")
    for model in measured["models"]:
        for row in model["rows"]:
            if "failed" in row:
                result.add_row(model["model"], row["attention"], f"[red]{row['failed']}[/red]")
                continue
            step = row["step"]
            shown = f"{step['median_ms']:.0f} ± {step['spread_ms']:.0f}"
            result.add_row(model["model"], row["attention"], shown, f"{row['of_sdpa']:.2f}")
        result.add_section()
    return result


def _model(name: str, rest: dict[str, Any], repetitions: int) -> dict[str, Any]:
    runtime = Runtime(threads=torch.get_num_threads())
    steps: dict[str, tuple[Callable[[], Any], ...]] = {}
    failures: dict[str, str] = {}
    for alternative, (position, compute, expected_from) in ALTERNATIVES.items():
        run = RunSpec.model_validate_json(json.dumps(rest | {"model": rest["model"] | {"position": position}}))
        trainer = Trainer(run, runtime)
        failed = failure(trainer, compute, expected_from)
        if failed:
            failures[alternative] = failed
        else:
            steps[alternative] = (step_of(trainer, compute),)
    times = interleaved(steps, repetitions)
    rows: list[dict[str, Any]] = []
    for alternative in ALTERNATIVES:
        if alternative in failures:
            rows.append({"attention": alternative, "failed": failures[alternative]})
            continue
        step = times[alternative][0]
        ratio = step["median_ms"] / times[SDPA][0]["median_ms"]
        rows.append({"attention": alternative, "step": step, "of_sdpa": round(ratio, 3)})
    return {"model": name, "batch": rest["train"]["batch"], "rows": rows}


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
