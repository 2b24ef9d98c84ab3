"""An ablation: a declared file that names a base configuration, what varies, the seeds, and the numbers to beat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from cope_sweep.frozen import Frozen
from cope_sweep.spec.explain import explain
from cope_sweep.spec.resources import Resources
from cope_sweep.spec.run import RunSpec
from cope_sweep.spec.source import KeyPath, Source, SpecError, parse_value, read_source

Json = Any
"""A value of JSON's types."""

Axis = list[Json] | dict[str, Json]
"""The values of a key: a list, or a mapping from the label that tables show to the value."""

Point = dict[str, Json]
"""Dotted keys of a run, and values: an assignment, or (a list: any of these) a condition."""


def name_of(value: Json) -> str:
    """How tables show a value that has no label: `cope+relative`, `cope(p_max=16)`, `128`."""
    if isinstance(value, list):
        return "+".join(map(name_of, value)) if value else "none"
    if isinstance(value, dict):
        kind = str(value.get("kind", ""))
        options = ", ".join(f"{key}={name_of(item)}" for key, item in value.items() if key != "kind")
        return f"{kind}({options})" if options else kind
    return value if isinstance(value, str) else json.dumps(value)


class Condition(Frozen):
    """`when` a point matches `if`, further axes open, or further values are set."""

    match: Point = Field(alias="if", description="Dotted keys, and the labels or values that they must have.")
    grid: dict[str, Axis] = {}
    set: Point = {}


class Metric(Frozen):
    """A column of the table. The first of an ablation's metrics is the one that it is judged by."""

    name: str = Field(
        description="As runs report it: `in_dist/token_error`, `test/perplexity@2048`, `facts.tokens_per_s`, …"
    )
    label: str | None = Field(default=None, description="The column's title; null: the name.")
    goal: Literal["min", "max"] = Field(default="min", description="Which direction is better.")
    unit: str = Field(default="", description="As `%`.")
    decimals: Annotated[int, Field(ge=0, le=6)] = 2

    @property
    def title(self) -> str:
        text = self.label or self.name
        return f"{text} ({self.unit})" if self.unit else text


class Published(Frozen):
    """The paper's numbers for one row, shown beside ours."""

    match: Point = Field(description="Which row: axis keys and labels.")
    values: dict[str, float] = Field(description="Metric name → published value.")
    std: dict[str, float] = Field(default={}, description="Metric name → published standard deviation.")
    source: str = Field(default="", description="As `Table 1`.")


class Scale(Frozen):
    """A named size of the same ablation: `--scale NAME`."""

    description: str = ""
    set: Point = {}
    grid: dict[str, Axis] = Field(default={}, description="Axes to put in the place of the base's.")
    seeds: Annotated[list[int] | None, Field(min_length=1)] = None
    metrics: Annotated[list[Metric] | None, Field(min_length=1)] = Field(
        default=None, description="Columns to put in the place of the base's."
    )


class Ablation(Frozen):
    """The content of an ablation file."""

    title: str
    hypothesis: str = ""
    reproduces: str = Field(default="", description="The table or figure of the paper that this re-makes.")
    base: dict[str, Json] = Field(description="A run's keys (task, model, train, evaluate), all that does not vary.")
    grid: dict[str, Axis] = Field(default={}, description="Dotted key → its values; every combination is a row.")
    zip: list[dict[str, list[Json]]] = Field(default=[], description="Axes that move together, value by value.")
    when: list[Condition] = Field(default=[], description="Axes and values for some combinations only.")
    exclude: list[Point] = Field(default=[], description="Combinations to leave out.")
    include: list[Point] = Field(default=[], description="Single rows to add to the grid.")
    seeds: Annotated[list[int], Field(min_length=1)] = [0]
    metrics: Annotated[list[Metric], Field(min_length=1)] = Field(description="The table's columns, the judge first.")
    published: list[Published] = []
    scales: dict[str, Scale] = {}
    resources: Resources = Resources()

    @field_validator("grid", mode="after")
    @classmethod
    def _axes_have_values(cls, grid: dict[str, Axis]) -> dict[str, Axis]:
        for key, values in grid.items():
            if not values:
                raise ValueError(f"the axis {key!r} is empty; give it a value, or leave the axis out")
        return grid

    @field_validator("seeds", mode="after")
    @classmethod
    def _seeds_differ(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"seeds {seeds} repeat; each counts once")
        return seeds

    @model_validator(mode="after")
    def _zipped_lengths_agree(self) -> Self:
        for group in self.zip:
            lengths = {key: len(values) for key, values in group.items()}
            if len(set(lengths.values())) != 1 or 0 in lengths.values():
                listed = ", ".join(f"{key} has {n}" for key, n in lengths.items())
                raise ValueError(f"zipped axes need the same number of values, one at least: {listed}")
        return self


