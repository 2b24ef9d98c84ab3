"""The C interface of the native kernels: structures made from `Arguments`, which `header` writes for the compiler.

Shapes: B batch, H heads, T queries, S keys, D head dim.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any, cast, get_type_hints

import torch
from torch import Tensor
from torch.utils import deterministic

from cope_sweep.kernels.arguments import DIFFERENTIABLE, QUERIES_AND_KEYS, Arguments, head_stride
from cope_sweep.kernels.dropout import threshold

MIN_WORK_ITEMS = 8
"""With fewer heads (B·H) than this, the queries of a head are split into groups, so that more threads have work."""
MAX_GROUPS = 8
"""The most groups into which the queries of a head are split."""


class FloatPointer(c_void_p):
    """`float*` in C; None: null."""


class Integers(c_void_p):
    """`int64_t*` in C; None: null."""


class View(ctypes.Structure):
    """A (B, H, T, D) tensor whose last dimension is contiguous. Strides count elements."""

    _fields_ = [
        ("data", c_void_p),
        ("batch", c_int64),
        ("head", c_int64),
        ("token", c_int64),
        ("is_bfloat16", c_int64),  # otherwise float32
    ]

    @staticmethod
    def of(x: Tensor | None) -> View:
        return View() if x is None else View(x.data_ptr(), *x.stride()[:3], x.dtype == torch.bfloat16)


def _c_type(name: str, kind: Any) -> Any:
    if name in Arguments._fields[:QUERIES_AND_KEYS]:
        return View
    if name in ("lengths", "seeds"):
        return Integers
    return {float: c_float, bool: c_int64, int: c_int64}.get(kind, FloatPointer)


_PASSED = {name: _c_type(name, kind) for name, kind in get_type_hints(Arguments).items() if name != "dropout"}
"""Fields of `Arguments` that the kernels are given as they are; what is None is a null pointer."""


class Problem(ctypes.Structure):
    """One attention: `Arguments`, and what follows from them."""

    _fields_ = [
        *_PASSED.items(),
        *[(name, c_int64) for name in "BHTSD"],
        ("P", c_int64),  # entries of e
        ("e_head", c_int64),  # floats between the tables of two heads; 0: one table
        ("N", c_int64),  # knots; there are N + 1 segments
        ("R", c_int64),  # entries of relative
        ("relative_head", c_int64),  # as e_head
        ("share_N", c_int64),  # share_knots
        ("biases", c_int64),  # entries of distance_bias for a head
        ("threshold", c_int64),  # weights whose 32 bits are below are dropped; 0: no dropout
        ("keep_scale", c_float),  # 1/(1 − dropout)
        ("groups", c_int32),  # number of groups of a head's queries, each with its own partial sums
        ("threads", c_int32),
        ("poison", c_int32),  # 1: fill scratch memory with NaN, as tests do
    ]


class Gradients(ctypes.Structure):
    """Outputs of the backward pass, as the arguments of the same names; every element is written."""

    _fields_ = list(_PASSED.items())[:DIFFERENTIABLE]


STRUCTURES = (View, Problem, Gradients)
_C_TYPES = {
    c_float: "float",
    c_int32: "int32_t",
    c_int64: "int64_t",
    c_void_p: "void*",
    FloatPointer: "float*",
    Integers: "int64_t*",
    View: "View",
}


def header() -> str:
    """The structures in C++, in namespace `abi`. The compiler checks that each field is where ctypes has it."""
    lines = ["#pragma once", "#include <cstddef>", "#include <cstdint>", "namespace abi {"]
    for structure in STRUCTURES:
        name, fields = structure.__name__, cast(Sequence[tuple[str, Any]], structure._fields_)
        members = " ".join(f"{_C_TYPES[kind]} {field};" for field, kind in fields)
        checks = [f"sizeof({name}) == {ctypes.sizeof(structure)}"]
        for field, kind in fields:
            checks.append(f"offsetof({name}, {field}) == {getattr(structure, field).offset}")
            checks.append(f"sizeof({name}::{field}) == {ctypes.sizeof(kind)}")
        lines += [f"struct {name} {{ {members} }};", f'static_assert({" && ".join(checks)}, "{name}");']
    return "\n".join([*lines, "}", ""])


def problem(arguments: Arguments) -> Problem:
    """The structure for arguments in the kernels' types and memory layouts, which have to stay alive."""
    B, H, T, D = arguments.q.shape
    S = arguments.k.shape[2]
    return Problem(
        *(_c_value(kind, getattr(arguments, name)) for name, kind in _PASSED.items()),
        B=B,
        H=H,
        T=T,
        S=S,
        D=D,
        P=_size(arguments.e, -2),
        e_head=head_stride(arguments.e),
        N=_size(arguments.knots, -1),
        R=_size(arguments.relative, -2),
        relative_head=head_stride(arguments.relative),
        share_N=_size(arguments.share_knots, -1),
        biases=_size(arguments.distance_bias, -1),
        threshold=threshold(arguments.dropout) if arguments.dropout else 0,
        keep_scale=1 / (1 - arguments.dropout) if arguments.dropout < 1 else 0.0,
        # From the shape alone: the number of threads must not change the order of any sum.
        groups=min(MAX_GROUPS, max(1, -(-MIN_WORK_ITEMS // max(1, B * H))), max(1, S // 128)),
        threads=torch.get_num_threads(),
        poison=_fills_new_memory(),
    )


def _fills_new_memory() -> bool:
    # A property that torch gives its module, which mypy does not see. torch then fills its own new memory with NaN.
    fills: bool = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return fills and torch.are_deterministic_algorithms_enabled()


def gradients(tensors: Sequence[Tensor | None]) -> Gradients:
    """The structure for gradients in the kernels' types and memory layouts, which have to stay alive."""
    kinds = list(_PASSED.values())[:DIFFERENTIABLE]
    return Gradients(*(_c_value(kind, x) for kind, x in zip(kinds, tensors, strict=True)))


def _c_value(kind: Any, value: Any) -> Any:
    if kind is View:
        return View.of(value)
    return value.data_ptr() if isinstance(value, Tensor) else value


def _size(x: Tensor | None, dimension: int) -> int:
    return 0 if x is None else x.shape[dimension]
