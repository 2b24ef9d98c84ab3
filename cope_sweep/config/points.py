"""The points of an ablation: what each row assigns to the keys of a run.

A key of a field, as `model.position.cope.p_max`, is assigned in the points whose model has the encoding, and in no
other: CoPE with two values of `p_max`, and RoPE, are three points.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from cope_sweep.config.ablation import Axis, Distribution, Optuna, Point, RandomSearch
from cope_sweep.config.keys import DECIDING_KEYS, ENCODINGS_KEY, field_place, is_field
from cope_sweep.config.loading import Assignments, AxisValue, LoadedAblation
from cope_sweep.config.source import Json, KeyPath, composed
from cope_sweep.errors import InvalidValue
from cope_sweep.positions import ENCODINGS

MAX_POINTS = 1_000_000
"""Largest number of points of a grid with its draws. It stops files that would use up the memory."""


@dataclass(frozen=True)
class Dimension:
    """One dimension of a search by suggestions: the values of an axis or of `choice`, or numbers."""

    name: str
    """The key of a run that it assigns."""
    values: tuple[AxisValue, ...] = ()
    numbers: Distribution | None = None
    """The distribution of a number; None for a dimension of `values`."""

    @property
    def is_of_field(self) -> bool:
        """It varies a field of an encoding. Rows without this encoding do not have it."""
        return is_field(self.name)

    @property
    def choices(self) -> tuple[str, ...]:
        """The label of each value, unique in the dimension; none for numbers."""
        return tuple(value.label for value in self.values)

    @property
    def size(self) -> float:
        """The number of values; infinite for numbers that are not whole."""
        if self.numbers is None:
            return len(self.values)
        low, high = self.numbers.bounds
        return high - low + 1 if self.numbers.is_int else math.inf

    @property
    def examples(self) -> tuple[AxisValue, ...]:
        """All values, or the lowest and the highest number."""
        if self.numbers is None:
            return self.values
        return tuple(self.value_of(bound) for bound in self.numbers.bounds)

    def value_of(self, parameter: str | float) -> AxisValue:
        """The value of one of `choices`, or of a number, which is rounded. Raises ValueError for another."""
        if self.numbers is not None:
            return AxisValue.of(self.numbers.rounded(float(parameter)), "search", "space", self.name)
        if parameter not in self.choices:
            raise InvalidValue(f"{self.name} has no value {parameter!r}", key=self.name, value=parameter)
        return self.values[self.choices.index(str(parameter))]

    def parameter(self, labels: Mapping[str, str]) -> str | float:
        """The choice or number of a row with these labels. Raises ValueError where the dimension does not have it."""
        label = labels.get(self.name)
        if label is None:
            raise InvalidValue(f"{self.name} has no value", key=self.name, value=None)
        if self.numbers is not None:
            return self.numbers.number_of(label)
        if label not in self.choices:
            raise InvalidValue(f"{self.name} has no value {label!r}", key=self.name, value=label)
        return label


def points_of(loaded: LoadedAblation, limit: int | None = None) -> list[Assignments]:
    """All points, in order, each once, before exclusion.

    Raises SpecError where they are more than `limit`, else MAX_POINTS.
    """
    limit = MAX_POINTS if limit is None else min(limit, MAX_POINTS)
    groups = [[{key: value} for value in values] for key, values in _axes(loaded).items()]
    if isinstance(loaded.content.search, RandomSearch):
        groups.append(_draws(loaded.content.search))
    expansion = _Expansion(loaded)
    # One more than allowed shows that there are too many, without making them all.
    points = list(itertools.islice(expansion.settled(expansion.combinations(groups)), limit + 1))
    if len(points) > limit:
        raise loaded.source.error(
            ("grid",),
            f"the combinations of the values are more than {limit:,} points; leave out axes or values",
            "too_many_points",
            limit=limit,
        )
    return points


def dimensions_of(loaded: LoadedAblation) -> tuple[Dimension, ...]:
    """The dimensions of a search by suggestions: axes, and the keys of the search space."""
    search = loaded.content.search
    dimensions = [Dimension(key, tuple(values)) for key, values in _axes(loaded).items()]
    for key, distribution in (search.space if isinstance(search, Optuna) else {}).items():
        if distribution.choice is None:
            dimensions.append(Dimension(key, numbers=distribution))
        else:
            values = tuple(AxisValue.of(value, "search", "space", key) for value in distribution.choice)
            dimensions.append(Dimension(key, values))
    return tuple(dimensions)


def chosen_parameters(
    loaded: LoadedAblation, choose: Callable[[Dimension], str | float]
) -> tuple[dict[str, str | float], Assignments]:
    """The parameters of one row of a search by suggestions, and its point.

    `choose` is called for each dimension; last for fields of encodings, and only if the row's model has the encoding.
    """
    expansion, dimensions = _Expansion(loaded), dimensions_of(loaded)
    parameters: dict[str, str | float] = {}
    point: Assignments = {}
    # Fields last: the values before decide which encodings the model has.
    for dimension in sorted(dimensions, key=lambda dimension: dimension.is_of_field):
        if expansion.has_place(expansion.conditioned(point), dimension.name):
            parameters[dimension.name] = choose(dimension)
            point[dimension.name] = dimension.value_of(parameters[dimension.name])
    # In the order of the file again, in which the name of a row lists its values.
    ordered = {axis.name: point[axis.name] for axis in dimensions if axis.name in point}
    return parameters, expansion.conditioned(ordered)


def point_of(loaded: LoadedAblation, parameters: Mapping[str, str | float]) -> Assignments:
    """The point that a search suggests: dimension name → its choice or number.

    Raises SpecError if a dimension does not have the value, KeyError if a parameter is missing.
    """
    try:
        return chosen_parameters(loaded, lambda dimension: parameters[dimension.name])[1]
    except InvalidValue as error:
        raise loaded.source.error(
            ("search",), f"a suggestion does not fit the search: {error}", "another_search", **error.data
        ) from error


def parameters_of(loaded: LoadedAblation, labels: Mapping[str, str]) -> dict[str, str | float]:
    """The parameters of the row with these labels: the inverse of `point_of`. Raises SpecError."""
    try:
        return chosen_parameters(loaded, lambda dimension: dimension.parameter(labels))[0]
    except InvalidValue as error:
        raise loaded.source.error(
            ("search",), f"a row does not fit the search: {error}", "another_search", **error.data
        ) from error


def example_points(loaded: LoadedAblation) -> list[Assignments]:
    """Points in which each option, and each bound of a number, of a search occurs at least once."""
    expansion = _Expansion(loaded)
    plain = [dimension for dimension in dimensions_of(loaded) if not dimension.is_of_field]
    of_fields = [dimension for dimension in dimensions_of(loaded) if dimension.is_of_field]
    points = []
    for start in _side_by_side(plain):
        point = expansion.conditioned(start)
        own_fields = [dimension for dimension in of_fields if expansion.has_place(point, dimension.name)]
        points += [expansion.conditioned(start | fields) for fields in _side_by_side(own_fields)]
    return points


def _side_by_side(dimensions: Sequence[Dimension]) -> Iterator[Assignments]:
    """The first examples of all dimensions, the second, …, as many as the longest has. No dimensions: one point."""
    columns = {dimension.name: dimension.examples for dimension in dimensions}
    for index in range(max(map(len, columns.values()), default=1)):
        yield {name: examples[min(index, len(examples) - 1)] for name, examples in columns.items()}


def size_of_space(loaded: LoadedAblation) -> float:
    """The number of rows that a search can suggest; infinite if a number is not whole."""
    expansion, dimensions = _Expansion(loaded), dimensions_of(loaded)
    deciding = [axis for axis in dimensions if axis.name in DECIDING_KEYS]
    of_fields = [axis for axis in dimensions if axis.is_of_field]
    other_sizes = [axis.size for axis in dimensions if axis not in deciding and axis not in of_fields]
    names = [axis.name for axis in deciding]
    combinations = itertools.product(*(axis.values for axis in deciding))
    models = (dict(zip(names, values, strict=True)) for values in combinations)
    sizes = (
        math.prod(axis.size for axis in of_fields if expansion.has_place(expansion.conditioned(model), axis.name))
        for model in models
    )
    return math.prod(other_sizes) * sum(sizes)


def matches(loaded: LoadedAblation, point: Assignments, condition: Point) -> bool:
    """The point meets the condition: each key has the label or value, or one of a list of them.

    A field may be assigned by the point, or be part of an encoding in its `model.position`.
    """
    for key, wanted in condition.items():
        actual = value_of(loaded, point, key)
        if actual is None:
            return False
        # A list means any of its items. But the value of a key, as model.position, may be a list itself.
        accepted = wanted if isinstance(wanted, list) else [wanted]
        if not names_value(accepted, actual) and actual.value != wanted:
            return False
    return True


def names_value(accepted: Sequence[Json], actual: AxisValue) -> bool:
    """One of the accepted items is the value or its label, in whichever form of Unicode."""
    if actual.label in accepted or actual.value in accepted:
        return True
    # Labels of ASCII are equal already if they look the same: most plans never come here.
    return not actual.label.isascii() and composed(actual.label) in [
        composed(item) for item in accepted if isinstance(item, str)
    ]


def value_of(loaded: LoadedAblation, point: Assignments, key: str) -> AxisValue | None:
    """What a point assigns to a key, or, for a field, what its encoding has; None if neither says."""
    if not is_field(key):
        return point.get(key)
    encodings = _encodings(loaded, point)
    place = field_place(encodings, key)
    if place is None or key in point:
        return None if place is None else point[key]
    index, field_path = place
    if len(field_path) != 1:
        return None
    encoding = encodings[index] if isinstance(encodings[index], dict) else {"kind": encodings[index]}
    cls = ENCODINGS.get(encoding["kind"])
    if field_path[0] not in encoding and (cls is None or field_path[0] not in cls.model_fields):
        return None
    if field_path[0] in encoding:
        value = encoding[field_path[0]]
    else:
        value = cls.model_fields[field_path[0]].default if cls else None
    return AxisValue.of(value)


def _encodings(loaded: LoadedAblation, point: Assignments) -> Sequence[Json]:
    """The list of encodings of a point, as it was written; empty where it is not a list."""
    part, _, name = ENCODINGS_KEY.partition(".")
    if ENCODINGS_KEY in point:
        encodings = point[ENCODINGS_KEY].value
    else:
        model = point[part].value if part in point else loaded.content.base.get(part)
        encodings = model.get(name) if isinstance(model, dict) else None
    return encodings if isinstance(encodings, list) else ()


_Group = list[Assignments]
"""The alternatives of an axis, or the draws of a random search. All have the same keys."""

_Open = tuple[Assignments, tuple[_Group, ...]]
"""A point, and the axes of fields that it has no encoding for. A condition may still give it one."""


class _Expansion:
    """Makes points of layers, axes and conditions.

    Until a point is settled it may hold values of fields that it has no encoding for. They match no condition.
    """

    def __init__(self, loaded: LoadedAblation) -> None:
        self.loaded = loaded

    def has_place(self, point: Assignments, key: str) -> bool:
        """The point's model has a place for the key: a field needs its encoding."""
        return not is_field(key) or field_place(_encodings(self.loaded, point), key) is not None

    def combinations(self, groups: Sequence[_Group]) -> Iterator[_Open]:
        """The product of groups: first the groups that decide which encodings a model has, then groups of fields.

        Every point starts with the layers. Rows that an assignment adds beside the base follow at the end.
        """
        layers = self.loaded.layers
        points: Iterator[_Open] = iter([(layers, ())])
        for group in _encodings_first(groups):
            points = self._with_group(points, group)
        return itertools.chain(points, ((layers | row, ()) for row in self.loaded.beside))

    def _with_group(self, points: Iterator[_Open], group: _Group) -> Iterator[_Open]:
        keys = group[0].keys()
        conditional = all(map(is_field, keys))
        for point, waiting in points:
            if conditional and not any(self.has_place(point, key) for key in keys):
                yield point, (*waiting, group)
            else:
                for alternative in group:
                    yield point | alternative, waiting

    def settled(self, points: Iterator[_Open]) -> Iterator[Assignments]:
        """Points with all conditions applied, without fields of encodings that they lack, each once."""
        for index in range(len(self.loaded.content.when)):
            points = self._with_condition(points, index)
        seen = set()
        for point, _ in points:
            if not any(map(is_field, point)):
                yield point
                continue
            with_place = {key: value for key, value in point.items() if self.has_place(point, key)}
            content = tuple(with_place.items())
            if content not in seen:
                seen.add(content)
                yield with_place

    def conditioned(self, point: Assignments) -> Assignments:
        """The point with layers and conditions. Only where conditions have no axes: then it is one point."""
        (settled,) = self.settled(iter([(self.loaded.layers | point, ())]))
        return settled

    def _with_condition(self, points: Iterator[_Open], index: int) -> Iterator[_Open]:
        """The points with the axes and values of a condition, except those of keys that a layer fixes."""
        condition, fixed = self.loaded.content.when[index], self.loaded.fixed
        values = {
            key: self.loaded.labelled(key, value, ("when", index, "set", key))
            for key, value in condition.set.items()
            if key not in fixed
        }
        axes = [
            [{key: value} for value in axis_values(axis, ("when", index, "grid", key))]
            for key, axis in condition.grid.items()
            if key not in fixed
        ]
        for point, waiting in points:
            if not matches(self.loaded, point, condition.match):
                yield point, waiting
                continue
            changed: Iterator[_Open] = iter([(point | values, ())])
            for group in (*_encodings_first(axes), *waiting):
                changed = self._with_group(changed, group)
            yield from changed


