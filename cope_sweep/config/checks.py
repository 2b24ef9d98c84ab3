"""Checks of a whole ablation, beyond the checks of single runs. Each raises SpecError with the line to change."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cope_sweep.config.ablation import Axis, EarlyStopping, Goal, GridSearch, Optuna, Point, RandomSearch
from cope_sweep.config.explain import suggest
from cope_sweep.config.keys import DECIDING_KEYS, ENCODINGS_KEY, RIVAL_KEYS, is_below, is_field, leaves
from cope_sweep.config.loading import Assignments, AxisValue, LoadedAblation, validated_content
from cope_sweep.config.points import Labelled, agreeing_rows, axis_values, dimensions_of, matches, names_value, value_of
from cope_sweep.config.run import FACT_METRICS, RunSpec
from cope_sweep.config.source import ASSIGNED, OPTION, FileList, FileMapping, Json, KeyPath, SpecError, places_of
from cope_sweep.errors import JsonValue
from cope_sweep.figures import FigureSpec
from cope_sweep.frozen import OF_LEARNED, is_reported, learning_parts, metric_parts
from cope_sweep.positions import Encoding
from cope_sweep.tasks import VALIDATION


def _no_axis(loaded: LoadedAblation, path: KeyPath, key: str, axes: Sequence[str]) -> SpecError:
    message = f"no axis is called {key!r}" + suggest(key, axes)
    return loaded.source.error(path, message, "unknown_axis", axis=key, allowed=list(axes))


def _no_metric(
    loaded: LoadedAblation, path: KeyPath, runs: Sequence[RunSpec], name: str, metrics: Sequence[str]
) -> SpecError:
    tasks = ", ".join(dict.fromkeys(run.task.kind for run in runs))
    message = f"the task {tasks} has no metric {name!r}"
    if "," in tasks:
        message = f"none of the tasks {tasks} has a metric {name!r}"
    message += suggest(name, metrics)
    return loaded.source.error(path, message, "unknown_metric", metric=name, task=tasks, allowed=list(metrics))


def _varied(loaded: LoadedAblation, points: Sequence[Assignments]) -> list[str]:
    """The keys that points assign, and not a scale or `--set`, sorted."""
    return sorted({key for point in points for key, value in point.items() if value is not loaded.layers.get(key)})


def check_points(loaded: LoadedAblation, points: Sequence[Assignments]) -> None:
    """Raises SpecError for a condition on a key or a value that no point has, which is probably a spelling mistake; and
    where the base or a point sets the seed.
    """
    keys, content = _varied(loaded, points), loaded.content
    # With a scale or `--set`, an axis of the file may have no row left, or one value.
    known_keys = {*keys, *loaded.fixed, *(path[-1] for path in loaded.assigning_places)}
    conditions: list[tuple[KeyPath, Point]] = [(("exclude", i), c) for i, c in enumerate(content.exclude)]
    conditions += [(("when", i, "if"), c.match) for i, c in enumerate(content.when)]
    conditions += [(("published", i, "match"), p.match) for i, p in enumerate(content.published)]
    conditions += [(("figures", i, "rows"), f.rows) for i, f in enumerate(content.figures)]
    for i, claim in enumerate(content.claims):
        conditions += [(("claims", i, "better"), claim.better), (("claims", i, "than"), claim.than)]
    for path, condition in conditions:
        for key in condition:
            known = key in known_keys or (is_field(key) and any(value_of(loaded, point, key) for point in points))
            if keys and not known:
                raise _no_axis(loaded, (*path, key), key, keys)
            _check_value(loaded, points, (*path, key), condition[key])
    for point in points:
        for key, rival in RIVAL_KEYS.items():
            if key in point and rival in point:
                raise loaded.source.error(
                    point[key].origin, f"a row also has {rival}; remove one of them", "two_budgets", key=key
                )
    seeds: list[KeyPath] = [("base", key) for key in ("seed", "seeds") if key in content.base]
    seeds += [point[key].origin for point in points for key in ("seed", "seeds") if key in point]
    if seeds:
        raise loaded.source.error(
            seeds[0],
            "seeds are not part of a row; write `seeds: [0, 1, …]` beside `base`, or beside `set` in a scale",
            "seed_in_row",
        )


def _check_value(loaded: LoadedAblation, points: Sequence[Assignments], path: KeyPath, wanted: Json) -> None:
    """Raises SpecError for a value of a condition, or an item of its list, that no row can have."""
    key = str(path[-1])
    here = {value for point in points if (value := value_of(loaded, point, key)) is not None}
    _check_is_clear(loaded, here, path, wanted)
    unknown = _unknown(wanted, here)
    if not unknown or not points or (is_field(key) and loaded.unchanged is not None):
        return
    if _is_inherited(loaded, path):
        return
    # A scale or `--set` may leave some of the file's values without a row; conditions then change nothing.
    written, is_open = _written_values(loaded, key)
    unknown = [] if is_open else _unknown(wanted, here | written)
    if unknown:
        labels = list(dict.fromkeys(value.label for value in (*here, *written)))
        message = f"no row has {unknown[0]!r} as its {key}{suggest(str(unknown[0]), sorted(labels))}"
        raise loaded.source.error(path, message, "unknown_value", key=key, value=unknown[0], allowed=sorted(labels))


def _is_inherited(loaded: LoadedAblation, path: KeyPath) -> bool:
    """The value is written in another file, so that it may be about rows that this one has replaced."""
    return loaded.source.location(path).startswith(tuple(f"{parent}:" for parent in loaded.source.parents))


def _check_is_clear(loaded: LoadedAblation, values: Collection[AxisValue], path: KeyPath, wanted: Json) -> None:
    """Raises SpecError for a list that is the value of some rows, and whose items name values of others."""
    if not isinstance(wanted, list):
        return
    whole = [value.label for value in values if value.value == wanted]
    items = {value.label: value.value for value in values if value.value != wanted and names_value(wanted, value)}
    names = sorted(items)
    if whole and items:
        raise loaded.source.error(
            path,
            f"{json.dumps(wanted)} may mean the value {whole[0]}, or any of the values {', '.join(names)}; write "
            f"{json.dumps([wanted])} for the one, {json.dumps([items[name] for name in names])} for the others",
            "ambiguous_value",
            key=str(path[-1]),
            value=wanted,
            labels=[whole[0], *names],
        )


def _unknown(wanted: Json, values: Collection[AxisValue]) -> list[Json]:
    if any(value.value == wanted for value in values):
        return []
    accepted = wanted if isinstance(wanted, list) else [wanted]
    return [item for item in accepted if not any(names_value([item], value) for value in values)]


def _written_values(loaded: LoadedAblation, key: str) -> tuple[set[AxisValue], bool]:
    """The values that the file gives a key anywhere, at all scales; and if it may have others, which are drawn."""
    contents = [loaded.content]
    if loaded.unchanged is not None:
        contents.append(validated_content(loaded.unchanged, loaded.unchanged.data))
    axes: list[Axis] = []
    single: list[Json] = []
    searches: list[object] = []
    for content in contents:
        scales = content.scales.values()
        grids = [content.grid, *(condition.grid for condition in content.when), *(scale.grid for scale in scales)]
        axes += [grid[key] for grid in grids if key in grid]
        sets = [*(condition.set for condition in content.when), *(scale.set for scale in scales)]
        single += [values[key] for values in sets if key in values]
        searches += [content.search, *(scale.search for scale in scales)]
    spaces = [space[key] for search in searches if key in (space := getattr(search, "space", {}))]
    axes += [distribution.choice for distribution in spaces if distribution.choice is not None]
    values = {AxisValue.of(value) for value in single}.union(*(axis_values(axis, ()) for axis in axes))
    return values, any(distribution.choice is None for distribution in spaces)


def check_fields(
    loaded: LoadedAblation, points: Sequence[Assignments], encodings: Mapping[str, type[Encoding]]
) -> None:
    """Raises SpecError for a key of a field, as `model.position.cope.p_max`, that has a place in none of the points.

    `encodings`: kind → class, of the encodings that any of the points has.
    """
    assigned = {key for point in points for key in point}
    for key, path in _fields_to_use(loaded):
        if key not in assigned:
            fields = [
                f"{ENCODINGS_KEY}.{kind}.{name}"
                for kind, cls in encodings.items()
                for name in cls.model_fields
                if name != "kind"
            ]
            if key in fields:  # an encoding of other rows has it
                hint = "; no row is left that it is for: remove it, or mend its condition"
            else:
                hint = suggest(key, fields) or f"; {ENCODINGS_KEY} is empty in all rows"
            message = f"no row has {key!r}, so it would have no effect{hint}"
            place = loaded.source.location(path)
            if place.startswith(OPTION):
                raise SpecError(f"{place}: {message}", code="no_effect", place=place, key=key, allowed=fields)
            raise loaded.source.error(path, message, "no_effect", key=key, allowed=fields)


def _fields_to_use(loaded: LoadedAblation) -> list[tuple[str, KeyPath]]:
    """Keys of fields and where they are assigned, if a row has to have them.

    Where a scale or `--set` gives other encodings, a field that was assigned before may have lost its encoding.
    """
    scaled_axes = loaded.content.scales[loaded.scale].grid if loaded.scale else {}
    has_own_encodings = not scaled_axes.keys().isdisjoint(DECIDING_KEYS)
    places = [(str(path[-1]), path) for path in loaded.assigning_places if path[-1] not in loaded.fixed]
    if has_own_encodings:
        places = []
    for key, layer in loaded.layers.items():
        if key in DECIDING_KEYS:
            places = [(other, path) for other, path in places if path[0] == ASSIGNED]
        elif layer.origin[0] == ASSIGNED or not has_own_encodings:
            places.append((key, layer.origin))
    return [(key, path) for key, path in places if is_field(key)]


def check_assigned_mappings(loaded: LoadedAblation) -> None:
    """Raises SpecError for `train: {lr: 0.1}` of a scale, `--set` or a condition where rows get another `train.lr` by
    an axis, which is deeper.
    """
    # Axes last, so that they win over conditions, which only some rows meet.
    deeper = {str(path[-1]): path for path in reversed(loaded.assigning_places) if path[-1] not in loaded.fixed}
    assigned = [(key, layer.value, layer.origin) for key, layer in loaded.layers.items()]
    for index, condition in enumerate(loaded.content.when):
        assigned += [(key, value, ("when", index, "set", key)) for key, value in condition.set.items()]
    for key, value, origin in assigned:
        if (key in loaded.fixed and origin[0] == "when") or _is_inherited(loaded, origin):
            continue
        for leaf, _ in leaves(value, key):
            above = (other for other in deeper if is_below(leaf, other) and is_below(other, key))
            winner = next((other for other in (leaf, RIVAL_KEYS.get(leaf), *above) if other in deeper), None)
            # One condition may refine what another one has set.
            if winner is None or leaf == key or is_field(leaf) or "when" == origin[0] == deeper[winner][0]:
                continue
            axis = f"rows that have their own {winner} ({loaded.source.location(deeper[winner])})"
            message = f"it has no effect on {leaf} of {axis}; write "
            if origin[0] == ASSIGNED:
                place = loaded.source.location(origin)
                raise SpecError(f"{place}: {message}--set {leaf}=…", code="no_effect", place=place, key=leaf)
            raise loaded.source.error(origin, f"{message}{leaf} as a key of its own", "no_effect", key=leaf)


def check_resources(loaded: LoadedAblation) -> None:
    """Raises SpecError where resources are given to some rows: a sweep has one kind of run."""
    for path in loaded.assigning_places:
        if str(path[-1]).startswith("resources."):
            raise loaded.source.error(
                path,
                "resources are for the whole sweep, and do not change a run; write them under `resources`, or train "
                f"these rows with a command of their own: --rows CONDITION --set {path[-1]}=…",
                "resources_axis",
            )


def check_search(loaded: LoadedAblation) -> None:
    """Raises SpecError where the search space and the rest of the file contradict each other."""
    content, search = loaded.content, loaded.content.search
    if not isinstance(search, (RandomSearch, Optuna)):
        return
    for key in search.space:
        if key in content.grid:
            raise loaded.source.error(
                ("search", "space", key),
                f"{key!r} is also an axis of the grid; remove it from one of them",
                "axis_in_space",
            )
    if not isinstance(search, Optuna):
        return
    name = f"the search {search.kind}"
    if search.seeds_per_sample is not None and search.seeds_per_sample > len(content.seeds):
        raise loaded.source.error(
            ("search", "seeds_per_sample"),
            f"{search.seeds_per_sample} is more than the {len(content.seeds)} of `seeds`; list as many there: "
            f"`seeds: {list(range(search.seeds_per_sample))}`",
            "too_few_seeds",
            seeds=len(content.seeds),
        )
    dimensions = dimensions_of(loaded)
    if not dimensions:
        raise loaded.source.error(
            ("search",), f"{name} has nothing to vary; give it a `space`, or the ablation a grid", "empty_space"
        )
    for dimension in dimensions:
        if len(set(dimension.choices)) < len(dimension.choices):
            raise loaded.source.error(
                dimension.values[0].origin[:-1],
                f"{name} needs a different label for each value of {dimension.name}",
                "same_labels",
                axis=dimension.name,
            )
    _check_conditions_of_suggestions(loaded, {dimension.name for dimension in dimensions}, name)


def _check_conditions_of_suggestions(loaded: LoadedAblation, varied: set[str], name: str) -> None:
    content = loaded.content
    remedy = "remove it, or use `search: random` or a grid"
    origins = [value.origin for row in loaded.beside for value in row.values()]
    for path in [*([("exclude",)] if content.exclude else []), *origins]:
        message = f"{name} suggests points itself, so this has no effect; {remedy}"
        raise loaded.source.error(path, message, "not_with_suggestions")
    for index, figure in enumerate(content.figures):
        if figure.has_claim:
            raise loaded.source.error(
                ("figures", index, "claim"),
                f"{name} suggests rows, and this claim needs one row that is known; make a figure without a claim",
                "not_with_suggestions",
            )
    for index, condition in enumerate(content.when):
        if condition.grid:
            raise loaded.source.error(
                ("when", index, "grid"), f"{name} has no conditional axes; {remedy}", "not_with_suggestions"
            )
        for key in sorted(varied & condition.set.keys()):
            raise loaded.source.error(
                ("when", index, "set", key),
                f"{name} varies {key!r}, so it cannot be fixed for some points; {remedy}",
                "not_with_suggestions",
            )


def check_rules(loaded: LoadedAblation, points: Sequence[Assignments]) -> None:
    """Raises SpecError for a rule of `when`, an exclusion, or published numbers, that are for none of the points.

    With a scale or `--set`, or in a random search, it may be; so may a rule that is inherited.
    """
    content = loaded.content
    if loaded.unchanged is not None or not isinstance(content.search, GridSearch):
        return
    origins = {value.origin[:2] for point in points for value in point.values()} if content.when else set()
    unused: list[KeyPath] = [("when", i, "if") for i in range(len(content.when)) if ("when", i) not in origins]
    others: dict[KeyPath, Point] = {("exclude", i): condition for i, condition in enumerate(content.exclude)}
    others |= {("published", i, "match"): entry.match for i, entry in enumerate(content.published)}
    unused += [path for path, condition in others.items() if not any(matches(loaded, p, condition) for p in points)]
    for path in unused:
        if not _is_inherited(loaded, path):
            reason = "no row matches it"
            if path[0] == "when":
                reason = "no row matches it when its turn comes, or entries after it replace all that it sets"
            raise loaded.source.error(path, f"{reason}; mend the condition, or remove it", "no_effect")


def check_metrics(loaded: LoadedAblation, runs: Sequence[RunSpec]) -> None:
    """Raises SpecError for a metric of the table or of published numbers that none of `runs` reports, and for a primary
    one that is no column or says nothing about which row is better.

    Tasks, lengths and variants (`evaluate`) may differ between runs: cells of a run without the metric stay empty.
    """
    content = loaded.content
    names = [metric.name for metric in content.metrics]
    if content.primary is not None and content.primary not in names:
        message = f"the table has no column {content.primary!r}{suggest(content.primary, names)}"
        raise loaded.source.error(("primary",), message, "unknown_column", column=content.primary, allowed=names)
    if not content.primary_metric.compared:
        index = names.index(content.primary_metric.name)
        raise loaded.source.error(
            ("metrics", index, "compared"),
            f"the primary metric decides which row is best, so it cannot be {names[index]!r}; name a measured one: "
            "`primary: METRIC`",
            "not_compared",
            metric=names[index],
        )
    of_runs = dict.fromkeys(name for run in runs for name in run.metrics)
    metric_names = [*of_runs, *FACT_METRICS]
    for index, metric in enumerate(content.metrics):
        if runs and not is_reported(metric.name, metric_names):
            raise _no_metric(loaded, ("metrics", index, "name"), runs, metric.name, metric_names)
        _check_is_learned(loaded, index)
    for index, published in enumerate(content.published if loaded.unchanged is None else ()):
        for name in published.values:
            path: KeyPath = ("published", index, "values", name)
            if not is_reported(name, metric_names) and not _is_inherited(loaded, path):
                raise _no_metric(loaded, path, runs, name, metric_names)


def _check_is_learned(loaded: LoadedAblation, index: int) -> None:
    """Raises SpecError for a metric that depends on when another one is learned, if no column says when it is."""
    name = loaded.content.metrics[index].name
    prefix, metric = learning_parts(name)
    limited = [each.name for each in loaded.content.metrics if each.learned is not None]
    if not prefix or metric in limited or (prefix == OF_LEARNED and limited):
        return
    column = "a column" if prefix == OF_LEARNED else f"a column {metric}"
    raise loaded.source.error(
        ("metrics", index, "name"),
        f"{name} depends on which runs have learned the task, so {column} has to say when it is learned: "
        "`learned: 1.0`",
        "not_learned",
        metric=metric,
    )


class ClaimedRow(Labelled, Protocol):
    """A row of the plan."""

    @property
    def better(self) -> Collection[int]:
        """The claims, by their index, that call it better."""

    @property
    def than(self) -> Collection[int]:
        """The claims that call it worse."""


def check_claims(loaded: LoadedAblation, rows: Sequence[ClaimedRow]) -> None:
    """Raises SpecError for a claim by which no rows are tested: about no such column, or no pair of known rows."""
    columns = {metric.name: metric for metric in loaded.content.metrics}
    names = list(columns)
    # A scale or --set may have other rows than the claims of the file are about, and a search suggests them later.
    scale = loaded.content.scales[loaded.scale] if loaded.scale and not loaded.assignments else None
    are_of_plan = loaded.unchanged is None or (scale is not None and scale.claims is not None)
    has_rows = are_of_plan and not isinstance(loaded.content.search, Optuna)
    for index, claim in enumerate(loaded.content.claims):
        better, than = claim.columns(loaded.content.primary_metric.name)
        for column, key in ((better, "metric" if claim.variant is None else "variant"), (than, "than_variant")):
            if column not in names:
                message = f"the table has no column {column!r}{suggest(column, names)}"
                place: KeyPath = ("claims", index, key)
                raise loaded.source.error(place, message, "unknown_column", column=column, allowed=names)
            if not columns[column].compared:
                message = f"rows are not tested by {column!r}, which has `compared: false`; remove that, or the claim"
                raise loaded.source.error(("claims", index), message, "not_compared", column=column)
        if not has_rows:
            continue
        sides = {"better": [r for r in rows if index in r.better], "than": [r for r in rows if index in r.than]}
        for side, found in sides.items():
            if not found:
                message = "no row matches" if side == "better" else "no row matches, or only rows that `better` matches"
                raise loaded.source.error(("claims", index, side), message, "matching_rows", rows=0)
        if not any(agreeing_rows(sides["better"], sides["than"], claim.differing_axes)):
            raise loaded.source.error(
                ("claims", index, "than"),
                "no row has the same labels as one of `better` on the axes that neither names, or both with the same "
                "values, so there is nothing to compare",
                "no_pair",
            )


@dataclass(frozen=True)
class Planned:
    """A figure's place in its file, and the plan that it is checked against."""

    loaded: LoadedAblation
    place: KeyPath
    points: Sequence[Assignments]
    """The rows of the plan."""
    runs: Sequence[RunSpec]
    """One run of each kind: task, steps and evaluation."""
    axes: Sequence[str]
    """The keys that vary."""

    @property
    def are_examples(self) -> bool:
        """The points are examples of the rows that a search will suggest."""
        return isinstance(self.loaded.content.search, Optuna)

    @property
    def seeds(self) -> list[int]:
        """The seeds of each row."""
        return self.loaded.content.row_seeds

    def labels(self, axis: str | None) -> list[str]:
        """The labels of the values of an axis, sorted; none if no row has it, or a search suggests the rows later."""
        points = () if self.are_examples else self.points
        return sorted({point[axis].label for point in points if axis in point})

    def error(self, key: KeyPath, message: str, code: str, **data: JsonValue) -> SpecError:
        """An error about a key of the figure, with its line."""
        return self.loaded.source.error((*self.place, *key), message, code, **data)

    def no_metric(self, key: KeyPath, runs: Sequence[RunSpec], name: str, metrics: Sequence[str]) -> SpecError:
        """The error of a metric that none of these runs reports; `metrics` are those that they do."""
        return _no_metric(self.loaded, (*self.place, *key), runs, name, metrics)

    def check_metrics(self, names: Collection[tuple[KeyPath, str]], *, at_lengths: bool = False) -> None:
        """Raise SpecError for a metric that not all runs report.

        Args:
            names: Pairs of a key of the figure and the metric that it names.
            at_lengths: Whether metrics at other lengths than the trained one count, such as `test/perplexity@1024`.
        """
        for run in self.runs:
            reported = [name for name in run.metrics if at_lengths or "@" not in name]
            for key, name in names:
                if not is_reported(name, reported):
                    raise self.no_metric(key, [run], name, reported)

    def check_axes(self, axes: Mapping[str, str]) -> None:
        """Raise SpecError for an axis (key of the figure → the axis) that does not vary."""
        for key, axis in axes.items():
            if axis not in self.axes:
                raise _no_axis(self.loaded, (*self.place, key), axis, self.axes)

    def check_rows(self, condition: Point, *, one: bool) -> None:
        """Raise SpecError if no row meets a condition; or several do, and the figure shows `one`."""
        rows = sum(matches(self.loaded, point, condition) for point in self.points)
        if self.are_examples:
            return
        if not rows or (one and rows > 1):
            wanted = "one row" if one else "at least one row"
            message = f"{rows} rows match, and this figure needs {wanted}"
            raise self.error(("rows",), message, "matching_rows", rows=rows)


