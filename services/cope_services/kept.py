"""Values kept while the state that they were made from stands; the least recently used goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Entry(Generic[T]):
    state: Hashable
    lock: threading.Lock = field(default_factory=threading.Lock)
    values: list[T] = field(default_factory=list)
    """The value, once it is made."""


class Kept(Generic[T]):
    """A cache of at most `most` keys. Threads that ask for the same value at once wait for one to make it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._entries: OrderedDict[Hashable, _Entry[T]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, state: Hashable, make: Callable[[], T]) -> T:
        """The value of `key` in this state. What `make` raises is raised, and not kept."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.state != state:
                entry = self._entries[key] = _Entry(state)
            self._entries.move_to_end(key)
            while len(self._entries) > self.most:
                self._entries.popitem(last=False)
        with entry.lock:
            if not entry.values:
                entry.values.append(make())
            return entry.values[0]
