"""The Triton kernels as torch operators, with fake implementations for tracing, and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cope_sweep.kernels.arguments import DIFFERENTIABLE, Arguments
from cope_sweep.kernels.triton_attention.launch import Saved, empty_outputs, launch_backward, launch_forward

_TYPES = {"Tensor": "Tensor", "Tensor | None": "Tensor?", "float": "float", "bool": "bool"}
_SCHEMA = ", ".join(f"{_TYPES[kind.__forward_arg__]} {name}" for name, kind in Arguments.__annotations__.items())
_N_SAVED = 5


def _forward(*given: Any) -> Saved:
    return launch_forward(Arguments(*given))


def _forward_fake(*given: Any) -> Saved:
    return empty_outputs(Arguments(*given))


def _backward(do: Tensor, *arguments: Any) -> list[Tensor]:
    """The gradients of the first `DIFFERENTIABLE` arguments, without those that are None."""
    saved, given = arguments[:_N_SAVED], Arguments(*arguments[_N_SAVED:])
    return [x for x in launch_backward(given, do, saved) if x is not None]


def _backward_fake(do: Tensor, *arguments: Any) -> list[Tensor]:
    given = arguments[_N_SAVED : _N_SAVED + DIFFERENTIABLE]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given if x is not None]


attention: Any = torch.library.custom_op(
    "cope_sweep::triton_attention",
    _forward,
    mutates_args=(),
    schema=f"({_SCHEMA}) -> ({', '.join(['Tensor'] * _N_SAVED)})",
)
_attention_backward: Any = torch.library.custom_op(
    "cope_sweep::triton_attention_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor do, Tensor o, Tensor lse, Tensor plain_end, Tensor pos_int, Tensor pos_frac, {_SCHEMA}) -> Tensor[]",
)
attention.register_fake(_forward_fake)
_attention_backward.register_fake(_backward_fake)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Saved) -> None:
    ctx.numbers = [None if isinstance(x, Tensor) else (x,) for x in inputs]
    ctx.save_for_backward(*output, *(x for x in inputs if isinstance(x, Tensor)))
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if do is None:
        return (None,) * len(ctx.numbers)
    saved, tensors = ctx.saved_tensors[:_N_SAVED], iter(ctx.saved_tensors[_N_SAVED:])
    given = [next(tensors) if number is None else number[0] for number in ctx.numbers]
    gradients = iter(_attention_backward(do, *saved, *given))
    first = [None if x is None else next(gradients) for x in given[:DIFFERENTIABLE]]
    return (*first, *[None] * (len(given) - DIFFERENTIABLE))


attention.register_autograd(_differentiate, setup_context=_save)
