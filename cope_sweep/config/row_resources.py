"""Resources of single rows: keys `resources.…` among the values that a condition or an included row sets."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from cope_sweep.config.ablation import LoadedAblation
from cope_sweep.config.explain import explain_all
from cope_sweep.config.points import Assignments
from cope_sweep.config.resources import SWEEP_KEYS, Resources
from cope_sweep.config.source import KeyPath, SpecError, dotted

PREFIX = "resources."


class RowResources:
    """Separates what a point says about resources from what it says about its runs, whose ids must not depend on it."""

    def __init__(self, loaded: LoadedAblation) -> None:
        """Raises SpecError where resources are an axis."""
        self.loaded = loaded
        self._known: dict[tuple[int, ...], tuple[Resources | None, list[object]]] = {}
        for path in _axes(loaded):
            if dotted(path[-1:]).startswith(PREFIX):
                raise loaded.source.error(
                    path,
                    "resources are no part of a run, so an axis of them would repeat runs; give them to some rows with "
                    f"`when: [{{if: …, set: {{{path[-1]}: …}}}}]`, or to all rows with `resources: …`",
                )

    def split(self, point: Assignments) -> tuple[Assignments, Resources | None]:
        """The values of the point's runs, and their resources; None: those of the ablation. Raises SpecError."""
        keys = [key for key in point if key.startswith(PREFIX)]
        if not keys:
            return point, None
        # Points share their values, and rows share their resources.
        cache_key = tuple(id(point[key]) for key in keys)
        if cache_key not in self._known:
            # The values are kept as well, because their addresses identify them.
            self._known[cache_key] = self._resources(point, keys), [point[key] for key in keys]
        return {key: value for key, value in point.items() if key not in keys}, self._known[cache_key][0]

    def _resources(self, point: Assignments, keys: list[str]) -> Resources | None:
        source, common = self.loaded.source, self.loaded.content.resources
        values = {key.removeprefix(PREFIX): point[key].value for key in keys}
        for name in SWEEP_KEYS & values.keys():
            raise source.error(
                point[PREFIX + name].origin, f"{name} is one for the whole sweep; write it below `resources`"
            )
        try:
            own = Resources.model_validate(common.model_dump() | values)
        except ValidationError as error:
            problems = explain_all(error, Resources)
            raise SpecError(
                "\n".join(
                    f"{source.location(point[PREFIX + str(path[0])].origin)}: {PREFIX}{dotted(path)}: {message}"
                    for path, message in problems
                )
            ) from error
        return None if own == common else own


def _axes(loaded: LoadedAblation) -> Iterator[KeyPath]:
    """Where each axis and each dimension of the search space is written."""
    content = loaded.content
    yield from (("grid", key) for key in content.grid)
    yield from (("zip", index, key) for index, group in enumerate(content.zip) for key in group)
    yield from (("when", index, "grid", key) for index, each in enumerate(content.when) for key in each.grid)
    yield from (("search", "space", key) for key in getattr(content.search, "space", {}))
