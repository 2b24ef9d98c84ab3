"""From an ablation to its plan: rows (points of the grid), and runs (a row with a seed), each run once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from pydantic import ValidationError

from cope_sweep.spec import NUMERIC_FACTS, LoadedAblation, Published, RunSpec, SpecError, default_label
from cope_sweep.spec.ablation import Axis, Point
from cope_sweep.spec.explain import explain, suggest
from cope_sweep.spec.source import Json, KeyPath, dotted, set_key


@dataclass(frozen=True)
class Row:
    """The runs that differ only by their seed."""

    name: str
    """Unique in the plan."""
    labels: dict[str, str]
    """Axis key → the label of its value in this row."""
    runs: tuple[RunSpec, ...]
    """One run per seed, in the order of the ablation's seeds."""
    published: Published | None = None


@dataclass(frozen=True)
class Plan:
    """Everything that an ablation trains, in order, without duplicates."""

    ablation: LoadedAblation
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        """The ablation's name."""
        return self.ablation.name

    @cached_property
    def axes(self) -> dict[str, str]:
        """Axis key → its short name in tables: the last part of the key, if no other axis ends with the same part."""
        keys = list(dict.fromkeys(key for row in self.rows for key in row.labels))
        last_parts = [key.split(".")[-1] for key in keys]
        return {key: part if last_parts.count(part) == 1 else key for key, part in zip(keys, last_parts, strict=True)}

    @cached_property
    def runs(self) -> tuple[RunSpec, ...]:
        """Every run once: the first seed of every row, then the second, …, so that all rows fill at the same rate."""
        columns = itertools.zip_longest(*(row.runs for row in self.rows))
        return tuple({run.run_id: run for column in columns for run in column if run is not None}.values())

    @cached_property
    def _rows_by_run(self) -> dict[str, Row]:
        return {run.run_id: row for row in reversed(self.rows) for run in row.runs}

    def row_of(self, run_id: str) -> Row | None:
        """The row that holds a run, or None if the plan does not contain the run."""
        return self._rows_by_run.get(run_id)

    def row_name(self, run_id: str) -> str:
        """The name of the row that holds a run, or an empty string."""
        row = self.row_of(run_id)
        return row.name if row else ""


@dataclass(frozen=True)
class _Value:
    """A value that a point assigns, its label, and its key path in the file."""

    label: str
    value: Json
    origin: KeyPath


_Assignments = dict[str, _Value]
"""Axis key → value: one point of the grid."""


def expand(loaded: LoadedAblation) -> Plan:
    """The plan of an ablation.

    Raises SpecError if a key, value or combination is not valid in a run, or if no row is left.
    """
    content = loaded.content
    points = [*_grid_points(loaded), *_included_points(loaded)]
    _check_conditions(loaded, points)
    _check_seeds_are_no_axis(loaded, points)
    points = [p for p in points if not any(_matches(p, condition) for condition in content.exclude)]
    if not points:
        raise loaded.source.error(("exclude",), "the ablation has no row left; remove an exclusion")
    ambiguous = _ambiguous_labels(points)
    rows: dict[str, Row] = {}
    problems: dict[str, None] = {}
    for point in points:
        try:
            first = _run(loaded, point)
        except SpecError as error:
            problems |= dict.fromkeys(str(error).splitlines())
            continue
        if first.run_id not in rows:
            labels = {key: value.label for key, value in point.items()}
            runs = (first, *(_with_seed(first, seed) for seed in content.seeds[1:]))
            rows[first.run_id] = Row(_row_name(labels, ambiguous), labels, runs, _published(loaded, point))
    if problems:
        raise SpecError("\n".join(problems))
    plan = Plan(loaded, tuple(rows.values()))
    _check_metrics(plan)
    return plan


def _grid_points(loaded: LoadedAblation) -> Iterator[_Assignments]:
    content = loaded.content
    groups: list[list[_Assignments]] = [
        [{key: value} for value in _axis_values(axis, ("grid", key))] for key, axis in content.grid.items()
    ]
    for index, group in enumerate(content.zip):
        columns = [_axis_values(values, ("zip", index, key)) for key, values in group.items()]
        groups.append([dict(zip(group, values, strict=True)) for values in zip(*columns, strict=True)])
    for combination in itertools.product(*groups):
        yield from _conditional_points(loaded, {key: value for part in combination for key, value in part.items()})


def _conditional_points(loaded: LoadedAblation, point: _Assignments) -> list[_Assignments]:
    """A point with the fixed values and further axes that `when` adds to it."""
    points = [point]
    for index, condition in enumerate(loaded.content.when):
        expanded = []
        for base in points:
            if not _matches(base, condition.match):
                expanded.append(base)
                continue
            fixed = {
                key: _Value(default_label(value), value, ("when", index, "set", key))
                for key, value in condition.set.items()
            }
            axes = [
                [(key, value) for value in _axis_values(axis, ("when", index, "grid", key))]
                for key, axis in condition.grid.items()
            ]
            expanded += [base | fixed | dict(combination) for combination in itertools.product(*axes)]
        points = expanded
    return points


