"""Absolute position encoding, learned: h_j ← h_j + e[j] (Golovneva et al. 2024, section 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from cope_sweep.positions.base import Dims, Encoding, Parameter

if TYPE_CHECKING:
    from torch import Tensor


class Absolute(Encoding):
    """A learned vector for each position of the context, added to the token embedding."""

    kind: Literal["absolute"] = "absolute"
    std: float = Field(
        default=0.02,
        ge=0,
        description="Standard deviation of the embeddings' normal initialisation (default: GPT-2's).",
    )

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        return {"e": Parameter((dims.context, dims.dim), self.std)}

    def embed(self, parameters: Mapping[str, Tensor], x_BTD: Tensor, start: int) -> Tensor:
        """Raises ValueError if a token is at a position beyond the table."""
        e_PD = parameters["e"]
        stop = start + x_BTD.shape[1]
        if stop > len(e_PD):
            raise ValueError(
                f"absolute position encoding has {len(e_PD)} embeddings, and the input has {stop} tokens; "
                f"set model.context to {stop} or more before training, or use an encoding that extrapolates"
            )
        return x_BTD + e_PD[start:stop]
