"""The best rows of an ablation by one metric, after a search or a grid.

`search: random` tries the same draws for each point of the grid, so all points have the same chances, and each has a
best draw. Otherwise, all rows form one list. The best row was chosen by its values, so these are optimistic: new seeds
show how good it is. `yaml_of_best` writes the YAML that trains them.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from cope_sweep.config import Plan, Row
from cope_sweep.config.ablation import Goal, RandomSearch, Scale
from cope_sweep.config.checks import validation_metric
from cope_sweep.config.explain import suggest
from cope_sweep.config.run import FACT_METRICS
from cope_sweep.config.source import Json
from cope_sweep.errors import counted
from cope_sweep.frozen import is_reported
from cope_sweep.read.numbers import significant
from cope_sweep.read.tables.layout import ColumnHeader, Layout, TextCell
from cope_sweep.read.tables.model import first_rows, varying_axes
from cope_sweep.read.tables.results import Results, setting
from cope_sweep.store import ENDED, QueryError, RunRecord, Status

LEAST_VALUES = 3
"""With fewer tried values of a key, none counts as being at the edge."""
SEEDS_TO_TUNE_BY = 3
"""With fewer seeds, the best of several draws is often not the best with other seeds."""
FRESH_SEEDS = 5
"""Number of new seeds to train the best row with: enough to test a few comparisons."""


@dataclass(frozen=True)
class Candidate:
    """A row: a draw or a suggestion of a search, or a point of a grid."""

    row: Row
    values: Mapping[str, Json]
    """Key → value, for the keys in which candidates may differ."""
    statuses: tuple[Status, ...]
    """The statuses of its runs."""
    scores: tuple[float, ...]
    """The finite values of the metric of its finished runs."""
    losses: tuple[float, ...] = ()
    """The finite losses of its finished runs on the same test set, at the same length, which decide between equal
    scores; none of a metric without such a loss."""

    @property
    def ended(self) -> bool:
        """Whether all its runs have ended."""
        return all(status in ENDED for status in self.statuses)

    @property
    def score(self) -> float | None:
        """Mean of the metric over the seeds; None unless all runs are finished with a finite value."""
        return statistics.fmean(self.scores) if len(self.scores) == len(self.statuses) else None

    @property
    def score_text(self) -> str:
        """The score as a text; empty without one."""
        return "" if self.score is None else significant(self.score)


@dataclass(frozen=True)
class Group:
    """The candidates of one grid point of a random search; otherwise all candidates, in plan order."""

    name: str
    """Its labels on the axes in which the groups differ."""
    labels: Mapping[str, str]
    """Axis key → label that all its candidates share."""
    candidates: tuple[Candidate, ...]
    goal: Goal
    chosen: frozenset[str] = frozenset()
    """Keys that a random search draws from a `choice`."""

    @property
    def missing(self) -> int:
        """The number of candidates that have not ended."""
        return sum(not candidate.ended for candidate in self.candidates)

    def ranked(self, first: int | None = None) -> list[Candidate]:
        """The candidates with a score among the first `first` candidates (None: all), best first.

        Of equal scores, as of several without an error, the one with the smaller loss comes first.
        """
        scored = [candidate for candidate in self.candidates[:first] if candidate.score is not None]
        sign = 1 if self.goal == "min" else -1

        def order(candidate: Candidate) -> tuple[float, float]:
            return sign * (candidate.score or 0.0), statistics.fmean(candidate.losses) if candidate.losses else 0.0

        return sorted(scored, key=order)

    def best(self, first: int | None = None) -> Candidate | None:
        """The best of the first `first` candidates (None: all); None if none of them is finished."""
        return next(iter(self.ranked(first)), None)

    @property
    def at_edge(self) -> tuple[str, ...]:
        """Keys whose best value is the smallest or largest value tried: a wider space may have a better one.

        Those of a `choice` are left out: of three values, two are the smallest or the largest.
        """
        best = self.best()
        keys = []
        for key, value in best.values.items() if best else ():
            if key in self.chosen:
                continue
            tried = {_number(candidate.values.get(key)) for candidate in self.candidates}
            numbers = [number for number in tried if number is not None]
            if len(numbers) >= LEAST_VALUES and _number(value) in (min(numbers), max(numbers)):
                keys.append(key)
        return tuple(keys)


@dataclass(frozen=True)
class Ranking:
    """All rows of an ablation, compared by one metric."""

    plan: Plan
    metric: str
    goal: Goal
    groups: tuple[Group, ...]
    """For a random search, one per point of the grid; otherwise one."""

    @property
    def seeds(self) -> list[int]:
        """The seeds over which scores are means."""
        return self.plan.ablation.content.row_seeds

    @property
    def size(self) -> int:
        """The number of candidates of each group."""
        return max(len(group.candidates) for group in self.groups)

    def layout(self, top: int = 10) -> Layout:
        """The best rows; or, for several groups, the best of the first 1, 2, 4, … candidates of each group."""
        return self._layout_of_groups if len(self.groups) > 1 else self._layout_of_rows(top)

    @cached_property
    def _layout_of_groups(self) -> Layout:
        budgets = [*(2**power for power in range((self.size - 1).bit_length())), self.size]
        has_missing = any(group.missing for group in self.groups)
        titles = ["best draw", "edge", *(["not ended"] * has_missing)]
        headers = [ColumnHeader("row", numeric=False), *(ColumnHeader(f"of {budget}") for budget in budgets)]
        headers += [ColumnHeader(title, numeric=False) for title in titles]
        lines = []
        for group in self.groups:
            texts = [group.name]
            for budget in budgets:
                best = group.best(budget)
                texts.append("" if best is None else best.score_text)
            best = group.best()
            draw = best.values.items() if best else ()
            texts += [", ".join(f"{key}={json.dumps(value)}" for key, value in draw), ", ".join(group.at_edge)]
            texts += [str(group.missing or "")] * has_missing
            lines.append(tuple(map(TextCell, texts)))
        note = (
            f"{self.metric}, mean over seeds {self.seeds}; {self.goal} is best, and of equal values the one with the "
            "smaller loss. of n: the best of the first n draws. "
            "edge: keys whose best value is the smallest or largest one drawn from a range; a choice does not count."
        )
        if len(self.seeds) < SEEDS_TO_TUNE_BY:
            note += f" With so few seeds a draw may be best by luck: tune by {SEEDS_TO_TUNE_BY} or more."
        return Layout(tuple(headers), tuple(lines), note)

    def _layout_of_rows(self, top: int) -> Layout:
        (group,) = self.groups
        ranked = group.ranked()
        keys = varying_axes(self.plan.axes, [candidate.row for candidate in group.candidates])
        headers = [ColumnHeader("rank"), ColumnHeader(self.metric)]
        headers += [ColumnHeader(name, numeric=False) for name in map(self.plan.axes.__getitem__, keys)]
        headers += [ColumnHeader("row", numeric=False)] * (not keys)
        lines = []
        for rank, candidate in enumerate(ranked[:top], start=1):
            score = candidate.score_text
            if len(candidate.scores) > 1:
                score += f" ± {significant(statistics.stdev(candidate.scores), 2)}"
            labels = [candidate.row.labels.get(key, "–") for key in keys] or [candidate.row.name]
            lines.append(tuple(map(TextCell, [str(rank), score, *labels])))
        return Layout(tuple(headers), tuple(lines), self._note(group, len(ranked)))

    def _note(self, group: Group, ranked: int) -> str:
        counts = Counter(
            status for candidate in group.candidates if candidate.score is None for status in candidate.statuses
        )
        mean = "mean ± standard deviation over seeds" if len(self.seeds) > 1 else "seed"
        seeds = ", ".join(map(str, self.seeds))
        parts = [f"{self.metric}, {mean} {seeds}, {self.goal} is best; {ranked} of {len(group.candidates)} rows"]
        if counts:
            listed = ", ".join(f"{number} {status}" for status, number in counts.items())
            parts.append(f"Runs of the others: {listed}")
        if self.plan.open_samples:
            parts.append(f"{self.plan.open_samples} rows are still to be suggested")
        if group.at_edge:
            parts.append(
                f"At the edge of what was tried: {', '.join(group.at_edge)}; a wider space may have a better value"
            )
        return ". ".join(parts) + "."

    @property
    def answer(self) -> str:
        """The best row, or the best and the worst groups, in a sentence; empty before any row is finished."""
        best_scores: dict[str, float] = {}
        for group in self.groups:
            best = group.best()
            if best is not None and best.score is not None:
                best_scores[group.name] = best.score
        if not best_scores:
            return ""
        if len(self.groups) == 1:
            (group,) = self.groups
            ranked = group.ranked()
            edge = f"; {', '.join(group.at_edge)} at the edge of what was tried" if group.at_edge else ""
            name, score = ranked[0].row.name, ranked[0].score_text
            return f"The best of {len(ranked)} rows by {self.metric}: {score} ({name}){edge}."
        names = sorted(best_scores, key=best_scores.__getitem__, reverse=self.goal == "max")
        lowest, highest = best_scores[names[0]], best_scores[names[-1]]
        first = first_rows([name for name in names if best_scores[name] == lowest])
        low, high = significant(lowest), significant(highest)
        spread = low if low == high else f"from {low} ({first}) to {high} ({names[-1]})"
        at_edge = sum(bool(group.at_edge) for group in self.groups)
        return (
            f"The best of {self.size} draws for each of {len(self.groups)} rows, by {self.metric}: {spread}. "
            f"For {counted(at_edge, 'row')}, it is at the edge of what was drawn."
        )


def rank_rows(results: Results, metric: str | None = None) -> Ranking:
    """All rows of an ablation, compared by a metric.

    Args:
        results: The runs.
        metric: Its name; None: what the search optimises, or else the primary metric, on the validation set if there
            is one.

    Raises QueryError for a metric that none of its runs reports. Rows without it have no score.
    """
    plan = results.plan
    content, search = plan.ablation.content, plan.search
    name = metric or (search.metric if search else None) or validation_metric(plan.ablation, plan.runs)
    allowed = [*dict.fromkeys(each for run in plan.runs for each in run.metrics), *FACT_METRICS]
    if plan.runs and not is_reported(name, allowed):
        raise QueryError(
            f"no run of {plan.name} has a metric {name!r}{suggest(name, allowed)}",
            code="unknown_metric",
            metric=name,
            allowed=allowed,
        )
    goals = {column.name: column.goal for column in content.metrics}
    goal = goals.get(name, content.measured_metric.goal)
    if search and search.metric == name and search.goal:
        goal = search.goal
    return Ranking(plan, name, goal, tuple(_groups(plan, results.records, name, goal)))


def _groups(plan: Plan, records: Mapping[str, RunRecord], metric: str, goal: Goal) -> list[Group]:
    """The rows of the plan; those of a random search are grouped by the points of its grid."""
    search = plan.ablation.content.search
    candidates_by_labels: dict[tuple[tuple[str, str], ...], list[Candidate]] = {}
    chosen: frozenset[str] = frozenset()
    if isinstance(search, RandomSearch):
        chosen = frozenset(key for key, distribution in search.space.items() if distribution.choice is not None)
        for row in plan.rows:
            labels = tuple((key, label) for key, label in row.labels.items() if key not in search.space)
            draw = {key: setting(row, key) for key in search.space}
            candidates_by_labels.setdefault(labels, []).append(_candidate(row, records, draw, metric))
    if len(candidates_by_labels) < 2:  # one point of the grid, or no random search
        candidates = tuple(_candidate(row, records, row.values, metric) for row in plan.rows)
        return [Group(plan.name, {}, candidates, goal, chosen)]
    common = set.intersection(*map(set, candidates_by_labels))
    return [
        Group(
            " · ".join(label for key, label in labels if (key, label) not in common) or plan.name,
            dict(labels),
            tuple(candidates),
            goal,
            chosen,
        )
        for labels, candidates in candidates_by_labels.items()
    ]


def _candidate(row: Row, records: Mapping[str, RunRecord], values: Mapping[str, Json], metric: str) -> Candidate:
    records_of_row = [records[run.run_id] for run in row.runs]
    finished = [record for record in records_of_row if record.status == "finished"]

    def finite(name: str) -> tuple[float, ...]:
        measured = (record.value(name) for record in finished)
        return tuple(float(value) for value in measured if value is not None and math.isfinite(value))

    test_set, _, quantity = metric.rpartition("/")
    _, at, length = quantity.partition("@")
    statuses = tuple(record.status for record in records_of_row)
    return Candidate(row, values, statuses, finite(metric), finite(f"{test_set}/loss{at}{length}"))


def _number(value: Json) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


# -- YAML to paste -----------------------------------------------------------------------------------------------------


def yaml_of_best(ranking: Ranking) -> str:
    """YAML for an ablation file that trains the best values with other seeds.

    Several groups give the key `when` for the ablation that you report, with the best values of each group. One group
    gives a scale of the same ablation with the best row alone.

    Raises:
        QueryError: A group has candidates that have not ended, or no row with a score; or the row cannot be a scale.
    """
    without_best = [group.name for group in ranking.groups if group.best() is None]
    needs_all = len(ranking.groups) > 1
    unfinished = [group.name for group in ranking.groups if group.missing and (needs_all or group.name in without_best)]
    if unfinished:
        raise QueryError(
            f"the rows of {first_rows(unfinished)} have not all ended; train them first",
            code="not_finished",
            rows=unfinished,
        )
    if without_best:
        raise QueryError(
            f"no row of {first_rows(without_best)} has a value of {ranking.metric} from every seed",
            code="no_value",
            metric=ranking.metric,
            rows=without_best,
        )
    if needs_all:
        return "when:\n" + "".join(_condition_lines(ranking.groups))
    return _scale_of_best(ranking)


def _condition_lines(groups: Sequence[Group]) -> Iterator[str]:
    for group in groups:
        best = group.best()
        assert best is not None  # noqa: S101 - checked by the caller
        for name, mapping in (("- if", group.labels), ("  set", best.values)):
            pairs = ", ".join(f"{key}: {_json(value)}" for key, value in mapping.items())
            yield f"  {name}: {{{pairs}}}\n"


def _scale_of_best(ranking: Ranking) -> str:
    """A scale with the values of the best row, and with those of the scale and `--set` that it was trained with."""
    plan, (group,) = ranking.plan, ranking.groups
    loaded, content = plan.ablation, plan.ablation.content
    best = group.ranked()[0]
    used_scale = content.scales[loaded.scale] if loaded.scale else Scale()
    kept = used_scale.model_dump(mode="json", exclude_unset=True, by_alias=True, exclude={"description", "grid", "set"})
    values = {**{key: layer.value for key, layer in loaded.layers.items()}, **best.values}
    first_seed = max(content.seeds) + 1
    fresh_seeds = list(range(first_seed, first_seed + FRESH_SEEDS))
    scale = kept | {"search": "grid", "schedule": "none", "seeds": fresh_seeds}
    about = f"The best of {len(group.ranked())} rows by {ranking.metric}: {best.score_text} (seeds {ranking.seeds})."
    lines = ["scales:", f"  {loaded.scale}_best:" if loaded.scale else "  best:", f"    description: {_json(about)}"]
    lines += ["    set:", *(f"      {key}: {_json(value)}" for key, value in values.items())]
    lines += [f"    {key}: {_json(value)}" for key, value in scale.items()]
    return "\n".join(lines) + "\n"


def _json(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)
