"""Attention by the path that fits the device, type and shape, or that the caller has chosen.

    auto        the fastest for the device, type and shape
    native      C++ on a CPU
    triton      Triton on a GPU
    blocked     PyTorch in blocks of queries, for every encoding: memory O(block × T)
    reference   directly from the equation: memory O(T²)

All compute the same result, with the same dropout mask. If the chosen implementation cannot compute a problem,
attention falls back to PyTorch, and logs the reason once. torch.compile traces `attend` without a break. `which` tells
the path without data, for plans.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cope_sweep.kernels import native, operator, self_check
from cope_sweep.kernels.arguments import (
    Arguments,
    Inputs,
    LayerEncoding,
    LayerEncodings,
    constant_when_compiled,
    make_problem,
)
from cope_sweep.kernels.dropout import draw_seeds
from cope_sweep.kernels.query_blocks import attend_in_blocks
from cope_sweep.kernels.reference import reference
from cope_sweep.sizes import MIN_BLOCKED_KEYS

if TYPE_CHECKING:
    from cope_sweep.positions import Dims, Encoding

log = logging.getLogger(__name__)

Implementation = Literal["auto", "reference", "blocked", "native", "triton"]

Observer = Callable[[Inputs, LayerEncodings], None]
"""Called with the inputs and encodings of every attention, before it is computed."""

_chosen: ContextVar[Implementation] = ContextVar("attention", default="auto")
_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


def set_implementation(implementation: Implementation) -> None:
    """Set the implementation that `attend` uses in this context unless its argument names one."""
    _chosen.set(implementation)


@contextmanager
def using(implementation: Implementation) -> Iterator[None]:
    """Use this implementation within a `with` block, and the previous one after it."""
    before = _chosen.get()
    set_implementation(implementation)
    try:
        yield
    finally:
        set_implementation(before)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call `observer` before every attention within a `with` block. An exception in it stops that attention."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


# The path -------------------------------------------------------------------------------------------------------------


PathName = Literal["sdpa", "reference", "blocked", "native", "triton"]

MIN_NATIVE_KEYS = 128
"""Number of keys from which the native kernels are faster than scaled_dot_product_attention, even without scores."""
MIN_FUSED_QUERIES = 17
"""With fewer queries, the reference is faster than the fused kernels."""


@dataclass(frozen=True)
class Path:
    """The way in which an attention is computed."""

    name: PathName
    """An implementation, or `sdpa`: torch's `scaled_dot_product_attention`."""
    reason: str | None = None
    """Why a fused kernel for the device, or the implementation that was asked for, is not used; None if it is."""
    problem: Arguments | None = None
    """Arguments of `native` or `triton`; None for the others."""


def which(
    encodings: Sequence[Encoding],
    dims: Dims,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
    hard: bool = False,
    padded: bool = False,
    tokens: int | None = None,
    implementation: Implementation = "auto",
) -> tuple[PathName, str | None]:
    """The path of a layer's attention on this machine, and why it is not a faster one (None: it is the fastest).

    No attention is computed, but for the check of a kernel that was not used here before (`self_check.py`). A path on
    `cuda` can be asked for on a machine without a GPU.

    Args:
        encodings: those that serve the layer.
        dims: the model's sizes.
        device: `cpu` or `cuda`.
        dtype: of queries, keys and values: under autocast, its type.
        dropout: the probability of dropping a weight.
        hard: attention is hard.
        padded: sequences have lengths.
        tokens: of the layer's queries and keys; None: the `context`.
        implementation: the one that the caller asks for.

    """
    tokens = dims.context if tokens is None else tokens
    # Meta tensors have neither data nor a device. On a CPU nothing writes to the memory of empty tensors.
    placed = "cpu" if device == "cpu" else "meta"
    with torch.no_grad():

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=placed)

        q_BHTK, k_BHSK, v_BHSK = (empty(1, dims.heads, tokens, dims.head_dim) for _ in range(3))
        positions = [
            LayerEncoding(encoding, {name: empty(*p.shape) for name, p in encoding.parameters(dims).items()})
            for encoding in encodings
        ]
        h_BSD = empty(1, tokens, dims.dim)
        features_BSX = [
            empty(1, tokens, dims.heads)
            if position.encoding.samples
            else position.encoding.features(position.parameters, h_BSD)
            for position in positions
        ]
        features = [None if x is None else x.view(1, tokens, dims.heads, -1).transpose(1, 2) for x in features_BSX]
        rotated_q_BHTK, rotated_k_BHSK = q_BHTK, k_BHSK
        for position, x in zip(positions, features, strict=True):
            rotated_q_BHTK = position.encoding.rotate(position.parameters, rotated_q_BHTK, 0, x)
            rotated_k_BHSK = position.encoding.rotate(position.parameters, rotated_k_BHSK, 0, x, keys=True)
        inputs = Inputs(
            q_BHTK,
            k_BHSK,
            v_BHSK,
            rotated_q_BHTK,
            rotated_k_BHSK,
            features,
            hard,
            torch.empty(1, dtype=torch.int64, device=placed) if padded else None,
        )
        path = choose(inputs, positions, dropout, implementation, torch.device(device))
    return path.name, path.reason


