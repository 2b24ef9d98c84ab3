"""From an ablation to its plan: rows (points of the grid), and runs (a row with a seed), each run once."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from cope_sweep.config.ablation import EarlyStopping, Optuna, Published, RandomSearch
from cope_sweep.config.checks import (
    check_assigned_mappings,
    check_claims,
    check_fields,
    check_figures,
    check_metrics,
    check_points,
    check_resources,
    check_rules,
    check_search,
    resolved_schedule,
    resolved_search,
    without_lost_figures,
)
from cope_sweep.config.explain import SpecProblem, explain_all
from cope_sweep.config.keys import depth, is_below, is_field, key_path, set_key, short_names
from cope_sweep.config.loading import Assignments, AxisValue, LoadedAblation
from cope_sweep.config.points import (
    example_points,
    matches,
    parameters_of,
    point_of,
    points_of,
    size_of_space,
)
from cope_sweep.config.run import RunSpec, part_text
from cope_sweep.config.source import ASSIGNED, Json, SpecError, composed, default_label, error_at
from cope_sweep.errors import InvalidValue
from cope_sweep.frozen import metric_parts
from cope_sweep.positions import Encoding
from cope_sweep.tasks import VALIDATION

PARTS: dict[str, TypeAdapter[Any]] = {
    name: TypeAdapter(field.rebuild_annotation()) for name, field in RunSpec.model_fields.items() if name != "seed"
}
"""The parts of a run (task, model, train, evaluate) and what validates them."""


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
    figures: frozenset[int] = frozenset()
    """The figures of the ablation that draw it, by their index in the file."""
    values: Mapping[str, Json] = field(default_factory=dict)
    """Axis key → its value in this row, as the file has it."""
    better: frozenset[int] = frozenset()
    """The claims of the ablation that say it is better than others, by their index in the file."""
    than: frozenset[int] = frozenset()
    """The claims that say others are better, or that it is so itself as another variant evaluates it."""


@dataclass(frozen=True)
class Plan:
    """Everything that an ablation trains, in order, without duplicates.

    Where a search suggests runs by results, the plan holds those that were suggested so far.
    """

    ablation: LoadedAblation
    rows: tuple[Row, ...]
    schedule: EarlyStopping | None = None
    """The rule that stops runs early, with every setting filled in; None: every run trains to its end."""
    search: Optuna | None = None
    """The search that suggests further rows, with every setting filled in; None: the plan has all its rows."""
    examples: tuple[Row, ...] = ()
    """Rows at the ends of the search space, if further rows are suggested: what those may cost."""
    chosen: tuple[str, ...] = ()
    """The values of `--rows` that have chosen the rows; empty: the plan has all rows."""

    @property
    def done_statuses(self) -> tuple[Literal["finished", "stopped"], ...]:
        """Those of runs that the same command does not train again. Without a schedule, it trains stopped runs on."""
        return ("finished",) if self.schedule is None else ("finished", "stopped")

    @property
    def reported_choices(self) -> tuple[tuple[str, str], ...]:
        """Key and metric of a search or schedule that chooses runs by a test set that the table reports."""
        names = [metric.name for metric in self.ablation.content.metrics]
        reported = {part for name in names for part in (name, *metric_parts(name))}
        choosers = (("search", self.search), ("schedule", self.schedule))
        chosen = [
            (key, chooser.metric) for key, chooser in choosers if chooser is not None and chooser.metric is not None
        ]
        return tuple((key, name) for key, name in chosen if name in reported and VALIDATION not in name.split("/"))

    @property
    def is_drawn(self) -> bool:
        """A search chose its rows, to find the best of them: they are not compared with each other."""
        return isinstance(self.ablation.content.search, (RandomSearch, Optuna))

    @cached_property
    def samples(self) -> int:
        """The number of rows that the search suggests in all: its `samples`, or what its space has if that is less."""
        return int(min(self.search.samples, size_of_space(self.ablation))) if self.search else 0

    @property
    def open_samples(self) -> int:
        """The number of rows that the search has still to suggest."""
        return max(0, self.samples - len(self.rows))

    @property
    def name(self) -> str:
        """The ablation's name."""
        return self.ablation.name

    @cached_property
    def axes(self) -> dict[str, str]:
        """Axis key → its short name in tables: the last part of the key, if no other axis ends with the same part."""
        keys = dict.fromkeys(key for row in self.rows or self.examples for key in row.labels)
        # An axis of fields is not in every row, so the order in the file counts.
        return short_names(dict.fromkeys([*(key for key in self.ablation.content.grid if key in keys), *keys]))

    @cached_property
    def runs(self) -> tuple[RunSpec, ...]:
        """Every run once: the first seed of every row, then the second, …, so that all rows fill at the same rate."""
        columns = itertools.zip_longest(*(row.runs for row in self.rows))
        return tuple({run.run_id: run for column in columns for run in column if run is not None}.values())

    @cached_property
    def _rows_by_run(self) -> dict[str, Row]:
        # Reversed: if several rows have the same run, the first of them wins.
        return {run.run_id: row for row in reversed(self.rows) for run in row.runs}

    def row_of(self, run_id: str) -> Row | None:
        """The row that holds a run, or None if the plan does not contain the run."""
        return self._rows_by_run.get(run_id)

    def row_name(self, run_id: str) -> str:
        """The name of the row that holds a run, or an empty string."""
        row = self.row_of(run_id)
        return row.name if row else ""


