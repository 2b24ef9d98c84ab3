"""Which implementation computes an attention.

    auto        the fastest for the device, type and shape
    reference   directly from the equation: memory O(T²), every case
    blocked     PyTorch in blocks of queries: memory O(block × T)
    native      C++ on a CPU
    triton      Triton on a GPU

All compute the same result, with the same dropout mask. If the chosen implementation cannot compute a problem (hard
attention, for example), attention falls back to blocked or the reference, and logs the reason once.
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
from cope_sweep.kernels.problem import AttentionProblem, make_problem
from cope_sweep.kernels.reference import reference

log = logging.getLogger(__name__)

Implementation = Literal["auto", "reference", "blocked", "native", "triton"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

_chosen: ContextVar[Implementation] = ContextVar("attention", default="auto")

Observer = Callable[[Inputs, Positions], None]
"""Called with the inputs and encodings of every attention, before it is computed."""
_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


class Kernel(Protocol):
    """A module of fused attention: `kernels/native`, `kernels/triton_attention.py`."""

    def why_not(self, problem: AttentionProblem) -> str | None:
        """Why it cannot compute this problem here, for a log message; None: it can."""

    def attend(self, problem: AttentionProblem) -> Tensor:
        """Attention, (B, H, T, K), differentiable in all inputs."""


_MODULES = {"native": "cope_sweep.kernels.native", "triton": "cope_sweep.kernels.triton_attention"}


def set_implementation(implementation: Implementation) -> None:
    """Set the implementation that `attend` uses in this context unless its argument names one."""
    _chosen.set(implementation)


@contextmanager
def using(implementation: Implementation) -> Iterator[None]:
    """Use this implementation within a `with` block, and the previous one after it."""
    token = _chosen.set(implementation)
    try:
        yield
    finally:
        _chosen.reset(token)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call `observer` before every attention within a `with` block. An exception in it stops that attention."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def attend(
    inputs: Inputs, positions: Positions, dropout: float = 0.0, implementation: Implementation | None = None
) -> Tensor:
    """Causal attention, softmax(q·k/√K + Σ scores)·v, (B, H, T, K). Query t is token S − T + t.

    `dropout` is the probability of dropping a weight. `implementation`: None means the one that `set_implementation` or
    `using` chose, or auto.
    """
    observer = _observer.get()
    if observer is not None:
        observer(inputs, positions)
    implementation = implementation or _chosen.get()
    if implementation == "auto":
        return _attend_fastest(inputs, positions, dropout)
    if implementation != "reference":
        problem = _make_problem(inputs, positions, dropout)
        if not isinstance(problem, str):
            return fused(problem, implementation)
        _log_once(f"attention: {implementation} is not used, {problem}; using the reference")
    return reference(inputs, positions, dropout)


def fused(problem: AttentionProblem, implementation: Implementation = "auto") -> Tensor:
    """Attention of a problem, (B, H, T, K), by the chosen kernel, or by blocked if that cannot compute it."""
    return (_kernel_for(problem, implementation) or blocked)(problem)


def _attend_fastest(inputs: Inputs, positions: Positions, dropout: float) -> Tensor:
    """Attention by the implementation that was fastest, forward and backward (measured with `bench attention`)."""
    T, S = inputs.q_BHTK.shape[2], inputs.k_BHSK.shape[2]
    no_scores = (
        not any(position.encoding.scores for position in positions) and inputs.lengths_B is None and not inputs.hard
    )
    if (
        no_scores
        and T in (1, S)
        and not (S >= MIN_NATIVE_KEYS and inputs.q_BHTK.dtype == torch.float32 and _on_cpu(inputs))
    ):
        return _without_scores(inputs, dropout)
    # With few queries, as in decoding, the fused kernels would spend most of their time on packing all keys.
    if T < MIN_FUSED_QUERIES:
        return reference(inputs, positions, dropout)
    problem = _make_problem(inputs, positions, dropout)
    if isinstance(problem, str):
        _log_once(f"attention: no fused kernel is used, {problem}; the reference needs memory for all T × T scores")
        return reference(inputs, positions, dropout)
    kernel = _kernel_for(problem, "auto")
    if kernel is not None:
        return kernel(problem)
    if no_scores and T == S:
        return _without_scores(inputs, dropout)
    if S < MIN_BLOCKED_KEYS:
        return reference(inputs, positions, dropout)
    return blocked(problem)


MIN_NATIVE_KEYS = 128
"""Number of keys from which the native kernels are faster than scaled_dot_product_attention, even without scores."""
MIN_FUSED_QUERIES = 17
"""With fewer queries, the reference is faster than the fused kernels."""
MIN_BLOCKED_KEYS = 256
"""With fewer keys, the reference is faster than the blocked path, and its T × T arrays are small."""


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


def _make_problem(inputs: Inputs, positions: Positions, dropout: float) -> AttentionProblem | str:
    return make_problem(inputs, positions, dropout, draw_seed() if dropout else None)


def _kernel_for(
    problem: AttentionProblem, implementation: Implementation
) -> Callable[[AttentionProblem], Tensor] | None:
    """The kernel's `attend`; None, with the reason logged, if it cannot compute the problem."""
    name: str = implementation
    if implementation == "auto":
        name = "triton" if problem.q_BHTK.is_cuda else "native"
    if name not in _MODULES:
        return None
    kernel = _kernel(name)
    reason = f"{_MODULES[name]} could not be imported" if kernel is None else kernel.why_not(problem)
    if kernel is not None and reason is None:
        return kernel.attend
    # float64 is used for comparisons, and blocked is its fast path: no warning.
    if implementation != "auto" or problem.q_BHTK.dtype != torch.float64:
        _log_once(f"attention: {name} is not used, {reason}; falling back to PyTorch")
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
