"""AdamW (Loshchilov & Hutter 2019, algorithm 2), with `lr`, `betas`, `eps` and `weight_decay` of `train`.

    m ← β₁·m + (1 − β₁)·g
    v ← β₂·v + (1 − β₂)·g²
    θ ← θ − lr·(m̂ / (√v̂ + ε) + weight_decay·θ)        m̂, v̂: corrected for their start at 0

Weight decay applies to matrices; not to biases, norms and position parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from cope_sweep.optim.base import FLOAT32_BYTES, NamedParameters, Optimizer, OptimizerSettings, Shape, is_decayed

if TYPE_CHECKING:
    import torch

STATE_BYTES = 2 * FLOAT32_BYTES
"""Size of the state of an element: both moments."""


class AdamW(Optimizer):
    """AdamW for all parameters."""

    kind: Literal["adamw"] = "adamw"

    def build(self, parameters: NamedParameters, settings: OptimizerSettings) -> list[torch.optim.Optimizer]:
        return [build_adamw(parameters, settings)]

    def state_bytes(self, name: str, shape: Shape) -> int:
        return STATE_BYTES


def build_adamw(parameters: NamedParameters, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """AdamW with two groups: the parameters with weight decay, then those without."""
    from cope_sweep.optim import uncompiled

    decayed = [value for name, value in parameters.items() if is_decayed(name, tuple(value.shape))]
    exempt = [value for name, value in parameters.items() if not is_decayed(name, tuple(value.shape))]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]
    return uncompiled.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
