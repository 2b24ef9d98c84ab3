"""A temperature of far queries, for layers without positions (Llama 4's model code, 2025).

    q_i ← q_i·(1 + 0.1·ln(⌊(i + 1)/n₀⌋ + 1))        n₀ = `floor`, 0.1 = `scale`
    q_i ← q_i·(1 + 0.1·ln(max((i + 1)/n₀, 1)))      `steps: false`, as in Inkling's model code

The more keys a query sees, the more its softmax spreads; larger logits work against that. Nothing changes before token
n₀: a model for short sequences needs a small n₀. It multiplies the queries of q·k alone, as a rotation does: what other
encodings compute from queries (CoPE's gates and its table) uses them as they were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from cope_sweep.frozen import Positive
from cope_sweep.positions.base import AttentionEncoding, Tensors

if TYPE_CHECKING:
    from torch import Tensor


class Temperature(AttentionEncoding):
    """Queries that grow with the logarithm of their position."""

    SOURCE: ClassVar[str] = "2025 huggingface/transformers"

    kind: Literal["temperature"] = "temperature"
    floor: Positive = Field(default=8192, description="n₀: the number of tokens from which queries grow.")
    scale: Annotated[float, Field(gt=0)] = Field(default=0.1, description="Factor of the logarithm.")
    steps: bool = Field(default=True, description="Grow once in `floor` tokens (Llama 4), or with each (Inkling).")

    def rotate(
        self,
        parameters: Tensors,
        x_BHTK: Tensor,
        start: int,
        features_BHSF: Tensor | None = None,
        *,
        keys: bool = False,
    ) -> Tensor:
        import torch

        if keys:
            return x_BHTK
        T = x_BHTK.shape[2]
        # In float64: a quotient of whole numbers must not round up to the next step.
        seen_T = torch.arange(start + 1, start + T + 1, dtype=torch.float64, device=x_BHTK.device) / self.floor
        grown_T = seen_T.floor() + 1 if self.steps else seen_T.clamp(min=1)
        return x_BHTK * (1 + self.scale * grown_T.log())[:, None].to(x_BHTK.dtype)
