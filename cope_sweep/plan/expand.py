"""An ablation unfolds into rows (points of its grid) and runs (a row and a seed), each run once."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from cope_sweep.spec import NUMERIC_FACTS, LoadedAblation, Published, RunSpec, SpecError, name_of
from cope_sweep.spec.ablation import Axis, Point
from cope_sweep.spec.explain import explain, suggest
from cope_sweep.spec.source import KeyPath, dotted


@dataclass(frozen=True)
class Row:
    """The runs that differ by seed only."""

    name: str
    """What people call it: no two rows of a plan have the same."""
    labels: dict[str, str]
    """Axis key → the label of its value here."""
    runs: tuple[RunSpec, ...]
    published: Published | None = None


@dataclass(frozen=True)
class Plan:
    """Everything that an ablation trains, in order, without duplicates."""

    ablation: LoadedAblation
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        return self.ablation.name

    @property
    def axes(self) -> dict[str, str]:
        """Axis key → the short name that tables show (its last part, where no other axis ends alike)."""
        keys = list(dict.fromkeys(key for row in self.rows for key in row.labels))
        last = [key.split(".")[-1] for key in keys]
        return {key: tail if last.count(tail) == 1 else key for key, tail in zip(keys, last, strict=True)}

    @property
    def runs(self) -> tuple[RunSpec, ...]:
        """Every run once: the first seed of every row, then the second, … so that a table fills evenly."""
        columns = itertools.zip_longest(*(row.runs for row in self.rows))
        return tuple({run.run_id: run for column in columns for run in column if run is not None}.values())

    def row_of(self, run_id: str) -> Row | None:
        return next((row for row in self.rows if any(run.run_id == run_id for run in row.runs)), None)

    def row_name(self, run_id: str) -> str:
        row = self.row_of(run_id)
        return row.name if row else ""


@dataclass(frozen=True)
class _Value:
    """A value that a point assigns, its label, and where it was written."""

    label: str
    value: Any
    origin: KeyPath


_Assigned = dict[str, _Value]


def expand(loaded: LoadedAblation) -> Plan:
    """The plan of an ablation. Raises SpecError for a key, value or combination that no run can have, or for no row."""
    content = loaded.content
    points = [*_grid_points(loaded), *_included(loaded)]
    _check_conditions(loaded, points)
    points = [p for p in points if not any(_matches(p, condition) for condition in content.exclude)]
    if not points:
        raise loaded.source.error(("exclude",), "the ablation has no row left; remove an exclusion")
    ambiguous = _ambiguous(points)
    rows: dict[str, Row] = {}
    problems: dict[str, None] = {}
    for point in points:
        try:
            runs = tuple(_run(loaded, point, seed) for seed in content.seeds)
        except SpecError as error:
            problems |= dict.fromkeys(str(error).splitlines())
            continue
        labels = {key: value.label for key, value in point.items()}
        rows.setdefault(runs[0].run_id, Row(_name(labels, ambiguous), labels, runs, _published(loaded, point)))
    if problems:
        raise SpecError("\n".join(problems))
    _check_metrics(loaded, rows)
    return Plan(loaded, tuple(rows.values()))


def _ambiguous(points: list[_Assigned]) -> set[tuple[str, ...]]:
    """Labels that points of different keys share."""
    keys: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for point in points:
        keys.setdefault(tuple(value.label for value in point.values()), set()).add(tuple(point))
    return {labels for labels, known in keys.items() if len(known) > 1}


def _name(labels: dict[str, str], ambiguous: set[tuple[str, ...]]) -> str:
    """The labels; with their keys, where a row of other keys has the same."""
    if tuple(labels.values()) in ambiguous:
        return " · ".join(f"{key.split('.')[-1]}={label}" for key, label in labels.items())
    return " · ".join(labels.values()) or "base"


def _grid_points(loaded: LoadedAblation) -> Iterator[_Assigned]:
    content = loaded.content
    groups: list[list[_Assigned]] = [
        [{key: value} for value in _values(axis, ("grid", key))] for key, axis in content.grid.items()
    ]
    for index, group in enumerate(content.zip):
        columns = [_values(values, ("zip", index, key)) for key, values in group.items()]
        groups.append([dict(zip(group, together, strict=True)) for together in zip(*columns, strict=True)])
    for combination in itertools.product(*groups):
        yield from _conditional(loaded, {key: value for part in combination for key, value in part.items()})


def _conditional(loaded: LoadedAblation, point: _Assigned) -> Iterator[_Assigned]:
    """A point, with what its `when` blocks add: fixed values, and further axes."""
    points = [point]
    for index, condition in enumerate(loaded.content.when):
        unfolded = []
        for base in points:
            if not _matches(base, condition.match):
                unfolded.append(base)
                continue
            fixed = {
                key: _Value(name_of(value), value, ("when", index, "set", key)) for key, value in condition.set.items()
            }
            axes = [
                [(key, value) for value in _values(axis, ("when", index, "grid", key))]
                for key, axis in condition.grid.items()
            ]
            unfolded += [base | fixed | dict(combination) for combination in itertools.product(*axes)]
        points = unfolded
    yield from points


def _included(loaded: LoadedAblation) -> Iterator[_Assigned]:
    for index, point in enumerate(loaded.content.include):
        yield {key: _Value(name_of(value), value, ("include", index, key)) for key, value in point.items()}


def _values(axis: Axis, origin: KeyPath) -> list[_Value]:
    if isinstance(axis, dict):
        return [_Value(label, value, (*origin, label)) for label, value in axis.items()]
    return [_Value(name_of(value), value, (*origin, index)) for index, value in enumerate(axis)]


def _matches(point: _Assigned, condition: Point) -> bool:
    """Whether each key has the label or value that the condition asks for (in a list: any of them)."""
    for key, wanted in condition.items():
        if key not in point:
            return False
        have = point[key]
        accepted = wanted if isinstance(wanted, list) else [wanted]
        if have.label not in accepted and have.value not in accepted and have.value != wanted:
            return False
    return True


def _check_conditions(loaded: LoadedAblation, points: list[_Assigned]) -> None:
    """A condition that can never match is a misspelt one."""
    keys = sorted({key for point in points for key in point})
    content = loaded.content
    conditions: list[tuple[KeyPath, Point]] = [(("exclude", i), c) for i, c in enumerate(content.exclude)]
    conditions += [(("when", i, "if"), c.match) for i, c in enumerate(content.when)]
    conditions += [(("published", i, "match"), p.match) for i, p in enumerate(content.published)]
    for path, condition in conditions:
        for key in condition:
            if keys and key not in keys:
                raise loaded.source.error((*path, key), f"no axis is called {key!r}" + suggest(key, keys))


def _published(loaded: LoadedAblation, point: _Assigned) -> Published | None:
    return next((p for p in loaded.content.published if _matches(point, p.match)), None)


def _run(loaded: LoadedAblation, point: _Assigned, seed: int) -> RunSpec:
    data = json.loads(json.dumps(loaded.content.base))
    if "seed" in data:
        raise loaded.source.error(("base", "seed"), "seeds are the ablation's: write `seeds: [0, 1, …]` beside `base`")
    for key, value in point.items():
        *parents, last = key.split(".")
        inner = data
        for parent in parents:
            if not isinstance(inner.setdefault(parent, {}), dict):
                inner[parent] = {}
            inner = inner[parent]
        inner[last] = value.value
    try:
        return RunSpec.model_validate_json(json.dumps(data | {"seed": seed}))
    except ValidationError as error:
        problems = [explain(item, RunSpec) for item in error.errors(include_url=False)]
        raise SpecError("\n".join(_placed(loaded, point, path, message) for path, message in problems)) from error


def _placed(loaded: LoadedAblation, point: _Assigned, path: KeyPath, message: str) -> str:
    """The problem of a run, at the line of the axis value or base key that caused it."""
    text = dotted(path)
    for key, value in sorted(point.items(), key=lambda item: -len(item[0])):
        if text == key or text.startswith((f"{key}.", f"{key}[")):
            rest = path[len(key.split(".")) :]
            return f"{loaded.source.place((*value.origin, *rest))}: {text}: {message}"
    error = loaded.source.error(("base", *path), message)
    row = ", ".join(f"{key} = {value.label}" for key, value in point.items())
    return f"{error}" + (f" (in the row {row})" if row and not path else "")


def _check_metrics(loaded: LoadedAblation, rows: dict[str, Row]) -> None:
    for row in rows.values():
        known = [*row.runs[0].metrics, *(f"facts.{name}" for name in NUMERIC_FACTS)]
        for index, metric in enumerate(loaded.content.metrics):
            if metric.name not in known:
                raise loaded.source.error(
                    ("metrics", index, "name"),
                    f"the task {row.runs[0].task.kind} has no metric {metric.name!r}" + suggest(metric.name, known),
                )
