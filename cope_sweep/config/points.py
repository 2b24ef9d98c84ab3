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

from cope_sweep.config.ablation import Axis, Distribution, Optuna, Point, RandomSearch
from cope_sweep.config.keys import DECIDING_KEYS, ENCODINGS_KEY, field_place, is_field
from cope_sweep.config.loading import LoadedAblation
from cope_sweep.config.source import Json, KeyPath, default_label
from cope_sweep.errors import InvalidValue
from cope_sweep.positions import ENCODINGS

SEPARATOR = " · "
"""Between the labels of zipped axes."""
MAX_POINTS = 1_000_000
"""Largest number of points of a grid with its draws. It stops files that would use up the memory."""


@dataclass(frozen=True, slots=True, eq=False)
class AxisValue:
    """A value that a point assigns, its label, and its key path in the file."""

    label: str
    value: Json
    origin: KeyPath

    @classmethod
    def of(cls, value: Json, *origin: str | int) -> AxisValue:
        """A value that the file gives no label."""
        return cls(default_label(value), value, origin)


Assignments = dict[str, AxisValue]
"""Axis key → value: one point."""


@dataclass(frozen=True)
class Dimension:
    """One dimension of a search by suggestions: the options of an axis, of zipped axes or of `choice`, or numbers."""

    keys: tuple[str, ...]
    """The keys of a run that it assigns: one, or several if axes are zipped."""
    options: tuple[Assignments, ...] = ()
    numbers: Distribution | None = None
    """The distribution of a number; None: it has options."""

    @property
    def name(self) -> str:
        """The keys, joined: `model.dim+model.heads`."""
        return "+".join(self.keys)

    @property
    def is_of_fields(self) -> bool:
        """Whether it only varies fields of encodings. Rows without these encodings do not have it."""
        return all(map(is_field, self.keys))

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
                raise InvalidValue(f"{self.name} has no value {parameter!r}", key=self.name, value=parameter)
            return self.options[self.choices.index(str(parameter))]
        (key,) = self.keys
        return {key: AxisValue.of(self.numbers.rounded(float(parameter)), "search", "space", key)}

    def parameter(self, labels: Mapping[str, str]) -> str | float:
        """The choice or number of a row with these labels. Raises ValueError where the dimension does not have it."""
        if missing := [key for key in self.keys if labels.get(key) is None]:
            raise InvalidValue(f"{missing[0]} has no value", key=missing[0], value=None)
        label = SEPARATOR.join(labels[key] for key in self.keys)
        if self.numbers is not None:
            return self.numbers.number_of(label)
        if label not in self.choices:
            raise InvalidValue(f"{self.name} has no value {label!r}", key=self.name, value=label)
        return label


def _joined(option: Assignments) -> str:
    return SEPARATOR.join(value.label for value in option.values())


def points_of(loaded: LoadedAblation, limit: int | None = None) -> list[Assignments]:
    """All points, in order, each once, before exclusion.

    Raises SpecError where they are more than `limit`, else MAX_POINTS.
    """
    limit = MAX_POINTS if limit is None else min(limit, MAX_POINTS)
    groups = _axis_groups(loaded)
    if isinstance(loaded.content.search, RandomSearch):
        groups.append(_draws(loaded.content.search))
    included = (
        {key: AxisValue.of(value, "include", index, key) for key, value in row.items()}
        for index, row in enumerate(loaded.content.include)
    )
    expansion = _Expansion(loaded)
    of_grid = expansion.settled(expansion.combinations(groups))
    points = list(itertools.islice(of_grid, limit + 1))
    if len(points) > limit:
        raise loaded.source.error(
            ("grid",),
            f"the combinations of the values are more than {limit:,} points; leave out axes or values",
            "too_many_points",
            limit=limit,
        )
    return [*points, *expansion.settled(((point, ()) for point in included), of_include=True)]


def dimensions_of(loaded: LoadedAblation) -> tuple[Dimension, ...]:
    """The dimensions of a search by suggestions: axes, zipped axes, and the keys of the search space."""
    search = loaded.content.search
    dimensions = [Dimension(tuple(group[0]), tuple(group)) for group in _axis_groups(loaded)]
    for key, distribution in (search.space if isinstance(search, Optuna) else {}).items():
        if distribution.choice is None:
            dimensions.append(Dimension((key,), numbers=distribution))
        else:
            options = tuple({key: AxisValue.of(value, "search", "space", key)} for value in distribution.choice)
            dimensions.append(Dimension((key,), options))
    return tuple(dimensions)


