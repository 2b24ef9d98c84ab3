"""A SQLite index for processes on other machines: one actor on the driver's node offers the methods of the index.

An index in PostgreSQL needs none. Importing this module imports neither Tune nor torch, so that the actor starts fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from cope_sweep.store import Store
from cope_sweep.store.index import IndexUnavailable

INDEX_TIMEOUT_S = 60.0
"""For the actor to answer. It takes a millisecond, and seconds while its process starts."""


class IndexActor:
    """Offers the methods of the index to the processes of other machines. Ray restarts it where it dies."""

    def __init__(self, location: str, url: str) -> None:
        self.index = Store(location, index=url).index

    def call(self, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The result of a method of the index. Raises what it raises."""
        return getattr(self.index, method)(*arguments, **named)


class RemoteIndex:
    """The index, through an `IndexActor`. It has the methods of an `Index`, and raises what they raise."""

    def __init__(self, actor: str) -> None:
        self._actor = ray.get_actor(actor)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            try:
                return ray.get(self._actor.call.remote(method, arguments, named), timeout=INDEX_TIMEOUT_S)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                raise IndexUnavailable(f"the index of the driver's machine does not answer: {error}") from error

        return call
