"""Which implementation computes an attention.

    auto        the fastest that is right here, by device, type and shape
    reference   straight from the equation: memory O(T²), every case
    blocked     PyTorch in blocks of queries: memory O(block × T)
    native      C++ on a CPU
    triton      on a GPU

A choice is one of execution, never of meaning: all compute the same, dropout's mask included. What the wished-for
implementation does not cover (hard attention, say) goes to the next that does, and that is logged once, by name.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from cope_sweep.kernels.blocked import blocked
from cope_sweep.kernels.dropout import draw_seed
from cope_sweep.kernels.inputs import Inputs, Positions
from cope_sweep.kernels.problem import Problem, problem_of
from cope_sweep.kernels.reference import reference

log = logging.getLogger(__name__)

Implementation = Literal["auto", "reference", "blocked", "native", "triton"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

_chosen: ContextVar[Implementation] = ContextVar("attention", default="auto")

Observer = Callable[[Inputs, Positions], None]
"""Is told of every attention, before it is computed."""
_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


class Kernel(Protocol):
    """A module of fused attention: `kernels/native`, `kernels/triton_attention.py`."""

    def why_not(self, problem: Problem) -> str | None:
        """Why it cannot compute this problem here, in words for a log; None: it can."""

    def attend(self, problem: Problem) -> Tensor:
        """Attention, (B, H, T, K), with gradients of everything."""


_MODULES = {"native": "cope_sweep.kernels.native", "triton": "cope_sweep.kernels.triton_attention"}


def set_implementation(implementation: Implementation) -> None:
    """What `attend` uses from now on, in this context, where it is not told."""
    _chosen.set(implementation)


@contextmanager
def using(implementation: Implementation) -> Iterator[None]:
    """Use this implementation within a `with` statement."""
    token = _chosen.set(implementation)
    try:
        yield
    finally:
        _chosen.reset(token)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell the observer of every attention within a `with` statement; what it raises ends that attention."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def attend(
    inputs: Inputs, positions: Positions, dropout: float = 0.0, implementation: Implementation | None = None
) -> Tensor:
    """softmax(q·k/√K + Σ scores)·v, where query t is the (S − T + t)-th token and sees no later one; (B, H, T, K).

    `implementation`: None is what `set_implementation` or `using` said, else auto.
    """
    observer = _observer.get()
    if observer is not None:
        observer(inputs, positions)
    implementation = implementation or _chosen.get()
    if implementation == "auto":
        return _attend_fastest(inputs, positions, dropout)
    if implementation != "reference":
        problem = _problem(inputs, positions, dropout)
        if problem is not None:
            return fused(problem, implementation)
        _log_once(f"attention: {implementation} cannot compute this sum of encodings; the reference does")
    return reference(inputs, positions, dropout)


def fused(problem: Problem, implementation: Implementation = "auto") -> Tensor:
    """Attention of a problem by the fused kernel that is wished for, or by the blocked path where it cannot."""
    return (_kernel_for(problem, implementation) or blocked)(problem)


def _attend_fastest(inputs: Inputs, positions: Positions, dropout: float) -> Tensor:
    """What was fastest, forward and backward, of all that is right (measured with `bench attention`)."""
    T, S = inputs.q_BHTK.shape[2], inputs.k_BHSK.shape[2]
    plain = not any(position.encoding.scores for position in positions) and inputs.lengths_B is None and not inputs.hard
    if plain and T in (1, S) and not (S >= NATIVE_TOKENS and inputs.q_BHTK.dtype == torch.float32 and _on_cpu(inputs)):
        return _without_scores(inputs, dropout)
    # Few queries, as in decoding: a few large operations cost less than the packing of all keys.
    if T < FEW_QUERIES:
        return reference(inputs, positions, dropout)
    problem = _problem(inputs, positions, dropout)
    if problem is None:
        return reference(inputs, positions, dropout)
    kernel = _kernel_for(problem, "auto")
    if kernel is not None:
        return kernel(problem)
    if plain and T == S:
        return _without_scores(inputs, dropout)
    if S < BLOCKED_TOKENS:
        return reference(inputs, positions, dropout)
    return blocked(problem)


NATIVE_TOKENS = 128
"""From here on the native kernels beat scaled_dot_product_attention without any scores, too."""
FEW_QUERIES = 17
"""Below, the reference beats the fused kernels."""
BLOCKED_TOKENS = 256
"""Below, the reference beats the blocked path, and its T × T arrays are small."""


def _on_cpu(inputs: Inputs) -> bool:
    return inputs.q_BHTK.device.type == "cpu"


def _without_scores(inputs: Inputs, dropout: float) -> Tensor:
    return F.scaled_dot_product_attention(
        inputs.rotated_q_BHTK,
        inputs.rotated_k_BHSK,
        inputs.v_BHSK,
        dropout_p=dropout,
        is_causal=inputs.q_BHTK.shape[2] > 1,
    )


def _problem(inputs: Inputs, positions: Positions, dropout: float) -> Problem | None:
    return problem_of(inputs, positions, dropout, draw_seed() if dropout else None)


def _kernel_for(problem: Problem, implementation: Implementation) -> Callable[[Problem], Tensor] | None:
    """The kernel's `attend`, or None, with the reason logged, where it cannot compute the problem."""
    name: str = implementation
    if implementation == "auto":
        name = "triton" if problem.q_BHTK.is_cuda else "native"
    if name not in _MODULES:
        return None
    kernel = _kernel(name)
    why = f"there is no {_MODULES[name]}" if kernel is None else kernel.why_not(problem)
    if kernel is not None and why is None:
        return kernel.attend
    # float64 is for comparing, and blocked is its fast path: nothing to report.
    if implementation != "auto" or problem.q_BHTK.dtype != torch.float64:
        _log_once(f"attention: {name} is not used, {why}; falling back to PyTorch")
    return None


@functools.cache
def _kernel(name: str) -> Kernel | None:
    try:
        return importlib.import_module(_MODULES[name])
    except ModuleNotFoundError as error:
        if error.name != _MODULES[name] and error.name != "triton":
            raise
        return None


@functools.cache
def _log_once(message: str) -> None:
    log.warning(message)