@dataclass(frozen=True)
class LoadedAblation:
    """An ablation with its name, and the source that its errors point into."""

    name: str
    content: Ablation
    source: Source


def validate(source: Source, name: str) -> LoadedAblation:
    """The ablation in a parsed file. Raises SpecError, every problem on a line of its own."""
    try:
        # JSON's rules: a list can be a tuple, and text is never a number.
        content = Ablation.model_validate_json(json.dumps(source.data))
    except ValidationError as error:
        problems = [explain(item, Ablation) for item in error.errors(include_url=False)]
        raise SpecError("\n".join(dict.fromkeys(str(source.error(*problem)) for problem in problems))) from error
    return LoadedAblation(name, content, source)


def load_ablation(path: Path) -> LoadedAblation:
    """Read an ablation file; its name is the file's. Raises SpecError."""
    return validate(read_source(path), path.stem)


def with_overrides(
    loaded: LoadedAblation, *, scale: str | None = None, assignments: Sequence[str] = ()
) -> LoadedAblation:
    """The ablation at a named scale, and with `key=value` assignments.

    A key of a run replaces the base's value, and an axis of that key; `seeds`, `metrics` and `resources.…` replace the
    ablation's own. Raises SpecError.
    """
    content = loaded.content
    data = content.model_dump(mode="json", by_alias=True)
    lines = dict(loaded.source.lines)
    if scale is not None:
        if scale not in content.scales:
            known = ", ".join(content.scales) or "none: this ablation has one size"
            raise SpecError(f"{loaded.source.name}: unknown scale {scale!r}; it has {known}")
        chosen = content.scales[scale]
        for key, value in chosen.set.items():
            _assign(data, key, value)
            _trace(lines, ("base", *key.split(".")), lines.get(("scales", scale, "set", key)))
        data["grid"] |= {key: _json(axis) for key, axis in chosen.grid.items()}
        if chosen.seeds is not None:
            data["seeds"] = chosen.seeds
        if chosen.metrics is not None:
            data["metrics"] = [metric.model_dump(mode="json") for metric in chosen.metrics]
            _trace(lines, ("metrics",), lines.get(("scales", scale, "metrics")))
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        option = f"--set {assignment}"
        if not equals or not key:
            raise SpecError(f"{option}: expected key=value, as in --set model.dim=128")
        value = parse_value(text, option)
        head = key.split(".")[0]
        if head in RunSpec.model_fields and head != "seed":
            _assign(data, key, value)
            _trace(lines, ("base", *key.split(".")), option)
        elif head in ("seeds", "metrics", "resources"):
            _nest(data, key.split("."), value)
            _trace(lines, tuple(key.split(".")), option)
        else:
            heads = [name for name in RunSpec.model_fields if name != "seed"]
            raise SpecError(f"{option}: no key {key!r}; it starts with one of {', '.join(heads)}, seeds, resources")
    return validate(Source(loaded.source.name, data, lines), loaded.name)


def _json(value: Json) -> Json:
    return json.loads(json.dumps(value))


def _assign(data: dict[str, Json], key: str, value: Json) -> None:
    """Fix a run's key everywhere: in the base, instead of any axis, and in what is said of that axis."""
    axis = data["grid"].pop(key, None)
    named = [label for label, each in axis.items() if each == value] if isinstance(axis, dict) else []
    for name, part in (("published", "match"), ("when", "if"), ("exclude", None)):
        kept = []
        for entry in data[name]:
            condition = entry if part is None else entry[part]
            wanted = condition.pop(key, value)
            if any(each in (value, *named) for each in (wanted, *(wanted if isinstance(wanted, list) else ()))):
                kept.append(entry)
        data[name] = kept
    data["zip"] = [rest for group in data["zip"] if (rest := {k: v for k, v in group.items() if k != key})]
    _nest(data["base"], key.split("."), value)


def _nest(data: dict[str, Json], parts: Sequence[str], value: Json) -> None:
    for part in parts[:-1]:
        inner = data.get(part)
        data[part] = inner = dict(inner) if isinstance(inner, dict) else {}
        data = inner
    data[parts[-1]] = value


def _trace(lines: dict[KeyPath, int | str], path: KeyPath, place: int | str | None) -> None:
    """From now on, `path` and all below it was written at `place`."""
    for known in [known for known in lines if known[: len(path)] == path]:
        del lines[known]
    if place is not None:
        lines[path] = place
