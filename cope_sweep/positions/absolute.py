"""Absolute position encoding, learned: h_j ← h_j + e[j] (Golovneva et al. 2024, section 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from cope_sweep.errors import InvalidValue
from cope_sweep.positions.base import Dims, Encoding, Parameter, Tensors

if TYPE_CHECKING:
    from torch import Tensor


class Absolute(Encoding):
    """A learned vector for each position of the context, added to the token embedding."""

    SOURCE: ClassVar[str] = "arXiv 1705.03122"

    kind: Literal["absolute"] = "absolute"
    std: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="Standard deviation of the embeddings' normal initialisation; null: the family's "
        "(gpt2, llama: 0.02; post_norm: 1/√dim).",
    )

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        std = dims.absolute_std if self.std is None else self.std
        return {"e": Parameter((dims.context, dims.dim), std)}

    def embed(self, parameters: Tensors, x_BTD: Tensor, start: int) -> Tensor:
        """Raises ValueError if a token is at a position beyond the table."""
        e_PD = parameters["e"]
        stop = start + x_BTD.shape[1]
        if stop > len(e_PD):
            raise InvalidValue(
                f"absolute position encoding has {len(e_PD)} embeddings, and the input has {stop} tokens; "
                f"set model.context to {stop} or more before training, or use an encoding that extrapolates",
                key="model.context",
                embeddings=len(e_PD),
                tokens=stop,
            )
        return x_BTD + e_PD[start:stop]
