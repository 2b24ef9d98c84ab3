"""Kerple, its logarithmic kernel (Chi et al. 2022): a_ij = softmax_j(q_i·k_j/√K − p_h·log(1 + a_h·(i − j))).

p and a are learned for each head and layer, at least 0.01, and start uniformly in 0 … 2 and 0 … 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from cope_sweep.positions.base import Attention, AttentionEncoding, Dims, Parameter, Tensors, at_least_float32
from cope_sweep.positions.relative import distances
from cope_sweep.terms import DistanceBias

if TYPE_CHECKING:
    from torch import Tensor


class Kerple(AttentionEncoding):
    """A learned penalty that grows with the logarithm of the distance."""

    SOURCE: ClassVar[str] = "arXiv 2205.09921"

    kind: Literal["kerple"] = "kerple"

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        p = Parameter((dims.heads,), per_layer=True, bound=1.0, centre=1.0)
        a = Parameter((dims.heads,), per_layer=True, bound=0.5, centre=0.5)
        return {"p": p, "a": a}

    def score(self, parameters: Tensors, attention: Attention) -> Tensor:
        return _bias(parameters, distances(attention).clamp(min=0)[None])

    def term(self, parameters: Tensors, q_BHQK: Tensor, keys: int, features_BHSF: Tensor | None) -> DistanceBias:
        import torch

        return DistanceBias(_bias(parameters, torch.arange(keys, device=q_BHQK.device)))


def _bias(parameters: Tensors, distance: Tensor) -> Tensor:
    """The bias of each head at these distances, of one or two dimensions after the heads."""
    shape = (-1,) + (1,) * max(1, distance.dim() - 1)
    p, a = (_at_least(at_least_float32(parameters[name])).view(shape) for name in ("p", "a"))
    return -p * (a * distance).log1p()


def _at_least(x: Tensor) -> Tensor:
    """`x`, or 0.01 where it is less; the gradient passes in both cases, as released, so that x can grow again."""
    return x.detach().clamp(min=0.01) + (x - x.detach())
