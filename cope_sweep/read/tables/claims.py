"""The claims of an ablation, with verdicts from its runs.

A claim says that some rows are better than others. Every pair of these rows has the test of `tables.pairs`: one p in a
document. The claim is

    shown           if every pair differs significantly, as claimed
    shown in part   if some pairs do, and the others do not differ
    opposite        if some pairs differ the other way, and none as claimed
    mixed           if pairs differ both ways
    not shown       if no pair differs
    too few seeds   if no data of this number of runs could show a difference, or a row has no value although its runs
                    have ended: they failed, or none has learned the task
    not testable    if most seeds of every row are stuck at a rule that does not solve the task
                    (`tables.rules`), so nothing follows from the order of the rows
    not trained     if no pair has runs that have ended
                    (if some pairs have values, the others count as pairs that do not differ)

A pair with planned runs that are not finished, failed or have no value has too few seeds (`pairs.runs_without_values`):
beside other pairs, it counts as one that does not differ.

A claim may also say that rows are equivalent, or not worse, by a `margin`: the smallest difference that matters. Then a
pair is as claimed if the 95 % interval of its difference lies within ± the margin, or does not reach beyond it on the
worse side. It is opposite if it differs significantly and the whole interval lies beyond the margin (of `not worse`, on
the worse side). The verdicts are the same; there are too few seeds if no pair has an interval.

With a margin, the size of a difference is

    equivalent      if its interval lies within ± the margin: even a significant difference does not matter
    better, worse   if the rows differ significantly otherwise
    unclear         otherwise

A claim is as strong as its weakest pair, so p, difference, interval and size are all of that pair. It is the one that
differs most the other way; if none does so significantly, the one with the largest p, and of these the smallest
difference in the claimed direction. With a margin, it is the pair with the smallest difference in that direction, or,
of rows that are called equivalent, the one that may differ most; p, by which such claims are not judged, is left out.

A figure of heads may claim that heads mark something: `controls` has the rule.

The verdict on a hypothesis combines the claims of its ablation: it is supported if all claims are shown. While some
are not trained, and no other says anything for it or against it, it is not tested in full yet.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from cope_sweep.api.ablations import ClaimSize, ClaimVerdict
from cope_sweep.config import Plan
from cope_sweep.config.ablation import Claim, Says
from cope_sweep.read.numbers import MISSING, fixed, p_text
from cope_sweep.read.tables.controls import MARKS_FROM, Judgement, judge, kinds_of_controls
from cope_sweep.read.tables.declared import declared_text
from cope_sweep.read.tables.layout import ColumnHeader, Layout, TextCell, lost_text
from cope_sweep.read.tables.model import LOST, Column, Comparison, MetricCell, TableModel, TableRow
from cope_sweep.read.tables.pairs import (
    BY_MARGIN_RULE,
    PairTest,
    claim_tests,
    gain,
    has_interval,
    is_better,
    runs_without_values,
)
from cope_sweep.read.tables.stats import SIGNIFICANT_P, Summary, benjamini_hochberg, summarise
from cope_sweep.records import RunRecord, Status
from cope_sweep.store.results_file import Declarations

if TYPE_CHECKING:
    import pandas as pd

    from cope_sweep.read.figures.kinds.maps import Maps

Outcome = Literal["as claimed", "opposite", ""]

MOST_VALUES = 5
"""Maximum number of values to list for a row and the rows that it is compared with; more are shown as a range."""
MOST_GROUPS = 4
"""Maximum number of rows that a claim calls better to list with those they are compared with."""
ALL_STUCK = "most seeds of every row are stuck at a rule that does not solve the task"
"""Why a claim about rows is not testable."""
VERDICT_NOTES: dict[ClaimVerdict, str] = {
    "shown": "every pair of rows differs significantly, as the claim says",
    "shown in part": "some pairs of rows differ significantly, as the claim says; no pair differs the other way",
    "mixed": "some pairs of rows differ significantly as the claim says, and some the other way",
    "opposite": "some pairs of rows differ significantly the other way, and none as the claim says",
    "not shown": "no pair of rows differs significantly",
    "too few seeds": "with so few seeds, or none of a row that learned the task, no difference could be significant",
    "not testable": f"{ALL_STUCK} (see the shortcuts)",
}
"""Verdict on a claim about rows → its meaning, below a table of claims."""
VALUES_NOTE = "Values are means ± standard deviations over seeds."
DIFFERENCE_NOTE = (
    "Difference and p are of the weakest pair of rows: the one that differs most the other way, or else the one with "
    "the largest p; with a margin, the one with the smallest difference in the claimed direction (of rows called "
    "equivalent, the one that may differ most). Difference: the row called better minus the other, with the 95 % "
    "interval of the same exact test. p is corrected for the pairs of all claims about this column and task (Holm), "
    "and the interval is not, so it may exclude 0 where p exceeds 0.05. n: seeds a row, or pairs of runs of the same "
    "seed."
)
MARGIN_NOTES: dict[str, str] = {
    "equivalent": "Equivalent rows: shown if every interval lies within ± the margin; opposite if a whole interval "
    "lies beyond it, and the difference is significant.",
    "not worse": "Rows that are not worse: shown if no interval reaches beyond the margin on the worse side; opposite "
    "if a whole interval lies beyond it there, and the difference is significant.",
}
"""What a claim says → its verdicts."""
SIZE_NOTE = (
    "Size: equivalent, if the interval lies within ± the margin, the smallest difference that matters; otherwise "
    "better or worse, if the difference is significant, or else unclear."
)
Q_NOTE = (
    "q: p corrected for the claims of this report that rows are better (Benjamini–Hochberg); of claims with q ≤ 0.05, "
    "at most 5 % are false, on average."
)
DECLARED_NOTE = (
    "Declared: whether the ablation file contained the claim, with these rows and this measure, before the first of "
    "their runs started, and since which day and commit."
)
UNTRAINED_NOTE = (
    "Pairs with a row that has no value (not trained yet, {failed}or no seed has learned the task) count in the "
    "correction, and as pairs that do not differ."
)
MISSING_NOTE = "Pairs of rows with such runs have too few seeds for a verdict, and count as pairs that do not differ."
HEADS_NOTE = (
    "Claims about heads use the AUC (area under the ROC curve) of one head per seed, chosen on separate sequences. Its "
    "controls are the same measure, with its own choice of a head, for tokens that the claim does not name; the "
    "percentile is its place among them (50: a token like any other), and p is the exact test of its ranks over seeds. "
    f"Shown: p ≤ {SIGNIFICANT_P:g}, above the controls, with an AUC above {MARKS_FROM:g} (95 % interval over seeds). "
    "Shown in part: p and rank are, and the AUC is lower. Not testable: too few seeds or controls."
)
OF_HYPOTHESIS: dict[ClaimVerdict, str] = {
    "shown": "supported",
    "shown in part": "supported in part",
    "mixed": "supported in part, contradicted in part",
    "opposite": "contradicted",
    "not shown": "not supported",
    "too few seeds": "not testable with so few seeds",
    "not testable": "not testable",
    "not trained": "not tested yet",
}
"""Combined verdict of the claims → verdict on the hypothesis."""


@dataclass(frozen=True)
class Pair:
    """A row that a claim calls better, and a row that it calls worse."""

    better: TableRow
    than: TableRow
    cell: MetricCell
    """What decides for the row called better."""
    than_cell: MetricCell
    """What decides for the row called worse."""
    comparison: Comparison
    """`better` minus `than`; its verdict is better, worse, or empty if there is no significant difference."""
    margin: float | None = None
    """The smallest difference that matters; None: the claim does not say."""
    outcome: Outcome = ""
    """What the pair says of the claim; empty: nothing."""

    @property
    def gain(self) -> tuple[float, float, float]:
        """The difference and its interval, positive where `better` is better; NaN without an interval."""
        return gain(self.comparison.difference, self.cell.column.goal)

    @property
    def size(self) -> ClaimSize | None:
        """How large the difference is, measured by the margin; None without one."""
        if self.margin is None:
            return None
        _, low, high = self.gain
        if -self.margin <= low and high <= self.margin:
            return "equivalent"
        of_verdict: dict[str, ClaimSize] = {"better": "better", "worse": "worse"}
        return of_verdict.get(self.comparison.verdict, "unclear")


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
    without_values: int = 0
    """Number of pairs with a row without values: none of its runs is finished, or none has learned the task."""
    runs: frozenset[str] = frozenset()
    """The ids of the planned runs of its rows."""
    missing: Mapping[str, Status] = field(default_factory=dict)
    """Those of them that a verdict lacks (`pairs.runs_without_values`), without rows that are still to be trained: run
    id → status."""
    is_about_heads: bool = False
    says: Says = "better"
    """What the claim says of the rows called better."""
    is_paired: bool = False
    """Whether runs of the same seed were compared in pairs."""
    q: float = math.nan
    """p, corrected for all claims of a page (`with_q`); NaN if the page has no other."""
    p_of_heads: float = math.nan
    """The p of a claim about heads; NaN if it was not tested."""
    seeds_of_heads: int = 0
    """The number of seeds by which a claim about heads is judged."""
    reason: str = ""
    """Why a claim about heads was not tested."""
    task: str = ""
    """The kind of task of the rows called better, or of the models whose heads are measured."""
    declared: str = ""
    """Whether the claim stood in the ablation file before its runs started: see `tables.declared`."""
    note: str = ""
    """Why the runs do not show it, and what would settle it, from the ablation file."""

    @property
    def p(self) -> float:
        """The corrected p of the weakest pair, or of a claim about heads; NaN if none was tested, or by a margin."""
        if self.is_about_heads:
            return self.p_of_heads
        if self.weakest is None or self.says != "better":
            return math.nan
        return _p_of(self.weakest)

    @property
    def shown(self) -> int:
        """The number of pairs that are as claimed."""
        return sum(pair.outcome == "as claimed" for pair in self.pairs)

    @property
    def weakest(self) -> Pair | None:
        """The pair that says least for the claim: see this module. None for a claim about heads, and before runs."""
        if self.says == "equivalent":
            return max(self.pairs, key=_may_differ_by, default=None)
        if self.says == "not worse":
            return min(self.pairs, key=lambda pair: pair.gain[0], default=None)
        opposite = [pair for pair in self.pairs if pair.outcome == "opposite"]
        if opposite:
            return min(opposite, key=lambda pair: pair.gain[0])
        return max(self.pairs, key=lambda pair: (_comparable(_p_of(pair)), -pair.gain[0]), default=None)

    @property
    def headline(self) -> str:
        """`CoPE 2.2, RoPE 15.7 (weakest of 9 pairs)`: the means of the weakest pair.

        For a claim about heads: their AUC, and the AUC of the first kind of control.
        """
        if self.weakest is None:
            return "; ".join(self.ours.split("; ")[:2])
        better, than = self.weakest.better.short, self.weakest.than.short
        number = len(self.pairs)
        weakest = f" (weakest of {number} pairs)" if number > 1 else ""
        return f"{better} {self.weakest.cell.mean_text}, {than} {self.weakest.than_cell.mean_text}{weakest}"

    @property
    def n(self) -> tuple[int, int] | None:
        """The smallest and the largest number of runs of a row, or of pairs of runs; None without tested rows."""
        counts = [count for pair in self.pairs for count in pair.comparison.difference.n]
        counts += [self.seeds_of_heads] * (self.seeds_of_heads > 0)
        return (min(counts), max(counts)) if counts else None

    @property
    def texts(self) -> Mapping[str, str]:
        """Difference with its interval, n, p, q, margin and size as texts; `–` for those that it lacks."""
        weakest, p, q = self.weakest, self.p, self.q
        difference = margin = size = MISSING
        if weakest is not None:
            of_cell = replace(weakest.cell, comparison=replace(weakest.comparison, margin=weakest.margin))
            numbers = of_cell.comparison_texts
            interval = "" if numbers["interval"] == MISSING else f" {numbers['interval']}"
            names = f" ({weakest.better.short} − {weakest.than.short})" if len(self.pairs) > 1 else ""
            difference = numbers["difference"] + interval + names
            margin = numbers["margin"]
            size = weakest.size or MISSING
        return {
            "difference": difference,
            "n": self._n_text,
            "p": MISSING if math.isnan(p) else p_text(p),
            "q": MISSING if math.isnan(q) else p_text(q),
            "margin": margin,
            "size": size,
        }

    @property
    def _n_text(self) -> str:
        """`8`, `5–8`, or `8 pairs`."""
        if self.n is None:
            return MISSING
        low, high = self.n
        text = f"{low}" if low == high else f"{low}–{high}"
        return f"{text} pairs" if self.is_paired else text

    @property
    def meaning(self) -> str:
        """What the verdict says of the rows or heads; empty before there are runs."""
        if self.verdict == "not trained":
            return ""
        if self.is_about_heads:
            return self.reason or HEADS_NOTE
        of_margin = self.says != "better" and self.verdict not in ("too few seeds", "not testable")
        meaning = MARGIN_NOTES[self.says] if of_margin else VERDICT_NOTES[self.verdict]
        return " ".join([*_missing_notes([self]), meaning])

    @property
    def verdict_text(self) -> str:
        """The verdict; if only some pairs are as claimed, with their number."""
        if self.is_about_heads or self.verdict not in ("shown in part", "mixed"):
            return self.verdict
        return f"{self.verdict} ({self.shown} of {len(self.pairs) + self.without_values} pairs)"


def _p_of(pair: Pair) -> float:
    """Its corrected p; NaN if it was not tested."""
    return math.nan if pair.comparison.p_adjusted is None else pair.comparison.p_adjusted


def _comparable(p: float) -> float:
    """A pair that was not tested says no more than one with p = 1."""
    return 1.0 if math.isnan(p) else p


def _may_differ_by(pair: Pair) -> tuple[bool, float]:
    """The largest size of the differences that an interval contains; of a pair without one, that of its difference."""
    value, low, high = pair.gain
    has_none = not has_interval(pair.comparison.difference)
    return has_none, abs(value) if has_none else max(abs(low), abs(high))


def with_q(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings of a page with their q, by Benjamini and Hochberg's method for all claims that were tested.

    Claims of equivalence, which an interval decides, have none, and a single claim needs none.
    """
    p_values = [finding.p for finding in findings]
    if sum(not math.isnan(p) for p in p_values) < 2:
        return tuple(findings)
    q_values = benjamini_hochberg(p_values)
    return tuple(replace(finding, q=q) for finding, q in zip(findings, q_values, strict=True))


