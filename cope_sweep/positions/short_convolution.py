"""A short convolution of queries and keys along the tokens (So et al. 2021, "Primer"), the one that PaTH has on its w.

    q'_t = Σ_{l < taps} a_l·q_{t−l}          k'_t = Σ_{l < taps} b_l·k_{t−l}          a_l, b_l for each channel

It is causal, and comes before everything else in attention: rotations, gates and scores take q' and k'. So it composes
with any encoding, `[cope, short_convolution]`, and shows how much of PaTH's or Selective RoPE's result is its
convolution's. Taps start as PaTH's and Selective RoPE's, like torch's convolution: uniform on ±1/√taps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from cope_sweep.positions.base import AttentionEncoding, Dims, Parameter, Tensors, causal_convolution

if TYPE_CHECKING:
    from torch import Tensor


class ShortConvolution(AttentionEncoding):
    """Each channel of queries and keys is a weighted sum of the last tokens'."""

    SOURCE: ClassVar[str] = "arXiv 2109.08668"

    kind: Literal["short_convolution"] = "short_convolution"
    taps: Annotated[int, Field(ge=1, le=10**6)] = Field(
        default=3, description="Tokens in a sum, the query's or key's own one included: 3 as PaTH, 4 as Selective RoPE."
    )

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        taps = Parameter((dims.dim, self.taps), per_layer=True, bound=self.taps**-0.5)
        return {"query_taps": taps, "key_taps": taps}

    def mix(self, parameters: Tensors, x_BHSK: Tensor, *, keys: bool) -> Tensor:
        return causal_convolution(x_BHSK, parameters["key_taps" if keys else "query_taps"])
