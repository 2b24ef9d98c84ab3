"""The claims of an ablation, with verdicts from its runs.

A claim says that some rows are better than others. Every pair of these rows is tested as in a table, with p corrected
by Holm's method for the pairs of one task (rows with the same labels on all axes except the encoding), which is one
column of the paper's tables. The claim is

    shown           if every pair differs significantly, as claimed
    shown in part   if some pairs do, and the others do not differ
    opposite        if some pairs differ the other way, and none as claimed
    mixed           if pairs differ both ways
    not shown       if no pair differs
    too few seeds   if no data of this number of runs could show a difference
    not testable    if most seeds of every row are stuck: they do no better than a rule that does not solve the task
                    (`tables.rules`), so nothing follows from the order of the rows
    not trained     if no pair has finished runs; if some pairs have, the others count as pairs that do not differ

A figure of heads may claim that heads mark something (`figures.marks` has the measure). With the AUC of one head per
seed, chosen on other sequences, and its AUC with the initial weights, the claim is

    shown           if training raises the AUC, and the AUC is above `MARKS_FROM` (by their 95 % intervals over seeds)
    shown in part   if only the first holds: heads have learned it, but set other tokens apart as well
    opposite        if training lowers the AUC
    not shown       if the interval of the difference contains 0
    too few seeds   with fewer than `LEAST_SEEDS`

Both intervals are Student's.

The verdict on a hypothesis combines the claims of its ablation: it is supported if all claims are shown.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cope_sweep.api.ablations import ClaimVerdict
from cope_sweep.config import Plan
from cope_sweep.config.ablation import Claim
from cope_sweep.read.numbers import MISSING, fixed, p_text
from cope_sweep.read.tables.layout import ColumnHeader, Layout, TextCell
from cope_sweep.read.tables.model import Column, Comparison, TableModel, TableRow, other_labels, same_labels
from cope_sweep.read.tables.stats import SIGNIFICANT_P, Difference, Summary, holm, summarise

if TYPE_CHECKING:
    import pandas as pd

    from cope_sweep.read.figures.kinds.maps import Maps

MARKS_FROM = 0.9
"""A head marks something if its AUC is at least this."""
LEAST_SEEDS = 3
"""With fewer seeds, an interval of the AUC of heads is too wide for a verdict."""
MOST_VALUES = 5
"""Maximum number of values to list for a row and the rows that it is compared with; more are shown as a range."""
MOST_GROUPS = 4
"""Maximum number of rows that a claim calls better to list with those they are compared with."""
VERDICT_NOTES: dict[ClaimVerdict, str] = {
    "shown": "every pair of rows differs significantly, as the claim says",
    "shown in part": "some pairs of rows differ significantly, as the claim says; no pair differs the other way",
    "mixed": "some pairs of rows differ significantly as the claim says, and some the other way",
    "opposite": "some pairs of rows differ significantly the other way, and none as the claim says",
    "not shown": "no pair of rows differs significantly",
    "too few seeds": "with so few seeds, no difference could be significant",
    "not testable": "no row does better than a rule that does not solve the task (see the shortcuts)",
}
"""Verdict on a claim about rows → its meaning, below a table of claims."""
VALUES_NOTE = (
    "Values are means ± standard deviations over seeds. p is the largest p among the pairs of rows that the claim "
    "compares, corrected for the pairs of one task (Holm)."
)
UNTRAINED_NOTE = "Pairs with a row that is not trained yet count in the correction, and as pairs that do not differ."
HEADS_NOTE = (
    "Claims about heads use the AUC (area under the ROC curve) of one head per seed, chosen on separate sequences, "
    "before and after training. Shown: training raises the AUC, and it is above "
    f"{MARKS_FROM:g} (95 % intervals over seeds). Shown in part: training raises it."
)
OF_HYPOTHESIS: dict[ClaimVerdict, str] = {
    "shown": "supported",
    "shown in part": "supported in part",
    "mixed": "supported in part, contradicted in part",
    "opposite": "contradicted",
    "not shown": "not supported",
    "too few seeds": "not testable with so few seeds",
    "not testable": "not testable: no row does better than a rule that does not solve the task",
    "not trained": "not tested yet",
}
"""Combined verdict of the claims → verdict on the hypothesis."""


@dataclass(frozen=True)
class Pair:
    """A row that a claim calls better, and a row that it calls worse."""

    better: TableRow
    than: TableRow
    comparison: Comparison
    """`better` minus `than`; its verdict is better, worse, or empty if there is no significant difference."""


@dataclass(frozen=True)
class Finding:
    """A claim, and its verdict from the runs."""

    claim: str
    """The statement."""
    source: str
    """The table or figure of the paper that makes it; may be empty."""
    measure: str
    """The title of the column that decides; both titles if a variant judges the rows called worse."""
    verdict: ClaimVerdict
    ours: str = ""
    """Our values: `CoPE 0.003 ± 0.006; RoPE 3.40 ± 4.72, Absolute 24.82 ± 4.09`."""
    published: str = ""
    """The published values of the same rows; empty if there are none."""
    pairs: tuple[Pair, ...] = ()
    """The pairs of rows that were compared; none for a claim about heads."""
    untrained: int = 0
    """Number of pairs without finished runs."""
    is_about_heads: bool = False

    @property
    def largest_p(self) -> float:
        """The largest corrected p of its pairs; NaN if none was tested."""
        p_values = [pair.comparison.p_adjusted for pair in self.pairs]
        return max((p for p in p_values if p is not None), default=math.nan)

    @property
    def shown(self) -> int:
        """The number of pairs that differ as claimed."""
        return sum(pair.comparison.verdict == "better" for pair in self.pairs)

    @property
    def meaning(self) -> str:
        """What the verdict says of the rows or heads; empty before there are runs."""
        if self.verdict == "not trained":
            return ""
        return HEADS_NOTE if self.is_about_heads else VERDICT_NOTES[self.verdict]

    @property
    def verdict_text(self) -> str:
        """The verdict; if only some pairs differ as claimed, with their number."""
        if self.is_about_heads or self.verdict not in ("shown in part", "mixed"):
            return self.verdict
        return f"{self.verdict} ({self.shown} of {len(self.pairs) + self.untrained} pairs)"


def head_findings(figures: Mapping[str, Maps], heads: pd.DataFrame) -> tuple[Finding, ...]:
    """The claims of figures (by name) about heads; `heads` is the frame of `figures.marks.measure_run`."""
    findings = []
    for name, figure in figures.items():
        of_figure = heads[heads["figure"] == name]
        chosen = of_figure[of_figure["chosen"]].set_index("seed")
        initial = of_figure[of_figure["initial_chosen"]].set_index("seed")["initial_auc"]
        auc, initial_auc, gain = summarise(chosen["auc"]), summarise(initial), summarise(chosen["auc"] - initial)
        ours = ""
        if auc.n:
            ours = (
                f"{_auc_text(auc)}, untrained {_auc_text(initial_auc)}; "
                f"mean {fixed(chosen['on'].mean(), 2)} with the label, {fixed(chosen['off'].mean(), 2)} without"
            )
        measured = f"gates of {figure.mark} tokens"
        if figure.show != "gates":
            measured = f"attention to keys since {figure.mark}"
        verdict = _verdict_on_heads(auc, gain)
        findings.append(Finding(figure.claim, figure.source, f"AUC: {measured}", verdict, ours, is_about_heads=True))
    return tuple(findings)


def _auc_text(auc: Summary) -> str:
    """`0.97 ± 0.01`; the mean alone for one seed."""
    return fixed(auc.mean, 2) if auc.n < 2 else f"{fixed(auc.mean, 2)} ± {fixed(auc.std, 2)}"


def _verdict_on_heads(auc: Summary, gain: Summary) -> ClaimVerdict:
    if gain.n < LEAST_SEEDS:
        return "too few seeds" if gain.n else "not trained"
    if gain.ci_low > 0:
        return "shown" if auc.ci_low > MARKS_FROM else "shown in part"
    return "opposite" if gain.ci_high < 0 else "not shown"


def claim_findings(plan: Plan, model: TableModel) -> tuple[Finding, ...]:
    """The claims about rows of this plan, with verdicts from `model`, the table of the same plan."""
    rows = {row.row: row for row in model.rows}
    columns = {column.name: column for column in model.columns}
    findings = []
    for index, claim in enumerate(plan.ablation.content.claims):
        better = [rows[row.name] for row in plan.rows if index in row.better]
        than = [rows[row.name] for row in plan.rows if index in row.than]
        named_axes = claim.better.keys() | claim.than.keys()
        pairs = [(row, other) for row in better for other in than if same_labels(row, other, named_axes)]
        if pairs:
            column = columns[claim.metric or model.primary.name]
            than_column = columns[claim.metric_of_than(column.name)]
            findings.append(_finding(model, claim, column, than_column, pairs))
    return tuple(findings)


def _finding(
    model: TableModel, claim: Claim, column: Column, than_column: Column, rows: Sequence[tuple[TableRow, TableRow]]
) -> Finding:
    """The verdict on a claim about pairs of rows.

    Args:
        model: The table.
        claim: The claim.
        column: The column of the rows that are called better.
        than_column: The column of the rows that are called worse.
        rows: Pairs of a row that is called better and one that is called worse.
    """
    measure = " against ".join(dict.fromkeys((column.title, than_column.title)))
    trained: list[tuple[TableRow, TableRow]] = []
    untrained: list[tuple[TableRow, TableRow]] = []
    for row, other in rows:
        is_trained = row.metrics[column.name].values and other.metrics[than_column.name].values
        (trained if is_trained else untrained).append((row, other))
    if not trained:
        return Finding(claim.text, claim.source, measure, "not trained")
    differences = [
        model.difference(row.metrics[column.name], other.metrics[than_column.name]) for row, other in trained
    ]
    corrected, smallest = _correct(trained, differences, untrained)
    pairs = []
    for (row, other), difference, p in zip(trained, differences, corrected, strict=True):
        verdict = ""
        if p <= SIGNIFICANT_P:
            is_lower = difference.difference < 0
            verdict = "better" if is_lower == (column.goal == "min") else "worse"
        pairs.append(Pair(row, other, Comparison(other.row, difference, verdict, None if math.isnan(p) else p)))
    if _are_all_stuck(pairs, column, than_column):
        on_claim: ClaimVerdict = "not testable"
    elif not any(p <= SIGNIFICANT_P for p in smallest):
        on_claim = "too few seeds"
    else:
        verdicts = {pair.comparison.verdict for pair in pairs}
        on_claim = _verdict_on_rows(verdicts | {""} if untrained else verdicts)
    return Finding(
        claim.text, claim.source, measure, on_claim,
        ours=_list_values(pairs, column, than_column, _our_value),
        published=_list_values(pairs, column, than_column, _published_value),
        pairs=tuple(pairs),
        untrained=len(untrained),
    )  # fmt: skip


def _correct(
    rows: Sequence[tuple[TableRow, TableRow]],
    differences: Sequence[Difference],
    untrained: Sequence[tuple[TableRow, TableRow]],
) -> tuple[list[float], list[float]]:
    """The corrected p of each pair, and the smallest possible one.

    The pairs of one task are corrected together: their better rows differ in the encoding alone. Pairs without finished
    runs count with p = 1, so that a verdict does not fall when they are trained.
    """
    untrained_of_task = Counter(other_labels(row) for row, _ in untrained)
    indices_by_task: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for index, (row, _) in enumerate(rows):
        indices_by_task.setdefault(other_labels(row), []).append(index)
    corrected, smallest = [math.nan] * len(rows), [math.nan] * len(rows)
    for task, indices in indices_by_task.items():
        ones = [1.0] * untrained_of_task[task]
        p_values = holm([differences[index].p for index in indices] + ones)
        smallest_p_values = holm([differences[index].smallest_p for index in indices] + ones)
        for index, p, smallest_p in zip(indices, p_values, smallest_p_values, strict=False):
            corrected[index], smallest[index] = p, smallest_p
    return corrected, smallest


def _are_all_stuck(pairs: Sequence[Pair], column: Column, than_column: Column) -> bool:
    """No row of these pairs does better than a rule that does not solve the task."""
    cells = [pair.better.metrics[column.name] for pair in pairs]
    cells += [pair.than.metrics[than_column.name] for pair in pairs]
    return all(cell.mostly_stuck for cell in cells)


def _verdict_on_rows(verdicts: set[str]) -> ClaimVerdict:
    """The verdict on a claim from the verdicts of its pairs."""
    if "worse" in verdicts:
        return "mixed" if "better" in verdicts else "opposite"
    if "better" in verdicts:
        return "shown in part" if "" in verdicts else "shown"
    return "not shown"


def _our_value(row: TableRow, column: Column) -> str:
    return row.metrics[column.name].text


def _published_value(row: TableRow, column: Column) -> str:
    cell = row.metrics[column.name]
    return "" if cell.published is None else cell.published_text


def _list_values(
    pairs: Sequence[Pair], column: Column, than_column: Column, value_text: Callable[[TableRow, Column], str]
) -> str:
    """The values of the rows that a claim calls better, each followed by the rows called worse; of many, a range."""
    groups: dict[str, tuple[TableRow, list[TableRow]]] = {}
    for pair in pairs:
        groups.setdefault(pair.better.row, (pair.better, []))[1].append(pair.than)
    if len(groups) > MOST_GROUPS:
        everyone = ([better for better, _ in groups.values()], [row for _, others in groups.values() for row in others])
        return ", ".join(
            _value_range(rows, each, value_text, name)
            for rows, each, name in zip(everyone, (column, than_column), ("rows", "others"), strict=True)
            if any(value_text(row, each) for row in rows)
        )
    parts = []
    for better, others in groups.values():
        texts = [(better.short, value_text(better, column))]
        texts += [(row.short, value_text(row, than_column)) for row in others]
        with_value = [f"{row} {text}" for row, text in texts if text]
        if len(with_value) > MOST_VALUES:
            parts.append(f"{with_value[0]}, {_value_range(others, than_column, value_text, 'others')}")
        elif with_value:
            parts.append(", ".join(with_value))
    return "; ".join(parts)


def _value_range(
    rows: Sequence[TableRow], column: Column, value_text: Callable[[TableRow, Column], str], name: str
) -> str:
    """`9 others from FoX 0.4 to ALiBi 76.2`."""
    ordered = sorted(rows, key=lambda row: row.metrics[column.name].summary.mean)
    ends = " to ".join(f"{row.short} {value_text(row, column)}" for row in (ordered[0], ordered[-1]))
    return f"{len(rows)} {name} from {ends}"


def hypothesis_verdict(findings: Sequence[Finding]) -> str:
    """The verdict on the hypothesis, such as `supported`; empty without claims."""
    if not findings:
        return ""
    verdicts = {finding.verdict for finding in findings}
    supports = bool(verdicts & {"shown", "shown in part", "mixed"})
    combined: ClaimVerdict
    if verdicts & {"opposite", "mixed"}:
        combined = "mixed" if supports else "opposite"
    elif supports:
        combined = "shown" if verdicts == {"shown"} else "shown in part"
    else:
        undecided: tuple[ClaimVerdict, ...] = ("not shown", "not testable", "too few seeds", "not trained")
        combined = next(verdict for verdict in undecided if verdict in verdicts)
    return OF_HYPOTHESIS[combined]


def place_in_paper(source: str) -> tuple[bool, str, int]:
    """The sort key of a source such as `Table 10`."""
    kind, _, number = source.partition(" ")
    digits = "".join(itertools.takewhile(str.isdecimal, number))
    return not source, "" if kind == "Table" else kind, int(digits or 0)


def claims_layout(findings: Sequence[Finding]) -> Layout:
    """One line per claim: its text, our values and the published values, p and the verdict."""
    has_published = any(finding.published for finding in findings)
    titles = ["claim", "paper", "measure", "ours", *(["published"] * has_published), "p", "verdict"]
    rows = []
    for finding in findings:
        p = MISSING if math.isnan(finding.largest_p) else p_text(finding.largest_p)
        texts = [finding.claim, finding.source, finding.measure, finding.ours]
        texts += [finding.published] * has_published
        rows.append(tuple(TextCell(text) for text in (*texts, p, finding.verdict_text)))
    headers = tuple(ColumnHeader(title, numeric=title == "p") for title in titles)
    return Layout(headers, tuple(rows), " ".join(_claim_notes(findings, has_published=has_published)))


def _claim_notes(findings: Sequence[Finding], *, has_published: bool) -> Iterator[str]:
    """Sentences that explain the values and the verdicts of these findings."""
    about_rows = {finding.verdict for finding in findings if not finding.is_about_heads}
    if about_rows:
        yield VALUES_NOTE
        for verdict, meaning in VERDICT_NOTES.items():
            if verdict in about_rows:
                yield f"{verdict.capitalize()}: {meaning}."
    if any(finding.pairs and finding.untrained for finding in findings):
        yield UNTRAINED_NOTE
    if has_published:
        yield "Published values are of the paper's size and data."
    if any(finding.is_about_heads for finding in findings):
        yield HEADS_NOTE
