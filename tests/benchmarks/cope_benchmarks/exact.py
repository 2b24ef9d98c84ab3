"""The standard for kernels: attention in float64, at any number of tokens, and the largest error that a kernel may have.

The error is that of a whole tensor, ‖computed − exact‖ (Frobenius norm). In small problems, the largest entry's is limited,
too. In large ones that would reject correct kernels: where rounding moves a position across an integer, the slope of the
table changes, and single gradients are off by their own size.

How much rounding changes depends on the problem, so it is measured: the attention is computed again in float64 with random
errors of the size of a correct kernel's roundings (`_Rounded`), in one draw with all positions moved up, in the next with
all moved down. The limit is `SAFETY` times the largest distance to the exact result, and a rounding of the result itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cope_sweep.kernels import blocked, operator
from cope_sweep.kernels.arguments import Arguments

SAFETY = 4.0
ROUNDING = {torch.float64: 2.0**-50, torch.float32: 2.0**-21, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
"""Relative error of what a kernel multiplies, and stores, in its type. That of float32 is a product's by three TF32 ones, which
leave out 2⁻²². Emulated, in eight problems of four and more random inputs each, their errors stayed below a quarter of the limits,
as those of the blocked path and the native kernels did. Where a position crosses an integer in one draw, a limit is up to 300
times as large as where none does; real kernels cross some, too."""
POSITION_ERROR = 2.0**-22
"""Error of a position p, the sum of n gates in float32, in units of p + √n."""
SCORE_ERROR = 2.0**-23
"""Error of a score, which is a sum in float32, relative to it: that of the weight is exp(score)'s."""
FLOAT64 = 2.0**-29
"""These errors of sums are smaller by this factor where the kernel computes in float64."""
SMALL = 1e-3
"""Entries of a result that are smaller than this may be off by a rounding of this."""
DRAWS, FEW_SCORES = 6, 1 << 22
"""Draws of errors, up to so many scores: a gradient of one number is sometimes off by little in 2 draws."""

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

    `attend` computes the exact attention of leaves in float64; None: by the blocked path. `exact_positions`: no rounding
    moves a position. `each_entry`: also limit the error of the largest entry.
    """

    def __init__(
        self, build: Build, leaves: Leaves, weight: Tensor, dtype: torch.dtype,
        attend: Callable[[Leaves], Tensor] | None = None, exact_positions: bool = False, each_entry: bool = False,
    ) -> None:  # fmt: skip
        given, problem = {name: x.double() for name, x in leaves.items()}, build(leaves)
        scores = problem.q.shape[:3].numel() * problem.k.shape[2]
        with _without_determinism():
            self.exact = computed_by(attend or by_blocks(build), given, weight.double())
            draws = range(DRAWS if scores <= FEW_SCORES else 2)
            roundings = [_Rounded(dtype, n, weight.device, exact_positions) for n in draws]
            rounded = [each.results(build, given, weight.double()) for each in roundings]
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


def by_blocks(build: Build) -> Callable[[Leaves], Tensor]:
    """The attention of a problem's leaves by the blocked path."""
    return lambda leaves: operator.attention(build(leaves), "blocked")


class _Rounded:
    """The blocked path in float64 with errors: of sums in the logits and positions, of the kernel's type in all else.

    A kernel rounds weights, products with tables and gradients of scores to its type: values, tables and the gradient of the
    output are off. Its gradients are a·(da − o·do) with the stored output o, which is off, too.
    """

    def __init__(self, dtype: torch.dtype, draw: int, device: torch.device, exact_positions: bool = False) -> None:
        self._error, self._product_error = ROUNDING[dtype], min(ROUNDING[dtype], ROUNDING[torch.float32])
        of_sums = FLOAT64 if dtype == torch.float64 else 1.0
        self._score_error = SCORE_ERROR * of_sums
        self._moved = 0.0 if exact_positions else POSITION_ERROR * of_sums * (1 - 2 * (draw % 2))
        self._draw = draw
        self._rng = torch.Generator(device).manual_seed(draw)

    def results(self, build: Build, leaves: Leaves, weight: Tensor) -> Leaves:
        backward, positions, scores_of = blocked.backward, blocked._gates_and_positions, blocked.scores_of

        def backward_from_rounded(given: Arguments, dout: Tensor, out: Tensor, *others: Any) -> None:
            backward(given, dout, self._off(out, self._error), *others)

        def moved_positions(scores: blocked.Scores, *others: Any) -> int:
            width = positions(scores, *others)
            if (p := scores.p_NRU) is not None:
                scores.p_NRU = (p + self._moved * (p + p.shape[-1] ** 0.5)).clamp(min=0)
            return width

        def rounded_scores(x: blocked.Tensors, block: blocked.Block, *others: Any, **more: Any) -> tuple[Any, int]:
            scores, width = scores_of(x, block, *others, **more)
            # The same errors in the forward and the backward pass.
            rng = torch.Generator(x.device).manual_seed(self._draw + (block.n0 << 32) + (block.a << 8))
            scores.s_NRC *= 1 + self._score_error * torch.randn(
                scores.s_NRC.shape, generator=rng, device=x.device, dtype=scores.s_NRC.dtype
            )
            return scores, width

        with (
            mock.patch.object(blocked, "scores_of", rounded_scores),
            mock.patch.object(blocked, "backward", backward_from_rounded),
            mock.patch.object(blocked, "_gates_and_positions", moved_positions),
        ):
            weight = self._off(weight, self._error)
            return computed_by(by_blocks(lambda x: self._problem(build(x))), leaves, weight)

    def _problem(self, given: Arguments) -> Arguments:
        summed = ("q", "k", "base_q", "gate_k", "m", "distance_bias", "key_bias")
        tables = ("v", "e", "relative", "segment_slope", "segment_intercept")
        errors = dict.fromkeys(summed, self._product_error) | dict.fromkeys(tables, self._error)
        tensors = {name: getattr(given, name) for name in errors}
        changed: dict[str, Any] = {n: self._off(x, errors[n]) for n, x in tensors.items() if x is not None}
        return given._replace(**changed)

    def _off(self, x: Tensor, error: float) -> Tensor:
        return x * (1 + error * torch.randn(x.shape, generator=self._rng, device=x.device, dtype=x.dtype))


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
