"""Muon for the weight matrices of the blocks (Jordan et al. 2024), AdamW for all other parameters.

    M ← μ·M + (1 − μ)·G
    O = NewtonSchulz(μ·M + (1 − μ)·G)            near UVᵀ, where the argument is U·S·Vᵀ; without Nesterov: of M
    W ← W − lr·weight_decay·W − lr·scale·O

`scale` depends on the shape (rows, columns) of W: 0.2·√max(rows, columns) for `match_adamw`, so that an update is about
as large as one of AdamW and both can share a learning rate (Liu et al. 2025, "Muon is Scalable for LLM Training"), or
√max(1, rows / columns) for `original`, with learning rates near 0.02. torch.optim.Muon computes the update, with
Newton–Schulz iterations in bfloat16.

The projections of queries, keys and values are one matrix here, and are orthogonalised together.
AdamW uses `lr`, `betas`, `eps` and `weight_decay` of `train`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from cope_sweep.optim.adamw import STATE_BYTES, build_adamw
from cope_sweep.optim.base import (
    FLOAT32_BYTES,
    NamedParameters,
    Optimizer,
    OptimizerSettings,
    Shape,
    is_hidden_matrix,
)

if TYPE_CHECKING:
    import torch


class Muon(Optimizer):
    """Muon for the matrices of the blocks, AdamW for the rest."""

    kind: Literal["muon"] = "muon"
    lr: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Learning rate of the matrices; null: train.lr. The schedule applies to both."
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    nesterov: bool = True
    iterations: Annotated[int, Field(ge=1, lt=100)] = Field(default=5, description="Newton–Schulz iterations.")
    scale: Literal["match_adamw", "original"] = Field(
        default="match_adamw",
        description="Factor of an update of a matrix: match_adamw: 0.2·√max(rows, columns), for learning rates of "
        "AdamW. original: √max(1, rows / columns).",
    )

    def build(self, parameters: NamedParameters, settings: OptimizerSettings) -> list[torch.optim.Optimizer]:
        from cope_sweep.optim import uncompiled

        matrices = {name: value for name, value in parameters.items() if is_hidden_matrix(name, tuple(value.shape))}
        rest = {name: value for name, value in parameters.items() if name not in matrices}
        muon = uncompiled.Muon(
            list(matrices.values()),
            lr=settings.lr if self.lr is None else self.lr,
            weight_decay=settings.weight_decay,
            momentum=self.momentum,
            nesterov=self.nesterov,
            ns_steps=self.iterations,
            adjust_lr_fn={"match_adamw": "match_rms_adamw", "original": "original"}[self.scale],
        )
        return [muon, build_adamw(rest, settings)]

    def rates(self, lr: float) -> dict[str, float]:
        return super().rates(lr) | ({} if self.lr is None else {"train/lr_matrices": self.lr})

    def state_bytes(self, name: str, shape: Shape) -> int:
        return FLOAT32_BYTES if is_hidden_matrix(name, shape) else STATE_BYTES