def head_findings(
    figures: Mapping[str, Maps],
    heads: pd.DataFrame,
    declarations: Declarations | None = None,
    records: Mapping[str, RunRecord] | None = None,
) -> tuple[Finding, ...]:
    """The claims of figures (by name) about heads.

    Args:
        figures: The figures.
        heads: The frame of `figures.marks.measure_run`.
        declarations: When claims were declared (`tables.declared`); None: it is not recorded.
        records: The records of the measured runs, which say when they started.
    """
    findings = []
    for name, figure in figures.items():
        of_figure = heads[heads["figure"] == name]
        judged = judge(of_figure, kinds_of_controls(figure.show))
        measured = f"gates of {figure.mark} tokens"
        if figure.show != "gates":
            measured = f"attention to keys since {figure.mark}"
        findings.append(
            Finding(
                figure.claim, figure.source, f"AUC: {measured}", judged.verdict, _our_heads(judged, of_figure),
                is_about_heads=True, p_of_heads=math.nan if judged.p is None else judged.p,
                seeds_of_heads=judged.auc.n, reason=judged.reason,
                declared=declared_text(figure.claim_identity, declarations, _starts_of_heads(of_figure, records or {})),
            )
        )  # fmt: skip
    return tuple(findings)


def _starts_of_heads(heads: pd.DataFrame, records: Mapping[str, RunRecord]) -> dict[int, int]:
    """Seed → when its run started, in ms since 1970, as far as known."""
    started = {run_id: record.created_ms for run_id, record in records.items() if record.created_ms is not None}
    runs = zip(heads["run_id"], heads["seed"], strict=True)
    return {int(seed): started[run_id] for run_id, seed in runs if run_id in started}


