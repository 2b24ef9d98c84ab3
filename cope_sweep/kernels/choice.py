"""What a caller has chosen for attention in this thread: the implementation, and an observer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

from cope_sweep.kernels.inputs import Inputs, Positions

Implementation = Literal["auto", "reference", "blocked", "native", "triton"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

Observer = Callable[[Inputs, Positions], None]
"""Called with the inputs and encodings of every attention, before it is computed."""

_chosen: ContextVar[Implementation] = ContextVar("attention", default="auto")
_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


def chosen_implementation() -> Implementation:
    """The implementation of this context."""
    return _chosen.get()


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


def observe(inputs: Inputs, positions: Positions) -> None:
    """Call the observer of this context, if there is one."""
    observer = _observer.get()
    if observer is not None:
        observer(inputs, positions)
