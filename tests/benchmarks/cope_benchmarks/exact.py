"""Attention in float64, in blocks of queries: what kernels on a GPU are compared with, at any number of tokens.

The error of a kernel is that of the whole tensor: ‖computed − exact‖ / ‖exact‖ (Frobenius norms). A largest error would
reject correct kernels: where rounding moves a position across an integer, the slope of the table changes, and single
gradients are off by their own size. It would also accept wrong ones in bfloat16, whose single entries have large errors.

`limits` computes how large the error of a correct kernel can be. The attention is computed again in float64, with the
roundings of such a kernel: η‖x‖‖y‖ for a product x·y that is summed in float32; weights, gradients of scores, tables and
results in the kernel's type; and all positions moved by `POSITION_ERROR`, up in one draw and down in the next. The limit
is `SAFETY` times the largest distance to the exact result, and a few roundings of the result itself.

Shapes: B batch, H heads, T queries (the last of the S tokens), S keys, K head dim; in names, R queries of a block and C
the keys that they see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cope_sweep.kernels.arguments import Arguments
from cope_sweep.kernels.dropout import dropout_mask, heads_of_batch

SAFETY = 4.0
PRODUCT_ERROR = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-23, torch.float16: 2.0**-23}
"""η: error of a product, relative to the norms of its vectors. Three TF32 products represent one of float32."""
POSITION_ERROR = 2.0**-22
"""Of a position p, the sum of n gates, in units of p + √n."""
RESULT_ERROR = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-11, torch.float16: 2.0**-14}
"""Of a result, relative to its norm; and to that of numbers of size `SMALL`."""
SMALL = 1e-3
DRAWS, FEW_SCORES = 6, 1 << 22
"""How often the roundings are drawn, up to so many scores. A gradient of one number is sometimes small by chance in 2 draws."""
BLOCK_ENTRIES = 1 << 23
"""Scores in a block of queries, over all heads."""

Leaves = dict[str, Tensor]
Build = Callable[[Leaves], Arguments]
"""Makes the problem from its leaves: the tensors whose gradients are compared, by name."""


@dataclass(frozen=True)
class Rounding:
    """The roundings of a kernel that computes in `dtype`; `direction`: where positions are moved, 1 or −1."""

    dtype: torch.dtype
    direction: int
    rng: torch.Generator

    def __call__(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).to(x.dtype)

    def weights(self, a: Tensor) -> Tensor:
        """Weights, rounded as multiples of the row's sum of exponentials: kernels divide by it at the end."""
        scale = 1 + torch.rand(*a.shape[:-1], 1, generator=self.rng, device=a.device, dtype=a.dtype)
        return self(a * scale) / scale

    def noise(self, x_norms: Tensor, y_norms: Tensor) -> Tensor:
        """The errors of all products of vectors with these norms."""
        size = x_norms[..., :, None] * y_norms[..., None, :]
        random = torch.randn(size.shape, generator=self.rng, device=size.device, dtype=torch.float32)
        errors: Tensor = size * random * PRODUCT_ERROR[self.dtype]
        return errors

    def moved(self, p: Tensor) -> Tensor:
        moved: Tensor = p + self.direction * POSITION_ERROR * (p + p.shape[-1] ** 0.5)
        return moved.clamp(min=0)


def exact(build: Build, leaves: Leaves, weight: Tensor) -> Leaves:
    """In float64: `output`, and the gradient of Σ output·weight for each leaf, by its name."""
    return _output_and_gradients(build, leaves, weight, None)


def limits(build: Build, leaves: Leaves, weight: Tensor, expected: Leaves, dtype: torch.dtype) -> dict[str, float]:
    """By name: the largest norm of the difference from `exact` that a correct kernel in `dtype` can have."""
    found = dict.fromkeys(expected, 0.0)
    problem = build(leaves)
    scores = problem.q.shape[:3].numel() * problem.k.shape[2]
    for draw in range(DRAWS if scores <= FEW_SCORES else 2):
        rng = torch.Generator(weight.device).manual_seed(draw)
        rounded = _output_and_gradients(build, leaves, weight, Rounding(dtype, 1 - 2 * (draw % 2), rng))
        for name, value in rounded.items():
            found[name] = max(found[name], SAFETY * _norm(value - expected[name]))
    small = RESULT_ERROR[dtype]
    return {
        name: limit + small * (_norm(expected[name]) + SMALL * expected[name].numel() ** 0.5)
        for name, limit in found.items()
    }


