"""The points of an ablation: what each row assigns to the keys of a run."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from cope_sweep.config.ablation import Axis, Distribution, Optuna, Point, RandomSearch
from cope_sweep.config.loading import LoadedAblation
from cope_sweep.config.source import Json, KeyPath, default_label

SEPARATOR = " · "
"""Between the labels of zipped axes."""
MAX_POINTS = 1_000_000
"""Largest number of points of a grid with its draws. It stops files that would use up the memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A value that a point assigns, its label, and its key path in the file."""

    label: str
    value: Json
    origin: KeyPath

    @classmethod
    def of(cls, value: Json, *origin: str | int) -> Value:
        """A value that the file gives no label."""
        return cls(default_label(value), value, origin)


Assignments = dict[str, Value]
"""Axis key → value: one point."""


@dataclass(frozen=True)
class Dimension:
    """One dimension of a search by suggestions: the options of an axis, of zipped axes or of `choice`, or numbers."""

    keys: tuple[str, ...]
    """The keys of a run that it assigns: one, or those of zipped axes."""
    options: tuple[Assignments, ...] = ()
    numbers: Distribution | None = None
    """The distribution of a number; None: it has options."""

    @property
    def name(self) -> str:
        """The keys, joined: `model.dim+model.heads`."""
        return "+".join(self.keys)

    @property
    def choices(self) -> tuple[str, ...]:
        """The label of each option, unique in the dimension; none for numbers."""
        return tuple(_joined(option) for option in self.options)

    @property
    def size(self) -> float:
        """The number of values; infinite for numbers that are not whole."""
        if self.numbers is None:
            return len(self.options)
        low, high = self.numbers.bounds
        return high - low + 1 if self.numbers.is_int else math.inf

    @property
    def examples(self) -> tuple[Assignments, ...]:
        """All options, or the lowest and the highest number."""
        if self.numbers is None:
            return self.options
        return tuple(self.assignments(bound) for bound in self.numbers.bounds)

    def assignments(self, parameter: str | float) -> Assignments:
        """The assignments of one of `choices`, or of a number, which is rounded. Raises ValueError for another."""
        if self.numbers is None:
            if parameter not in self.choices:
                raise ValueError(f"{self.name} has no value {parameter!r}")
            return self.options[self.choices.index(str(parameter))]
        (key,) = self.keys
        return {key: Value.of(self.numbers.rounded(float(parameter)), "search", "space", key)}

    def parameter(self, labels: Mapping[str, str]) -> str | float:
        """The choice or number of a row with these labels. Raises ValueError where the dimension does not have it."""
        if missing := [key for key in self.keys if labels.get(key) is None]:
            raise ValueError(f"{missing[0]} has no value")
        label = SEPARATOR.join(labels[key] for key in self.keys)
        if self.numbers is not None:
            return self.numbers.number_of(label)
        if label not in self.choices:
            raise ValueError(f"{self.name} has no value {label!r}")
        return label


def _joined(option: Assignments) -> str:
    return SEPARATOR.join(value.label for value in option.values())


def points_of(loaded: LoadedAblation, limit: int | None = None) -> list[Assignments]:
    """All points, in order, before exclusion. Raises SpecError where they are more than `limit`, else MAX_POINTS."""
    limit = MAX_POINTS if limit is None else min(limit, MAX_POINTS)
    groups = _axis_groups(loaded)
    if isinstance(loaded.content.search, RandomSearch):
        groups.append(_draws(loaded.content.search))
    of_grid = _with_conditions(loaded, map(_merged, itertools.product(*groups)))
    points = list(itertools.islice(of_grid, limit + 1))
    if len(points) > limit:
        raise loaded.source.error(
            ("grid",), f"the combinations of the values are more than {limit:,} points; leave out axes or values"
        )
    included = enumerate(loaded.content.include)
    return [
        *points,
        *({key: Value.of(value, "include", index, key) for key, value in row.items()} for index, row in included),
    ]


def dimensions_of(loaded: LoadedAblation) -> tuple[Dimension, ...]:
    """The dimensions of a search by suggestions: axes, zipped axes, and the keys of the search space."""
    search = loaded.content.search
    dimensions = [Dimension(tuple(group[0]), tuple(group)) for group in _axis_groups(loaded)]
    for key, distribution in (search.space if isinstance(search, Optuna) else {}).items():
        if distribution.choice is None:
            dimensions.append(Dimension((key,), numbers=distribution))
        else:
            options = tuple({key: Value.of(value, "search", "space", key)} for value in distribution.choice)
            dimensions.append(Dimension((key,), options))
    return tuple(dimensions)


def point_of(loaded: LoadedAblation, parameters: Mapping[str, str | float]) -> Assignments:
    """The point that a search by suggestions means with one of each dimension's choices, or a number, by its name.

    Raises SpecError where a dimension does not have its parameter.
    """
    try:
        parts = [dimension.assignments(parameters[dimension.name]) for dimension in dimensions_of(loaded)]
    except ValueError as error:
        raise loaded.source.error(("search",), f"a suggestion does not fit the search: {error}") from error
    (point,) = _with_conditions(loaded, iter([_merged(parts)]))
    return point


def parameters_of(loaded: LoadedAblation, labels: Mapping[str, str]) -> dict[str, str | float]:
    """The parameters of the row with these labels: the inverse of `point_of`. Raises SpecError."""
    try:
        return {dimension.name: dimension.parameter(labels) for dimension in dimensions_of(loaded)}
    except ValueError as error:
        raise loaded.source.error(("search",), f"a row does not fit the search: {error}") from error


def example_points(loaded: LoadedAblation) -> list[Assignments]:
    """Points in which each option, and each bound of numbers, of a search by suggestions occurs at least once."""
    columns = [dimension.examples for dimension in dimensions_of(loaded)]
    longest = max(map(len, columns), default=0)
    points = [_merged(column[min(index, len(column) - 1)] for column in columns) for index in range(longest)]
    return list(_with_conditions(loaded, iter(points)))


def matches(point: Assignments, condition: Point) -> bool:
    """Whether each key of the condition has the label or value that it asks for; of a list, any."""
    for key, wanted in condition.items():
        if key not in point:
            return False
        actual = point[key]
        accepted = wanted if isinstance(wanted, list) else [wanted]
        if actual.label not in accepted and actual.value not in accepted and actual.value != wanted:
            return False
    return True


def _merged(parts: Iterable[Assignments]) -> Assignments:
    return {key: value for part in parts for key, value in part.items()}


def _axis_groups(loaded: LoadedAblation) -> list[list[Assignments]]:
    """The alternatives of each axis, and of each group of zipped axes."""
    content = loaded.content
    groups: list[list[Assignments]] = [
        [{key: value} for value in _axis_values(axis, ("grid", key))] for key, axis in content.grid.items()
    ]
    for index, group in enumerate(content.zip):
        columns = [_axis_values(values, ("zip", index, key)) for key, values in group.items()]
        groups.append([dict(zip(group, values, strict=True)) for values in zip(*columns, strict=True)])
    return groups


def _draws(search: RandomSearch) -> list[Assignments]:
    """The draws of a random search. Those of one key depend on the seed and this key alone."""
    columns = []
    for key, distribution in search.space.items():
        generator = random.Random(f"{search.seed}/{key}")
        values = [distribution.value_at(generator.random()) for _ in range(search.samples)]
        columns.append([Value.of(value, "search", "space", key) for value in values])
    return [dict(zip(search.space, values, strict=True)) for values in zip(*columns, strict=True)]


def _with_conditions(loaded: LoadedAblation, points: Iterator[Assignments]) -> Iterator[Assignments]:
    """The points with the fixed values and further axes that each entry of `when` adds to them, one after another."""
    for index, condition in enumerate(loaded.content.when):
        fixed = {key: Value.of(value, "when", index, "set", key) for key, value in condition.set.items()}
        axes = [
            [(key, value) for value in _axis_values(axis, ("when", index, "grid", key))]
            for key, axis in condition.grid.items()
        ]
        points = _with_condition(points, condition.match, fixed, axes)
    return points


def _with_condition(
    points: Iterator[Assignments], match: Point, fixed: Assignments, axes: list[list[tuple[str, Value]]]
) -> Iterator[Assignments]:
    for point in points:
        if matches(point, match):
            for combination in itertools.product(*axes):
                yield point | fixed | dict(combination)
        else:
            yield point


def _axis_values(axis: Axis, origin: KeyPath) -> list[Value]:
    if isinstance(axis, dict):
        return [Value(label, value, (*origin, label)) for label, value in axis.items()]
    return [Value.of(value, *origin, index) for index, value in enumerate(axis)]
