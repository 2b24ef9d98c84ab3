"""The C interface of the native kernels: its structures are declared here, and `header` writes them for the compiler.

Shapes: B batch, H heads, T queries, S keys, D head dim.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_uint64, c_void_p

import torch
from torch import Tensor

from cope_sweep.kernels.arguments import Arguments
from cope_sweep.kernels.dropout import threshold

MIN_WORK_ITEMS = 8
"""With fewer heads (B·H) than this, the queries of a head are split into groups, so that more threads have work."""
MAX_GROUPS = 8
"""Of a head's queries."""

poison_scratch = False
"""Whether to fill scratch memory with NaN before use. For tests."""


class Floats(c_void_p):
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


class Problem(ctypes.Structure):
    """One attention."""

    _fields_ = [
        *[(name, c_int64) for name in "BHTSD"],
        *[(name, View) for name in ("q", "k", "v")],
        ("base_q", View),  # queries before rotation, for gates and tables; no data: q
        ("gate_k", View),  # no data: gates see the attention logits
        ("e", Floats),  # table of positions, (P, D) or (H, P, D), or null
        ("P", c_int64),
        ("e_head", c_int64),  # floats between the tables of two heads; 0: one table
        ("knots", Floats),  # (N,), or null
        ("N", c_int64),
        ("segment_slope", Floats),  # (B, H, T, N + 1)
        ("segment_intercept", Floats),  # (B, H, T, N + 1)
        ("m", Floats),  # (H,), or null
        ("relative", Floats),  # table of distances, (R, D) or (H, R, D), or null
        ("R", c_int64),
        ("relative_head", c_int64),  # floats between the tables of two heads; 0: one table
        ("far_last", c_int64),
        ("distance_bias", Floats),  # (H, biases), or null
        ("biases", c_int64),
        ("distance_slope", Floats),  # (H,), or null
        ("lengths", Integers),  # (B,), or null
        ("seed", c_uint64),
        ("threshold", c_int64),  # weights whose 32 bits are below are dropped; 0: no dropout
        ("scale", c_float),
        ("limit", c_float),
        ("keep_scale", c_float),  # 1/(1 − dropout)
        ("e_scale", c_float),  # of base_q·e
        ("relative_scale", c_float),
        ("groups", c_int32),  # number of groups of a head's queries, each with its own partial sums
        ("threads", c_int32),
        ("poison", c_int32),  # whether to fill scratch memory with NaN (for tests)
    ]


class Gradients(ctypes.Structure):
    """Outputs of the backward pass, as the arguments of the same names; every element is written."""

    _fields_ = [
        *[(name, View) for name in ("q", "k", "v", "base_q", "gate_k")],
        *[(name, Floats) for name in ("e", "segment_slope", "segment_intercept", "m", "relative", "distance_bias")],
    ]


STRUCTURES = (View, Problem, Gradients)
_C_TYPES = {
    c_float: "float",
    c_int32: "int32_t",
    c_int64: "int64_t",
    c_uint64: "uint64_t",
    c_void_p: "void*",
    Floats: "float*",
    Integers: "int64_t*",
    View: "View",
}


def header() -> str:
    """The structures in C++, in namespace `abi`. The compiler checks that each field is where ctypes has it."""
    lines = ["#pragma once", "#include <cstddef>", "#include <cstdint>", "namespace abi {"]
    for structure in STRUCTURES:
        name, fields = structure.__name__, structure._fields_
        members = " ".join(f"{_C_TYPES[kind]} {field};" for field, kind in fields)
        checks = [f"sizeof({name}) == {ctypes.sizeof(structure)}"]
        for field, kind in fields:
            checks.append(f"offsetof({name}, {field}) == {getattr(structure, field).offset}")
            checks.append(f"sizeof({name}::{field}) == {ctypes.sizeof(kind)}")
        lines += [f"struct {name} {{ {members} }};", f'static_assert({" && ".join(checks)}, "{name}");']
    return "\n".join([*lines, "}", ""])


def problem(given: Arguments) -> Problem:
    """The structure for arguments in the kernels' types and memory layouts, which have to stay alive."""
    B, H, T, D = given.q.shape
    S = given.k.shape[2]
    return Problem(
        B=B,
        H=H,
        T=T,
        S=S,
        D=D,
        q=View.of(given.q),
        k=View.of(given.k),
        v=View.of(given.v),
        base_q=View.of(given.base_q),
        gate_k=View.of(given.gate_k),
        e=pointer(given.e),
        P=0 if given.e is None else given.e.shape[-2],
        e_head=_head_stride(given.e),
        knots=pointer(given.knots),
        N=_last_size(given.knots),
        segment_slope=pointer(given.segment_slope),
        segment_intercept=pointer(given.segment_intercept),
        m=pointer(given.m),
        relative=pointer(given.relative),
        R=0 if given.relative is None else given.relative.shape[-2],
        relative_head=_head_stride(given.relative),
        far_last=given.far_last,
        distance_bias=pointer(given.distance_bias),
        biases=_last_size(given.distance_bias),
        distance_slope=pointer(given.distance_slope),
        lengths=pointer(given.lengths),
        seed=0 if given.seed is None else int(given.seed),
        threshold=threshold(given.dropout) if given.dropout else 0,
        scale=given.scale,
        limit=given.limit,
        keep_scale=1 / (1 - given.dropout) if given.dropout < 1 else 0.0,
        e_scale=given.e_scale,
        relative_scale=given.relative_scale,
        # From the shape alone: the number of threads must not change the order of any sum.
        groups=min(MAX_GROUPS, max(1, -(-MIN_WORK_ITEMS // max(1, B * H))), max(1, S // 128)),
        threads=torch.get_num_threads(),
        poison=poison_scratch,
    )


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _head_stride(table: Tensor | None) -> int:
    """Floats between the tables of two heads; 0 where all heads share one."""
    return table.stride(0) if table is not None and table.dim() == 3 else 0


def _last_size(x: Tensor | None) -> int:
    return 0 if x is None else x.shape[-1]
