"""ALiBi: attention with linear biases (Press et al. 2022).

a_ij = softmax_j(q_i·k_j/√K − m_h·(i − j))

Positions can be random floats instead of i and j (`sampled.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, Strict

from cope_sweep.errors import InvalidValue
from cope_sweep.positions.base import Attention, AttentionEncoding, Dims, Tensors, at_least_float32, constants
from cope_sweep.positions.relative import distances
from cope_sweep.positions.sampled import DESCRIPTION, Sampled
from cope_sweep.terms import DistanceSlope, KeyBias

if TYPE_CHECKING:
    from torch import Tensor

Slopes = Annotated[tuple[float, ...], Field(min_length=1), Strict(False)]
"""One slope for each head. Accepts a list too: files have no tuples."""


def standard_slopes(heads: int) -> list[float]:
    """The slopes of Press et al. for n heads: 2^(−8/n), 2^(−16/n), …

    If n is not a power of 2, use the slopes of the next lower power, followed by every other slope of the next
    higher power (section 3 and the released code).
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2 ** (-4 * (h + 1) / power) for h in range(0, 2 * power, 2)]
    return slopes + between[: heads - power]


def check_slopes(slopes: tuple[float, ...], dims: Dims, kind: str) -> None:
    """Raise ValueError if the number of slopes is not the number of heads."""
    if len(slopes) != dims.heads:
        raise InvalidValue(
            f"{kind}.slopes has {len(slopes)} slopes, and model.heads = {dims.heads}; give one slope for each head",
            key=f"{kind}.slopes",
            slopes=len(slopes),
            heads=dims.heads,
        )


class ALiBi(AttentionEncoding):
    """A penalty proportional to the distance, with a fixed slope for each head."""

    SOURCE: ClassVar[str] = "arXiv 2108.12409"

    kind: Literal["alibi"] = "alibi"
    slopes: Slopes | Literal["standard"] = Field(
        default="standard", description="One slope for each head; standard: 2^(−8h/heads)."
    )
    sampled: Sampled = Field(default=None, description=DESCRIPTION)

    @property
    def samples(self) -> bool:
        return self.sampled is not None

    def check(self, dims: Dims) -> None:
        super().check(dims)
        if self.slopes != "standard":
            check_slopes(self.slopes, dims, self.kind)

    def score(self, parameters: Tensors, attention: Attention) -> Tensor:
        slopes_H11 = self._slopes(attention.q_BHQK)[:, None, None]
        if self.sampled is None:
            return -slopes_H11[None] * distances(attention)
        assert attention.features_BHSF is not None  # noqa: S101 - the model gives positions
        position_BHS = self.sampled * attention.features_BHSF[..., 0]
        first = position_BHS.shape[2] - attention.q_BHQK.shape[2]
        # Shares are float64: near positions are subtracted before they are rounded.
        distance_BHQS = position_BHS[:, :, first:, None] - position_BHS[:, :, None]
        return -slopes_H11 * distance_BHQS.to(slopes_H11.dtype)

    def term(
        self, parameters: Tensors, q_BHQK: Tensor, keys: int, features_BHSF: Tensor | None
    ) -> DistanceSlope | KeyBias:
        slopes_H = self._slopes(q_BHQK)
        if self.sampled is None or features_BHSF is None:
            return DistanceSlope(-slopes_H)
        # The query's own position is the same for all keys.
        return KeyBias((slopes_H[:, None] * self.sampled * features_BHSF[..., 0]).to(at_least_float32(slopes_H).dtype))

    def _slopes(self, q_BHQK: Tensor) -> Tensor:
        return constants(standard_slopes(q_BHQK.shape[1]) if self.slopes == "standard" else self.slopes, q_BHQK)