def _encodings_first(groups: Sequence[_Group]) -> list[_Group]:
    """The groups in order, but groups of fields alone only after the groups that assign the list of encodings."""
    last = max((index for index, group in enumerate(groups) if group[0].keys() & {*DECIDING_KEYS}), default=-1)

    def place(index: int) -> tuple[int, bool]:
        of_fields = all(map(is_field, groups[index][0]))
        return (max(index, last) if of_fields else index), of_fields

    return [groups[index] for index in sorted(range(len(groups)), key=place)]


def _axes(loaded: LoadedAblation) -> dict[str, list[AxisValue]]:
    return {key: axis_values(axis, ("grid", key)) for key, axis in loaded.axes.items()}


def _draws(search: RandomSearch) -> _Group:
    """The draws of a random search. The draws of a key depend on the seed and this key alone."""
    columns = []
    for key, distribution in search.space.items():
        # A text as the seed is hashed by SHA-512, and so gives the same draws in every process.
        generator = random.Random(f"{search.seed}/{key}")
        values = [distribution.value_at(generator.random()) for _ in range(search.samples)]
        columns.append([AxisValue.of(value, "search", "space", key) for value in values])
    return [dict(zip(search.space, values, strict=True)) for values in zip(*columns, strict=True)]


def axis_values(axis: Axis, origin: KeyPath) -> list[AxisValue]:
    """The values of an axis, with labels. Their key paths begin with `origin`."""
    if isinstance(axis, dict):
        return [AxisValue(label, value, (*origin, label)) for label, value in axis.items()]
    return [AxisValue.of(value, *origin, index) for index, value in enumerate(axis)]


