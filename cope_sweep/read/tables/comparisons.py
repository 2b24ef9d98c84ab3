"""Comparisons of the cells of a table: with another row, or with the paper.

With a row, or with the rows that have one label of an axis, rows are tested by the primary metric alone: an exact test
of `stats`, with p corrected by Holm's method for all rows that are compared with the same row. A pair of rows that a
claim compares, by whatever metric, has the p of the claims (`pairs`) instead. A row is `better` or `worse` if the
corrected p is at most 5 %; otherwise there is `no significant difference`. A comparison is `descriptive`, a difference
without a verdict, for all other metrics; if no data could bring the corrected p so low, because there are too few seeds
for so many rows; and while planned runs of the pair are not finished or have no value (`pairs.runs_without_values`).

With the paper, at its scale, a cell

    agrees        if the 90 % interval of the difference lies within ± the margin (two one-sided tests at 5 %)
    differs       if it does not, and the 95 % interval of the difference excludes 0
    inconclusive  otherwise: more seeds are needed

The paper gives no values of single runs to permute, so this interval is Welch's, from our mean and standard deviation
over n runs and the published ones over the number of seeds that the paper names. It includes half a unit of the last
published digit as an uncertainty. If the paper gives a standard deviation but no number of seeds, 2 are assumed, the
smallest possible number, which makes the interval the widest. The margin is `MARGIN_STDS` published standard
deviations, but at least one unit of the last digit. A value without a standard deviation is a single run, and nothing
says how much such runs vary, so its difference is descriptive: a rank test of one run against n needs n ≥ 19, and any
other test needs a distribution. A row of fewer than `LEAST_RUNS` finished runs is descriptive as well, and so is one
with planned runs that are not finished or have no value.

The number of parameters is the same for all seeds. It agrees if it differs by at most one unit of the last published
digit.

Runs at another scale than the paper's have other values. There, only the order of the rows is compared: each row with
the one that is best in the paper.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from cope_sweep.config import Plan
from cope_sweep.config.explain import suggest
from cope_sweep.config.points import AnyRow, agreeing_rows
from cope_sweep.config.source import spelled_as
from cope_sweep.read.numbers import decimal_places, p_text
from cope_sweep.read.tables.model import (
    PAPER,
    POSITION,
    TASK,
    CellKey,
    Column,
    Comparison,
    MetricCell,
    PublishedValue,
    TableModel,
    TableRow,
    row_label,
    table_model,
    varying_axes,
)
from cope_sweep.read.tables.pairs import (
    BY_MARGIN_RULE,
    PairTest,
    claim_families,
    claim_tests,
    corrected,
    is_better,
    runs_without_values,
)
from cope_sweep.read.tables.row_names import axis_of_label, find_axis, named_rows
from cope_sweep.read.tables.stats import SIGNIFICANT_P, Difference, Summary, t_quantile, t_tail
from cope_sweep.store import QueryError, RunRecord

LEAST_RUNS = 3
"""The smallest number of our runs that is tested against published ones."""
MARGIN_STDS = 2.0
"""Published standard deviations by which a mean may differ and still agree."""
METHOD = "cope"
"""The encoding of the default reference."""

DIFFERENCE_RULE = (
    "Difference of {metric}: row minus {row}. Its 95 % interval is not corrected for the number of comparisons. "
)
TESTS = {
    False: "permutation test",
    True: "sign-flip test of the differences between runs of the same seed, which share initial weights and data",
}
"""Whether runs are paired → the exact test."""
TEST_RULE = (
    "p: exact {test}, corrected for {comparisons} (Holm). With {runs}, p is at least {smallest_p}. If p ≤ 0.05, "
    "{meaning}; otherwise there is no significant difference. "
)
TOO_FEW_RULE = (
    "Too few seeds for verdicts: with {runs} and {comparisons}, the corrected p of an exact {test} is at least "
    "{smallest_p}, so no difference could be significant. "
)
CLAIMED_RULE = (
    "Where a claim compares two rows, p is the claim's: exact {test}, corrected for the pairs of all claims about this "
    "column and task (Holm). With {runs}, it is at least {smallest_p}. If p ≤ 0.05, {meaning}; otherwise there is no "
    "significant difference. "
)
TOO_FEW_CLAIMED_RULE = (
    "Too few seeds for verdicts on pairs that a claim compares: with {runs}, the p of an exact {test}, corrected for "
    "the pairs of all claims about this column and task, is at least {smallest_p}, so no difference could be "
    "significant. "
)
SECONDARY_RULE = (
    "The other pairs are secondary: p is corrected for {comparisons} among them; with {runs}, it is at least "
    "{smallest_p}. "
)
TOO_FEW_SECONDARY_RULE = (
    "The other pairs are secondary, and have too few seeds for verdicts: p is corrected for {comparisons} among them; "
    "with {runs}, it is at least {smallest_p}. "
)
UNTESTED_RULE = "Too few runs are finished for a test. "
NO_REFERENCE_RULE = "No other row agrees with exactly one such row on the other axes, so none is compared. "
OTHERS_RULE = "The other metrics are descriptive."
OTHERS_AND_CLAIMED_RULE = "The other metrics are descriptive, except where a claim compares a pair of rows by them."
BETTER_OR_WORSE = "the row is better or worse"
SAME_OR_OPPOSITE = "the order is the same or opposite"
"""What p ≤ 0.05 means, in a rule."""
PAPER_RULE = (
    "Agrees: the 90 % interval of the difference (Welch, from the published standard deviation and number of seeds) "
    f"lies within ± {MARGIN_STDS:g} published standard deviations, at least one unit of the last digit. Differs: it "
    "does not, and the 95 % interval excludes 0. Inconclusive: neither; more seeds are needed. Not corrected for the "
    "number of cells."
)
UNKNOWN_SEEDS_RULE = (
    "The source does not give the number of seeds of {sources}; the comparison assumes 2, the smallest possible number."
)
SINGLE_RULE = (
    "A published value without a standard deviation is a single run, and nothing says how much such runs vary, so its "
    "difference is descriptive."
)
FEW_RULE = f"Rows with fewer than {LEAST_RUNS} finished runs are descriptive."
INCOMPLETE_RULE = "Rows with runs that failed, have no value, or are not finished are descriptive."
EXACT_RULE = "A number of parameters agrees if it differs by at most one unit of the last published digit."
ORDER_RULE = (
    "These runs do not have the paper's size ({keys} differ), so only the order of rows is compared, by {metric}: each "
    "row with the one that is best in the paper. "
)
LISTED_KEYS = 3
"""The most keys that a rule lists."""
NAMED_ROWS = 6
"""The most rows that a sentence of an answer names; of more, it gives the number."""

DESCRIPTIVE, SAME = "descriptive", "no significant difference"
BOTH_STUCK = "both stuck"
SENTENCES = {
    BOTH_STUCK: "Stuck, as {against}",
    "better": "Better than {against}",
    "worse": "Worse than {against}",
    "same order": "Worse than {against}, as in the paper",
    "opposite order": "Better than {against}, unlike in the paper",
    SAME: "No significant difference from {against}",
    DESCRIPTIVE: "Too few seeds for a test against {against}",
}
"""Verdict on rows → the sentence of an answer that names them."""
PAPER_SENTENCES = {
    "agrees": "Agrees",
    "differs": "Differs",
    "inconclusive": "Inconclusive",
    DESCRIPTIVE: "Not tested",
}
"""Verdict on published numbers → the sentence of an answer that counts them."""


def compared(model: TableModel, against: str) -> TableModel:
    """The table with the comparisons of its cells.

    Args:
        model: The table.
        against: The name of a row (`row_names`); `paper`; or `AXIS=LABEL`, which compares each row with the one that
            has this label and the same labels on all other axes that both rows have. A label that one axis alone has
            needs no `AXIS=`.

    Raises QueryError if there is no such row, or there are no published numbers.
    """
    rows = {row.row: row for row in model.rows}
    if against in rows:
        return _compare_with_row(model, rows[against])
    if against == PAPER:
        if not any(cell.published for row in model.rows for cell in row.metrics.values()):
            raise QueryError(
                f"{model.ablation} has no published numbers; compare with one of its rows: --compare ROW",
                code="nothing_published",
                ablation=model.ablation,
            )
        return _compare_order(model) if model.replaced else _compare_with_paper(model)
    if (found := reference_label(model, against)) is not None:
        return _compare_with_label(model, *found)
    if (row := named_row(model, against)) is not None:
        return _compare_with_row(model, row)
    axis, equals, label = (part.strip() for part in against.partition("="))
    if equals and (key := find_axis(model.axes, axis)):
        labels = _labels_of(model, key)
        message = f"the axis {key} of {model.ablation} has no label {label!r}{suggest(label, labels)}"
        raise QueryError(message, code="unknown_value", axis=key, value=label, allowed=labels)
    if equals:
        message = f"{model.ablation} has no axis {axis!r}{suggest(axis, list(model.axes))}"
        raise QueryError(message, code="unknown_axis", axis=axis, allowed=list(model.axes))
    raise QueryError(
        f"{model.ablation} has no row {against!r}{suggest(against, rows)}; AXIS=LABEL compares with a label of "
        f"one of its axes ({', '.join(model.axes.values()) or 'none'}), `{PAPER}` with the published numbers",
        code="unknown_row",
        row=against,
        allowed=list(rows),
    )


def reference_label(model: TableModel, against: str) -> tuple[str, str] | None:
    """The axis and its label that `compared` compares with; None: `against` names a row, or nothing."""
    if against == PAPER or any(row.row == against for row in model.rows):
        return None
    axis, equals, label = (part.strip() for part in against.partition("="))
    key = find_axis(model.axes, axis) if equals else None
    if key is None:
        return axis_of_label(against, [row.labels for row in model.rows], model.axes)
    labels = _labels_of(model, key)
    label = spelled_as(label, labels)
    return (key, label) if label in labels else None


def _labels_of(model: TableModel, key: str) -> list[str]:
    return list(dict.fromkeys(row.labels[key] for row in model.rows if key in row.labels))


def named_row(model: TableModel, text: str) -> TableRow | None:
    """The row that a text names; None: it names none. Raises QueryError if it names several."""
    rows = {row.row: row for row in model.rows}
    names = named_rows(text, {name: row.labels for name, row in rows.items()}, model.axes)
    if len(names) > 1:
        raise QueryError(
            f"{text!r} names several rows of {model.ablation}: {', '.join(names)}; write one in full",
            code="ambiguous_row",
            row=text,
            rows=names,
        )
    return rows[names[0]] if names else None


def reference(plan: Plan) -> str | None:
    """What a report compares its rows with by default, as an argument of `compared`; None: nothing.

    It is the paper if it has numbers for a row in a column, and the runs have its size. Otherwise it is the first row
    with CoPE, or the first row; in a table with several axes, each row is compared with the one that has this encoding
    and the same labels on the other axes, unless several rows have. Rows of different tasks are not compared: where the
    task varies and one other axis, each row is compared with the one that has the first label of that axis. A single
    row, and a random search, whose rows are draws to choose from, have none.
    """
    if plan.is_drawn:
        return None
    published = {name for row in plan.rows if row.published for name in row.published.values}
    if not plan.ablation.replaced and any(m.name in published for m in plan.ablation.content.metrics):
        return PAPER
    if len(plan.rows) < 2:
        return None
    chosen = next((row for row in plan.rows if _uses_cope(row.runs[0].model.position)), plan.rows[0])
    varied = varying_axes(chosen.labels, plan.rows)
    others = [key for key in varied if key != TASK]
    if POSITION in varied:
        label = chosen.labels[POSITION]
        return f"{POSITION}={label}" if _with_label(plan.rows, POSITION, label) else chosen.name
    return f"{others[0]}={chosen.labels[others[0]]}" if TASK in varied and len(others) == 1 else chosen.name


def compared_pair(plan: Plan, model: TableModel, row: TableRow, than: TableRow) -> TableModel:
    """The table in which a row is compared with another one, with the p that they have in reports.

    It is compared by default, if that compares the two, whichever of them is the reference; else with the label of the
    other row on an axis where they differ, so that p is corrected for rows of the same kind; else with the other row.
    """
    default = reference(plan)
    by_default = model if default is None else compared(model, default)
    if by_default.references.get(row.row) == than.row:
        return by_default
    if by_default.references.get(than.row) == row.row:
        return _reversed(by_default, than.row, row.row)
    differing = [key for key in row.labels.keys() & than.labels.keys() if row.labels[key] != than.labels[key]]
    for against in (f"{key}={than.labels[key]}" for key in model.axes if key in differing):
        by_label = compared(model, against)
        if by_label.references.get(row.row) == than.row:
            return by_label
    return compared(model, than.row)


def _reversed(model: TableModel, row: str, reference: str) -> TableModel:
    """The table with one comparison, by its primary metric, of a row with its reference, turned round."""
    rows = {each.row: each for each in model.rows}
    column, turned = model.primary.name, rows[reference]
    comparison = rows[row].metrics[column].comparison
    if comparison is not None:
        verdict = {"better": "worse", "worse": "better"}.get(comparison.verdict, comparison.verdict)
        back = replace(comparison, against=row, difference=comparison.difference.reversed(), verdict=verdict)
        turned = replace(turned, metrics={**turned.metrics, column: replace(turned.metrics[column], comparison=back)})
    return replace(
        model,
        rows=tuple(turned if each.row == reference else each for each in model.rows),
        references={reference: row},
        family_sizes={reference: model.family_sizes[row]},
    )


def least_compared(plan: Plan) -> int:
    """The smallest number of comparisons that a p of the report of this plan is corrected for; 0: nothing is tested."""
    against = reference(plan)
    model = table_model(plan, {run.run_id: RunRecord(run_id=run.run_id) for run in plan.runs})
    of_rows = compared(model, against).family_sizes if against is not None else {}
    return min([*of_rows.values(), *map(len, claim_families(model))], default=0)


def _uses_cope(encodings: object) -> bool:
    return isinstance(encodings, (list, tuple)) and any(encoding.kind == METHOD for encoding in encodings)


# -- with another row --------------------------------------------------------------------------------------------------


def _compare_with_row(model: TableModel, other: TableRow) -> TableModel:
    references = {row.row: other for row in model.rows if row is not other}
    return _compare_with_references(model, references, other.row, other.row)


def _compare_with_label(model: TableModel, key: str, label: str) -> TableModel:
    """Compare each row with the one that has another label on one axis."""
    references = {row.row: other for row, other in _with_label(model.rows, key, label)}
    description = f"the row with {model.axes[key]} = {label}"
    if sum(row.labels.get(key) == label for row in model.rows) > 1:
        description += " and the same values of the other axes"
    return _compare_with_references(model, references, label, description)


def _with_label(rows: Sequence[AnyRow], key: str, label: str) -> list[tuple[AnyRow, AnyRow]]:
    """Each row with another label on an axis, and the row with this label that agrees with it, if exactly one does."""
    others = [row for row in rows if row.labels.get(key) != label]
    pairs = list(agreeing_rows(others, [row for row in rows if row.labels.get(key) == label], {key}))
    counts = Counter(id(row) for row, _ in pairs)
    return [pair for pair in pairs if counts[id(pair[0])] == 1]


def _compare_with_references(
    model: TableModel, references: Mapping[str, TableRow], label: str, description: str
) -> TableModel:
    """Compare rows with others.

    Args:
        model: The table.
        references: Name of a row → the row to compare it with.
        label: What `Comparison.against` calls the references.
        description: What the rule calls them.
    """

    def find_reference(row: TableRow, column: Column) -> TableRow | None:
        return references.get(row.row) if column.compared else None

    difference_rule = DIFFERENCE_RULE.format(metric=model.primary.label, row=description)
    if not references:
        return _fill(model, {}, difference_rule + NO_REFERENCE_RULE)
    with_comparisons = _compare_rows(
        model, model.primary, find_reference, ("better", "worse"), BETTER_OR_WORSE, label, difference_rule
    )
    of_rows = {name: other.row for name, other in references.items()}
    compared = replace(with_comparisons, difference_rule=difference_rule, references=of_rows)
    return replace(compared, answer=_answer(compared, model.primary))


def _compare_order(model: TableModel) -> TableModel:
    """Compare each cell that has a published value with the row that is best in the paper."""
    best_rows = {column.name: _best_published(model, column) for column in model.columns if column.compared}

    def find_reference(row: TableRow, column: Column) -> TableRow | None:
        cell, best = row.metrics[column.name], best_rows.get(column.name)
        if best is None or row is best or cell.published is None:
            return None
        best_value = best.metrics[column.name].published
        return best if best_value is not None and best_value.value != cell.published.value else None

    with_published = [
        column for column in model.columns if any(row.metrics[column.name].published for row in model.rows)
    ]
    tested_column = model.primary
    if model.primary not in with_published:
        tested_column = next((column for column in with_published if column.compared), model.primary)
    keys = ", ".join(model.replaced[:LISTED_KEYS])
    if len(model.replaced) > LISTED_KEYS:
        keys += ", …"
    order_rule = ORDER_RULE.format(keys=keys, metric=tested_column.label)
    with_comparisons = _compare_rows(
        model,
        tested_column,
        find_reference,
        ("opposite order", "same order"),
        SAME_OR_OPPOSITE,
        difference_rule=order_rule,
    )
    return replace(with_comparisons, answer=_answer(with_comparisons, tested_column))


def _best_published(model: TableModel, column: Column) -> TableRow | None:
    """The row with the best published value of a column."""
    candidates = []
    for row in model.rows:
        published = row.metrics[column.name].published
        if published is not None:
            candidates.append((published.value, row))
    if not candidates:
        return None
    best: TableRow = column.best(candidates, key=lambda pair: pair[0])[1]
    return best


def _compare_rows(
    model: TableModel,
    tested_column: Column,
    find_reference: Callable[[TableRow, Column], TableRow | None],
    verdicts: tuple[str, str],
    meaning: str,
    label: str | None = None,
    difference_rule: str = "",
) -> TableModel:
    """The table with the comparisons of its cells, and with the rule that explains them.

    Args:
        model: The table.
        tested_column: The column that gets corrected p and verdicts. All others are descriptive.
        find_reference: The row to compare a cell with, also where one has no values yet; None: it is not compared.
        verdicts: The verdict on a row that is better, and on one that is worse.
        meaning: What p ≤ 0.05 means, for the rule.
        label: What `Comparison.against` calls the references; None: their names.
        difference_rule: The beginning of the rule.
    """
    comparisons: dict[CellKey, Comparison] = {}
    rows = {row.row: row for row in model.rows}
    claimed_sizes = {frozenset(pair): len(family) for family in claim_families(model) for pair in family}
    family_sizes: dict[str, int] = {}
    of_claims = claim_tests(model)
    tested_claims: dict[CellKey, PairTest] = {}
    secondary: dict[str, dict[CellKey, Difference | None]] = {}  # by reference; those of the tested column

    def compare(key: CellKey, other_key: CellKey, test: PairTest) -> None:
        verdict = DESCRIPTIVE
        cells = [(rows[name], column) for name, column in (key, other_key)]
        if not math.isnan(test.p) and test.is_testable and not runs_without_values(*cells):
            goal = rows[key[0]].metrics[key[1]].column.goal
            verdict = verdicts[0] if is_better(test.difference, goal) else verdicts[1]
            if not test.is_significant:
                verdict = SAME
        p = None if math.isnan(test.p) else test.p
        comparisons[key] = Comparison(label or other_key[0], test.difference, verdict, p)

    for row in model.rows:
        for column in model.columns:
            other = find_reference(row, column)
            if other is None:
                continue
            key, other_key = (row.row, column.name), (other.row, column.name)
            cell, other_cell = row.metrics[column.name], other.metrics[column.name]
            if (size := claimed_sizes.get(frozenset((key, other_key)))) is not None:
                if column is tested_column:
                    family_sizes[row.row] = size
                if (test := of_claims.get((key, other_key))) is not None:
                    compare(key, other_key, test)
                    if not math.isnan(test.p):
                        tested_claims[key] = test
                continue
            difference = model.difference(cell, other_cell) if cell.values and other_cell.values else None
            if column is tested_column:
                secondary.setdefault(other.row, {})[key] = difference
            elif difference is not None:
                comparisons[key] = Comparison(label or other.row, difference, DESCRIPTIVE)
    for other_name, differences in secondary.items():
        family_sizes |= {name: len(differences) for name, _ in differences}
        for key, test in zip(differences, corrected(list(differences.values())), strict=True):
            if test is not None:
                compare(key, (other_name, tested_column.name), test)
    in_column = [test for (_, name), test in tested_claims.items() if name == tested_column.name]
    rule = ""
    if in_column:
        rule = _claimed_rule(in_column, meaning, is_paired=model.paired)
        if len({pair.is_by_margin for pair in model.claimed}) > 1:
            rule += f"{BY_MARGIN_RULE} "
    if secondary or not in_column:
        families = [list(differences.values()) for differences in secondary.values()]
        rule += _test_rule(families, meaning, is_paired=model.paired, is_secondary=bool(in_column))
    if any(column.compared and column is not tested_column for column in model.columns):
        has_others = len(tested_claims) > len(in_column)
        rule += OTHERS_AND_CLAIMED_RULE if has_others else OTHERS_RULE
    return replace(_fill(model, comparisons, difference_rule + rule), family_sizes=family_sizes)


def _claimed_rule(tests: Sequence[PairTest], meaning: str, *, is_paired: bool) -> str:
    """The rule of the tests that claims share with the comparisons. `meaning`: see `_test_rule`."""
    smallest_p = min(test.smallest_p for test in tests)
    rule = CLAIMED_RULE if smallest_p <= SIGNIFICANT_P else TOO_FEW_CLAIMED_RULE
    run_counts = {count for test in tests for count in test.difference.n}
    return rule.format(
        test=TESTS[is_paired], runs=_runs_text(run_counts, is_paired), smallest_p=p_text(smallest_p), meaning=meaning
    )


def _runs_text(counts: Iterable[int], is_paired: bool) -> str:
    return f"{_alternatives(counts)} {'pairs of runs' if is_paired else 'runs a row'}"


def _test_rule(
    families: Sequence[Sequence[Difference | None]], meaning: str, *, is_paired: bool, is_secondary: bool
) -> str:
    """The rule of a test.

    Args:
        families: The differences that are corrected together, also those that are not there or not tested yet.
        meaning: What p ≤ 0.05 means.
        is_paired: Whether runs are compared in pairs.
        is_secondary: Whether `_claimed_rule` stands before it, with the same test.
    """
    tests = [test for family in families for test in corrected(family) if test is not None and not math.isnan(test.p)]
    if not tests:
        return "" if is_secondary else UNTESTED_RULE
    smallest_p = min(test.smallest_p for test in tests)
    sizes = {test.compared for test in tests}
    comparisons = f"{_alternatives(sizes)} comparison{'s' if max(sizes) > 1 else ''}"
    if len(families) > 1:
        comparisons += " with the same row"
    run_counts = {count for test in tests for count in test.difference.n}
    rule = TEST_RULE if smallest_p <= SIGNIFICANT_P else TOO_FEW_RULE
    if is_secondary:
        rule = SECONDARY_RULE if smallest_p <= SIGNIFICANT_P else TOO_FEW_SECONDARY_RULE
    return rule.format(
        test=TESTS[is_paired],
        comparisons=comparisons,
        runs=_runs_text(run_counts, is_paired),
        smallest_p=p_text(smallest_p),
        meaning=meaning,
    )


def _alternatives(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))


def _answer(model: TableModel, column: Column) -> str:
    """A sentence for each verdict of a column: `By In-dist. (%). Worse than CoPE: RoPE. No significant …`.

    Of several tasks, each has its own sentences: `By 4 × (%). Flip-Flop: better than CoPE: PaTH. MQAR: …`.
    """
    of_tasks: dict[str, list[TableRow]] = {}
    for row in model.rows:
        of_tasks.setdefault(row.labels.get(TASK, ""), []).append(row)
    if len(of_tasks) == 1:
        text = " ".join(_sentences(model, column, model.rows, {row.row: row.short for row in model.rows}))
    else:
        parts = []
        for task, rows in of_tasks.items():
            names = _names_in_task(model, rows)
            if sentences := _sentences(model, column, rows, names):
                first, *others = sentences
                parts.append(" ".join([f"{task}: {first[0].lower()}{first[1:]}", *others]))
        text = " ".join(parts)
    return f"By {column.title}. {text}" if text else ""


def _names_in_task(model: TableModel, rows: Sequence[TableRow]) -> dict[str, str]:
    """Name of a row → its labels on the axes on which the rows of a task differ."""
    varying = [key for key in varying_axes(model.axes, rows) if key != TASK]
    return {row.row: row_label(model.axes, row, varying) or row.short for row in rows}


def _sentences(
    model: TableModel, column: Column, rows: Sequence[TableRow], short_names: Mapping[str, str]
) -> list[str]:
    cells = {row.row: row.metrics[column.name] for row in model.rows}
    named: dict[str, dict[str, list[str]]] = {verdict: {} for verdict in SENTENCES}  # by verdict, then reference
    for row in rows:
        cell, reference_cell = cells[row.row], cells.get(model.references.get(row.row, ""))
        if cell.comparison is not None and cell.comparison.verdict in SENTENCES:
            # Among rows that are stuck, a difference says nothing of what they have learned.
            are_stuck = reference_cell is not None and cell.mostly_stuck and reference_cell.mostly_stuck
            verdict = BOTH_STUCK if are_stuck else cell.comparison.verdict
            named[verdict].setdefault(cell.comparison.against, []).append(short_names[row.row])
    return [
        f"{SENTENCES[verdict].format(against=short_names.get(against, against))}: {_listed(names)}."
        for verdict, names_by_reference in named.items()
        for against, names in names_by_reference.items()
    ]


def _listed(names: Sequence[str]) -> str:
    if len(names) > NAMED_ROWS:
        return f"{len(names)} rows"
    separator = "; " if any("," in name for name in names) else ", "  # a label may have commas: `RoPE, half`
    return separator.join(names)


def _fill(model: TableModel, comparisons: Mapping[CellKey, Comparison], rule: str) -> TableModel:
    """The table with these comparisons in its cells, and with their rule."""
    rows = []
    for row in model.rows:
        metrics = {
            name: replace(cell, comparison=comparisons.get((row.row, name))) for name, cell in row.metrics.items()
        }
        rows.append(replace(row, metrics=metrics))
    return replace(model, rows=tuple(rows), rules=(*model.rules, rule))


# -- with the paper ----------------------------------------------------------------------------------------------------


def _compare_with_paper(model: TableModel) -> TableModel:
    comparisons: dict[CellKey, Comparison] = {}
    cells: list[tuple[MetricCell, bool]] = []
    for row in model.rows:
        for column in model.columns:
            cell = row.metrics[column.name]
            if cell.published is not None and cell.summary.n > 0:
                is_complete = not row.without_value(column.name)
                cells.append((cell, is_complete))
                comparisons[row.row, column.name] = with_published(
                    cell.summary, cell.published, scale=column.scale, exact=column.exact, is_complete=is_complete
                )
    counts = Counter(comparison.verdict for comparison in comparisons.values())
    sentences = [f"{text}: {counts[verdict]}." for verdict, text in PAPER_SENTENCES.items() if counts[verdict]]
    answer = " ".join([f"Published numbers: {len(comparisons)}.", *sentences]) if sentences else ""
    return replace(_fill(model, comparisons, " ".join(_paper_rules(cells))), answer=answer)


def _paper_rules(cells: Iterable[tuple[MetricCell, bool]]) -> Iterable[str]:
    """The rule of verdicts, and what is assumed about the published values that were compared.

    `cells`: (cell, whether all planned runs of its row have a value).
    """
    varying, has_exact = [], False
    for cell, is_complete in cells:
        if cell.column.exact:
            has_exact = True
        elif cell.published is not None:
            varying.append((cell.summary, cell.published, is_complete))
    tested = [published for ours, published, is_complete in varying if is_complete and _is_tested(ours, published)]
    if tested:
        yield PAPER_RULE
    unknown_sources = [published.source for published in tested if published.seeds is None]
    if unknown_sources:
        sources = " and ".join(dict.fromkeys(filter(None, unknown_sources))) or "the published values"
        yield UNKNOWN_SEEDS_RULE.format(sources=sources)
    if any(published.std is None for _, published, _ in varying):
        yield SINGLE_RULE
    if any(published.std is not None and ours.n < LEAST_RUNS for ours, published, _ in varying):
        yield FEW_RULE
    if any(not is_complete and _is_tested(ours, published) for ours, published, is_complete in varying):
        yield INCOMPLETE_RULE
    if has_exact:
        yield EXACT_RULE


def _is_tested(ours: Summary, published: PublishedValue) -> bool:
    return published.std is not None and ours.n >= LEAST_RUNS and math.isfinite(ours.std)


def with_published(
    ours: Summary, published: PublishedValue, *, scale: float = 1.0, exact: bool = False, is_complete: bool = True
) -> Comparison:
    """The comparison of our mean with a published one, by the rule in the module docstring.

    Args:
        ours: Our runs.
        published: The published value.
        scale: The factor by which the published value was multiplied when it was printed.
        exact: Whether the value is the same for all seeds.
        is_complete: Whether all planned runs have a value.
    """
    unit = 10.0 ** -decimal_places(published.value, scale) / scale
    n, difference = (ours.n, published.assumed_runs), ours.mean - published.value
    if exact:
        verdict = "agrees" if abs(difference) <= unit * (1 + 1e-9) else "differs"
        return Comparison(PAPER, Difference(difference, n=n), verdict, margin=unit)
    published_std = published.std
    if published_std is None or not is_complete or not _is_tested(ours, published):
        return Comparison(PAPER, Difference(difference, n=n), DESCRIPTIVE)
    margin = max(MARGIN_STDS * published_std, unit)
    # Welch–Satterthwaite. The error of rounding is uniform over a unit of the last digit: its variance is unit² / 12.
    parts = [(ours.std**2 / n[0], n[0] - 1), (published_std**2 / n[1], n[1] - 1)]
    variance = unit**2 / 12 + sum(part for part, _ in parts)
    spread = sum(part**2 / dof for part, dof in parts)
    error, dof = math.sqrt(variance), min(variance**2 / spread, 1e6) if spread else 1e6
    t95, t90 = (t_quantile(probability, dof) * error for probability in (0.975, 0.95))
    test = Difference(difference, difference - t95, difference + t95, t_tail(difference / error, dof), n=n)
    if abs(difference) + t90 <= margin * (1 + 1e-9):
        verdict = "agrees"
    else:
        verdict = "differs" if abs(difference) > t95 else "inconclusive"
    return Comparison(PAPER, test, verdict, margin=margin)