def chosen_parameters(
    loaded: LoadedAblation, choose: Callable[[Dimension], str | float]
) -> tuple[dict[str, str | float], Assignments]:
    """The parameters of one row of a search by suggestions, and its point.

    `choose` is called for each dimension; last for fields of encodings, and only if the row's model has the encoding.
    """
    expansion = _Expansion(loaded)
    dimensions = sorted(dimensions_of(loaded), key=lambda dimension: dimension.is_of_fields)
    parameters: dict[str, str | float] = {}
    point: Assignments = {}
    for dimension in dimensions:
        if not dimension.is_of_fields or expansion.has_any(expansion.conditioned(point), dimension.keys):
            parameters[dimension.name] = choose(dimension)
            point |= dimension.assignments(parameters[dimension.name])
    ordered = {key: point[key] for axis in dimensions_of(loaded) for key in axis.keys if key in point}
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
    plain = [dimension for dimension in dimensions_of(loaded) if not dimension.is_of_fields]
    of_fields = [dimension for dimension in dimensions_of(loaded) if dimension.is_of_fields]
    points = []
    for start in _side_by_side(plain):
        point = expansion.conditioned(start)
        own_fields = [dimension for dimension in of_fields if expansion.has_any(point, dimension.keys)]
        points += [expansion.conditioned(start | fields) for fields in _side_by_side(own_fields)]
    return points


def _side_by_side(dimensions: Sequence[Dimension]) -> Iterator[Assignments]:
    """The first examples of all dimensions, the second, …, as many as the longest has. No dimensions: one point."""
    columns = [dimension.examples for dimension in dimensions]
    for index in range(max(map(len, columns), default=1)):
        yield _merged(column[min(index, len(column) - 1)] for column in columns)


def size_of_space(loaded: LoadedAblation) -> float:
    """The number of rows that a search can suggest; infinite if a number is not whole."""
    expansion, dimensions = _Expansion(loaded), dimensions_of(loaded)
    deciding = [axis for axis in dimensions if any(key in DECIDING_KEYS for key in axis.keys)]
    of_fields = [axis for axis in dimensions if axis.is_of_fields]
    other_sizes = [axis.size for axis in dimensions if axis not in deciding and axis not in of_fields]
    models = map(_merged, itertools.product(*(axis.options for axis in deciding)))
    sizes = (
        math.prod(axis.size for axis in of_fields if expansion.has_any(expansion.conditioned(model), axis.keys))
        for model in models
    )
    return math.prod(other_sizes) * sum(sizes)


def matches(loaded: LoadedAblation, point: Assignments, condition: Point) -> bool:
    """Whether a point meets a condition: each key has the label or value, or one of a list of them.

    A field may be assigned by the point, or be part of an encoding in its `model.position`.
    """
    for key, wanted in condition.items():
        actual = value_of(loaded, point, key)
        if actual is None:
            return False
        accepted = wanted if isinstance(wanted, list) else [wanted]
        if actual.label not in accepted and actual.value not in accepted and actual.value != wanted:
            return False
    return True


def value_of(loaded: LoadedAblation, point: Assignments, key: str) -> AxisValue | None:
    """What a point assigns to a key, or, for a field, what its encoding has; None: neither."""
    if not is_field(key):
        return point.get(key)
    encodings = _encodings(loaded, point)
    place = field_place(encodings, key)
    if place is None or key in point:
        return None if place is None else point[key]
    index, field_path = place
    if ENCODINGS_KEY not in point or len(field_path) != 1:
        return None
    encoding = encodings[index] if isinstance(encodings[index], dict) else {"kind": encodings[index]}
    cls = ENCODINGS.get(encoding["kind"])
    if field_path[0] not in encoding and (cls is None or field_path[0] not in cls.model_fields):
        return None
    if field_path[0] in encoding:
        value = encoding[field_path[0]]
    else:
        value = cls.model_fields[field_path[0]].default if cls else None
    return AxisValue.of(value, *point[ENCODINGS_KEY].origin)


def has_encoding(loaded: LoadedAblation, point: Assignments, key: str) -> bool:
    """Whether a point's model has a place for the key: a field needs its encoding."""
    return not is_field(key) or field_place(_encodings(loaded, point), key) is not None