def expand(loaded: LoadedAblation, *, max_runs: int | None = None) -> Plan:
    """The plan of an ablation. It has no rows yet where a search suggests them by results (`search: optuna`).

    Raises SpecError if a key, value or combination is not valid in a run, if no row is left, or, before it makes any
    run, if there are more than `max_runs` runs.
    """
    check_search(loaded)
    if isinstance(loaded.content.search, (RandomSearch, Optuna)):
        _check_size(loaded, loaded.content.search.samples * len(loaded.content.row_seeds), max_runs)
    if isinstance(loaded.content.search, Optuna):
        # Its checks need examples of points only: the rows do not exist yet.
        return plan_of_recorded(loaded, [])
    # Points are made before exclusions: with a limit, three in four may be excluded.
    all_points = points_of(loaded, None if max_runs is None else 4 * max_runs)
    check_points(loaded, all_points)
    points = [p for p in all_points if not any(matches(loaded, p, condition) for condition in loaded.content.exclude)]
    if not points:
        raise loaded.source.error(("exclude",), "the ablation has no row left; remove an exclusion", "no_row")
    _check_size(loaded, len(points) * len(loaded.content.row_seeds), max_runs)
    loaded, rows, kinds = _checked(loaded, points)
    check_rules(loaded, all_points)
    return Plan(loaded, rows, resolved_schedule(loaded, kinds))


def _checked(
    loaded: LoadedAblation, points: Sequence[Assignments]
) -> tuple[LoadedAblation, tuple[Row, ...], list[RunSpec]]:
    """The ablation without lost figures, the rows of points, and one run of each kind. Raises SpecError."""
    loaded = without_lost_figures(loaded, points)
    rows = _rows(loaded, points)
    kinds = _kinds_of_runs(rows)
    check_fields(loaded, points, _encodings(rows))
    check_metrics(loaded, kinds)
    check_figures(loaded, points, kinds)
    check_claims(loaded, rows)
    return loaded, rows, kinds


def _check_size(loaded: LoadedAblation, runs: int, max_runs: int | None) -> None:
    if max_runs is not None and runs > max_runs:
        message = f"{runs:,} runs are more than {max_runs:,}; leave out axes, values or seeds"
        raise loaded.source.error((), message, "too_many_runs", runs=runs, limit=max_runs)


def row_of(loaded: LoadedAblation, parameters: Mapping[str, str | float]) -> Row:
    """The row that a search suggests, in an ablation that was already expanded. Raises SpecError."""
    (row,) = _rows(loaded, [point_of(loaded, parameters)])
    return row


def plan_of_recorded(loaded: LoadedAblation, recorded: Iterable[tuple[str, Mapping[str, str]]]) -> Plan:
    """The plan of what a search has suggested so far: pairs of a run id, of any seed, and the labels of its row.

    A pair whose labels now mean another run, or none, is left out: the ablation has changed. Raises SpecError if the
    ablation is not valid.
    """
    check_search(loaded)
    points = example_points(loaded)
    check_points(loaded, points)
    loaded, examples, kinds = _checked(loaded, points)
    rows: dict[str, Row] = {}
    for run_id, labels in recorded:
        with contextlib.suppress(SpecError):
            row = row_of(loaded, parameters_of(loaded, labels))
            if any(run.run_id == run_id for run in row.runs):
                rows[row.runs[0].run_id] = row
    return Plan(
        loaded, tuple(rows.values()), resolved_schedule(loaded, kinds), resolved_search(loaded, kinds), examples
    )


