"""The points of an ablation: what each row assigns to the keys of a run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from cope_sweep.config.ablation import Axis, Distribution, Optuna, Point, RandomSearch
from cope_sweep.config.loading import LoadedAblation
from cope_sweep.config.source import Json, KeyPath, default_label

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
    """One dimension of a search by suggestions: the options of an axis or of zipped axes, or a distribution."""

    keys: tuple[str, ...]
    """The keys of a run that it assigns: one, or those of zipped axes."""
    options: tuple[Assignments, ...] = ()
    distribution: Distribution | None = None

    @property
    def name(self) -> str:
        """The keys, joined: `model.dim+model.heads`."""
        return "+".join(self.keys)

    @property
    def labels(self) -> tuple[str, ...]:
        """The label of each option, unique in the dimension; none for a distribution."""
        return tuple(" · ".join(value.label for value in option.values()) for option in self.options)

    def assignments(self, labels: Mapping[str, str]) -> Assignments:
        """Assignments of a row with these labels. Raises ValueError where the dimension does not have them."""
        wanted = [labels.get(key) for key in self.keys]
        if self.distribution is None:
            for option in self.options:
                if [value.label for value in option.values()] == wanted:
                    return option
            raise ValueError(f"{self.name} has no value {' · '.join(map(str, wanted))!r}")
        (key,), (label,) = self.keys, wanted
        if label is None:
            raise ValueError(f"{key} has no value")
        return {key: Value(label, self.distribution.value_of(label), ("search", "space", key))}

    @property
    def samples(self) -> tuple[Assignments, ...]:
        """All options, or the extremes of the distribution."""
        if self.distribution is None:
            return self.options
        (key,) = self.keys
        return tuple({key: Value.of(value, "search", "space", key)} for value in self.distribution.extremes)


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
    space = search.space if isinstance(search, Optuna) else {}
    axes = [Dimension(tuple(group[0]), tuple(group)) for group in _axis_groups(loaded)]
    return (*axes, *(Dimension((key,), distribution=distribution) for key, distribution in space.items()))


def points_of_draws(loaded: LoadedAblation, draws: Iterable[Mapping[str, str]]) -> list[Assignments]:
    """The points with these labels, of a search by suggestions. Raises SpecError where a label does not exist."""
    dimensions = dimensions_of(loaded)
    try:
        chosen = [[dimension.assignments(draw) for dimension in dimensions] for draw in draws]
    except ValueError as error:
        raise loaded.source.error(("search",), f"a draw does not fit the search: {error}") from error
    return list(_with_conditions(loaded, map(_merged, chosen)))


def extreme_points(loaded: LoadedAblation) -> list[Assignments]:
    """Points in which each option and each bound of a search by suggestions occurs at least once."""
    samples = [dimension.samples for dimension in dimensions_of(loaded)]
    longest = max(map(len, samples), default=0)
    chosen = [[options[min(index, len(options) - 1)] for options in samples] for index in range(longest)]
    return list(_with_conditions(loaded, map(_merged, chosen)))


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