def check_figures(loaded: LoadedAblation, points: Sequence[Assignments], runs: Sequence[RunSpec]) -> None:
    """Raises SpecError for a figure of an axis, a metric, a row or a seed that the ablation does not have.

    `points` are the rows, and `runs` all kinds of runs.
    """
    axes = _varied(loaded, points)
    for index, figure in enumerate(loaded.content.figures):
        figure.check(Planned(loaded, ("figures", index), points, runs, axes))


def without_lost_figures(loaded: LoadedAblation, points: Sequence[Assignments]) -> LoadedAblation:
    """The ablation without figures that a scale or `--set` leaves nothing to draw: over an axis with one value, or of
    rows that are no longer there.

    A figure that the file itself cannot draw stays, so that `check_figures` says so.
    """
    if loaded.unchanged is None:
        return loaded
    varied = _varied(loaded, points)
    lost_keys = {*loaded.fixed, *(str(path[-1]) for path in loaded.assigning_places)} - {*varied}

    def is_lost(figure: FigureSpec) -> bool:
        if not lost_keys.isdisjoint(figure.axes().values()):
            return True
        has_rows = any(matches(loaded, point, figure.rows) for point in points)
        return not has_rows and not lost_keys.isdisjoint(figure.rows)

    figures, written = loaded.content.figures, loaded.source.data.get("figures", [])
    kept = [index for index, figure in enumerate(figures) if not is_lost(figure)]
    # Places of items are kept by index, and figures move up where one before them is left out.
    places = {new: places_of(written)[old] for new, old in enumerate(kept) if old in places_of(written)}
    left = FileMapping({"figures": FileList((written[index] for index in kept), places)})
    content = loaded.content.model_copy(update={"figures": [figures[index] for index in kept]})
    return replace(loaded, content=content, source=loaded.source.with_keys(left))