class Expected:
    """What is expected of a kernel in `dtype`. At 16,384 tokens its computation takes seconds on a GPU."""

    def __init__(self, build: Build, leaves: Leaves, weight: Tensor, dtype: torch.dtype) -> None:
        self.exact = exact(build, leaves, weight)
        self.limits = limits(build, leaves, weight, self.exact, dtype)

    def compare(self, computed: Leaves) -> Comparison:
        """The errors of computed output and gradients."""
        errors, relative = {}, {}
        for name, value in self.exact.items():
            difference = _norm(computed[name].double() - value)
            norm = max(_norm(value), SMALL * value.numel() ** 0.5)
            errors[name] = difference / self.limits[name] if difference == difference else float("inf")
            relative[name] = difference / norm
        return Comparison(errors, relative)


@dataclass(frozen=True)
class Comparison:
    """By name of output or gradient."""

    of_limit: dict[str, float]
    """The error ÷ the largest that a correct kernel can have."""
    relative: dict[str, float]
    """The relative Frobenius error; relative to entries of size `SMALL` where the exact ones are smaller, or 0."""

    @property
    def wrong(self) -> str | None:
        """The tensors with errors above their limit, for a message; None: all are correct."""
        wrong = [
            f"{name} is off by {self.relative[name]:.1e}, {error:.1f} × what rounding explains"
            for name, error in self.of_limit.items()
            if not error <= 1
        ]
        return "; ".join(wrong) or None


def computed_by(attend: Callable[[Leaves], Tensor], leaves: Leaves, weight: Tensor) -> Leaves:
    """Output and gradients of `attend` for these leaves, by the names of `exact`."""
    given = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    out = attend(given)
    gradients = torch.autograd.grad(out, list(given.values()), weight.to(out.dtype), allow_unused=True)
    found = (torch.zeros_like(x) if g is None else g for x, g in zip(given.values(), gradients, strict=True))
    return {"output": out.detach(), **dict(zip(given, found, strict=True))}


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x))


@contextmanager
def _without_determinism() -> Iterator[None]:
    """Tests fill new memory and want the same bits of kernels; here, both would cost time and gigabytes."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@_without_determinism()
def _output_and_gradients(build: Build, leaves: Leaves, weight: Tensor, rounding: Rounding | None) -> Leaves:
    given = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    problem = build(given)
    (B, H, T, _), S = problem.q.shape, problem.k.shape[2]
    rows = max(16, BLOCK_ENTRIES // (B * H * S))
    outputs, total = [], {name: torch.zeros_like(x) for name, x in given.items()}
    for first in range(0, T, rows):
        block = slice(first, min(T, first + rows))
        out = _Block(problem, block, rounding).attention()
        outputs.append(out.detach())
        # The graph from the leaves to the problem's tensors is kept for the next block.
        gradients = torch.autograd.grad(
            out, list(given.values()), weight[:, :, block].double(), allow_unused=True, retain_graph=True
        )
        for name, gradient in zip(given, gradients, strict=True):
            if gradient is not None:
                total[name] += gradient
    found = {"output": torch.cat(outputs, 2), **total}
    return {name: rounding(x) for name, x in found.items()} if rounding else found


class _Block:
    """The attention of a block of queries."""

    def __init__(self, problem: Arguments, rows: slice, rounding: Rounding | None) -> None:
        self.problem, self.rows, self.rounding = problem, rows, rounding
        start = problem.k.shape[2] - problem.q.shape[2]
        self.device = problem.q.device
        self.base_q = problem.q if problem.base_q is None else problem.base_q
        self.i_R = torch.arange(start + rows.start, start + rows.stop, device=self.device)
        self.j_C = torch.arange(start + rows.stop, device=self.device)
        self.distance_RC = self.i_R[:, None] - self.j_C
        self.visible_RC = self.distance_RC >= 0

    def attention(self) -> Tensor:
        problem = self.problem
        s = self.product(problem.q, problem.k) * problem.scale
        total = s + self.contextual(s) if problem.contextual else s
        total = total + self.by_distance()
        total = total.masked_fill(~self.visible_RC, -torch.inf)
        kept = None
        if problem.dropout and problem.seeds is not None:
            B, H = total.shape[:2]
            of_heads = heads_of_batch(problem.seeds.to(self.device), H)
            kept = dropout_mask(problem.dropout, *of_heads, self.i_R, self.j_C)
            kept = kept.view(B, H, *kept.shape[1:]).double() / (1 - problem.dropout)
        out = _Attend.apply(total, self.keys(problem.v), kept, self.rounding)
        if problem.lengths is not None:
            is_token = self.i_R < problem.lengths[:, None]
            out = out.where(is_token[:, None, :, None], 0)
        return out  # type: ignore[no-any-return]

    def keys(self, x_BHSK: Tensor) -> Tensor:
        return x_BHSK[:, :, : len(self.j_C)]

    def product(self, q_BHTK: Tensor, k_BHSK: Tensor) -> Tensor:
        product: Tensor = _Product.apply(q_BHTK[:, :, self.rows], self.keys(k_BHSK), self.rounding)
        return product

    def table(self, e: Tensor, scale: float) -> Tensor:
        """The products of the block's queries with a table, (B, H, R, entries)."""
        z = self.base_q[:, :, self.rows] @ e.mT * scale
        return _Stored.apply(z, self.rounding) if self.rounding else z

    def contextual(self, s: Tensor) -> Tensor:
        """The scores that depend on positions, which are sums of gates."""
        problem = self.problem
        logits = s if problem.gate_k is None else self.product(self.base_q, problem.gate_k) * problem.scale
        gates = torch.sigmoid(logits) * self.visible_RC
        p = gates.flip(-1).cumsum(-1).flip(-1)
        if self.rounding:
            p = p + (self.rounding.moved(p.detach()) - p.detach()) * self.visible_RC
        score = torch.zeros_like(s)
        if problem.e is not None:
            score = score + self.looked_up(self.table(problem.e, problem.e_scale), p)
        if problem.knots is not None and problem.segment_slope is not None and problem.segment_intercept is not None:
            p_limited = p.clamp(max=problem.limit)
            score = score + self.piecewise(problem.knots, problem.segment_slope, problem.segment_intercept, p_limited)
        if problem.m is not None:
            score = score + problem.m[:, None, None] * p
        return score

    def looked_up(self, z: Tensor, p: Tensor) -> Tensor:
        p = p.clamp(max=z.shape[-1] - 1)
        below, above = p.detach().floor(), p.detach().ceil()
        z_below, z_above = z.gather(-1, below.long()), z.gather(-1, above.long())
        return z_below + (p - below) * (z_above - z_below)

    def piecewise(self, knots: Tensor, slope: Tensor, intercept: Tensor, p: Tensor) -> Tensor:
        segment = torch.searchsorted(knots.detach(), p.detach().contiguous(), right=True)
        slope, intercept = (x[:, :, self.rows].expand(*p.shape[:3], -1) for x in (slope, intercept))
        return slope.gather(-1, segment) * p + intercept.gather(-1, segment)

    def by_distance(self) -> Tensor:
        problem, distance = self.problem, self.distance_RC.clamp(min=0)
        score = torch.zeros((), dtype=torch.float64, device=self.device)
        if problem.relative is not None:
            z = self.table(problem.relative, problem.relative_scale)
            last = z.shape[-1] - 1
            index = distance.clamp(max=last).expand(*z.shape[:2], *distance.shape)
            near = torch.ones_like(self.visible_RC) if problem.far_last else self.distance_RC <= last
            score = score + z.gather(-1, index) * near
        if problem.distance_bias is not None:
            b_HR = problem.distance_bias
            score = score + b_HR[:, distance.clamp(max=b_HR.shape[-1] - 1)]
        if problem.distance_slope is not None:
            score = score + problem.distance_slope.double()[:, None, None] * distance
        return score


