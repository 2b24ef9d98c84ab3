"""Benchmark of decoding: one token after a context whose keys and values are cached, by the context's length.

The model has the size of GPT-2 small, random weights, and one sequence; its encodings change. With random weights gates
are near ½; a bias gives gates near 0.02, with which fewer keys are beyond the last embedding. Before anything is timed, the
logits of the token are compared with those of a full pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cope_benchmarks.prefill import run_of
from cope_benchmarks.report import Measured, Row, Rows, add_ratios
from cope_benchmarks.timing import times
from cope_sweep.model import Transformer

GPT2_SMALL = {"family": "gpt2", "layers": 12, "dim": 768, "heads": 12}
VOCABULARY = 50_257
NONE = "no encoding"
ALTERNATIVES: dict[str, Any] = {
    NONE: [],
    "RoPE": ["rope"],
    "CoPE": ["cope"],
    "CoPE, gates near 0.02": [{"kind": "cope", "gate_bias": -4.0}],
    "CoPE, a position for every token": [{"kind": "cope", "p_max": "full"}],
    "CoPE, separate gate keys": [{"kind": "cope", "gate": "separate"}],
}
LIMIT = 1e-3
"""Of the relative error of the logits."""


def measure(tokens: Sequence[int], repetitions: int, layers: int = 12, vocabulary: int = VOCABULARY) -> Measured:
    """The time of one token in float32, and as a multiple of the time without an encoding, by length of the context.

    Args:
        tokens: Lengths of the context.
        repetitions: How many times each alternative is timed, in turns.
        layers: Layers of the model.
        vocabulary: Its token ids.
    """
    rows = Rows("decode")
    size = GPT2_SMALL | {"layers": layers}
    models = {
        name: Transformer(run_of(size, position, max(tokens) + 1, vocabulary)).eval()
        for name, position in ALTERNATIVES.items()
    }
    for length in tokens:
        rows.add_rows(f"{length:,} tokens", _measure_one(models, length, repetitions))
    return rows.measured(model=size | {"vocabulary": vocabulary})


@torch.inference_mode()
def _measure_one(models: dict[str, Transformer], length: int, repetitions: int) -> dict[str, Row]:
    steps: dict[str, Callable[[], torch.Tensor]] = {}
    found: dict[str, Row] = {}
    for name, model in models.items():
        random = torch.Generator().manual_seed(0)
        tokens_1T = torch.randint(model.vocabulary_size, (1, length + 1), generator=random)
        cache: list[dict[str, torch.Tensor]] = [{} for _ in model.blocks]
        model.hidden(tokens_1T[:, :-1], cache)
        step = _step(model, cache, tokens_1T[:, -1:])
        full = model.logits(model.hidden(tokens_1T)[:, -1:])
        error = float((step() - full).norm() / full.norm())
        if error > LIMIT:
            found[name] = {"failed": f"logits are off by {error:.1e}"}
            continue
        steps[name] = step
        found[name] = {"cached MB": sum(x.nbytes for layer in cache for x in _distinct(layer)) / 1e6}
    for name, taken in times(steps, repetitions).items():
        found[name] = {"a token (ms)": taken} | found[name]
    add_ratios(found, "a token (ms)", NONE, f"÷ {NONE}")
    return found


def _step(
    model: Transformer, cache: list[dict[str, torch.Tensor]], token_11: torch.Tensor
) -> Callable[[], torch.Tensor]:
    @torch.inference_mode()
    def compute() -> torch.Tensor:
        # A copy of the dictionaries: the model puts longer tensors into them, and leaves these as they are.
        return model.logits(model.hidden(token_11, [dict(layer) for layer in cache]))

    return compute


def _distinct(layer: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return list({x.data_ptr(): x for x in layer.values()}.values())