def choose(
    inputs: Inputs,
    positions: LayerEncodings,
    dropout: float,
    implementation: Implementation,
    device: torch.device,
    seeds_B: Tensor | None = None,
) -> Path:
    """The path of an attention. `auto` is the fastest, forward and backward (measured with `bench attention`).

    `seeds_B` are the seeds of the dropout masks; None where nothing is computed.
    """
    if implementation == "auto":
        return _fastest(inputs, positions, dropout, device, seeds_B)
    # A compiled graph would hold the operations of every block.
    instead: PathName = "reference" if torch.compiler.is_compiling() else "blocked"
    if implementation == "reference":
        return Path("reference")
    if implementation == "blocked":
        return Path(instead, None if instead == "blocked" else "torch.compile traces the reference instead of blocked")
    problem = make_problem(inputs, positions, dropout, seeds_B)
    reason = problem if isinstance(problem, str) else _why_not(problem, implementation, device)
    if isinstance(problem, Arguments) and reason is None:
        return Path(implementation, None, problem)
    return Path(instead, f"{implementation} is not used, {reason}; falling back to PyTorch ({instead})")


def _fastest(
    inputs: Inputs, positions: LayerEncodings, dropout: float, device: torch.device, seeds_B: Tensor | None
) -> Path:
    T, S, on_cpu = inputs.q_BHTK.shape[2], inputs.k_BHSK.shape[2], device.type == "cpu"
    # torch's attention would draw the dropout mask of the whole batch from its generator.
    plain = not any(position.encoding.scores or position.encoding.weighs for position in positions)
    no_scores = plain and not (dropout or inputs.hard)
    no_scores &= inputs.lengths_B is None
    native_is_faster = on_cpu and S >= MIN_NATIVE_KEYS and inputs.q_BHTK.dtype == torch.float32
    # Its causal mask starts at the upper left corner: it fits all queries, and one query needs none.
    if no_scores and T in (1, S) and not native_is_faster:
        return Path("sdpa")
    # With few queries, as in decoding, the fused kernels would spend most of their time on packing all keys.
    if T < MIN_FUSED_QUERIES:
        return Path("reference")
    instead: PathName = "blocked" if S >= MIN_BLOCKED_KEYS and not torch.compiler.is_compiling() else "reference"
    problem = make_problem(inputs, positions, dropout, seeds_B)
    if isinstance(problem, str):
        why = f"no fused kernel: {problem}; using"
        if instead == "blocked":
            return Path("blocked", f"{why} PyTorch (blocked)")
        return Path("reference", f"{why} the reference, which needs O(T²) memory")
    name: Literal["native", "triton"] = "native" if on_cpu else "triton"
    reason = _why_not(problem, name, device)
    if reason is None:
        return Path(name, None, problem)
    instead = "sdpa" if no_scores and T == S else instead
    return Path(instead, f"{name} is not used, {reason}; falling back to PyTorch ({instead})")


def _why_not(problem: Arguments, implementation: Literal["native", "triton"], device: torch.device) -> str | None:
    """Why the kernels of this name cannot compute the problem, or not on this machine; None if they can."""
    if implementation == "native":
        reason = native.why_not(problem, device)
    elif not _has_triton():
        return "Triton is not installed"
    else:
        from cope_sweep.kernels import triton_attention

        reason = triton_attention.why_not(problem, device)
    return reason or self_check.why_not(implementation, problem, device)


@constant_when_compiled
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


# Attention ------------------------------------------------------------------------------------------------------------


def attend(
    inputs: Inputs,
    positions: LayerEncodings,
    dropout: float = 0.0,
    seeds_B: Tensor | None = None,
    implementation: Implementation | None = None,
) -> Tensor:
    """Causal attention, softmax(q·k/√K + Σ scores)·v, (B, H, T, K). Query t is token S − T + t.

    `dropout` is the probability of dropping a weight, and `seeds_B`, int64, determine the mask of each sequence; None:
    they are drawn from torch's global generator. `implementation`: None means the one that `set_implementation` or
    `using` chose, or auto.
    """
    observer, device = _observer.get(), inputs.q_BHTK.device
    # Both call hooks of encodings, which choose their types themselves.
    with torch.autocast(device.type, enabled=False):
        if observer is not None:
            observer(inputs, positions)
        if inputs.q_BHTK.shape[2] == 0:
            return inputs.q_BHTK  # empty, and of the result's shape: no path has to handle 0 queries
        implementation = implementation or _chosen.get()
        if dropout and seeds_B is None:
            seeds_B = draw_seeds(len(inputs.q_BHTK), device)
        path = choose(inputs, positions, dropout, implementation, device, seeds_B)
    # float64 is for comparisons: that auto then uses PyTorch needs no warning.
    if path.reason is not None and (implementation != "auto" or inputs.q_BHTK.dtype != torch.float64):
        _log_once(f"attention: {path.reason}")
    if path.problem is not None:
        out_BHTK = operator.attention(path.problem, path.name)
        K = inputs.v_BHSK.shape[-1]  # values are as wide as the keys there
        return out_BHTK if out_BHTK.shape[-1] == K else out_BHTK[..., :K]
    if path.name == "blocked":
        return attend_in_blocks(inputs, positions, dropout, seeds_B)
    if path.name == "sdpa":
        return _without_scores(inputs)
    return reference(inputs, positions, dropout, seeds_B)


def _without_scores(inputs: Inputs) -> Tensor:
    return F.scaled_dot_product_attention(
        inputs.rotated_q_BHTK,
        inputs.rotated_k_BHSK,
        inputs.v_BHSK,
        # A single query is the last token.
        is_causal=inputs.q_BHTK.shape[2] > 1,
        scale=inputs.q_BHTK.shape[-1] ** -0.5 if inputs.widened else None,
    )


@constant_when_compiled
def _log_once(message: str) -> None:
    _cached_log(message)


@functools.cache
def _cached_log(message: str) -> None:
    log.warning(message)
