"""Is a row better than another one? The answer in one word, for programs that act on it.

The test is that of the table: one p for a pair of rows, by the primary metric alone, corrected for all rows that are
compared (`comparisons`). So nobody chooses the metric afterwards, and a pair does not become significant by being asked
about alone. There is no verdict before all planned runs of both rows have a value: whoever looks while seeds arrive,
and stops when p is small, finds differences where there are none. And seeds that are added afterwards change no verdict
unless they were needed for one.

The first of these that applies is the verdict:

    too few seeds  no data of so many runs could be significant, or planned runs are not finished or have no value
    equivalent     the whole 95 % interval lies within ± the margin
    better, worse  the corrected p is at most 5 %
    unclear        otherwise, and where no run of a row has the metric, which more seeds would not have either
"""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Iterator, Sequence

from cope_sweep.api.tables import Verdict, VerdictWord
from cope_sweep.config.ablation import margin_value
from cope_sweep.config.explain import suggest
from cope_sweep.errors import InvalidValue
from cope_sweep.frozen import OF_LEARNED, learning_parts
from cope_sweep.read.numbers import MISSING
from cope_sweep.read.tables.claims import claim_findings
from cope_sweep.read.tables.comparisons import DESCRIPTIVE, named_row
from cope_sweep.read.tables.declared import plan_declarations
from cope_sweep.read.tables.model import Comparison, MetricCell, TableModel, TableRow
from cope_sweep.read.tables.pairs import runs_without_values
from cope_sweep.read.tables.results import Results
from cope_sweep.read.tables.stats import finite, least_seeds
from cope_sweep.store import QueryError

NOT_CLAIMED = "not claimed"


def find_row(model: TableModel, text: str) -> TableRow:
    """The row that a text names. Raises QueryError if it names none, or several."""
    if (row := named_row(model, text)) is not None:
        return row
    names = [row.row for row in model.rows]
    message = f"{model.ablation} has no row {text!r}{suggest(text, names)}"
    raise QueryError(message, code="unknown_row", row=text, allowed=names)


def verdicts(
    results: Results, model: TableModel, margin: str | None = None, only: str | None = None
) -> Iterator[Verdict]:
    """A verdict on each row that the table compares with another one; none where it compares with the paper.

    Without `only`, pairs of rows that both do not have the primary metric are left out.

    Args:
        results: The results of the table.
        model: The table with its comparisons, and with all rows that they compare.
        margin: The smallest difference that matters, as in a claim; None: any does.
        only: The name of the row to judge; None: all.

    Raises QueryError for an invalid margin.
    """
    rows = {row.row: row for row in model.rows}
    declared = _declared(results, model) if model.references else {}
    for name, than in model.references.items():
        if only not in (None, name):
            continue
        lacking = _rows_without_metric(model, rows[name], rows[than])
        if only is None and len(lacking) == 2:
            continue
        yield _verdict(results, model, rows[name], rows[than], lacking, margin, declared.get(frozenset((name, than))))


def _declared(results: Results, model: TableModel) -> dict[frozenset[str], str]:
    """Two rows → when a claim that compares them by the primary metric was declared."""
    if not model.claimed:
        return {}
    found: dict[frozenset[str], str] = {}
    for finding in claim_findings(results.plan, model, plan_declarations(results.plan, results.store)):
        for pair in finding.pairs:
            if pair.cell.column.primary and pair.than_cell.column.primary:
                found.setdefault(frozenset((pair.better.row, pair.than.row)), finding.declared)
    return found


def _rows_without_metric(model: TableModel, *rows: TableRow) -> list[TableRow]:
    """Those of two rows that do not have the primary metric, which is known once all runs of both have ended."""
    name = model.primary.name
    if runs_without_values(*((row, name) for row in rows)) or learning_parts(name)[0] == OF_LEARNED:
        return []  # a metric of seeds that have learned the task: others may learn it
    return [row for row in rows if not row.metrics[name].values]


