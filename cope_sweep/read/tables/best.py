"""The best draw of each row of a random search: the way to tune every row with the same number of trials.

`search: random` gives each point of the grid the same draws from the space, so all rows have had the same chances. The
best values of each then train other seeds: conditions (`when`) of the ablation that is reported set them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cope_sweep.config import Plan, Row, SpecError
from cope_sweep.config.ablation import RandomSearch
from cope_sweep.config.checks import validation_metric
from cope_sweep.config.source import Json
from cope_sweep.read.tables.model import first_rows
from cope_sweep.read.tables.render import ColumnHeader, Layout, TextCell
from cope_sweep.read.tables.runs import Results, setting
from cope_sweep.store import QueryError, RunRecord


@dataclass(frozen=True)
class Draw:
    """One draw from the space, trained for one row with each of the seeds."""

    values: Mapping[str, Json]
    """Key of the space → what was drawn."""
    ended: bool
    """Whether all of its runs have ended."""
    score: float | None
    """Mean of the metric over the seeds; None unless all runs are finished with a finite value."""


@dataclass(frozen=True)
class Tuned:
    """The draws of one row of the grid, in the order in which they were drawn."""

    name: str
    """Its labels of the axes in which the rows differ."""
    labels: Mapping[str, str]
    """Axis key → label, without the keys of the space."""
    draws: tuple[Draw, ...]
    goal: str

    @property
    def missing(self) -> int:
        """The number of draws that have not ended."""
        return sum(not draw.ended for draw in self.draws)

    def best(self, first: int | None = None) -> Draw | None:
        """The best of the first so many draws (None: of all); None if none of them is finished."""
        scored = [draw for draw in self.draws[:first] if draw.score is not None]
        sign = 1 if self.goal == "min" else -1
        return min(scored, key=lambda draw: sign * (draw.score or 0.0), default=None)

    @property
    def at_edge(self) -> tuple[str, ...]:
        """Keys whose best value is the least or the greatest that was drawn: a wider space may have a better one."""
        best = self.best()
        if best is None or len(self.draws) < 3:
            return ()
        found = []
        for key, value in best.values.items():
            drawn = [draw.values[key] for draw in self.draws]
            if all(isinstance(each, (int, float)) for each in drawn) and value in (min(drawn), max(drawn)):
                found.append(key)
        return tuple(found)


@dataclass(frozen=True)
class Tuning:
    """All rows of a random search."""

    metric: str
    """Metric by whose mean over the seeds draws are compared."""
    goal: str
    seeds: tuple[int, ...]
    rows: tuple[Tuned, ...]

    @property
    def draws(self) -> int:
        """The number of draws of each row."""
        return len(self.rows[0].draws)

    @property
    def layout(self) -> Layout:
        """A line for each row: the best value of the first 1, 2, 4, … draws and of all, and the best draw."""
        budgets = [*(2**power for power in range((self.draws - 1).bit_length())), self.draws]
        names = ["best draw", "edge", *(["not ended"] if any(row.missing for row in self.rows) else [])]
        headers = [ColumnHeader("row", numeric=False), *(ColumnHeader(f"of {each}") for each in budgets)]
        headers += [ColumnHeader(each, numeric=False) for each in names]
        lines = []
        for row in self.rows:
            best = row.best()
            scores = ["" if each is None else f"{each.score:.4g}" for each in map(row.best, budgets)]
            drawn = ", ".join(f"{key}={json.dumps(value)}" for key, value in best.values.items()) if best else ""
            cells = [row.name, *scores, drawn, ", ".join(row.at_edge), str(row.missing or "")]
            lines.append(tuple(map(TextCell, cells[: len(headers)])))
        note = (
            f"{self.metric}, mean over seeds {list(self.seeds)}, {self.goal} is best. of n: the best value "
            "of the first n draws. edge: keys whose best value is the least or greatest that was drawn."
        )
        return Layout(tuple(headers), tuple(lines), note)

    @property
    def answer(self) -> str:
        """The best and the worst rows, in a sentence; empty before any draw is finished."""
        found = {row.name: best.score for row in self.rows if (best := row.best()) and best.score is not None}
        if not found:
            return ""
        order = sorted(found, key=found.__getitem__, reverse=self.goal == "max")
        first = [name for name in order if found[name] == found[order[0]]]
        edge = sum(bool(row.at_edge) for row in self.rows)
        return (
            f"The best of {self.draws} draws for each of {len(self.rows)} rows, by {self.metric}: from "
            f"{found[order[0]]:.4g} ({first_rows(first)}) to {found[order[-1]]:.4g} ({order[-1]}). For {edge} rows it "
            "is at the edge of what was drawn."
        )


def tuning(results: Results, metric: str | None = None) -> Tuning:
    """The draws of all rows, compared by a metric.

    Args:
        results: The runs of an ablation with `search: random`.
        metric: Its name; None: the primary metric, on the validation set where there is one.

    Raises QueryError for an ablation without a random search, and for a metric that its tasks do not have.
    """
    plan = results.plan
    content = plan.ablation.content
    name = metric or validation_metric(plan.ablation, plan.runs)
    if unknown := next((run for run in plan.runs if name not in run.metrics), None):
        raise QueryError(
            f"metric {name}: the task {unknown.task.kind} has no such metric",
            code="unknown_metric",
            metric=name,
            task=unknown.task.kind,
        )
    goal = {each.name: each.goal for each in content.metrics}.get(name, content.primary_metric.goal)
    return Tuning(name, goal, tuple(content.seeds), tuple(tuned_rows(plan, results.records, name, goal)))


def tuned_rows(plan: Plan, records: Mapping[str, RunRecord], metric: str, goal: str) -> list[Tuned]:
    """The rows of the grid with their draws.

    Args:
        plan: The plan of an ablation with `search: random`.
        records: Run id → record, of every run of the plan.
        metric: The metric that draws are compared by.
        goal: `min` or `max`.

    Raises QueryError for an ablation without a random search.
    """
    search = plan.ablation.content.search
    if not isinstance(search, RandomSearch):
        raise QueryError(
            f"{plan.name} has search: {search.kind}, and only search: random gives every row the same draws",
            code="not_a_random_search",
            ablation=plan.name,
            search=search.kind,
        )
    rows: dict[tuple[tuple[str, str], ...], list[Draw]] = {}
    for row in plan.rows:
        labels = tuple((key, label) for key, label in row.labels.items() if key not in search.space)
        rows.setdefault(labels, []).append(_draw(row, records, list(search.space), metric))
    of_all = set.intersection(*map(set, rows)) if len(rows) > 1 else set()
    names = [" · ".join(each[1] for each in labels if each not in of_all) or plan.name for labels in rows]
    return [
        Tuned(name, dict(labels), tuple(draws), goal) for name, (labels, draws) in zip(names, rows.items(), strict=True)
    ]


def _draw(row: Row, records: Mapping[str, RunRecord], keys: Sequence[str], metric: str) -> Draw:
    own = [records[run.run_id] for run in row.runs]
    scores = [record.metrics.get(metric, math.nan) for record in own if record.status == "finished"]
    complete = len(scores) == len(own) and all(math.isfinite(score) for score in scores)
    return Draw(
        {key: setting(row, key) for key in keys},
        all(record.status in ("finished", "stopped", "failed") for record in own),
        sum(scores) / len(scores) if complete else None,
    )


def conditions(tuned: Sequence[Tuned]) -> str:
    """The best values as the key `when` of an ablation file, in YAML. Raises SpecError where a row has none yet."""
    unfinished = [each.name for each in tuned if each.missing or each.best() is None]
    if unfinished:
        raise SpecError(
            f"the draws of {first_rows(unfinished)} have not all ended; train them first",
            code="not_finished",
            rows=unfinished,
        )
    return "when:\n" + "".join(_condition_lines(tuned))


def _condition_lines(tuned: Sequence[Tuned]) -> Iterator[str]:
    for each in tuned:
        best = each.best()
        assert best is not None  # noqa: S101 - checked by the caller
        for name, mapping in (("- if", each.labels), ("  set", best.values)):
            pairs = ", ".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in mapping.items())
            yield f"  {name}: {{{pairs}}}\n"