class Labelled(Protocol):
    """A row of a plan or of a table."""

    @property
    def labels(self) -> Mapping[str, str]:
        """Axis key → label."""


AnyRow = TypeVar("AnyRow", bound=Labelled)


def agreeing_rows(
    rows: Iterable[AnyRow], others: Sequence[AnyRow], except_keys: Collection[str]
) -> Iterator[tuple[AnyRow, AnyRow]]:
    """Each row with each of the others that has the same labels on all axes that both have, except some; in order.

    It looks up labels, so that thousands of rows are not compared with each other: most have the same axes.
    """
    places_by_axes: dict[frozenset[str], list[int]] = {}
    for place, other in enumerate(others):
        places_by_axes.setdefault(frozenset(other.labels).difference(except_keys), []).append(place)
    places_by_labels: dict[tuple[frozenset[str], frozenset[str]], dict[frozenset[tuple[str, str]], list[int]]] = {}

    def labels_on(row: AnyRow, axes: frozenset[str]) -> frozenset[tuple[str, str]]:
        return frozenset((axis, row.labels[axis]) for axis in axes)

    for row in rows:
        found: list[int] = []
        for axes, places in places_by_axes.items():
            shared = axes.intersection(row.labels)
            by_labels = places_by_labels.get((axes, shared))
            if by_labels is None:
                by_labels = places_by_labels[axes, shared] = {}
                for place in places:
                    by_labels.setdefault(labels_on(others[place], shared), []).append(place)
            found += by_labels.get(labels_on(row, shared), [])
        yield from ((row, others[place]) for place in sorted(found))
