"""The C interface of the native kernels for ctypes: the structures of problem.h and backward.h, fields in their order.

Shapes: B batch, H heads, T queries, S keys, D head dim.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_float, c_int32, c_int64, c_uint64, c_void_p

import torch
from torch import Tensor

from cope_sweep.kernels.arguments import Arguments
from cope_sweep.kernels.dropout import threshold
from cope_sweep.kernels.native.build import BuildError, library

MIN_WORK_ITEMS = 8
"""With fewer heads (B·H) than this, the queries of a head are split into groups, so that more threads have work."""
MAX_GROUPS = 8
"""Of a head's queries."""

poison_scratch = False
"""Whether to fill scratch memory with NaN before use. For tests."""


class View(ctypes.Structure):
    """A (B, H, T, D) tensor of float32 whose last dimension is contiguous."""

    _fields_ = [("data", c_void_p), ("batch", c_int64), ("head", c_int64), ("token", c_int64)]

    @staticmethod
    def of(x: Tensor | None) -> View:
        return View() if x is None else View(x.data_ptr(), *x.stride()[:3])


class NativeProblem(ctypes.Structure):
    """`NativeProblem` of problem.h: its comments describe the fields."""

    _fields_ = [
        *[(name, c_int64) for name in "BHTSD"],
        *[(name, View) for name in ("q", "k", "v", "base_q", "gate_k")],
        ("e", c_void_p),
        ("P", c_int64),
        ("e_head", c_int64),
        ("knots", c_void_p),
        ("N", c_int64),
        ("segment_slope", c_void_p),
        ("segment_intercept", c_void_p),
        ("m", c_void_p),
        ("relative", c_void_p),
        ("R", c_int64),
        ("relative_head", c_int64),
        ("far_last", c_int64),
        ("distance_bias", c_void_p),
        ("biases", c_int64),
        ("distance_slope", c_void_p),
        ("lengths", c_void_p),
        ("seed", c_uint64),
        ("threshold", c_int64),
        ("scale", c_float),
        ("limit", c_float),
        ("keep_scale", c_float),
        ("e_scale", c_float),
        ("relative_scale", c_float),
        ("groups", c_int32),
        ("threads", c_int32),
        ("poison", c_int32),
    ]


class Gradients(ctypes.Structure):
    """`Gradients` of backward.h."""

    _fields_ = [
        *[(name, View) for name in ("q", "k", "v", "base_q", "gate_k")],
        *[(name, c_void_p) for name in ("e", "segment_slope", "segment_intercept", "m", "relative", "distance_bias")],
    ]


@functools.cache
def load(target: str) -> ctypes.CDLL:
    """The library for an instruction set, with its functions declared. Raises BuildError."""
    native = library(target)
    native.cope_forward.argtypes = [POINTER(NativeProblem), POINTER(View), c_void_p]
    native.cope_forward.restype = None
    native.cope_backward.argtypes = [POINTER(NativeProblem), POINTER(View), c_void_p, POINTER(View), POINTER(Gradients)]
    native.cope_backward.restype = None
    sizes = (native.cope_problem_size(), native.cope_gradients_size())
    declared = (ctypes.sizeof(NativeProblem), ctypes.sizeof(Gradients))
    if sizes != declared:
        raise BuildError(
            f"the native kernels' structures have {sizes} bytes and abi.py declares {declared}: correct abi.py"
        )
    return native


def native_problem(given: Arguments) -> NativeProblem:
    """The structure for arguments in the kernels' types and memory layouts, which have to stay alive."""
    B, H, T, D = given.q.shape
    S = given.k.shape[2]
    return NativeProblem(
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
