"""Attention in C++ for CPUs: compiled at first use, computes in float32, same bits at any number of threads.

Queries, keys and values in bfloat16 are converted as they are packed, and results as they are written: no copies in
float32 are made of them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from cope_sweep.kernels.arguments import QUERIES_AND_KEYS, Arguments, constant_when_compiled, unit_stride
from cope_sweep.kernels.native import abi, build

READ = (torch.float32, torch.bfloat16)
"""The types of queries, keys and values that the kernels read, and of results that they write."""
DTYPES = (*READ, torch.float16)
"""The types that are computed; float16 through copies in float32."""


def why_not(arguments: Arguments, device: torch.device) -> str | None:
    """Why these kernels cannot compute this problem on a device, for a log message; None if they can."""
    q, k, v = arguments.q, arguments.k, arguments.v
    if device.type != "cpu":
        return f"it runs on CPUs, and the tensors are on {device.type}"
    if q.dtype not in DTYPES:
        return f"it computes in float32, and the tensors are {q.dtype}"
    if arguments.e is not None and arguments.knots is not None:
        return "it computes CoPE or CoPE-MLP in a layer, not both"
    if 0 in q.shape:
        return f"there is nothing to compute for queries of the shape {tuple(q.shape)}"
    if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        return f"q, k and v need the same head dim, which are {q.shape[-1]}, {k.shape[-1]} and {v.shape[-1]}"
    if arguments.gate_k is not None and arguments.gate_k.shape[-1] != k.shape[-1]:
        return f"gates need the head dim {k.shape[-1]} of the keys, and theirs is {arguments.gate_k.shape[-1]}"
    reason: str | None = _build_error()
    return reason


def forward(arguments: Arguments, out: Tensor, lse: Tensor, carry: Tensor) -> None:
    """Write the output and the log-sum-exp; `carry` gets what an output in half precision is off by.

    The gradients of scores are a·(da − Σ do·o). With a rounded o, those of a row would not sum to 0, and sums of them
    over all keys, in which most cancels, would be off by some percent.
    """
    arguments, result = _kernel_layout(arguments), _written(out, READ)
    rest = carry if out.dtype == torch.bfloat16 else None
    _library().cope_forward(abi.problem(arguments), abi.View.of(result), abi.View.of(rest), lse.data_ptr())
    if result is not out:
        out.copy_(result)
        carry.copy_(result - out)


def backward(
    arguments: Arguments, dout: Tensor, out: Tensor, lse: Tensor, carry: Tensor, gradients: list[Tensor | None]
) -> None:
    """Write the gradients."""
    arguments, dout = _kernel_layout(arguments), unit_stride(_readable(dout))
    other_gradients = carry if out.dtype == torch.bfloat16 else None
    if out.dtype not in READ:
        out = out.float() + carry
    heads, tables = gradients[:QUERIES_AND_KEYS], gradients[QUERIES_AND_KEYS:]
    outputs = [None if x is None else _written(x, READ) for x in heads]
    outputs += [None if x is None else _written(x, READ[:1]) for x in tables]
    to = abi.gradients(outputs)
    saved = abi.View.of(out), abi.View.of(other_gradients), lse.data_ptr()
    _library().cope_backward(abi.problem(arguments), *saved, abi.View.of(dout), to)
    for gradient, result in zip(gradients, outputs, strict=True):
        if gradient is not None and result is not None and result is not gradient:
            gradient.copy_(result)


def _library() -> Any:
    return build.library(build.best_target())


def _readable(x: Tensor) -> Tensor:
    """The tensor itself, or a copy in float32."""
    return x if x.dtype in READ else x.float()


def _written(x: Tensor, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """The tensor itself, or an empty one in float32 with its shape and strides."""
    return x if x.dtype in dtypes else torch.empty_like(x, dtype=torch.float32)


def _kernel_layout(arguments: Arguments) -> Arguments:
    """The arguments in the types and memory layouts that the kernels read. Keep the result alive while they run."""
    changed: dict[str, Any] = {}
    for index, (name, value) in enumerate(arguments._asdict().items()):
        if not isinstance(value, Tensor):
            continue
        if index < QUERIES_AND_KEYS:
            changed[name] = unit_stride(_readable(value))
        else:
            changed[name] = value.to(torch.int64 if name in ("lengths", "seeds") else torch.float32).contiguous()
    return arguments._replace(**changed)


@constant_when_compiled
def _build_error() -> str | None:
    return _cached_build_error(build.best_target())


@functools.cache
def _cached_build_error(target: str) -> str | None:
    try:
        build.library(target)
    except build.BuildError as error:
        return str(error)
    return None
