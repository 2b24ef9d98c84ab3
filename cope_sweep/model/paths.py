"""The kernel by which each layer of a run's model computes its attention in training, without computing anything."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import torch

from cope_sweep.config import Resources, RunSpec
from cope_sweep.kernels import which


class LayerPaths(NamedTuple):
    """Layers in a row that take the same path."""

    layers: tuple[int, int]
    """The first and the last one, counted from 0."""
    name: str
    """`triton`, `native`, `blocked`, `reference`, or `sdpa`: torch's own attention."""
    reason: str | None
    """Why a fused kernel for the device is not used; None if it is, or if none is needed."""


def attention_paths(run: RunSpec, resources: Resources, device: str) -> list[LayerPaths]:
    """The path of each layer of a training step on `device`, `cpu` or `cuda`, which this machine need not have."""
    bf16 = resources.precision == "bf16" or (resources.precision == "auto" and device == "cuda")

    def paths() -> Iterator[tuple[str, str | None]]:
        by_layer: dict[tuple[int, ...], tuple[str, str | None]] = {}
        for layer in range(run.model.layers):
            serving = [index for index, encoding in enumerate(run.model.position) if encoding.serves(layer)]
            if tuple(serving) not in by_layer:
                by_layer[tuple(serving)] = which(
                    [run.model.position[index] for index in serving],
                    run.dims,
                    device=device,
                    dtype=torch.bfloat16 if bf16 else torch.float32,
                    dropout=run.model.dropout,
                    hard=run.model.hard_attention,
                    # A training step has no longer sequences, whatever the model may be evaluated on.
                    tokens=run.task.length("train"),
                    implementation=resources.attention,
                )
            yield by_layer[tuple(serving)]

    paths_found: list[LayerPaths] = []
    for (name, reason), group in groupby(enumerate(paths()), key=lambda numbered: numbered[1]):
        layers = [layer for layer, _ in group]
        paths_found.append(LayerPaths((layers[0], layers[-1]), name, reason))
    return paths_found