class _Product(torch.autograd.Function):
    """x·yᵀ; with a rounding, as a kernel computes it: the gradient of the product is rounded to the kernel's type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, rounding: Rounding | None) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.rounding = rounding
        product = x @ y.mT
        if rounding:
            product += rounding.noise(x.norm(dim=-1), y.norm(dim=-1))
        return product

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors
        d = ctx.rounding(d) if ctx.rounding else d
        return d @ y, d.mT @ x, None


class _Attend(torch.autograd.Function):
    """softmax(s)·v, with dropped weights; with a rounding, weights and output are rounded to the kernel's type.

    The gradient is a·(da − o·do), as kernels compute it: from the stored output o.
    """

    @staticmethod
    def forward(ctx: Any, s: Tensor, v: Tensor, kept: Tensor | None, rounding: Rounding | None) -> Tensor:
        a = s.softmax(-1)
        used = a if kept is None else a * kept
        out = (rounding.weights(used) if rounding else used) @ v
        ctx.save_for_backward(a, v, kept, rounding(out) if rounding else out)
        ctx.rounding = rounding
        return out

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor, None, None]:
        a, v, kept, out = ctx.saved_tensors
        used, da, rounding = a, d @ v.mT, ctx.rounding
        if rounding:
            da += rounding.noise(d.norm(dim=-1), v.norm(dim=-1))
        if kept is not None:
            used, da = a * kept, da * kept
        ds = a * (da - (out * d).sum(-1, keepdim=True))
        return ds, (rounding(used) if rounding else used).mT @ d, None, None


class _Stored(torch.autograd.Function):
    """A tensor that is stored in the kernel's type, as its gradient is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Rounding) -> Tensor:
        ctx.rounding = rounding
        return rounding(x)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return ctx.rounding(d), None
