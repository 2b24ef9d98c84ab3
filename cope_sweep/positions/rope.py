"""RoPE: queries and keys rotated by angles proportional to their positions (Su et al. 2021, RoFormer).

At position t the pair of components (k, k + K/2) is rotated by t·base^(−2k/K), the layout of Llama. A score then
depends on positions only through their difference.

Variants: partial RoPE (Barbero et al. 2025, p-RoPE) rotates only the ⌊p·K/2⌋ fastest pairs. Three change the angles of
a trained model for sequences `factor` times as long, in an evaluation (`evaluate.variants`):

    pi     (Chen et al. 2023)    all angles divided by the factor s
    ntk    (bloc97 2023)         base·s^(K/(K − 2)): the fastest pair keeps its angles, the slowest's are divided by s
    yarn   (Peng et al. 2024)    angles of pairs with fewer than 1 turn in the trained length L divided by s, with more
                                 than 32 turns kept, with a linear ramp between; queries and keys times 0.1·ln s + 1

YaRN's ramp follows the paper, over turns; its code has one over the indices of pairs.

Positions can be random floats instead of t (`sampled.py`).

Shapes: B batch, H heads, T tokens, K head dim, C = K/2 pairs of components.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from cope_sweep.errors import InvalidValue
from cope_sweep.frozen import Positive
from cope_sweep.positions.base import AttentionEncoding, Dims, Tensors
from cope_sweep.positions.sampled import DESCRIPTION, Sampled

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class RotaryEncoding(AttentionEncoding):
    """The base of encodings that rotate pairs of components of queries and keys."""

    def check(self, dims: Dims) -> None:
        super().check(dims)
        if dims.head_dim % 2:
            raise InvalidValue(
                f"{self.kind} rotates pairs of components, and the head dimension {dims.dim}/{dims.heads} = "
                f"{dims.head_dim} is odd; choose model.dim and model.heads with an even quotient",
                key="model.dim",
                kind=self.kind,
                head_dim=dims.head_dim,
            )


class RoPE(RotaryEncoding):
    """Rotary position embedding."""

    SOURCE: ClassVar[str] = "arXiv 2104.09864"

    kind: Literal["rope"] = "rope"
    base: float = Field(
        default=10_000.0, gt=1, description="The slowest pair completes a turn in about 2π·base tokens."
    )
    rotated: float = Field(
        default=1.0, ge=0, le=1, description="Share of the pairs that rotate, the fastest ones (partial RoPE)."
    )
    scaling: Literal["none", "pi", "ntk", "yarn"] = Field(
        default="none", description="How a trained model's angles are changed for longer sequences."
    )
    factor: float = Field(default=1.0, ge=1, description="With `scaling`: how many times as long.")
    trained: Positive | None = Field(
        default=None, description="With `scaling: yarn`: the length of the training sequences."
    )
    sampled: Sampled = Field(default=None, description=DESCRIPTION)

    @property
    def samples(self) -> bool:
        return self.sampled is not None

    def check(self, dims: Dims) -> None:
        super().check(dims)
        if self.scaling == "yarn" and self.trained is None:
            raise InvalidValue(
                "rope.scaling: yarn needs rope.trained, the length of the training sequences",
                key="rope.trained",
                scaling="yarn",
            )
        if self.scaling == "none":
            self.refuse(("factor",), "rope.scaling is none")
        if self.scaling != "yarn":
            self.refuse(("trained",), f"rope.scaling is {self.scaling}, and not yarn")
        if self.factor == 1:
            self.refuse(("scaling",), "rope.factor is 1")
        if self.scaling == "ntk" and dims.head_dim == 2:
            raise InvalidValue(
                "rope.scaling: ntk needs a head dimension above 2: with one pair there is no slowest one",
                key="rope.scaling",
                scaling="ntk",
                head_dim=2,
            )

    def version(self, dims: Dims) -> int:
        """2 where version 1 rotated another number of pairs: it rounded p·K/2."""
        pairs = dims.head_dim // 2
        return self.VERSION if self.rotated_pairs(dims.head_dim) == round(self.rotated * pairs) else 2

    def rotated_pairs(self, head_dim: int) -> int:
        """The number of pairs that rotate: ⌊p·K/2⌋, as in the authors' code."""
        return int(self.rotated * head_dim // 2)

    def rotate(
        self,
        parameters: Tensors,
        x_BHTK: Tensor,
        start: int,
        features_BHSF: Tensor | None = None,
        *,
        keys: bool = False,
    ) -> Tensor:
        if self.sampled is None:
            return turned(x_BHTK, *_rotation(self, start, x_BHTK))
        assert features_BHSF is not None  # noqa: S101 - the model gives positions
        position_B1T1 = self.sampled * features_BHSF[:, :1, start : start + x_BHTK.shape[2]]  # of all heads
        angle_B1TC = position_B1T1 * self.rates(x_BHTK.shape[-1], x_BHTK.device)
        return turned(x_BHTK, angle_B1TC.cos() * self.magnitude, angle_B1TC.sin() * self.magnitude)

    def rates(self, head_dim: int, device: torch.device | None = None) -> Tensor:
        """The angle of each pair at position 1, in radians, (C,) float64."""
        import torch

        base, s = self.base, self.factor
        if self.scaling == "ntk":
            base *= s ** (head_dim / (head_dim - 2))
        rate_C = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
        if self.scaling == "pi":
            rate_C = rate_C / s
        elif self.scaling == "yarn" and self.trained is not None:
            few, many = 1.0, 32.0  # turns in the trained length: pairs with fewer are interpolated, with more kept
            kept_C = ((self.trained * rate_C / (2 * math.pi) - few) / (many - few)).clamp(0, 1)
            rate_C = rate_C * kept_C + rate_C / s * (1 - kept_C)
        rate_C[self.rotated_pairs(head_dim) :] = 0
        return rate_C

    @property
    def magnitude(self) -> float:
        """Factor of queries and keys: YaRN's temperature."""
        return 0.1 * math.log(self.factor) + 1 if self.scaling == "yarn" else 1.0


def turned(x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (k, k + K/2) of components turned by angles with these cosines and sines, (T, C) or (B, H or 1, T, C)."""
    import torch

    cos, sin = cos.to(x_BHTK.dtype), sin.to(x_BHTK.dtype)
    a, b = x_BHTK.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _rotation(rope: RoPE, start: int, x_BHTK: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle of each pair of components of `x_BHTK`, (T, C), in its type and on its device.

    They are kept: layers, queries and keys share them. While torch.compile traces, they are part of the graph, which
    computes them once for all layers.
    """
    import torch

    T, K = x_BHTK.shape[-2:]
    wanted = (rope, K, start, T, x_BHTK.dtype, x_BHTK.device)
    # What is computed with fake tensors, or while a CUDA graph is captured, has no values to keep.
    if torch.compiler.is_compiling() or type(x_BHTK) is not torch.Tensor:
        return _cos_and_sin(*wanted)
    if x_BHTK.is_cuda and torch.cuda.is_current_stream_capturing():
        return _cos_and_sin(*wanted)
    return _kept_cos_and_sin(*wanted)


def _cos_and_sin(
    rope: RoPE, head_dim: int, start: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    import torch

    # In float64: at position 10⁵ a float32 angle has an error of up to 4·10⁻³.
    angle_TC = torch.arange(start, start + tokens, device=device)[:, None] * rope.rates(head_dim, device)
    cos_TC, sin_TC = angle_TC.cos(), angle_TC.sin()
    if rope.magnitude != 1:
        cos_TC, sin_TC = cos_TC * rope.magnitude, sin_TC * rope.magnitude
    return cos_TC.to(dtype), sin_TC.to(dtype)


@functools.lru_cache(maxsize=8)
def _kept_cos_and_sin(
    rope: RoPE, head_dim: int, start: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    import torch

    # Tensors made in inference mode could not be used in a training step later.
    with torch.inference_mode(False), torch.no_grad():
        return _cos_and_sin(rope, head_dim, start, tokens, dtype, device)