def _included_points(loaded: LoadedAblation) -> Iterator[_Assignments]:
    for index, point in enumerate(loaded.content.include):
        yield {key: _Value(default_label(value), value, ("include", index, key)) for key, value in point.items()}


def _axis_values(axis: Axis, origin: KeyPath) -> list[_Value]:
    if isinstance(axis, dict):
        return [_Value(label, value, (*origin, label)) for label, value in axis.items()]
    return [_Value(default_label(value), value, (*origin, index)) for index, value in enumerate(axis)]


def _matches(point: _Assignments, condition: Point) -> bool:
    """Whether each key of the condition has the label or value that it asks for; of a list, any."""
    for key, wanted in condition.items():
        if key not in point:
            return False
        actual = point[key]
        accepted = wanted if isinstance(wanted, list) else [wanted]
        if actual.label not in accepted and actual.value not in accepted and actual.value != wanted:
            return False
    return True


def _ambiguous_labels(points: list[_Assignments]) -> set[tuple[str, ...]]:
    """The combinations of labels that occur with different keys."""
    keys: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for point in points:
        keys.setdefault(tuple(value.label for value in point.values()), set()).add(tuple(point))
    return {labels for labels, known in keys.items() if len(known) > 1}


def _row_name(labels: dict[str, str], ambiguous: set[tuple[str, ...]]) -> str:
    """The labels of a row, with their keys if another row has the same labels for other keys."""
    if tuple(labels.values()) in ambiguous:
        return " · ".join(f"{key.split('.')[-1]}={label}" for key, label in labels.items())
    return " · ".join(labels.values()) or "base"


def _published(loaded: LoadedAblation, point: _Assignments) -> Published | None:
    """The first matching entry of `published`."""
    return next((entry for entry in loaded.content.published if _matches(point, entry.match)), None)


def _run(loaded: LoadedAblation, point: _Assignments) -> RunSpec:
    """The run of a point with the ablation's first seed. Raises SpecError."""
    data = loaded.content.base | {"seed": loaded.content.seeds[0]}
    for key, value in point.items():
        set_key(data, key, value.value)
    try:
        return RunSpec.model_validate(data)
    except ValidationError as error:
        problems = [explain(item, RunSpec) for item in error.errors(include_url=False)]
        raise SpecError("\n".join(_located(loaded, point, path, message) for path, message in problems)) from error


def _with_seed(run: RunSpec, seed: int) -> RunSpec:
    """A copy of a run with another seed that was validated already.

    It is made from the fields alone, because `model_copy` would also copy the cached run id.
    """
    fields = {name: getattr(run, name) for name in RunSpec.model_fields} | {"seed": seed}
    return RunSpec.model_construct(run.model_fields_set | {"seed"}, **fields)


def _located(loaded: LoadedAblation, point: _Assignments, path: KeyPath, message: str) -> str:
    """The message about a run, with the line of the axis value or base key that caused it."""
    text = dotted(path)
    for key, value in sorted(point.items(), key=lambda item: -len(item[0])):
        if text == key or text.startswith((f"{key}.", f"{key}[")):
            rest = path[len(key.split(".")) :]
            return f"{loaded.source.location((*value.origin, *rest))}: {text}: {message}"
    error = loaded.source.error(("base", *path), message)
    row = ", ".join(f"{key} = {value.label}" for key, value in point.items())
    return f"{error}" + (f" (in the row {row})" if row and not path else "")


def _check_conditions(loaded: LoadedAblation, points: list[_Assignments]) -> None:
    """Raises SpecError for a condition on a key that no point has, which is probably a spelling mistake."""
    keys = sorted({key for point in points for key in point})
    content = loaded.content
    conditions: list[tuple[KeyPath, Point]] = [(("exclude", i), c) for i, c in enumerate(content.exclude)]
    conditions += [(("when", i, "if"), c.match) for i, c in enumerate(content.when)]
    conditions += [(("published", i, "match"), p.match) for i, p in enumerate(content.published)]
    for path, condition in conditions:
        for key in condition:
            if keys and key not in keys:
                raise loaded.source.error((*path, key), f"no axis is called {key!r}" + suggest(key, keys))


def _check_seeds_are_no_axis(loaded: LoadedAblation, points: list[_Assignments]) -> None:
    """Raises SpecError where the base or a point sets the seed."""
    origins: list[KeyPath] = [("base", "seed")] if "seed" in loaded.content.base else []
    origins += [point["seed"].origin for point in points if "seed" in point]
    if origins:
        raise loaded.source.error(
            origins[0], "seeds are not part of a row; write `seeds: [0, 1, …]` at the top level, beside `base`"
        )


def _check_metrics(plan: Plan) -> None:
    """Raises SpecError for a metric that some row does not report."""
    source = plan.ablation.source
    for row in plan.rows:
        known = [*row.runs[0].metrics, *(f"facts.{name}" for name in NUMERIC_FACTS)]
        for index, metric in enumerate(plan.ablation.content.metrics):
            if metric.name not in known:
                raise source.error(
                    ("metrics", index, "name"),
                    f"the task {row.runs[0].task.kind} has no metric {metric.name!r}" + suggest(metric.name, known),
                )