def _our_heads(judged: Judgement, heads: pd.DataFrame) -> str:
    """`0.88 ± 0.05; 137 other token types 0.79 ± 0.11, percentile 74; untrained 0.57 ± 0.06`; empty without runs."""
    if not judged.auc.n:
        return ""
    parts = [_auc_text(judged.auc)]
    for controls in judged.controls:
        summary = summarise(value for values in controls.auc_by_seed.values() for value in values)
        place = summarise(controls.percentile_by_seed.values())
        parts.append(f"{controls.number} {controls.kind} {_auc_text(summary)}, percentile {fixed(place.mean, 0)}")
    of_seeds = heads[heads["seed"].isin(judged.seeds)]
    parts.append(f"untrained {_auc_text(summarise(of_seeds.loc[of_seeds['initial_chosen'], 'initial_auc']))}")
    measured, seeds = judged.auc.n, int(heads.loc[heads["chosen"], "seed"].nunique())
    if measured < seeds:
        parts.append(f"{measured} of {seeds} seeds have controls")
    return "; ".join(parts)


def _auc_text(auc: Summary) -> str:
    """`0.97 ± 0.01`; the mean alone for one seed."""
    return fixed(auc.mean, 2) if auc.n < 2 else f"{fixed(auc.mean, 2)} ± {fixed(auc.std, 2)}"


