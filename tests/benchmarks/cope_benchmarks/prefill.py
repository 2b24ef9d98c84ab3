"""Benchmark of prefill: the forward pass of a whole model over a prompt, up to the logits of the next token.

The model has the size of GPT-2 small (on a GPU, by `make gpu`, about 1 B parameters), random weights, and one sequence; its
encodings change. The rates are those of one
process: each by the kernel that training and inference choose, and CoPE also by the equation of the paper's listing (the
kernel `reference`). Before anything is timed, the logits are compared with those of `reference` in float32, over a short prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cope_benchmarks.report import Measured, Row, Rows, add_ratios
from cope_benchmarks.timing import resumed, times
from cope_sweep.config import RunSpec
from cope_sweep.config.source import parse_value
from cope_sweep.kernels import Implementation, using
from cope_sweep.model import Transformer
from cope_sweep.train import Runtime

GPT2_SMALL = {"family": "gpt2", "layers": 12, "dim": 768, "heads": 12}
ONE_BILLION = {"family": "llama", "layers": 16, "dim": 2048, "heads": 32}
TINY = {"family": "llama", "layers": 1, "dim": 32, "heads": 2}
VOCABULARY = 50_257
NONE = "no encoding"
Alternatives = Mapping[str, tuple[Any, Implementation]]
"""By name: `model.position`, and the kernel."""
Models = Mapping[str, tuple[Transformer, Implementation]]
ALTERNATIVES: dict[str, tuple[Any, Implementation]] = {
    NONE: ([], "auto"),
    "RoPE": (["rope"], "auto"),
    "CoPE": (["cope"], "auto"),
    "FoX": (["fox"], "auto"),
    "CoPE, the paper's listing": (["cope"], "reference"),
}
LIMITS = {"fp32": 1e-3, "bf16": 5e-2}
"""Limits of the relative error of the logits of a short prompt."""
SHORT = 128


def measure(
    positions: Sequence[str],
    tokens: Sequence[int],
    precisions: Sequence[str],
    repetitions: int,
    layers: int = 12,
    vocabulary: int = VOCABULARY,
) -> Measured:
    """Tokens per second of each encoding, and as a share of those without any, by length and precision.

    Args:
        positions: Further values of `model.position`, as text: `alibi`, `[cope, rope]`.
        tokens: Lengths of the prompt.
        precisions: `fp32`, `bf16`.
        repetitions: How many times each alternative is timed, in turns.
        layers: Layers of the model.
        vocabulary: Its token ids.
    """
    alternatives = dict(ALTERNATIVES)
    for text in positions:
        value = parse_value(text, "--position")
        alternatives[text] = (value if isinstance(value, list) else [value], "auto")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = GPT2_SMALL | {"layers": layers}
    models = _models(size, alternatives, max(tokens), vocabulary, device)
    rows = Rows("prefill")
    for precision in precisions:
        for length in tokens:
            measured = measure_one((length, precision), models, device, repetitions)
            rows.add_rows(f"{length:,} tokens, {precision}", measured)
    return rows.measured(device=device, model=size | {"vocabulary": vocabulary})


def measure_gpu(folder: Path, device: str, budget_s: float) -> Measured:
    """A model of about 1 B parameters on a GPU, with DaRoPE beside the others, into `prefill.json` and `prefill.md`.

    With device `cpu`, a dry run of a tiny model.
    """
    alternatives = ALTERNATIVES | {"DaRoPE": (["darope"], "auto")}
    size, vocabulary, lengths = (ONE_BILLION, VOCABULARY, (4096, 1024)) if device == "cuda" else (TINY, 50, (64,))
    models = _models(size, alternatives, max(lengths), vocabulary, device)
    todo = {
        f"{length:,} tokens, {precision}": (length, precision) for precision in ("bf16", "fp32") for length in lengths
    }
    one = partial(measure_one, models=models, device=device, repetitions=5)
    return resumed(folder / "prefill.json", device, budget_s, todo, one)


def _models(size: Mapping[str, Any], alternatives: Alternatives, tokens: int, vocabulary: int, device: str) -> Models:
    return {
        name: (Transformer(run_of(dict(size), position, tokens, vocabulary)).to(device).eval(), kernel)
        for name, (position, kernel) in alternatives.items()
    }


def measure_one(prompt: tuple[int, str], models: Models, device: str, repetitions: int) -> dict[str, Row]:
    """By alternative: tokens per second over a prompt of (tokens, precision), or why it is not timed."""
    length, precision = prompt
    runtime = Runtime(device=device, precision=precision)
    errors = {name: _error(*model, runtime, min(SHORT, length)) for name, model in models.items()}
    passes = {
        name: _pass(*models[name], runtime, length) for name, error in errors.items() if error <= LIMITS[precision]
    }
    taken = times(passes, repetitions, device, turn_ms=200.0)
    found: dict[str, Row] = {
        name: {"tokens/s": 1e3 * length / taken[name]["median_ms"]}
        if name in taken
        else {"failed": f"logits are off by {error:.1e}"}
        for name, error in errors.items()
    }
    add_ratios(found, "tokens/s", NONE, f"÷ {NONE}")
    return found


def run_of(model: dict[str, Any], position: Any, tokens: int, vocabulary: int) -> RunSpec:
    lengths = dict.fromkeys(("blanks", "dense_blanks", "sparse_blanks"), 0)
    task = {"kind": "selective_copy", "vocabulary": vocabulary, "tokens": 1} | lengths  # nothing of it is read
    spec = {"task": task, "model": model | {"position": position, "context": tokens}}
    return RunSpec.model_validate_json(json.dumps(spec))


def _pass(model: Transformer, kernel: Implementation, runtime: Runtime, tokens: int) -> Callable[[], torch.Tensor]:
    """A function that computes the logits of the token after a prompt of so many random tokens, (1, 1, V)."""
    random = torch.Generator().manual_seed(0)
    tokens_1T = torch.randint(model.vocabulary_size, (1, tokens), generator=random).to(runtime.device)

    @torch.inference_mode()
    def compute() -> torch.Tensor:
        with using(kernel), runtime.autocast():
            return model.logits(model.hidden(tokens_1T)[:, -1:]).float()

    return compute


def _error(model: Transformer, kernel: Implementation, runtime: Runtime, tokens: int) -> float:
    """The relative error of the logits after so many tokens, compared with `reference` in float32."""
    exact = _pass(model, "reference", Runtime(device=runtime.device), tokens)()
    return float((_pass(model, kernel, runtime, tokens)() - exact).norm() / exact.norm())