def _rows(loaded: LoadedAblation, points: Sequence[Assignments]) -> tuple[Row, ...]:
    """The rows of points; a point that is given twice is one row. Raises SpecError with one line per problem."""
    check_resources(loaded)
    check_assigned_mappings(loaded)
    builder = RunBuilder(loaded)
    content = loaded.content
    varied = {*loaded.axes, *getattr(content.search, "space", ())}
    labelled = [_labelled(point, varied, loaded.layers) for point in points]
    short = short_names(dict.fromkeys(key for values in labelled for key in values))
    named = [_names(values, short) for values in labelled]
    ambiguous = _ambiguous_names(named)
    rows: dict[str, Row] = {}
    problems: list[SpecError] = []
    for point, values, names in zip(points, labelled, named, strict=True):
        try:
            runs = builder.runs(point)
        except SpecError:
            # All rows are tried: one error lists the problems of all.
            problems += builder.problems(point)
            continue
        name, labels = _row_name(names, ambiguous), {key: value.label for key, value in values.items()}
        published = next((entry for entry in content.published if matches(loaded, point, entry.match)), None)
        figures = frozenset(
            index for index, figure in enumerate(content.figures) if matches(loaded, point, figure.rows)
        )
        assigned = {key: value.value for key, value in values.items()}
        better = frozenset(index for index, claim in enumerate(content.claims) if matches(loaded, point, claim.better))
        than = frozenset(
            index
            for index, claim in enumerate(content.claims)
            if matches(loaded, point, claim.than) and (index not in better or claim.variant != claim.than_variant)
        )
        # A row that both sides of a claim match is not compared with itself.
        row = Row(name, labels, runs, published, figures, assigned, better, than)
        same_run = rows.setdefault(runs[0].run_id, row)
        if same_run.name != name:
            message = f"the rows {same_run.name!r} and {name!r} are the same configuration; remove one of them"
            problems.append(loaded.source.error((), message, "same_rows", rows=[same_run.name, name]))
    rows_by_name: dict[str, Row] = {}
    for row in rows.values():
        other = rows_by_name.setdefault(composed(row.name), row)
        if other is not row:
            message = f"the names of the rows {other.name!r} and {row.name!r} look the same; give one another label"
            problems.append(loaded.source.error((), message, "same_names", rows=[other.name, row.name]))
    if problems:
        raise SpecError.of(list(_without_repetition(problems)))
    return tuple(rows.values())


def _without_repetition(problems: Iterable[SpecError]) -> Iterator[SpecError]:
    """Each problem once. If it is about a combination of values, it names the first row with it."""
    same: dict[str, list[SpecError]] = {}
    for problem in problems:
        same.setdefault(str(problem), []).append(problem)
    for message, repeated in same.items():
        first = repeated[0]
        others = f"; and in {len(repeated) - 1} others" if len(repeated) > 1 else ""
        row = f" (in the row {first.data['combination']}{others})" if "combination" in first.data else ""
        yield SpecError(message + row, code=first.code, **first.data)


def _kinds_of_runs(rows: Iterable[Row]) -> list[RunSpec]:
    """One run for each task, each number of steps and each way of evaluation among `rows`."""
    kinds: dict[tuple[str, int, str], RunSpec] = {}
    for row in rows:
        run = row.runs[0]
        kinds.setdefault((run.task.model_dump_json(), run.train.steps, run.evaluate.model_dump_json()), run)
    return list(kinds.values())


def _encodings(rows: Iterable[Row]) -> dict[str, type[Encoding]]:
    return {encoding.kind: type(encoding) for row in rows for encoding in row.runs[0].model.position}


def _labelled(point: Assignments, varied: Collection[str], layers: Assignments) -> Assignments:
    """The values that tables show: of what varies.

    What a condition sets follows from these, unless it replaces an axis's value.
    """

    def is_set(value: AxisValue) -> bool:
        return value.origin[0] == "when" and value.origin[2] == "set"

    return {
        key: value
        for key, value in point.items()
        if value is not layers.get(key) and (key in varied or not is_set(value))
    }


def _names(values: Assignments, short: Mapping[str, str]) -> dict[str, str]:
    """Axis key → what the name of the row says: the label; of a field, `p_max 8`, as not every row has it."""
    return {
        key: f"{short[key]} {value.label}"
        if is_field(key) and value.label == default_label(value.value)
        else value.label
        for key, value in values.items()
    }


def _ambiguous_names(rows: Iterable[Mapping[str, str]]) -> set[tuple[str, ...]]:
    """The combinations of names that occur with different keys."""
    keys: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for names in rows:
        keys.setdefault(tuple(names.values()), set()).add(tuple(names))
    return {names for names, key_sets in keys.items() if len(key_sets) > 1}