def claim_findings(plan: Plan, model: TableModel, declarations: Declarations | None = None) -> tuple[Finding, ...]:
    """The claims about rows of this plan, with verdicts from `model`, the table of the same plan.

    `declarations` says when claims were declared (`tables.declared`); None: it is not recorded.
    """
    rows = {row.row: row for row in model.rows}
    columns = {column.name: column for column in model.columns}
    tests = claim_tests(model)
    findings = []
    for index, claim in enumerate(plan.ablation.content.claims):
        pairs = [pair for pair in model.claimed if pair.claim == index]
        if pairs:
            column, than_column = (columns[name] for _, name in (pairs[0].better, pairs[0].than))
            finding = Finding(
                claim.text, claim.source, " against ".join(dict.fromkeys((column.title, than_column.title))),
                "not trained", says=claim.says, is_paired=model.paired,
                task=rows[pairs[0].better[0]].runs[0][0].task.kind,
            )  # fmt: skip
            tested = [
                (rows[pair.better[0]], rows[pair.than[0]], tests[pair.better, pair.than])
                for pair in pairs
                if (pair.better, pair.than) in tests
            ]
            if tested:
                finding = _with_verdict(finding, claim, column, than_column, tested, len(pairs) - len(tested))
            elif any(all(_has_ended(rows[name]) for name, _ in (pair.better, pair.than)) for pair in pairs):
                finding = replace(finding, verdict="too few seeds")
            cells = [(rows[name], metric) for pair in pairs for name, metric in (pair.better, pair.than)]
            finding = replace(
                finding,
                runs=frozenset(run.run_id for row, _ in cells for run, _ in row.runs),
                missing=runs_without_values(*(cell for cell in cells if _has_ended(cell[0]))),
            )
            starts_ms = _starts_ms((rows[pair.better[0]], rows[pair.than[0]]) for pair in pairs)
            identity = claim.identity(model.primary.name, is_paired=model.paired)
            # Results of earlier versions do not say whether the test in pairs was declared, too.
            known = declarations or {}
            is_older = identity not in known and claim.identity(model.primary.name) in known
            declared = declared_text(identity, None if is_older else declarations, starts_ms)
            findings.append(replace(finding, declared=declared, note=" ".join(claim.note.split())))
    return tuple(findings)


