"""The native kernels as torch operators, with fake implementations for tracing, and gradients.

Shapes: B batch, H heads, T queries, S keys, K head dim, P positions, M segments, R distances.
"""

from __future__ import annotations

import ctypes
from typing import Any, cast

import torch
from torch import Tensor

from cope_sweep.kernels.arguments import DIFFERENTIABLE, QUERIES_AND_KEYS, Arguments, kernel_layout, unit_stride
from cope_sweep.kernels.native import abi
from cope_sweep.kernels.native.build import best_target

target: str | None = None
"""The instruction set to use: avx512, avx2 or portable; None: the best of this processor."""


def native() -> ctypes.CDLL:
    """The compiled kernels for `target`. Raises BuildError."""
    return abi.load(target or best_target())


@torch.library.custom_op("cope_sweep::attention", mutates_args=(), device_types="cpu")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    base_q: Tensor | None,
    gate_k: Tensor | None,
    e: Tensor | None,
    segment_slope: Tensor | None,
    segment_intercept: Tensor | None,
    m: Tensor | None,
    relative: Tensor | None,
    distance_bias: Tensor | None,
    knots: Tensor | None,
    distance_slope: Tensor | None,
    seed: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    limit: float,
    e_scale: float,
    relative_scale: float,
    far_last: bool,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Attention of `Arguments`: the output, (B, H, T, K), and the log-sum-exp of the scores, (B, H, T)."""
    given = kernel_layout(
        Arguments(
            q, k, v, base_q, gate_k, e, segment_slope, segment_intercept, m, relative, distance_bias, knots,
            distance_slope, seed, lengths, scale, limit, e_scale, relative_scale, far_last, dropout,
        )
    )  # fmt: skip
    out, lse = _empty_outputs(q)
    native().cope_forward(abi.native_problem(given), abi.View.of(out), lse.data_ptr())
    return out, lse


@attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_outputs(q)


def _empty_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    return _empty_token_major(q), q.new_empty(q.shape[:3])


def _empty_token_major(x: Tensor) -> Tensor:
    """An empty tensor (B, H, T, K) with memory in the order (B, T, H, K), as projections write and read it."""
    B, H, T, K = x.shape
    return x.new_empty(B, T, H, K).transpose(1, 2)


@torch.library.custom_op("cope_sweep::attention_backward", mutates_args=(), device_types="cpu")
def attention_backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    base_q: Tensor | None,
    gate_k: Tensor | None,
    e: Tensor | None,
    segment_slope: Tensor | None,
    segment_intercept: Tensor | None,
    m: Tensor | None,
    relative: Tensor | None,
    distance_bias: Tensor | None,
    knots: Tensor | None,
    distance_slope: Tensor | None,
    seed: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    limit: float,
    e_scale: float,
    relative_scale: float,
    far_last: bool,
    dropout: float,
) -> list[Tensor]:
    """The gradients of the first `DIFFERENTIABLE` of `Arguments`, without those that are None."""
    given = kernel_layout(
        Arguments(
            q, k, v, base_q, gate_k, e, segment_slope, segment_intercept, m, relative, distance_bias, knots,
            distance_slope, seed, lengths, scale, limit, e_scale, relative_scale, far_last, dropout,
        )
    )  # fmt: skip
    dout, gradients = unit_stride(dout), _empty_gradients(given)
    pointers = abi.Gradients(
        *(abi.View.of(gradients[n]) for n in range(QUERIES_AND_KEYS)),
        *(abi.pointer(gradients[n]) for n in range(QUERIES_AND_KEYS, DIFFERENTIABLE)),
    )
    native().cope_backward(abi.native_problem(given), abi.View.of(out), lse.data_ptr(), abi.View.of(dout), pointers)
    return [x for x in gradients if x is not None]


@attention_backward.register_fake
def _(dout: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> list[Tensor]:
    return [x for x in _empty_gradients(Arguments(*arguments)) if x is not None]


def _empty_gradients(given: Arguments) -> list[Tensor | None]:
    """Empty tensors for the gradients of the first `DIFFERENTIABLE` arguments."""
    inputs = cast(tuple[Tensor | None, ...], given[:DIFFERENTIABLE])
    views = [None if x is None else _empty_token_major(x) for x in inputs[:QUERIES_AND_KEYS]]
    return [
        *views,
        *(
            None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
            for x in inputs[QUERIES_AND_KEYS:]
        ),
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.plan = [None if isinstance(value, Tensor) else (value,) for value in inputs]
    ctx.save_for_backward(*output, *(value for value in inputs if isinstance(value, Tensor)))
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    out, lse, *tensors = ctx.saved_tensors
    values = iter(tensors)
    arguments = [next(values) if kept is None else kept[0] for kept in ctx.plan]
    gradients = iter(attention_backward(dout, out, lse, *arguments))
    first = [None if argument is None else next(gradients) for argument in arguments[:DIFFERENTIABLE]]
    return (*first, *[None] * (len(arguments) - DIFFERENTIABLE))


attention.register_autograd(_backward, setup_context=_setup)
