"""Choices of a caller for attention in this thread: the implementation, and an observer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar

import torch

from cope_sweep.kernels.inputs import Inputs, Positions

Implementation = Literal["auto", "reference", "blocked", "native", "triton"]

Observer = Callable[[Inputs, Positions], None]
"""Called with the inputs and encodings of every attention, before it is computed."""

_chosen: ContextVar[Implementation] = ContextVar("attention", default="auto")
_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@dataclass
class _Traced:
    """The same for code that torch.compile traces. Its guards notice changes of an object, and torch 2.11 traces no
    ContextVar.

    One for all threads: the implementation that was set last, and the number of observers.
    """

    implementation: Implementation = "auto"
    observers: int = 0


_traced = _Traced()


R = TypeVar("R")
P = ParamSpec("P")


def constant_when_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.assume_constant_result`, which imports the whole compiler (1.5 s) in order to set this mark."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def chosen_implementation() -> Implementation:
    """The implementation of this context."""
    if torch.compiler.is_compiling():
        return _traced.implementation
    return _chosen.get()


def set_implementation(implementation: Implementation) -> None:
    """Set the implementation that `attend` uses in this context unless its argument names one."""
    _chosen.set(implementation)
    _traced.implementation = implementation


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
    _traced.observers += 1
    try:
        yield
    finally:
        _traced.observers -= 1
        _observer.reset(token)


def observe(inputs: Inputs, positions: Positions) -> None:
    """Call the observer of this context, if there is one."""
    if torch.compiler.is_compiling() and not _traced.observers:
        return
    observer = _observer.get()
    if observer is not None:
        observer(inputs, positions)
