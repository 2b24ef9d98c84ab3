"""Makes the runs of points. What points have in common is validated and hashed once."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from cope_sweep.config.ablation import LoadedAblation
from cope_sweep.config.explain import explain_all
from cope_sweep.config.points import Assignments
from cope_sweep.config.run import PartTexts, RunSpec
from cope_sweep.config.source import KeyPath, SpecError, dotted, set_key

PARTS: dict[str, TypeAdapter[Any]] = {
    name: TypeAdapter(field.rebuild_annotation()) for name, field in RunSpec.model_fields.items() if name != "seed"
}
"""The parts of a run (task, model, train, evaluate) and what validates them."""


class RunBuilder:
    """Makes the runs of an ablation's points. Points that assign equal values to a part of a run share that part."""

    def __init__(self, loaded: LoadedAblation) -> None:
        self.loaded = loaded
        self._parts: dict[tuple[str, tuple[int, ...]], Any] = {}
        self._texts: PartTexts = {}

    def runs(self, point: Assignments) -> tuple[RunSpec, ...]:
        """The runs of a point, one per seed, with their ids. Raises SpecError."""
        run = self._assembled(point)
        if run is None:
            raise self._error(point)
        return run.with_seeds(self.loaded.content.seeds, self._texts)

    def _assembled(self, point: Assignments) -> RunSpec | None:
        """The run of a point with the first seed; None if it is not valid."""
        base = self.loaded.content.base
        assigned: dict[str, list[str]] = {name: [] for name in base}
        for key in point:
            assigned.setdefault(key.partition(".")[0], []).append(key)
        if not assigned.keys() <= PARTS.keys():
            return None
        try:
            parts = {name: self._part(name, keys, point) for name, keys in assigned.items()}
            return RunSpec.model_validate(parts | {"seed": self.loaded.content.seeds[0]})
        except ValidationError:
            return None

    def _part(self, name: str, keys: list[str], point: Assignments) -> Any:
        """A part of a run with the values that `point` assigns to its keys."""
        cache_key = name, tuple(id(point[key]) for key in keys)
        if cache_key not in self._parts:
            base = self.loaded.content.base
            data = {name: base[name]} if name in base else {}
            for key in keys:
                set_key(data, key, point[key].value)
            # The values are kept as well, because their addresses identify them.
            self._parts[cache_key] = PARTS[name].validate_python(data[name]), [point[key] for key in keys]
        return self._parts[cache_key][0]

    def _error(self, point: Assignments) -> SpecError:
        """Errors of the run of a point. The whole run is validated, so that paths start at its top."""
        data = self.loaded.content.base | {"seed": self.loaded.content.seeds[0]}
        for key, value in point.items():
            set_key(data, key, value.value)
        try:
            RunSpec.model_validate(data)
        except ValidationError as error:
            problems = (_located(self.loaded, point, *problem) for problem in explain_all(error, RunSpec))
            return SpecError("\n".join(problems))
        raise AssertionError("a run is valid exactly if its parts and their combination are")


def _located(loaded: LoadedAblation, point: Assignments, path: KeyPath, message: str) -> str:
    """The message about a run, with the line of the axis value or base key that caused it."""
    text = dotted(path)
    for key, value in sorted(point.items(), key=lambda item: -len(item[0])):
        if text == key or text.startswith((f"{key}.", f"{key}[")):
            rest = path[len(key.split(".")) :]
            return f"{loaded.source.location((*value.origin, *rest))}: {text}: {message}"
    error = loaded.source.error(("base", *path), message)
    row = ", ".join(f"{key} = {value.label}" for key, value in point.items())
    return f"{error}" + (f" (in the row {row})" if row and not path else "")