def _verdict(
    results: Results,
    model: TableModel,
    row: TableRow,
    other: TableRow,
    lacking: Sequence[TableRow],
    margin: str | None,
    declared: str | None,
) -> Verdict:
    """The verdict on `row` against `other`; `lacking`: those of both that do not have the primary metric."""
    cell, other_cell = (each.metrics[model.primary.name] for each in (row, other))
    comparison = cell.comparison or Comparison(other.row, model.difference(cell, other_cell), DESCRIPTIVE)
    test, compared = comparison.difference, model.family_sizes[row.row]
    width = _margin(margin, other_cell)
    missing = runs_without_values((row, model.primary.name), (other, model.primary.name))
    unfinished = [run_id for run_id, status in missing.items() if status != "finished"]
    needed: int | None = 0
    if not lacking and (math.isnan(test.p) or comparison.verdict == DESCRIPTIVE):
        needed = least_seeds(compared, is_paired=model.paired)
    word: VerdictWord = "unclear"
    if missing or needed != 0:
        word = "too few seeds"
    elif width is not None and -width <= test.ci_low and test.ci_high <= width:
        word = "equivalent"
    elif comparison.verdict in ("better", "worse"):
        word = "better" if comparison.verdict == "better" else "worse"
    have = min(row.seeds, other.seeds) if missing else min(test.n)
    more = max((needed or 0) - have, 0)
    # More seeds of a search that suggests rows would be another search, with other rows.
    command = _training(results, more) if (unfinished or more) and not (more and results.plan.search) else None
    parts = [f"{row.short} against {other.short} by {model.primary.title}: {word}"]
    if texts := cell.comparison_texts:
        interval = "" if texts["interval"] == MISSING else f" {texts['interval']}"
        parts += [f"difference {texts['difference']}{interval}", *[f"p {texts['p']}"] * (texts["p"] != MISSING)]
    parts.append(f"n = {test.n[0]} pairs" if model.paired else f"n = {test.n[0]} and {test.n[1]}")
    if lacking:
        parts.append(f"no run of {'these rows' if len(lacking) == 2 else lacking[0].short} has this metric")
    if unfinished:
        parts.append(f"{len(unfinished)} planned runs of these rows are not finished")
    if without := len(missing) - len(unfinished):
        parts.append(f"{without} finished runs of these rows have no value")
    if more:
        parts.append(f"train {more} more seeds a row")
    if needed is None:
        parts.append(f"among {compared:,} comparisons no number of seeds is enough")
    return Verdict(
        row=row.row,
        than=other.row,
        metric=model.primary.title,
        verdict=word,
        text=", ".join(parts),
        difference=finite(test.difference),
        ci_low=finite(test.ci_low),
        ci_high=finite(test.ci_high),
        p=comparison.p_adjusted,
        compared=compared,
        n=test.n,
        paired=model.paired,
        margin=width,
        unfinished=len(unfinished),
        more_seeds=more,
        command=command,
        declared=declared or NOT_CLAIMED,
    )


def _margin(margin: str | None, other: MetricCell) -> float | None:
    if margin is None:
        return None
    value: float | str = margin
    with contextlib.suppress(ValueError):
        value = float(margin)
    try:
        return margin_value(value, other.summary.mean, other.column.scale)
    except InvalidValue as error:
        raise QueryError(str(error), code="margin", value=margin) from error


def _training(results: Results, more: int) -> str:
    """The command that trains what is missing, with `more` seeds that no row has had."""
    plan, words = results.plan, []
    arguments = iter(plan.ablation.arguments)
    for word in arguments:
        assignment = next(arguments, "") if word == "--set" else ""
        if not (more and assignment.partition("=")[0].strip() == "seeds"):
            words += [word, assignment] if assignment else [word]
    if more:
        seeds = sorted(plan.ablation.content.row_seeds)
        seeds += range(seeds[-1] + 1, seeds[-1] + 1 + more)
        words += ["--set", f"seeds={seeds}".replace(" ", "")]
    return f"cope-sweep run {shlex.join([*words, *results.store.option])}"
