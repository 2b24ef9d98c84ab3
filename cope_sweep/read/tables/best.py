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
from cope_sweep.config.source import Json
from cope_sweep.read.tables.runs import setting
from cope_sweep.store import RunRecord


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

    labels: Mapping[str, str]
    """Axis key → label, without the keys of the space."""
    draws: tuple[Draw, ...]
    goal: str

    @property
    def name(self) -> str:
        return " · ".join(self.labels.values()) or "base"

    @property
    def missing(self) -> int:
        """How many draws have not ended."""
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


def tuned_rows(plan: Plan, records: Mapping[str, RunRecord], metric: str, goal: str) -> list[Tuned]:
    """The rows of the grid with their draws.

    Args:
        plan: The plan of an ablation with `search: random`.
        records: Run id → record, of every run of the plan.
        metric: The metric that draws are compared by.
        goal: `min` or `max`.

    Raises SpecError for an ablation without a random search.
    """
    search = plan.ablation.content.search
    if not isinstance(search, RandomSearch):
        raise SpecError(
            f"{plan.name} has search: {search.kind}, and only search: random gives every row the same draws"
        )
    rows: dict[tuple[tuple[str, str], ...], list[Draw]] = {}
    for row in plan.rows:
        labels = tuple((key, label) for key, label in row.labels.items() if key not in search.space)
        rows.setdefault(labels, []).append(_draw(row, records, list(search.space), metric))
    return [Tuned(dict(labels), tuple(draws), goal) for labels, draws in rows.items()]


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
        raise SpecError(f"the draws of {', '.join(unfinished)} have not all ended; train them first")
    return "when:\n" + "".join(_condition_lines(tuned))


def _condition_lines(tuned: Sequence[Tuned]) -> Iterator[str]:
    for each in tuned:
        best = each.best()
        assert best is not None  # noqa: S101 - checked by the caller
        for name, mapping in (("- if", each.labels), ("  set", best.values)):
            pairs = ", ".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in mapping.items())
            yield f"  {name}: {{{pairs}}}\n"