def resolved_search(loaded: LoadedAblation, runs: Sequence[RunSpec]) -> Optuna | None:
    """The search with metric and goal filled in, if it suggests runs by their results. Raises SpecError.

    `runs` are all kinds of runs that it may suggest.
    """
    search = loaded.content.search
    if not isinstance(search, Optuna):
        return None
    metric, goal = _objective(loaded, "search", search, runs)
    if metric.startswith("facts."):
        raise loaded.source.error(
            ("search", "metric"),
            f"{metric!r} is not a metric of an evaluation; choose another",
            "not_evaluated",
            metric=metric,
        )
    return search.model_copy(update={"metric": metric, "goal": goal})


def resolved_schedule(loaded: LoadedAblation, runs: Sequence[RunSpec]) -> EarlyStopping | None:
    """The schedule with metric, goal and grace filled in; None if no run is stopped early. Raises SpecError.

    `runs` are all kinds of runs of the plan.
    """
    schedule = loaded.content.schedule
    if not isinstance(schedule, EarlyStopping):
        return None
    metric, goal = _objective(loaded, "schedule", schedule, runs)
    for run in runs:
        if run.evaluate.every >= run.train.steps:
            raise loaded.source.error(
                ("schedule",),
                f"the schedule {schedule.kind} compares runs at evaluations before the last step, but evaluate.every = "
                f"{run.evaluate.every} is not less than train.steps = {run.train.steps}; evaluate more often, or write "
                "`schedule: none`",
                "no_evaluation",
                every=run.evaluate.every,
                steps=run.train.steps,
            )
        within = run.metrics_in_training
        if metric not in within:
            raise loaded.source.error(
                ("schedule", "metric") if schedule.metric else ("schedule",),
                f"{metric!r} is not measured before the last step, so runs cannot be compared by it"
                + suggest(metric, within),
                "not_evaluated",
                metric=metric,
                allowed=list(within),
            )
    steps = min(run.train.steps for run in runs)
    if schedule.grace is not None and schedule.grace >= steps:
        raise loaded.source.error(
            ("schedule", "grace"),
            f"grace = {schedule.grace} steps is not less than train.steps = {steps}, so no run would be stopped; "
            "lower it, or write `schedule: none`",
            "grace_too_long",
            grace=schedule.grace,
            steps=steps,
        )
    # At least one evaluation of every run comes before the end of the grace, and the grace ends before the last step.
    grace = schedule.grace or max(steps // 10, *(run.evaluate.every for run in runs), 1)
    return schedule.model_copy(update={"metric": metric, "goal": goal, "grace": min(grace, steps - 1)})


def validation_metric(loaded: LoadedAblation, runs: Sequence[RunSpec]) -> str:
    """The primary metric on the validation set, of the same variant, where all of `runs` evaluate one; else itself."""
    primary = loaded.content.measured_metric.name
    test_set, _, quantity = primary.rpartition("/")
    wanted = "/".join(filter(None, (test_set.rpartition("/")[0], VALIDATION, quantity)))
    return wanted if runs and all(wanted in run.metrics for run in runs) else primary


def _objective(
    loaded: LoadedAblation, key: str, spec: EarlyStopping | Optuna, runs: Sequence[RunSpec]
) -> tuple[str, Goal]:
    """The metric that `search` or `schedule` compares runs by, and its goal. Raises SpecError."""
    columns = {metric.name: metric for metric in loaded.content.metrics}
    name = spec.metric or validation_metric(loaded, runs)
    for run in runs:
        # Runs report no means of metrics while they are trained.
        if name not in run.metrics and (spec.metric or metric_parts(name)):
            path: KeyPath = (key, "metric") if spec.metric else (key,)
            raise _no_metric(loaded, path, [run], name, run.metrics)
    # A metric of the validation set is no column, and has the goal of the test set's.
    column = columns.get(name) or (None if spec.metric else loaded.content.measured_metric)
    if column is None and spec.goal is None:
        raise loaded.source.error(
            (key, "metric"),
            f"{name!r} is not a column of the table, so its goal is not known; add `goal: min` or `goal: max`",
            "unknown_goal",
            metric=name,
        )
    if column is not None and spec.goal not in (None, column.goal):
        raise loaded.source.error(
            (key, "goal"),
            f"{spec.goal} contradicts the goal of the column {name!r}, {column.goal}; remove one of them",
            "contradicting_goal",
            goal=spec.goal,
            column=name,
        )
    return name, spec.goal or (column.goal if column else "min")