def _has_ended(row: TableRow) -> bool:
    """Whether a run of the row is finished or has failed."""
    return any(row.counts[status] for status in LOST)


def _starts_ms(pairs: Iterable[tuple[TableRow, TableRow]]) -> dict[int, int]:
    """Seed → when the first finished run of these rows with this seed started, in ms since 1970, as far as known."""
    starts_ms: dict[int, int] = {}
    for run, record in (run for pair in pairs for row in pair for run in row.runs):
        if record.status == "finished" and record.created_ms is not None:
            starts_ms[run.seed] = min(starts_ms.get(run.seed, record.created_ms), record.created_ms)
    return starts_ms


def _with_verdict(
    finding: Finding,
    claim: Claim,
    column: Column,
    than_column: Column,
    tested: Sequence[tuple[TableRow, TableRow, PairTest]],
    without_values: int,
) -> Finding:
    """The finding with its verdict.

    Args:
        finding: The claim without runs.
        claim: The claim.
        column: The column of the rows that are called better.
        than_column: The column of the rows that are called worse.
        tested: A row that is called better, one that is called worse, and their test; of all pairs with values.
        without_values: The number of the other pairs.
    """
    pairs, has_enough = [], []
    for row, other, test in tested:
        verdict = ""
        is_complete = not runs_without_values((row, column.name), (other, than_column.name))
        if test.is_significant and is_complete:
            verdict = "better" if is_better(test.difference, column.goal) else "worse"
        comparison = Comparison(other.row, test.difference, verdict, None if math.isnan(test.p) else test.p)
        margin = claim.margin_at(other.metrics[than_column.name].summary.mean, column.scale)
        pair = Pair(row, other, row.metrics[column.name], other.metrics[than_column.name], comparison, margin)
        pairs.append(replace(pair, outcome=_outcome(pair, claim.says) if is_complete else ""))
        # An interval without ends says as little about equivalence as a p that cannot be small about a difference.
        has_test = test.is_testable if claim.says == "better" else has_interval(test.difference)
        has_enough.append(has_test and is_complete)
    if _are_all_stuck(pairs, column, than_column):
        on_claim: ClaimVerdict = "not testable"
    elif not any(has_enough):
        on_claim = "too few seeds"
    else:
        outcomes = {pair.outcome for pair in pairs}
        on_claim = _verdict_on_rows(outcomes | {""} if without_values else outcomes)
    return replace(
        finding,
        verdict=on_claim,
        ours=_list_values(pairs, column, than_column, _our_value),
        published=_list_values(pairs, column, than_column, _published_value),
        pairs=tuple(pairs),
        without_values=without_values,
    )


