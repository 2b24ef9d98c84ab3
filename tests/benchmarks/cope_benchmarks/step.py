"""Whole training steps: forward, backward, clipping and AdamW, with positions and without.

Two models: 4 layers of dim 256 at 511 tokens, and one layer of GPT-2's size at 1023. Every way is first compared, in
loss and every gradient, with the reference (the MLP, whose reference would need gigabytes, with the blocked path) on a
sequence: what fails has no speed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import cope_sweep.model.attention as model_attention
from cope_benchmarks import peers
from cope_benchmarks.timing import interleaved, machine
from cope_sweep.kernels import Implementation, Inputs, Positions, attend, using
from cope_sweep.model import next_token_loss
from cope_sweep.spec import RunSpec
from cope_sweep.train import Runtime, Trainer

REPETITIONS = 9
OFF_BY = 2e-3
"""Of a gradient's largest entry, in the mean: float32's roundings, where positions are near integers."""

AttendAs = Callable[[Inputs, Positions, float], Tensor]

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


def _sdpa(inputs: Inputs, positions: Positions, dropout: float) -> Tensor:
    return peers.sdpa({"q": inputs.q_BHTK, "k": inputs.k_BHSK, "v": inputs.v_BHSK})


def _listing(inputs: Inputs, positions: Positions, dropout: float) -> Tensor:
    table = positions[0].parameters["e"]
    return peers.listing({"q": inputs.q_BHTK, "k": inputs.k_BHSK, "v": inputs.v_BHSK, "e": table})


def _by(implementation: Implementation) -> AttendAs:
    return lambda inputs, positions, dropout: attend(inputs, positions, dropout, implementation)


COPE: list[Any] = [{"kind": "cope", "p_max": 64}]
MLP: list[Any] = [{"kind": "cope_mlp", "hidden": 64}]
WAYS: dict[str, tuple[list[Any], AttendAs, Implementation]] = {
    SDPA: ([], _sdpa, "reference"),
    "CoPE, native": (COPE, _by("native"), "reference"),
    "CoPE, blocked": (COPE, _by("blocked"), "reference"),
    "CoPE, the paper's listing": (COPE, _listing, "reference"),
    "CoPE-MLP(64), native": (MLP, _by("native"), "blocked"),
    "relative, native": (["relative"], _by("native"), "reference"),
    "RoPE, auto": (["rope"], _by("auto"), "reference"),
}
"""By name: the encodings, what computes their attention, and what it is compared with."""


def measure(repetitions: int = REPETITIONS) -> dict[str, Any]:
    """Milliseconds of a step of every way, and its ratio to the same model's step with SDPA and no positions."""
    return {
        "machine": machine(),
        "repetitions": repetitions,
        "models": [_model(name, rest, repetitions) for name, rest in MODELS.items()],
    }


def table(measured: dict[str, Any]) -> Table:
    """The measurement for people."""
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
    for way, (position, compute, answer) in WAYS.items():
        run = RunSpec.model_validate_json(json.dumps(rest | {"model": rest["model"] | {"position": position}}))
        trainer = Trainer(run, runtime)
        failure = _failure(trainer, compute, answer)
        if failure:
            failures[way] = failure
        else:
            steps[way] = (_step(trainer, compute),)
    times = interleaved(steps, repetitions)
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        if way in failures:
            rows.append({"attention": way, "failed": failures[way]})
            continue
        step = times[way][0]
        ratio = step["median_ms"] / times[SDPA][0]["median_ms"]
        rows.append({"attention": way, "step": step, "of_sdpa": round(ratio, 3)})
    return {"model": name, "batch": rest["train"]["batch"], "rows": rows}


def _step(trainer: Trainer, compute: AttendAs) -> Callable[[], None]:
    def step() -> None:
        with _attending(compute):
            trainer.train_step()

    return step


def _failure(trainer: Trainer, compute: AttendAs, answer: Implementation) -> str | None:
    """What is wrong with the first sequence's gradients, computed so; None: nothing."""
    with _attending(compute):
        got = _gradients(trainer)
    with using(answer):
        wanted = _gradients(trainer)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, expected in wanted.items():
        # What is 0 but for roundings (what adds the same to all scores of a row) is held to the others' size.
        off = (got[name] - expected).abs().mean() / expected.abs().max().clamp(min=1e-3 * largest)
        if not off <= OFF_BY:
            return f"{name} is off by {off:.1e} of its largest"
    return None


def _gradients(trainer: Trainer) -> dict[str, Tensor]:
    spec, model = trainer.spec, trainer.model
    batch = spec.task.sequences("train", 0, 0, 1)
    loss = next_token_loss(model(torch.from_numpy(batch.inputs_NT)), torch.from_numpy(batch.targets_NT))
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss / batch.inputs_NT.size, parameters)
    return {"loss": loss.detach(), **dict(zip(names, gradients, strict=True))}


@contextmanager
def _attending(compute: AttendAs) -> Iterator[None]:
    """The model's attention is computed so, within a `with` statement."""
    theirs = model_attention.attend
    model_attention.attend = compute  # type: ignore[assignment] # the model names no implementation
    try:
        yield
    finally:
        model_attention.attend = theirs
