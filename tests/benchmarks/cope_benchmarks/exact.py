"""The standard for kernels: attention in float64, at any number of tokens, and the largest error that a kernel may have.

The error is that of a whole tensor, ‖computed − exact‖ (Frobenius norm). In small problems, the largest entry's is limited,
too. In large ones that would reject correct kernels: where rounding moves a position across an integer, the slope of the
table changes, and single gradients are off by their own size.

How much rounding changes depends on the problem, so it is measured: the attention is computed again in float64 with random
errors of the size of a correct kernel's roundings (`_Rounded`), in one draw with all positions moved up, in the next with
all moved down. The limit is `SAFETY` times the largest distance to the exact result, and a rounding of the result itself.

Shapes: B batch, H heads, T queries (the last of the S keys), R queries of a block, K head dim, P positions, M segments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cope_sweep.kernels.arguments import DIFFERENTIABLE, Arguments
from cope_sweep.kernels.dropout import dropout_mask, heads_of_batch

SAFETY = 4.0
ROUNDING = {torch.float64: 2.0**-50, torch.float32: 2.0**-21, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
"""Relative error of what a kernel multiplies, and stores, in its type. That of float32 is a product's by three TF32 ones, which
leave out 2⁻²². Where a position crosses an integer in one draw, a limit is up to 300 times as large as where none does; real
kernels cross some, too."""
POSITION_ERROR = 2.0**-22
"""Error of a position p, the sum of n gates in float32, in units of p + √n."""
FEWEST_GATES = 64
"""Kernels sum the gates of whole tiles: n is at least this."""
SCORE_ERROR = 2.0**-23
"""Error of a score, which is a sum in float32, relative to it: that of the weight is exp(score)'s."""
FLOAT64 = 2.0**-29
"""These errors of sums are smaller by this factor where the kernel computes in float64."""
SMALL = 1e-3
"""Entries of a result that are smaller than this may be off by a rounding of this."""
DRAWS, FEW_SCORES = 6, 1 << 22
"""Draws of errors, up to so many scores: a gradient of one number is sometimes off by little in 2 draws."""
BLOCK_SCORES = 1 << 21
"""Scores that are computed at once, about."""

Leaves = dict[str, Tensor]
Build = Callable[[Leaves], Arguments]
"""Makes the problem from its leaves: the tensors whose gradients are compared, by name."""


def computed_by(attend: Callable[[Leaves], Tensor], leaves: Leaves, weight: Tensor) -> Leaves:
    """Output of `attend`, and the gradient of Σ output·weight for each leaf, by its name."""
    given = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    out = attend(given)
    gradients = torch.autograd.grad(out, list(given.values()), weight.to(out.dtype), allow_unused=True)
    found = (torch.zeros_like(x) if g is None else g for x, g in zip(given.values(), gradients, strict=True))
    return {"output": out.detach(), **dict(zip(given, found, strict=True))}


class Expected:
    """The expectation of a kernel in `dtype`: the exact results, and by name how far others may be from them.

    `attend` computes the exact attention of leaves in float64; None: by `results` below. `exact_positions`: no rounding
    moves a position. `each_entry`: also limit the error of the largest entry. `draws`: how often errors are drawn; None: by the size.
    """

    def __init__(
        self, build: Build, leaves: Leaves, weight: Tensor, dtype: torch.dtype,
        attend: Callable[[Leaves], Tensor] | None = None, exact_positions: bool = False, each_entry: bool = False,
        draws: int | None = None,
    ) -> None:  # fmt: skip
        given, problem = {name: x.double() for name, x in leaves.items()}, build(leaves)
        scores = problem.q.shape[:3].numel() * problem.k.shape[2]
        with _without_determinism():
            exact = computed_by(attend, given, weight.double()) if attend else results(build, given, weight.double())
            self.exact = exact
            if draws is None:
                draws = DRAWS if scores <= FEW_SCORES else 2
            errors = [Errors.of(dtype, n, exact_positions) for n in range(draws)]
            rounded = [results(build, given, weight.double(), each) for each in errors]
        norms = (_norm, _largest) if each_entry else (_norm,)
        self.limits = {
            norm: {
                name: SAFETY * max(norm(each[name] - x) for each in rounded)
                + ROUNDING[dtype] * (norm(x) + SMALL * norm(torch.ones_like(x)))
                for name, x in self.exact.items()
            }
            for norm in norms
        }

    def relative_errors(self, computed: Leaves) -> dict[str, float]:
        """The errors of output and gradients, ÷ the norms of the exact ones."""
        return {
            name: _norm(computed[name].double() - x) / max(_norm(x), SMALL * x.numel() ** 0.5)
            for name, x in self.exact.items()
        }

    def errors_over_limit(self, computed: Leaves) -> dict[str, float]:
        """The errors of output and gradients, ÷ the largest that rounding explains."""
        return {
            name: max(norm(computed[name].double() - x) / limits[name] for norm, limits in self.limits.items())
            for name, x in self.exact.items()
        }

    def wrong(self, computed: Leaves, at_most: float = 1.0) -> str | None:
        """The results that are off by more than `at_most` × what rounding explains, for a message; None: all are right."""
        relative = self.relative_errors(computed)
        return "; ".join(
            f"{name} is off by {relative[name]:.1e}, {of_limit:.1f} × what rounding explains"
            for name, of_limit in self.errors_over_limit(computed).items()
            if not of_limit <= at_most  # a NaN is wrong, too
        ) or None  # fmt: skip


