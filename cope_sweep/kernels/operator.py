"""Fused attention as one torch operator, `cope_sweep::attention`, and its gradients, `cope_sweep::attention_backward`.

torch.compile traces through attention without a break, because all that depends on the machine (compiled libraries,
modules that may be missing, pointers) happens inside the operator. Its argument `kernel` names the implementation, and
the others are fields of `Arguments`. There is no synchronisation with a GPU here.

Shapes: B batch, H heads, T queries, K head dim.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from cope_sweep.kernels.arguments import DIFFERENTIABLE, QUERIES_AND_KEYS, Arguments, schema


class Kernel(Protocol):
    """A module that computes attention. Neither function changes its arguments."""

    def forward(self, given: Arguments, out: Tensor, lse: Tensor, carry: Tensor) -> None:
        """Write the output, the log-sum-exp, and what `backward` needs, into the tensors of `empty_outputs`."""

    def backward(
        self, given: Arguments, dout: Tensor, out: Tensor, lse: Tensor, carry: Tensor, gradients: list[Tensor | None]
    ) -> None:
        """Write the gradients of the first `DIFFERENTIABLE` arguments into the tensors of `empty_gradients`."""


@cache
def _module(kernel: str) -> Kernel:
    # Imported when it is used: Triton may be missing.
    modules = {"native": "cope_sweep.kernels.native", "triton": "cope_sweep.kernels.triton_attention"}
    return cast(Kernel, importlib.import_module(modules[kernel]))


def attention(given: Arguments, kernel: str) -> Tensor:
    """Attention, (B, H, T, K), in the type of the values, differentiable, by a kernel that can compute it."""
    out: Tensor = _attention(*given, kernel)[0]
    return out


def empty_outputs(arguments: Arguments, kernel: str) -> tuple[Tensor, Tensor, Tensor]:
    """The output, (B, H, T, K); the log-sum-exp, (B, H, T); and what else the kernel saves for its backward pass."""
    B, H, T, _ = arguments.q.shape
    lse = arguments.q.new_empty((B, H, T), dtype=torch.float32)
    return _empty_heads(arguments.q, arguments.v.shape[-1], arguments.v.dtype, kernel), lse, _carry(arguments, kernel)


def _carry(arguments: Arguments, kernel: str) -> Tensor:
    """An empty tensor for what a kernel saves for its backward pass beside the output and the log-sum-exp."""
    (B, H, T, _), v = arguments.q.shape, arguments.v
    if kernel == "triton":  # numbers of each query
        return arguments.q.new_empty((4, B, H, T), dtype=torch.int32)
    # What rounding to half precision has cut off the output.
    return v.new_empty((B, H, T, v.shape[-1]) if v.dtype.itemsize < 4 else (0,))


def empty_gradients(given: Arguments, kernel: str) -> list[Tensor | None]:
    """Tensors for the gradients of the first `DIFFERENTIABLE` arguments; None for an argument that is None."""
    inputs = cast(tuple[Tensor | None, ...], given[:DIFFERENTIABLE])
    heads = [None if x is None else _empty_heads(x, x.shape[-1], x.dtype, kernel) for x in inputs[:QUERIES_AND_KEYS]]
    others = [None if x is None else x.new_empty(x.shape) for x in inputs[QUERIES_AND_KEYS:]]
    return [*heads, *others]


def _empty_heads(like: Tensor, head_dim: int, dtype: torch.dtype, kernel: str) -> Tensor:
    """An empty tensor (B, H, T, K). For native, its memory is in the order (B, T, H, K) of the model's projections."""
    B, H, T, _ = like.shape
    if kernel == "native":
        return like.new_empty((B, T, H, head_dim), dtype=dtype).transpose(1, 2)
    return like.new_empty((B, H, T, head_dim), dtype=dtype)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    given, kernel = Arguments(*arguments[:-1]), arguments[-1]
    outputs = empty_outputs(given, kernel)
    _module(kernel).forward(given, *outputs)
    return outputs


def _backward(dout: Tensor, out: Tensor, lse: Tensor, carry: Tensor, *arguments: Any) -> list[Tensor]:
    given, kernel = Arguments(*arguments[:-1]), arguments[-1]
    gradients = empty_gradients(given, kernel)
    _module(kernel).backward(given, dout, out, lse, carry, gradients)
    return [x for x in gradients if x is not None]


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_outputs(Arguments(*arguments[:-1]), arguments[-1])


def _backward_fake(dout: Tensor, out: Tensor, lse: Tensor, carry: Tensor, *arguments: Any) -> list[Tensor]:
    return [x for x in empty_gradients(Arguments(*arguments[:-1]), arguments[-1]) if x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    # In a tuple, because a value may be None, and None stands for a tensor here.
    ctx.constants = [None if isinstance(value, Tensor) else (value,) for value in inputs]
    ctx.save_for_backward(*output, *(value for value in inputs if isinstance(value, Tensor)))
    ctx.mark_non_differentiable(*output[1:])
    # Without a gradient of the output, `dout` is None, and not an array of zeros.
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * len(ctx.constants)
    out, lse, carry, *tensors = ctx.saved_tensors
    values = iter(tensors)
    arguments = [next(values) if constant is None else constant[0] for constant in ctx.constants]
    gradients = iter(_attention_backward(dout, out, lse, carry, *arguments))
    first = [None if argument is None else next(gradients) for argument in arguments[:DIFFERENTIABLE]]
    return (*first, *[None] * (len(arguments) - DIFFERENTIABLE))


def _refuse_to_differentiate_again(ctx: Any, *gradients: Any) -> None:
    """The gradients are no function of the tensors for autograd: without this, those of a gradient would be missing."""
    raise RuntimeError("the gradients of fused attention cannot be differentiated again")


def _define(name: str, arguments: str, returns: str, function: Any, fake: Any) -> Any:
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    torch.library.define(f"cope_sweep::{name}", f"({arguments}) -> {returns}", tags=tags)
    torch.library.impl(f"cope_sweep::{name}", ("cpu", "cuda"), function)
    torch.library.register_fake(f"cope_sweep::{name}", fake)
    return getattr(torch.ops.cope_sweep, name).default


_ARGUMENTS = f"{schema()}, str kernel"
_attention = _define("attention", _ARGUMENTS, "(Tensor, Tensor, Tensor)", _forward, _forward_fake)
_attention_backward = _define(
    "attention_backward",
    f"Tensor dout, Tensor out, Tensor lse, Tensor carry, {_ARGUMENTS}",
    "Tensor[]",
    _backward,
    _backward_fake,
)
torch.library.register_autograd("cope_sweep::attention", _differentiate, setup_context=_save)
torch.library.register_autograd("cope_sweep::attention_backward", _refuse_to_differentiate_again)