def _encodings(loaded: LoadedAblation, point: Assignments) -> Sequence[Json]:
    """The list of encodings of a point, as it was written; empty where it is not a list."""
    part, _, name = ENCODINGS_KEY.partition(".")
    if ENCODINGS_KEY in point:
        encodings = point[ENCODINGS_KEY].value
    else:
        model = point[part].value if part in point else loaded.content.base.get(part)
        encodings = model.get(name) if isinstance(model, dict) else None
    return encodings if isinstance(encodings, list) else ()


def _merged(parts: Iterable[Assignments]) -> Assignments:
    return {key: value for part in parts for key, value in part.items()}


_Group = list[Assignments]
"""The alternatives of an axis, or of a group of zipped axes. All have the same keys."""

_Open = tuple[Assignments, tuple[_Group, ...]]
"""A point, and the axes of fields that it has no encoding for. A condition may still give it one."""


class _Expansion:
    """Makes points of axes and conditions.

    Until a point is settled it may hold values of fields that it has no encoding for. They match no condition.
    """

    def __init__(self, loaded: LoadedAblation) -> None:
        self.loaded = loaded

    def has_any(self, point: Assignments, keys: Collection[str]) -> bool:
        """Whether any of these keys has a place in the point's model."""
        return any(has_encoding(self.loaded, point, key) for key in keys)

    def combinations(self, groups: Sequence[_Group]) -> Iterator[_Open]:
        """The product of groups: first the groups that decide which encodings a model has, then groups of fields."""
        points: Iterator[_Open] = iter([({}, ())])
        for group in _encodings_first(groups):
            points = self._with_group(points, group)
        return points

    def _with_group(self, points: Iterator[_Open], group: _Group) -> Iterator[_Open]:
        keys = group[0].keys()
        conditional = all(map(is_field, keys))
        for point, waiting in points:
            if conditional and not self.has_any(point, keys):
                yield point, (*waiting, group)
            else:
                for alternative in group:
                    yield point | alternative, waiting

    def settled(self, points: Iterator[_Open], *, of_include: bool = False) -> Iterator[Assignments]:
        """Points with all conditions applied, without fields of encodings that they lack, each once.

        Args:
            points: The points.
            of_include: Whether they are single rows (`include`), for which only conditions without an `if` hold.
        """
        for index, condition in enumerate(self.loaded.content.when):
            if not (of_include and condition.match):
                points = self._with_condition(points, index)
        seen = set()
        for point, _ in points:
            if not any(map(is_field, point)):
                yield point
                continue
            with_place = {key: value for key, value in point.items() if has_encoding(self.loaded, point, key)}
            content = tuple(with_place.items())
            if content not in seen:
                seen.add(content)
                yield with_place

    def conditioned(self, point: Assignments) -> Assignments:
        """The point after all conditions. Only for ablations whose conditions have no axes: it stays one point."""
        (settled,) = self.settled(iter([(point, ())]))
        return settled

    def _with_condition(self, points: Iterator[_Open], index: int) -> Iterator[_Open]:
        condition = self.loaded.content.when[index]
        fixed = {key: AxisValue.of(value, "when", index, "set", key) for key, value in condition.set.items()}
        axes = [
            [{key: value} for value in _axis_values(axis, ("when", index, "grid", key))]
            for key, axis in condition.grid.items()
        ]
        for point, waiting in points:
            if not matches(self.loaded, point, condition.match):
                yield point, waiting
                continue
            changed: Iterator[_Open] = iter([(point | fixed, ())])
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
    """The draws of a random search. The draws of a key depend on the seed and this key alone."""
    columns = []
    for key, distribution in search.space.items():
        generator = random.Random(f"{search.seed}/{key}")
        values = [distribution.value_at(generator.random()) for _ in range(search.samples)]
        columns.append([AxisValue.of(value, "search", "space", key) for value in values])
    return [dict(zip(search.space, values, strict=True)) for values in zip(*columns, strict=True)]


def _axis_values(axis: Axis, origin: KeyPath) -> list[AxisValue]:
    if isinstance(axis, dict):
        return [AxisValue(label, value, (*origin, label)) for label, value in axis.items()]
    return [AxisValue.of(value, *origin, index) for index, value in enumerate(axis)]