@dataclass(frozen=True)
class Errors:
    """The relative errors of a kernel: of sums in the logits and positions, of the kernel's type in all else.

    A kernel rounds weights, products with tables and gradients of scores to its type: values, tables and the gradient of the
    output are off. Its gradients are a·(da − o·do) with the stored output o, which is off, too.
    """

    draw: int
    """The seed of the errors."""
    of_type: float
    of_products: float
    of_scores: float
    of_positions: float
    """All positions are moved by it, in units of p + √n; its sign is that of the draw."""

    @staticmethod
    def of(dtype: torch.dtype, draw: int, exact_positions: bool = False) -> Errors:
        """The errors of a kernel in `dtype`; with `exact_positions`, none moves a position."""
        of_sums = FLOAT64 if dtype == torch.float64 else 1.0
        moved = 0.0 if exact_positions else POSITION_ERROR * of_sums * (1 - 2 * (draw % 2))
        of_products = min(ROUNDING[dtype], ROUNDING[torch.float32])
        return Errors(draw, ROUNDING[dtype], of_products, SCORE_ERROR * of_sums, moved)


def results(build: Build, leaves: Leaves, weight: Tensor, errors: Errors | None = None) -> Leaves:
    """The same as `computed_by`, in blocks of queries, of leaves in float64; with the errors of a kernel's roundings."""
    given = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    rng = torch.Generator(weight.device).manual_seed(errors.draw if errors else 0)

    def off(x: Tensor, error: float) -> Tensor:
        return x * (1 + error * torch.randn(x.shape, generator=rng, device=x.device, dtype=x.dtype))

    problem = build(given)
    if errors:
        weight = off(weight, errors.of_type)
        summed = ("q", "k", "base_q", "gate_k", "m", "gate_bias", "distance_bias", "key_bias")
        tables = ("v", "e", "relative", "segment_slope", "segment_intercept")
        size_of = dict.fromkeys(summed, errors.of_products) | dict.fromkeys(tables, errors.of_type)
        tensors = {name: getattr(problem, name) for name in size_of}
        changed: dict[str, Any] = {n: off(x, size_of[n]) for n, x in tensors.items() if x is not None}
        problem = problem._replace(**changed)
    # The graph of a block ends at these: their gradients are summed block by block, and go on to the leaves at the end.
    inputs: dict[str, Any] = {n: getattr(problem, n) for n in Arguments._fields[:DIFFERENTIABLE]}
    inputs = {name: x for name, x in inputs.items() if x is not None}
    cut: dict[str, Any] = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    B, H, T, _ = problem.q.shape
    S = problem.k.shape[2]
    out_BHTK = torch.empty_like(weight)
    rows = max(1, BLOCK_SCORES // (B * H * S))
    for first in range(0, T, rows):
        block = slice(first, min(T, first + rows))
        out_BHRK, log_sum_BHR = _block(problem._replace(**cut), block, errors)
        out_BHTK[:, :, block] = out_BHRK.detach()
        total = (out_BHRK * weight[:, :, block]).sum()
        if errors:  # do·o is the factor of the weights in the gradients of scores, as of the log-sum-exp's
            wrong_by = off(out_BHRK.detach(), errors.of_type) - out_BHRK.detach()
            total = total - ((wrong_by * weight[:, :, block]).sum(-1) * log_sum_BHR).sum()
        torch.autograd.backward(total)
    reached = [(x, cut[name].grad) for name, x in inputs.items() if x.requires_grad and cut[name].grad is not None]
    torch.autograd.backward([x for x, _ in reached], [gradient for _, gradient in reached])
    found = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in given.items()}
    return {"output": out_BHTK, **found}


