"""Random attention problems for the checks and the benchmark of the kernels on a GPU.

Shapes: B batch, H heads, T queries (the last of the S tokens), S keys, K head dim, P positions, R distances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from cope_benchmarks.exact import Expected, Leaves
from cope_sweep.kernels import operator
from cope_sweep.kernels.arguments import Arguments

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SEED = 1234567890123456789
"""Seed of dropout."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The sizes and terms of a random attention problem."""

    batch: int = 1
    heads: int = 2
    tokens: int = 256
    """T; with `cached`, S = cached + tokens."""
    cached: int = 0
    head_dim: int = 64
    dtype: str = "bfloat16"
    p_max: int | Literal["full"] | None = 64
    """Entries of the table of positions; full: as many as there are keys, and one; None: no table."""
    per_head: bool = False
    gate: Literal["logits", "keys", "values", "separate"] = "logits"
    """Gates use the logits, keys before a rotation (then q and k of the logits are others), values, or separate keys."""
    mean_gate: float | None = None
    """Every gate is about this; None: logits are about normal, so the mean is ½."""
    gate_bias: bool = False
    """A bias of the gates' logits, for each head."""
    slope: bool = False
    """A bias m·p (CoPE-ALiBi)."""
    knots: int = 0
    """Segments of a piecewise linear function of p (CoPE-MLP), and one; 0: none."""
    relative: int | Literal["full"] | None = None
    """Entries of a table of distances."""
    far: Literal["none", "last"] = "none"
    buckets: int = 0
    """Entries of a bias by distance (T5); 0: none."""
    alibi: bool = False
    key_bias: bool = False
    """A bias of keys (FoX)."""
    dropout: float = 0.0
    lengths: tuple[int, ...] | None = None
    projection: bool = False
    """Memory is as in a model: q, k and v are views of one projection (B, T, 3, H, K), and other vectors of queries and keys,
    with the gradient of the output, have the order (B, T, H, K). Else all is contiguous."""
    float32_tables: bool = False
    """Tables are float32, as parameters under autocast; their numbers are exact in `dtype`."""

    @property
    def keys(self) -> int:
        return self.cached + self.tokens

    @property
    def entries(self) -> int | None:
        return self.keys + 1 if self.p_max == "full" else self.p_max

    @property
    def contextual(self) -> bool:
        return bool(self.p_max or self.slope or self.knots)

    @property
    def name(self) -> str:
        """The fields that differ from their defaults."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return " ".join(f"{name}={value}" for name, value in changed.items()).replace("'", "")

    def tiny(self) -> Problem:
        """The problem at a size for Triton's interpreter, with the same terms and layout."""
        tokens, cached = 33 if self.tokens > 256 else 20, min(self.cached, 13)
        return replace(
            self,
            batch=len(self.lengths) if self.lengths else 1,
            heads=2 if self.per_head else 1,
            tokens=tokens,
            cached=cached,
            head_dim=16 if self.head_dim == Problem.head_dim else self.head_dim,
            p_max=min(self.p_max, 6) if isinstance(self.p_max, int) else self.p_max,
            relative=min(self.relative, 7) if isinstance(self.relative, int) else self.relative,
            lengths=self.lengths and tuple(length * (tokens + cached) // self.keys for length in self.lengths),
        )

    def one_sequence(self) -> Problem:
        """The problem with one sequence and at most two heads: the same kernels, in little memory."""
        return replace(self, batch=1, heads=min(2, self.heads), lengths=self.lengths and self.lengths[:1])

    def leaves(self, device: str = "cpu", seed: int = 0) -> tuple[Leaves, Tensor]:
        """The tensors with gradients, by name, and the gradient of the output."""
        rng = torch.Generator(device).manual_seed(seed)
        dtype = DTYPES[self.dtype]
        B, H, T, S, K = self.batch, self.heads, self.tokens, self.keys, self.head_dim

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=rng, device=device) * std).to(dtype)

        def in_memory(x: Tensor) -> Tensor:
            return x.transpose(1, 2).contiguous().transpose(1, 2) if self.projection else x

        def table(*shape: int) -> Tensor:
            entries = normal(*shape, std=2 * K**-0.5)
            return entries.float() if self.float32_tables else entries

        q, k, v, do = normal(B, H, T, K), normal(B, H, S, K), normal(B, H, S, K), normal(B, H, T, K)
        gate_k = normal(B, H, S, K) if self.gate in ("keys", "separate") else None
        gate_q = normal(B, H, T, K) if self.gate == "keys" else q
        if self.mean_gate is not None:
            # One component determines the logits of gates, the others are small.
            sources = {"logits": k, "values": v}
            of_keys = sources.get(self.gate, gate_k)
            assert of_keys is not None
            gate_q.mul_(0.3)[..., 0] = 1
            of_keys[..., 0] = math.log(self.mean_gate / (1 - self.mean_gate)) * K**0.5
        found: Leaves = {"q": q, "k": k, "v": v}
        if self.projection:
            found = {"qkv": torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)}
        if gate_k is not None:
            found["gate_k"] = in_memory(gate_k)
        if self.gate == "keys":
            found["gate_q"] = in_memory(gate_q)
        heads = (H,) if self.per_head else ()
        if self.entries:
            found["e"] = table(*heads, self.entries, K)
        if self.gate_bias:
            found["gate_bias"] = normal(H).float()
        if self.slope:
            found["m"] = normal(H, std=0.3).float()
        if self.relative:
            entries = S if self.relative == "full" else self.relative
            found["e_relative"] = table(*heads, entries, K)
        if self.buckets:
            found["b"] = normal(H, self.buckets).float()
        if self.key_bias:
            found["key_bias"] = normal(B, H, S).float()
        if self.knots:
            found["segments"] = normal(B, H, T, self.knots + 1, std=0.2).float()
        return found, in_memory(do)

    def build(self, x: Leaves) -> Arguments:
        """The problem of these leaves, which may have another type."""
        q, k, v = x["qkv"].permute(2, 0, 3, 1, 4) if self.projection else (x["q"], x["k"], x["v"])
        keys = {"logits": None, "values": v}.get(self.gate, x.get("gate_k"))
        knots, slope, intercept = self._piecewise(x["segments"]) if self.knots else (None, None, None)
        return Arguments(
            q,
            k,
            v,
            base_q=x.get("gate_q"),
            gate_k=keys if self.contextual else None,
            e=x.get("e"),
            m=x.get("m"),
            gate_bias=x.get("gate_bias"),
            relative=x.get("e_relative"),
            distance_bias=x.get("b"),
            key_bias=x.get("key_bias"),
            distance_slope=self._slopes(q.device) if self.alibi else None,
            seeds=SEED + torch.arange(self.batch, device=q.device) if self.dropout else None,
            lengths=None if self.lengths is None else torch.tensor(self.lengths, device=q.device),
            scale=self.head_dim**-0.5,
            far_last=self.far == "last",
            dropout=self.dropout,
            knots=knots,
            segment_slope=slope,
            segment_intercept=intercept,
        )

    def attend(self, x: Leaves, kernel: str = "triton") -> Tensor:
        """The attention of these leaves by a fused kernel."""
        return operator.attention(self.build(x), kernel)

    def wrong(self, leaves: Leaves, weight: Tensor, computed: Leaves) -> str | None:
        """The results of a kernel that are off by more than rounding explains, for a message; None: all are right."""
        return self.expected(leaves, weight).wrong(computed)

    def expected(self, leaves: Leaves, weight: Tensor) -> Expected:
        """The exact results, and the errors that a kernel may have."""
        return Expected(self.build, leaves, weight, DTYPES[self.dtype])

    def _slopes(self, device: torch.device) -> Tensor:
        return -(2.0 ** -torch.linspace(1, 8, self.heads, device=device))

    def _piecewise(self, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Knots, slopes and intercepts of a continuous function of p with these slopes."""
        knots = torch.arange(1, self.knots + 1, device=slope.device, dtype=slope.dtype) * 1.7
        steps = (slope[..., :-1] - slope[..., 1:]) * knots
        intercept = torch.cat([torch.zeros_like(slope[..., :1]), steps.cumsum(-1)], -1)
        return knots, slope, intercept