def _row_name(names: dict[str, str], ambiguous: set[tuple[str, ...]]) -> str:
    """The names of a row's values, with their keys if another row has the same ones for other keys."""
    if tuple(names.values()) in ambiguous:
        return " · ".join(name if is_field(key) else f"{key.split('.')[-1]}={name}" for key, name in names.items())
    return " · ".join(names.values()) or "base"


# -- the runs of points ------------------------------------------------------------------------------------------------


class RunBuilder:
    """Makes the runs of an ablation's points.

    Points share their values. Points that assign equal values to a part of a run also share that part.
    """

    def __init__(self, loaded: LoadedAblation) -> None:
        self.loaded = loaded
        self._parts: dict[tuple[str, tuple[AxisValue, ...]], tuple[Any, str]] = {}
        """Name of a part, and the values that it was made of → the part, and its text in the run's identity."""

    def runs(self, point: Assignments) -> tuple[RunSpec, ...]:
        """The runs of a point, one per seed, with their ids. Raises SpecError."""
        assigned: dict[str, list[str]] = {name: [] for name in self.loaded.content.base}
        for key in point:
            assigned.setdefault(key.partition(".")[0], []).append(key)
        seeds = self.loaded.content.row_seeds
        try:
            parts = {name: self._part(name, keys, point) for name, keys in assigned.items()}
            run = RunSpec.model_validate({name: part for name, (part, _) in parts.items()} | {"seed": seeds[0]})
        except ValueError:  # of pydantic or of `set_key`
            raise SpecError.of(self.problems(point)) from None
        # A part that was resolved, as a budget in tokens, has another text.
        return run.with_seeds(seeds, {name: text for name, (part, text) in parts.items() if getattr(run, name) is part})

    def _part(self, name: str, keys: list[str], point: Assignments) -> tuple[Any, str]:
        """A part of a run with the values that `point` assigns to its keys, and its text in the run's identity."""
        made_of = name, tuple(point[key] for key in keys)
        if made_of not in self._parts:
            if name not in PARTS:
                # `runs` catches it, and `problems` says the same with the line.
                raise ValueError(f"a run has no {name!r}")
            base = self.loaded.content.base
            data = {name: base[name]} if name in base else {}
            # A deeper key refines a higher one, so it has to come after it.
            for key in sorted(keys, key=depth):
                set_key(data, key, point[key].value)
            part = PARTS[name].validate_python(data[name])
            self._parts[made_of] = part, part_text(name, part)
        return self._parts[made_of]

    def problems(self, point: Assignments) -> list[SpecError]:
        """The errors of the run of a point. The whole run is validated, so that paths start at its top."""
        data = self.loaded.content.base | {"seed": self.loaded.content.seeds[0]}
        lost: list[SpecError] = []
        for key, value in sorted(point.items(), key=lambda item: depth(item[0])):
            try:
                set_key(data, key, value.value)
            except InvalidValue as error:
                place = self.loaded.source.location(value.origin)
                lost.append(error_at(place, (key,), str(error), error.code, **error.data))
        try:
            RunSpec.model_validate(data)
        except ValidationError as error:
            return [_located(self.loaded, point, data, problem) for problem in explain_all(error, RunSpec)]
        if not lost:
            raise AssertionError("a run is valid exactly if its parts and their combination are")
        return lost


def _located(loaded: LoadedAblation, point: Assignments, data: Json, problem: SpecProblem) -> SpecError:
    """The error about the run in `data`, with the line of the axis value or base key that caused it."""
    path = problem.path
    parts = key_path(data, path)
    name = ".".join(parts)
    for key, value in sorted(point.items(), key=lambda item: -depth(item[0])):
        length = depth(key) + 1
        if ".".join(parts[:length]) == key or (is_field(name) and is_below(key, name)):
            place = loaded.source.location((*value.origin, *path[length:]))
            shown = parts if is_field(key) else path
            return error_at(place, shown, problem.message, problem.code, **problem.data)
    error_data = dict(problem.data)
    if point and not path:
        error_data["combination"] = ", ".join(f"{key} = {value.label}" for key, value in point.items())
    # Of values that do not go together, name those of `--set`: without them the file is valid.
    assigned = [
        loaded.source.location(value.origin)
        for key, value in point.items()
        if value.origin[0] == ASSIGNED and (not path or is_below(key, name))
    ]
    path = ("base", *path)
    return error_at(
        ", ".join(assigned) or loaded.source.location(path), path, problem.message, problem.code, **error_data
    )