def _block(x: Arguments, rows: slice, errors: Errors | None) -> tuple[Tensor, Tensor]:
    """Attention of some queries, and the logarithm of the sum of their weights before normalisation: the definition."""
    T, S, device = x.q.shape[2], x.k.shape[2], x.q.device
    i_R1 = torch.arange(S - T + rows.start, S - T + rows.stop, device=device)[:, None]
    distance_RS = i_R1 - torch.arange(S, device=device)
    hidden_RS = distance_RS < 0
    q_BHRK = x.q[:, :, rows]
    base_q_BHRK = q_BHRK if x.base_q is None else x.base_q[:, :, rows]
    s_BHRS = logits_BHRS = q_BHRK @ x.k.transpose(-1, -2) * x.scale
    if x.contextual:
        if x.gate_k is not None:
            logits_BHRS = base_q_BHRK @ x.gate_k.transpose(-1, -2) * x.scale
        if x.gate_bias is not None:
            logits_BHRS = logits_BHRS + x.gate_bias[:, None, None]
        gates_BHRS = logits_BHRS.sigmoid().masked_fill(hidden_RS, 0)
        p_BHRS = gates_BHRS.flip(-1).cumsum(-1).flip(-1)
        if errors and errors.of_positions:
            n_RS = (distance_RS + 1).clamp(min=FEWEST_GATES)
            p_BHRS = (p_BHRS + errors.of_positions * (p_BHRS + n_RS.sqrt())).clamp(min=0)
        if x.e is not None:
            s_BHRS = s_BHRS + _interpolated(base_q_BHRK @ x.e.transpose(-1, -2) * x.e_scale, p_BHRS)
        if x.segment_slope is not None and x.segment_intercept is not None and x.knots is not None:
            stopped_BHRS = p_BHRS.masked_fill(p_BHRS >= x.limit, x.limit) if math.isfinite(x.limit) else p_BHRS
            index_BHRS = torch.searchsorted(x.knots.to(p_BHRS.dtype), stopped_BHRS.detach(), right=True)
            slope_BHRM, intercept_BHRM = x.segment_slope[:, :, rows], x.segment_intercept[:, :, rows]
            s_BHRS = s_BHRS + slope_BHRM.gather(-1, index_BHRS) * stopped_BHRS + intercept_BHRM.gather(-1, index_BHRS)
        if x.m is not None:
            s_BHRS = s_BHRS + x.m[:, None, None] * p_BHRS
    if x.relative is not None:
        z_BHRD = base_q_BHRK @ x.relative.transpose(-1, -2) * x.relative_scale
        bias_BHRS = z_BHRD.gather(-1, distance_RS.clamp(0, z_BHRD.shape[-1] - 1).expand_as(s_BHRS))
        s_BHRS = s_BHRS + (bias_BHRS if x.far_last else bias_BHRS * (distance_RS < z_BHRD.shape[-1]))
    if x.distance_bias is not None:
        s_BHRS = s_BHRS + x.distance_bias[:, distance_RS.clamp(0, x.distance_bias.shape[-1] - 1)]
    if x.distance_slope is not None:
        s_BHRS = s_BHRS + x.distance_slope[:, None, None] * distance_RS
    if x.key_bias is not None:
        s_BHRS = s_BHRS + x.key_bias[:, :, None]
    if errors:
        rng = torch.Generator(device).manual_seed(errors.draw + (rows.start << 8))
        noise_BHRS = torch.randn(s_BHRS.shape, generator=rng, device=device, dtype=s_BHRS.dtype)
        s_BHRS = s_BHRS * (1 + errors.of_scores * noise_BHRS)
    s_BHRS = s_BHRS.masked_fill(hidden_RS, -torch.inf)
    log_sum_BHR = s_BHRS.logsumexp(-1)
    a_BHRS = (s_BHRS - log_sum_BHR[..., None]).exp()
    if x.dropout:
        assert x.seeds is not None
        tokens_S = torch.arange(S, device=device)
        kept = dropout_mask(x.dropout, *heads_of_batch(x.seeds.to(device), x.q.shape[1]), i_R1[:, 0], tokens_S)
        a_BHRS = a_BHRS * kept.view(a_BHRS.shape) / (1 - x.dropout)
    out_BHRK = a_BHRS @ x.v
    if x.lengths is not None:
        is_token_BR = i_R1[:, 0] < x.lengths[:, None]
        out_BHRK = out_BHRK.where(is_token_BR[:, None, :, None], 0)
        log_sum_BHR = log_sum_BHR.where(is_token_BR[:, None], 0)
    return out_BHRK, log_sum_BHR


def _interpolated(z_BHRP: Tensor, p_BHRS: Tensor) -> Tensor:
    """Entries of tables at positions; at a whole number, with the derivative to the right."""
    last = z_BHRP.shape[-1] - 1
    p_BHRS = p_BHRS.masked_fill(p_BHRS >= last, last)
    index_BHRS = p_BHRS.detach().long().clamp(min=0)
    below_BHRS, above_BHRS = z_BHRP.gather(-1, index_BHRS), z_BHRP.gather(-1, (index_BHRS + 1).clamp(max=last))
    return below_BHRS + (p_BHRS - index_BHRS) * (above_BHRS - below_BHRS)


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x))


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


@contextmanager
def _without_determinism() -> Iterator[None]:
    """Tests fill new memory and want the same bits of kernels; here, both would cost time and gigabytes."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