def _outcome(pair: Pair, says: Says) -> Outcome:
    """What a pair says of its claim."""
    verdict, margin = pair.comparison.verdict, pair.margin
    if says == "better" or margin is None:
        by_verdict: dict[str, Outcome] = {"better": "as claimed", "worse": "opposite"}
        return by_verdict.get(verdict, "")
    _, low, high = pair.gain
    is_significant = verdict != ""
    if -margin <= low and (high <= margin or says == "not worse"):
        return "as claimed"
    if is_significant and (high < -margin or (low > margin and says == "equivalent")):
        return "opposite"
    return ""


def _are_all_stuck(pairs: Sequence[Pair], column: Column, than_column: Column) -> bool:
    """Most seeds of every row of these pairs are stuck at a rule that does not solve the task."""
    cells = [pair.better.metrics[column.name] for pair in pairs]
    cells += [pair.than.metrics[than_column.name] for pair in pairs]
    return all(cell.mostly_stuck for cell in cells)


def _verdict_on_rows(outcomes: set[Outcome]) -> ClaimVerdict:
    """The verdict on a claim from the outcomes of its pairs."""
    if "opposite" in outcomes:
        return "mixed" if "as claimed" in outcomes else "opposite"
    if "as claimed" in outcomes:
        return "shown in part" if "" in outcomes else "shown"
    return "not shown"


ValueOf = Callable[[TableRow, Column], tuple[float, str] | None]
"""A row's value in a column, and its text; None: it has none."""


def _our_value(row: TableRow, column: Column) -> tuple[float, str] | None:
    cell = row.metrics[column.name]
    return cell.summary.mean, cell.text


def _published_value(row: TableRow, column: Column) -> tuple[float, str] | None:
    cell = row.metrics[column.name]
    return None if cell.published is None else (cell.published.value, cell.published_text)


def _list_values(pairs: Sequence[Pair], column: Column, than_column: Column, value_of: ValueOf) -> str:
    """The values of the rows that a claim calls better, each followed by the rows called worse; of many, a range."""
    groups: dict[str, tuple[TableRow, list[TableRow]]] = {}
    for pair in pairs:
        groups.setdefault(pair.better.row, (pair.better, []))[1].append(pair.than)
    if len(groups) > MOST_GROUPS:
        betters = [row for row, _ in groups.values()]
        others = list({row.row: row for _, rows in groups.values() for row in rows}.values())
        ranges = (
            _value_range(betters, column, value_of, "rows"),
            _value_range(others, than_column, value_of, "others"),
        )
        return ", ".join(filter(None, ranges))
    parts = []
    for better, others in groups.values():
        first, listed = (
            [f"{row.short} {value[1]}" for row in rows if (value := value_of(row, each)) is not None]
            for rows, each in (([better], column), (others, than_column))
        )
        if len(first) + len(listed) > MOST_VALUES:
            listed = [_value_range(others, than_column, value_of, "others")]
        parts.append(", ".join(first + listed))
    return "; ".join(filter(None, parts))


def _value_range(rows: Sequence[TableRow], column: Column, value_of: ValueOf, name: str) -> str:
    """`9 others from FoX 0.4 to ALiBi 76.2`, of those that have a value; empty if none has."""
    found = [(value, row.short) for row in rows if (value := value_of(row, column)) is not None]
    if not found:
        return ""
    ordered = sorted(found, key=lambda each: each[0][0])
    ends = " to ".join(f"{short} {text}" for (_, text), short in (ordered[0], ordered[-1]))
    return f"{len(found)} {name} from {ends}"


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
    elif "not trained" in verdicts:
        return OF_HYPOTHESIS["not trained"] if len(verdicts) == 1 else "not tested in full yet"
    else:
        undecided: tuple[ClaimVerdict, ...] = ("not shown", "not testable", "too few seeds")
        combined = next(verdict for verdict in undecided if verdict in verdicts)
        if combined == "not testable":
            untested = next(finding for finding in findings if finding.verdict == combined)
            return f"{OF_HYPOTHESIS[combined]}: {untested.reason or ALL_STUCK}"
    return OF_HYPOTHESIS[combined]


