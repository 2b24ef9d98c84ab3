"""The claims of an ablation, with verdicts from its runs.

A claim says that some rows are better than others. Every pair of these rows is tested as in a table, with p corrected
by Holm's method for the pairs of one task (rows with the same labels on all axes except the encoding), which is one
column of the paper's tables. The claim is

    shown           if every pair differs as claimed
    shown in part   if some pairs differ as claimed, and the others do not differ
    opposite        if some pairs differ the other way, and none as claimed
    mixed           if pairs differ both ways
    not shown       if no pair differs
    too few seeds   if no data of this number of runs could show a difference
    not trained     if no pair has finished runs; otherwise pairs without finished runs are left out

A figure of heads may claim that heads mark something (`figures.marks` has the measure). With the AUC of one head per
seed, chosen on other sequences, and that head's AUC with the initial weights, the claim is

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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cope_sweep.api.answers import ClaimVerdict
from cope_sweep.config import Plan
from cope_sweep.config.ablation import Claim, Maps
from cope_sweep.read.tables.model import Column, Comparison, TableModel, TableRow, other_labels, p_text, same_labels
from cope_sweep.read.tables.render import MISSING, ColumnHeader, Layout, TextCell, mean_text, published_text
from cope_sweep.read.tables.stats import TELLS, Summary, holm, summarise

if TYPE_CHECKING:
    import pandas as pd

MARKS_FROM = 0.9
"""A head marks something where its AUC is at least this."""
LEAST_SEEDS = 3
"""Seeds of which an interval of heads says something."""
MOST_VALUES = 5
"""Maximum number of values to list for a row and the rows that it is compared with; more are shown as a range."""
CLAIMS_NOTE = (
    "Mean ± standard deviation over seeds; p: the largest of the pairs of rows, corrected for those of one task "
    "(Holm). Shown: every pair differs as the claim says; opposite: a pair differs the other way."
)
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
    "not trained": "not trained",
}
"""Combined verdict of the claims → verdict on the hypothesis."""


@dataclass(frozen=True)
class Pair:
    """A row that a claim calls better, and a row that it calls worse."""

    better: TableRow
    than: TableRow
    comparison: Comparison
    """`better` minus `than`."""


@dataclass(frozen=True)
class Finding:
    """A claim, and its verdict from the runs."""

    claim: Claim
    column: Column
    than_column: Column
    """The column of the rows called worse; different from `column` if an evaluation variant judges them."""
    verdict: ClaimVerdict
    pairs: tuple[Pair, ...]

    @property
    def largest_p(self) -> float:
        """The largest corrected p of its pairs; NaN if none was tested."""
        p_values = [pair.comparison.p_adjusted for pair in self.pairs]
        return max((p for p in p_values if p is not None), default=math.nan)

    @property
    def ours(self) -> str:
        """Our values: `CoPE 0.003 ± 0.006; RoPE 3.40 ± 4.72, Absolute 24.82 ± 4.09`."""
        return self._values(lambda row, column: mean_text(row.metrics[column.name], column))

    @property
    def published(self) -> str:
        """The published values of the same rows; empty if there are none."""

        def value(row: TableRow, column: Column) -> str:
            published = row.metrics[column.name].published
            return "" if published is None else published_text(published, column)

        return self._values(value)

    def _values(self, text: Callable[[TableRow, Column], str]) -> str:
        """The values of the rows that the claim calls better, each followed by the rows called worse."""
        groups: dict[str, list[TableRow]] = {}
        for pair in self.pairs:
            groups.setdefault(pair.better.row, [pair.better]).append(pair.than)
        parts = []
        for better, *others in groups.values():
            texts = [(better.short, text(better, self.column))]
            texts += [(row.short, text(row, self.than_column)) for row in others]
            with_value = [(row, value) for row, value in texts if value]
            if len(with_value) > MOST_VALUES:  # the extremes of the others
                ordered = sorted(others, key=lambda row: row.metrics[self.than_column.name].summary.mean)
                ends = " to ".join(f"{row.short} {text(row, self.than_column)}" for row in (ordered[0], ordered[-1]))
                parts.append(f"{better.short} {text(better, self.column)}, {len(others)} others from {ends}")
            elif with_value:
                parts.append(", ".join(f"{row} {value}" for row, value in with_value))
        return "; ".join(parts)

    @property
    def measure(self) -> str:
        """The title of the deciding column; both titles if the rows called worse have a different one."""
        titles = dict.fromkeys((self.column.title, self.than_column.title))
        return " against ".join(titles)

    @property
    def shown(self) -> int:
        """The number of pairs that differ as claimed."""
        return sum(pair.comparison.verdict == "better" for pair in self.pairs)

    @property
    def text(self) -> str:
        """The verdict; if only some pairs differ as claimed, with their number."""
        if self.verdict not in ("shown in part", "mixed"):
            return self.verdict
        return f"{self.verdict} ({self.shown} of {len(self.pairs)} pairs)"


@dataclass(frozen=True)
class HeadFinding:
    """A claim of a figure that heads mark something, and what the runs say about it."""

    claim: Claim
    figure: str
    """The name of the figure."""
    auc: Summary
    """Of the chosen head of each seed."""
    initial_auc: Summary
    """The same with the initial weights."""
    gain: Summary
    """Their difference, by seed."""
    on: float
    """Mean value of the chosen heads with the label."""
    off: float
    """And without."""
    measure: str
    verdict: ClaimVerdict
    largest_p: float = math.nan
    published: str = ""
    pairs: tuple[Pair, ...] = ()
    shown: int = 0

    @property
    def ours(self) -> str:
        """AUC, and the mean values with the label and without."""
        if not self.auc.n:
            return ""
        own, first = (f"{each.mean:.2f} ± {each.std:.2f}" for each in (self.auc, self.initial_auc))
        return f"{own}, untrained {first}; mean {self.on:.2f} with the label, {self.off:.2f} without"

    @property
    def text(self) -> str:
        """The verdict."""
        return self.verdict


def head_findings(figures: Mapping[str, Maps], heads: pd.DataFrame) -> tuple[HeadFinding, ...]:
    """The claims of figures (by name) about heads; `heads` is the frame of `figures.marks.measure_run`."""
    found = []
    for name, figure in figures.items():
        lines = heads[heads["figure"] == name]
        chosen = lines[lines["chosen"]].set_index("seed")
        first = lines[lines["initial_chosen"]].set_index("seed")["initial_auc"]
        own, gain = summarise(chosen["auc"]), summarise(chosen["auc"] - first)
        what = f"gates of {figure.mark} tokens" if figure.show == "gates" else f"attention to keys since {figure.mark}"
        found.append(
            HeadFinding(
                Claim(text=figure.claim, source=figure.source, better={}, than={}), name, own, summarise(first), gain,
                chosen["on"].mean(), chosen["off"].mean(), f"AUC: {what}", _of_heads(own, gain),
            )
        )  # fmt: skip
    return tuple(found)


def _of_heads(own: Summary, gain: Summary) -> ClaimVerdict:
    if gain.n < LEAST_SEEDS:
        return "too few seeds" if gain.n else "not trained"
    if gain.ci_low > 0:
        return "shown" if own.ci_low > MARKS_FROM else "shown in part"
    return "opposite" if gain.ci_high < 0 else "not shown"


def claim_findings(plan: Plan, model: TableModel) -> tuple[Finding, ...]:
    """The claims about rows of this plan, with verdicts from `model`, the table of the same plan."""
    rows = {row.row: row for row in model.rows}
    columns = {column.name: column for column in model.columns}
    found = []
    for index, claim in enumerate(plan.ablation.content.claims):
        better = [rows[row.name] for row in plan.rows if index in row.better]
        than = [rows[row.name] for row in plan.rows if index in row.than]
        named = claim.better.keys() | claim.than.keys()
        pairs = [(row, other) for row in better for other in than if same_labels(row, other, named)]
        column = columns[claim.metric or model.primary.name]
        of_than = columns[claim.metric_of_than(column.name)]
        trained = [
            (row, other)
            for row, other in pairs
            if row.metrics[column.name].values and other.metrics[of_than.name].values
        ]
        if trained:
            found.append(_finding(model, claim, column, of_than, trained))
        elif pairs:
            found.append(Finding(claim, column, of_than, "not trained", ()))
    return tuple(found)


def _finding(
    model: TableModel, claim: Claim, column: Column, of_than: Column, rows: Sequence[tuple[TableRow, TableRow]]
) -> Finding:
    differences = [model.difference(row.metrics[column.name], other.metrics[of_than.name]) for row, other in rows]
    corrected, floors = [math.nan] * len(rows), [math.nan] * len(rows)
    for family in _families(rows):
        p_values = holm([differences[index].p for index in family])
        smallest = holm([differences[index].smallest_p for index in family])
        for index, p, floor in zip(family, p_values, smallest, strict=True):
            corrected[index], floors[index] = p, floor
    pairs, signs = [], set()
    for (row, other), difference, p in zip(rows, differences, corrected, strict=True):
        sign = 0
        if p <= TELLS:
            sign = 1 if (difference.difference < 0) == (column.goal == "min") else -1
        signs.add(sign)
        word = {1: "better", 0: "", -1: "worse"}[sign]
        pairs.append(Pair(row, other, Comparison(other.row, difference, word, None if math.isnan(p) else p)))
    verdict: ClaimVerdict
    if not any(floor <= TELLS for floor in floors):
        verdict = "too few seeds"
    elif -1 in signs:
        verdict = "mixed" if 1 in signs else "opposite"
    elif 1 in signs:
        verdict = "shown in part" if 0 in signs else "shown"
    else:
        verdict = "not shown"
    return Finding(claim, column, of_than, verdict, tuple(pairs))


def _families(rows: Sequence[tuple[TableRow, TableRow]]) -> Collection[list[int]]:
    """The indices of the pairs of each task: pairs whose better rows differ in their encoding alone."""
    families: dict[object, list[int]] = {}
    for index, (row, _) in enumerate(rows):
        families.setdefault(other_labels(row), []).append(index)
    return families.values()


def hypothesis_verdict(findings: Sequence[Finding | HeadFinding]) -> str:
    """The verdict on the hypothesis, such as `supported`; empty without claims."""
    verdicts = [finding.verdict for finding in findings if finding.verdict != "not trained"]
    if not verdicts:
        return OF_HYPOTHESIS["not trained"] if findings else ""
    together: ClaimVerdict
    for_it = {"shown", "shown in part", "mixed"} & set(verdicts)
    if {"opposite", "mixed"} & set(verdicts):
        together = "mixed" if for_it else "opposite"
    elif for_it:
        together = "shown" if set(verdicts) == {"shown"} and len(verdicts) == len(findings) else "shown in part"
    else:
        together = "not shown" if "not shown" in verdicts else "too few seeds"
    return OF_HYPOTHESIS[together]


def place_in_paper(source: str) -> tuple[bool, str, int]:
    """The sort key of a source such as `Table 10`."""
    kind, _, number = source.partition(" ")
    digits = "".join(itertools.takewhile(str.isdecimal, number))
    return not source, "" if kind == "Table" else kind, int(digits or 0)


def claims_layout(findings: Sequence[Finding | HeadFinding]) -> Layout:
    """One line per claim: its text, our values and the published values, p and the verdict."""
    has_published = any(finding.published for finding in findings)
    titles = ["claim", "paper", "measure", "ours", *(["published"] * has_published), "p", "verdict"]
    rows = []
    for finding in findings:
        p = MISSING if math.isnan(finding.largest_p) else p_text(finding.largest_p)
        texts = [finding.claim.text, finding.claim.source, finding.measure, finding.ours]
        texts += [finding.published] * has_published
        rows.append(tuple(TextCell(text) for text in (*texts, p, finding.text)))
    headers = tuple(ColumnHeader(title, numeric=title == "p") for title in titles)
    notes = [CLAIMS_NOTE] if any(isinstance(each, Finding) for each in findings) else []
    notes += ["Published values are of the paper's size and data."] if has_published else []
    notes += [HEADS_NOTE] if any(isinstance(each, HeadFinding) for each in findings) else []
    return Layout(headers, tuple(rows), " ".join(notes))