def place_in_paper(source: str) -> tuple[bool, str, int]:
    """The sort key of a source such as `Table 10`."""
    kind, _, number = source.partition(" ")
    digits = "".join(itertools.takewhile(str.isdecimal, number))
    return not source, "" if kind == "Table" else kind, int(digits or 0)


TITLES = {"difference": "difference [95 %]", "q": "q (report)"}
"""Column of a table of claims → its title, if that is another one."""
NUMBERS = ("difference", "n", "p", "q", "margin")


def claims_layout(findings: Sequence[Finding]) -> Layout:
    """A table with a line for each claim: text, values, smallest difference, n, p and verdict; q if there are several.

    `findings` must not be empty.
    """
    lines = [
        {"claim": finding.claim, "paper": finding.source, "measure": finding.measure, "ours": finding.ours,
         "published": finding.published, **finding.texts, "verdict": finding.verdict_text, "declared": finding.declared}
        for finding in findings
    ]  # fmt: skip
    optional = {
        "published": any(finding.published for finding in findings),
        "q": any(not math.isnan(finding.q) for finding in findings),
        "declared": any(finding.declared for finding in findings),
    }
    optional |= dict.fromkeys(("margin", "size"), any(line["margin"] != MISSING for line in lines))
    names = [name for name in lines[0] if optional.get(name, True)]
    headers = tuple(ColumnHeader(TITLES.get(name, name), numeric=name in NUMBERS) for name in names)
    rows = tuple(tuple(TextCell(line[name]) for name in names) for line in lines)
    return Layout(headers, rows, " ".join(_claim_notes(findings)))


def _missing_notes(findings: Iterable[Finding]) -> Iterator[str]:
    """Sentences about the runs that the verdicts of these findings lack."""
    runs = {run_id for finding in findings for run_id in finding.runs}
    missing = {run_id: status for finding in findings for run_id, status in finding.missing.items()}
    lost = sum(status in LOST for status in missing.values())
    if lost:
        yield f"{lost_text(lost, len(runs))}."
    if unfinished := len(missing) - lost:
        yield f"Not finished: {unfinished} of {len(runs)} runs."
    if missing:
        yield MISSING_NOTE


def _claim_notes(findings: Sequence[Finding]) -> Iterator[str]:
    """Sentences that explain the values and the verdicts of these findings."""
    about_rows = [finding for finding in findings if not finding.is_about_heads]
    if about_rows:
        yield VALUES_NOTE
        if any(finding.n for finding in about_rows):
            yield DIFFERENCE_NOTE
            if len({finding.says == "better" for finding in about_rows}) > 1:
                yield BY_MARGIN_RULE
        verdicts = {finding.verdict for finding in about_rows if finding.says == "better"}
        verdicts |= {finding.verdict for finding in about_rows} & {"too few seeds", "not testable"}
        for verdict, meaning in VERDICT_NOTES.items():
            if verdict in verdicts:
                yield f"{verdict.capitalize()}: {meaning}."
    for says, note in MARGIN_NOTES.items():
        if any(finding.says == says for finding in about_rows):
            yield note
    if any(pair.size for finding in about_rows for pair in finding.pairs):
        yield SIZE_NOTE
    if any(not math.isnan(finding.q) for finding in findings):
        yield Q_NOTE
    yield from _missing_notes(findings)
    if any(finding.pairs and finding.without_values for finding in findings):
        yield UNTRAINED_NOTE.format(failed="failed, " * any(finding.missing for finding in findings))
    if any(finding.published for finding in findings):
        yield "Published values are of the paper's size and data."
    if any(finding.is_about_heads for finding in findings):
        yield HEADS_NOTE
    for reason in dict.fromkeys(finding.reason for finding in findings if finding.reason):
        yield f"Not tested: {reason}."
    if any(finding.declared for finding in findings):
        yield DECLARED_NOTE
