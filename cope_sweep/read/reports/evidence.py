"""The evidence of one ablation at one scale: its table with comparisons, its figures, and what made its runs.

`provenance` has commits, versions, machines, commands, dates and time of the finished runs. `shortcuts` has the errors
of rules that do not solve the task (`Task.shortcuts`), `thresholds` the steps until it is learned (`learned` of a
metric).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cope_sweep.api.questions import GetFigure
from cope_sweep.config import Plan, RunSpec
from cope_sweep.config.ablation import Maps
from cope_sweep.errors import UserError
from cope_sweep.read.figures import FIGURES
from cope_sweep.read.figures.available import Declared, declared_figures, draw_declared
from cope_sweep.read.figures.figure import Figure
from cope_sweep.read.reports.aggregates import aggregates
from cope_sweep.read.reports.runs import CURVE_COLUMNS, CURVES, run_frame, to_parquet
from cope_sweep.read.tables import Results, Table
from cope_sweep.read.tables.best import rank_rows
from cope_sweep.read.tables.claims import Finding, claim_findings, claims_layout, hypothesis_verdict
from cope_sweep.read.tables.model import STATUSES, Column, TableModel, TableRow, named_label, reference
from cope_sweep.read.tables.render import (
    MISSING,
    ColumnHeader,
    Layout,
    TextCell,
    decimals_of,
    markdown_table,
    markdown_text,
)
from cope_sweep.read.tables.rules import ERROR, LEAST_SEQUENCES, NEAR, SEQUENCES, rule_errors, stuck_from
from cope_sweep.read.tables.stats import LEVEL
from cope_sweep.store.files import write_bytes

EXPLORATORY = "Exploratory: the recipe was chosen by looking at results like these."
UNKNOWN = "not recorded"
PROVENANCE_COLUMNS = [
    "run_id", "status", "commit", "versions", "cpu", "cores", "system", "command", "created_ms", "ended_ms",
    "facts.wall_s", "facts.device", "facts.threads", "facts.python", "facts.torch",
]  # fmt: skip
"""Columns of a frame of `reports.runs` that say what made its runs."""
NOTE = (
    f"Errors of simple rules that do not solve the task, on the first {SEQUENCES} sequences of each test set (fewer "
    f"of longer ones, at least {LEAST_SEQUENCES}). A seed is stuck where it does no better than the best of them: its "
    f"error is at least {100 * (1 - NEAR):g} % of the rule's. A row scores like a rule where most of its seeds have an "
    f"error within {100 * NEAR:g} % of the rule's; its median is in parentheses."
)
RESAMPLES = 9_999


class ReportError(UserError):
    """There is nothing to report. The message says how to train it."""

    default_code = "nothing_to_report"


@dataclass(frozen=True)
class Drawn:
    """A figure of a report: what was drawn, or why it could not be."""

    name: str
    title: str
    source: str
    """The figure of the paper that it makes again; may be empty."""
    svg: Callable[[], bytes] | None
    """Draws it, or reads the picture of a report, which has no checkpoint."""
    problem: str = ""


@dataclass(frozen=True)
class Evidence:
    """Evidence of an ablation: table, figures and gaps of its finished runs."""

    results: Results
    table: Table
    figures: tuple[Drawn, ...]

    @property
    def plan(self) -> Plan:
        """The plan of the ablation at this scale."""
        return self.results.plan

    @property
    def scale(self) -> str | None:
        """None: the ablation's own size."""
        return self.plan.ablation.scale

    @cached_property
    def runs(self) -> pd.DataFrame:
        """The runs, as `reports.runs` writes them."""
        return run_frame(self.results)

    @property
    def provenance(self) -> Provenance:
        """Provenance of the finished runs."""
        return provenance([self.runs])

    @property
    def stem(self) -> str:
        """The beginning of the names of its files: `<ablation>.<scale>`, or the ablation's name alone."""
        return f"{self.plan.name}.{self.scale}" if self.scale else self.plan.name

    @property
    def size(self) -> str:
        """Description of the scale, from the file."""
        if self.scale is None:
            return ""
        return " ".join(self.plan.ablation.content.scales[self.scale].description.split())

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Gaps of the table and the figures, with reasons; empty if nothing is missing."""
        counts: Counter[str] = Counter()
        for row in self.table.model.rows:
            counts.update(row.counts)
        runs = [f"{counts[each]} {each}" for each in STATUSES if counts[each] and each != "finished"]
        lines = [f"{sum(counts.values()) - counts['finished']} of {sum(counts.values())} runs: {', '.join(runs)}"]
        lines = lines if runs else []
        if self.plan.open_samples:
            lines.append(f"{self.plan.open_samples} rows that the search has still to suggest")
        return (*lines, *(f"{each.name}: {each.problem}" for each in self.figures if each.svg is None))

    @property
    def answer(self) -> str:
        """The verdicts in a sentence; empty where nothing was compared."""
        return self.table.model.answer

    @cached_property
    def aggregates(self) -> Layout | None:
        """Scores over all tasks; None where the ablation has no axis of tasks, or too few runs are finished."""
        return aggregates(self.table.model, (self.table.compare or "").partition("=")[2] or None)

    @cached_property
    def draws(self) -> Layout | None:
        """The best rows of a search; None: the ablation has none."""
        return rank_rows(self.results).layout() if self.plan.is_drawn else None

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """The claims of the ablation, with their verdicts."""
        return claim_findings(self.plan, self.table.model)

    @property
    def claims(self) -> Layout | None:
        """The claims as a table; None where the file has none about these rows."""
        return claims_layout(self.findings) if self.findings else None

    @property
    def hypothesis_verdict(self) -> str:
        """What the claims say about the hypothesis, as `supported`; empty where there are none."""
        return hypothesis_verdict(self.findings)

    @cached_property
    def shortcuts(self) -> Shortcuts | None:
        """The errors of rules that do not solve the tasks; None where the tasks have none."""
        return shortcuts(self.table.model)

    @cached_property
    def structure(self) -> Layout | None:
        """What makes the tasks hard; None where they do not say."""
        return structure(self.table.model)

    @cached_property
    def thresholds(self) -> Layout | None:
        """Steps and sequences until the task is learned; None where the file does not say from which value on."""
        return thresholds(self.table.model, self.results.curves)

    def files(self) -> dict[str, bytes]:
        """File name → content: runs, learning curves, report and figures. The same store gives the same bytes."""
        found = {f"{self.stem}.parquet": to_parquet(self.runs)}
        if not self.results.curves.empty:
            found[f"{self.stem}{CURVES}"] = to_parquet(self.results.curves[CURVE_COLUMNS])
        found |= {self.pictures[each.name]: each.svg() for each in self.figures if each.svg}
        return found | {f"{self.stem}.md": self.to_markdown(self.pictures).encode()}

    @property
    def pictures(self) -> dict[str, str]:
        """Name of a figure that was drawn → its file."""
        return {each.name: f"{self.stem}.{each.name}.svg" for each in self.figures if each.svg}

    def to_markdown(self, pictures: dict[str, str]) -> str:
        """The report; `pictures` are the files of the figures by their names."""
        content = self.plan.ablation.content
        parts = [f"# {markdown_text(content.title)}"]
        parts += [f"Hypothesis: {markdown_text(content.hypothesis)}"] if content.hypothesis else []
        if self.hypothesis_verdict:
            parts.append(f"**The hypothesis is {self.hypothesis_verdict}.**")
        parts += [f"**Result: {markdown_text(self.answer)}**"] if self.answer else []
        parts += [EXPLORATORY] if content.exploratory else []
        if content.reproduces:
            size = ", at another size than the paper's" if self.table.model.replaced else ""
            parts.append(f"Reproduces: {markdown_text(content.reproduces)}{size}.")
        parts += [f"Scale `{self.scale}`: {markdown_text(self.size)}"] if self.scale else []
        if self.claims is not None:
            parts += ["## Claims", markdown_table(self.claims), markdown_text(self.claims.note)]
        parts += ["## Results", self.table.to_markdown().strip()]
        if self.aggregates is not None:
            drawn = self.aggregates
            parts += ["### Over all tasks", markdown_table(drawn), markdown_text(drawn.note)]
        if self.draws is not None:
            parts += ["### Best rows", markdown_table(self.draws), markdown_text(self.draws.note)]
        if self.structure is not None:
            drawn = self.structure
            parts += ["### Structure of the task", markdown_table(drawn), markdown_text(drawn.note)]
        if self.shortcuts is not None:
            drawn = self.shortcuts.layout
            parts += ["### Shortcuts", markdown_table(drawn), markdown_text(drawn.note)]
            if self.shortcuts.alike:
                parts.append("\n".join(f"- {markdown_text(text)}" for text in self.shortcuts.alike))
        if self.thresholds is not None:
            drawn = self.thresholds
            parts += ["### Until the task is learned", markdown_table(drawn), markdown_text(drawn.note)]
        for each in self.figures:
            if each.name in pictures:
                title = markdown_text(each.title) + (f", as {markdown_text(each.source)}" if each.source else "")
                parts.append(f"![{title}]({pictures[each.name]})")
        parts += ["## Missing", "\n".join(f"- {line}" for line in self.missing)] if self.missing else []
        rows = [
            *self.provenance.lines,
            ("This report", f"`cope-sweep report {self.plan.ablation.cli_args}{self._options}`"),
        ]
        cells = [(name, text.replace("|", r"\|")) for name, text in rows]
        parts += ["## Provenance", "\n".join(["| | |", "| --- | --- |", *(f"| {k} | {v} |" for k, v in cells)])]
        return "\n\n".join(parts) + "\n"

    @property
    def _options(self) -> str:
        against = self.table.compare
        return (f" --compare {_quoted(against)}" if against else "") + " --out ablations/results"


def evidence(results: Results, compare: str | None = None) -> Evidence:
    """The evidence of a plan at a scale, from the runs that are finished.

    Args:
        results: The plan and its runs.
        compare: What the rows are compared with, as in `tables.Table`; None: `reference(plan)`.

    Raises ReportError where no run is finished, StoreError.
    """
    plan = results.plan
    if not any(record.status == "finished" for record in results.records.values()):
        words = plan.ablation.cli_args
        raise ReportError(
            f"no run of {words} is finished in {results.place}; train them with: {results.training}",
            ablation=plan.name,
        )
    figures = tuple(_drawn(results, each) for each in declared_figures(plan))
    if not figures:
        kind = "budget" if plan.is_drawn else "summary"
        figures = (
            Drawn(
                kind,
                plan.ablation.content.title,
                "",
                _svg(FIGURES[kind].make(results, GetFigure(name=plan.name, figure=kind))),
            ),
        )
    return Evidence(results, Table(results, compare or reference(plan)), figures)


def write_evidence(found: Evidence, folder: Path) -> tuple[Path, ...]:
    """Write the files of `found` to a folder, which is made if it is missing; each is replaced as a whole.

    Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / name: content for name, content in found.files().items()}
    for path, content in files.items():
        write_bytes(path, content)
    return tuple(files)


def _drawn(results: Results, declared: Declared) -> Drawn:
    title = declared.figure.title or results.plan.ablation.content.title
    source, is_map = declared.figure.source, isinstance(declared.figure, Maps)
    kept = results.picture(declared.name) if is_map else None
    if is_map and results.store is None:
        problem = "" if kept else "no picture is in the report, and no checkpoint"
        return Drawn(declared.name, title, source, (lambda: kept) if kept else None, problem)
    try:
        made = draw_declared(results, declared)
    except UserError as error:  # no checkpoint, or no such mark in the tokens
        if kept:
            return Drawn(declared.name, title, source, lambda: kept)
        reason = str(error).replace(f" in {results.place}", "")
        # A report is kept elsewhere than the store.
        reason = reason.replace(results.training, f"cope-sweep run {results.plan.ablation.cli_args}")
        return Drawn(declared.name, title, source, None, reason)
    if made.empty and not is_map:
        return Drawn(declared.name, title, source, None, "too few finished runs")
    return Drawn(declared.name, title, source, _svg(made))


def _svg(figure: Figure) -> Callable[[], bytes]:
    return lambda: figure.render("svg")


def _quoted(text: str) -> str:
    return f"'{text}'" if set(text) & set(" ()'\"$&|;<>*?") else text


@dataclass(frozen=True)
class Provenance:
    """Provenance of some finished runs. Lists are in the order of their number of runs."""

    runs: int
    commits: tuple[str, ...]
    """Git commits of the working tree; `-dirty`: with changes that were not committed."""
    versions: tuple[str, ...]
    """Each like `torch 2.15.0`."""
    machines: tuple[str, ...]
    """Each like `cpu, 2 threads; AMD EPYC 9B14, 2 cores; Linux`."""
    commands: tuple[str, ...]
    """The commands of the sweeps, without options that name folders or hosts."""
    first: str
    """UTC date of the first start of a run, as 2026-07-30."""
    last: str
    """UTC date of the last end of a run."""
    compute_s: float
    """Sum of the wall times of the runs, in seconds."""

    @property
    def lines(self) -> tuple[tuple[str, str], ...]:
        """Name and text of each item."""
        return (
            ("Commit", ", ".join(self.commits) or UNKNOWN),
            ("Versions", ", ".join(self.versions) or UNKNOWN),
            ("Machine", " / ".join(self.machines) or UNKNOWN),
            ("Runs", f"{self.runs} finished, {self.first} to {self.last}"),
            ("Compute", f"{duration(self.compute_s)} (sum of the wall times of the runs)"),
            ("Command", " / ".join(f"`{each}`" for each in self.commands) or UNKNOWN),
        )


def provenance(frames: Iterable[pd.DataFrame]) -> Provenance:
    """Provenance of the finished runs of frames of `reports.runs`; a run that several frames have counts once."""
    needed = [frame.reindex(columns=PROVENANCE_COLUMNS).astype(object) for frame in frames]
    runs = pd.concat(needed).drop_duplicates("run_id")
    finished = runs[runs["status"] == "finished"]
    lines = finished.where(finished.notna(), None).to_dict("records")
    return Provenance(
        len(lines),
        _ordered(line["commit"] for line in lines),
        _ordered(text for line in lines for text in _versions(line)),
        _ordered(map(_machine, lines)),
        _ordered(line["command"] for line in lines),
        _date(min((line["created_ms"] for line in lines if line["created_ms"] is not None), default=None)),
        _date(max((line["ended_ms"] for line in lines if line["ended_ms"] is not None), default=None)),
        float(sum(line["facts.wall_s"] or 0.0 for line in lines)),
    )


def duration(seconds: float) -> str:
    """`45 s`, `12 min` or `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def _versions(line: Mapping[Any, Any]) -> Iterable[str]:
    """Each like `torch 2.15.0`: of the run, and else of the sweep that trained it."""
    known = dict(text.split(" ", 1) for text in (line["versions"] or "").split(", ") if text)
    known |= {name: text for name in ("python", "torch") if (text := line[f"facts.{name}"])}
    return (f"{name} {known[name]}" for name in sorted(known))


def _machine(line: Mapping[Any, Any]) -> str:
    """The device of a run, and processor, cores and system of the machine that its sweep was started on."""
    threads, cores = line["facts.threads"], line["cores"]
    parts = [str(line["facts.device"] or "") + (f", {threads} threads" if threads else "")]
    if cores:
        parts.append(", ".join([*([line["cpu"]] if line["cpu"] else []), f"{cores} cores"]))
    return "; ".join(part for part in (*parts, line["system"]) if part)


def _ordered(texts: Iterable[Any]) -> tuple[str, ...]:
    """Distinct texts, the most frequent ones first."""
    counts = Counter(text for text in texts if text)
    return tuple(sorted(counts, key=lambda text: (-counts[text], text)))


def _date(time_ms: int | None) -> str:
    return UNKNOWN if time_ms is None else time.strftime("%Y-%m-%d", time.gmtime(time_ms / 1000))


@dataclass(frozen=True)
class Shortcuts:
    """The shortcuts of the tasks of a table, and the rows that score like one."""

    layout: Layout
    alike: tuple[str, ...]
    """Sentences that name these rows."""


def shortcuts(model: TableModel) -> Shortcuts | None:
    """The shortcuts of a table's tasks; None where no column is a token error or no task has any."""
    by_task = _by_task(model)
    columns = [c for c in model.columns if c.compared and any(rule_errors(run, c.name) for run, _ in by_task)]
    lines: list[tuple[TextCell, ...]] = []
    alike: list[str] = []
    for run, rows in by_task:
        errors = {column: rule_errors(run, column.name) for column in columns}
        rules = list(dict.fromkeys(rule for found in errors.values() for rule in found))
        names = _names(rows, model)
        for rule in rules:
            known = [errors[column].get(rule) for column in columns]
            cells = [
                TextCell(MISSING if error is None else f"{error:.{column.decimals}f}")
                for error, column in zip(known, columns, strict=True)
            ]
            lines.append((*([TextCell(names)] * (len(by_task) > 1)), TextCell(rule), *cells))
        alike += _alike(rows, errors)
    if not lines:
        return None
    headers = [*([ColumnHeader("rows", numeric=False)] * (len(by_task) > 1)), ColumnHeader("rule", numeric=False)]
    headers += [ColumnHeader(column.title) for column in columns]
    return Shortcuts(Layout(tuple(headers), tuple(lines), NOTE), tuple(alike))


def structure(model: TableModel) -> Layout | None:
    """What makes the tasks of a table hard, a column for each test set; None where no task says so."""
    columns = [(column, split) for column in model.columns if (split := _split(column)) is not None and column.compared]
    by_task = _by_task(model)
    lines = []
    for run, rows in by_task:
        found = [run.task.structure(split, SEQUENCES) for _, split in columns]
        names = _names(rows, model)
        for name in found[0] if found else []:
            cells = [TextCell(f"{each[name]:.3g}") for each in found]
            lines.append((*([TextCell(names)] * (len(by_task) > 1)), TextCell(name), *cells))
    if not lines:
        return None
    headers = [*([ColumnHeader("rows", numeric=False)] * (len(by_task) > 1)), ColumnHeader("structure", numeric=False)]
    headers += [ColumnHeader(column.label) for column, _ in columns]
    return Layout(tuple(headers), tuple(lines), f"Of the first {SEQUENCES} sequences of each test set.")


def _by_task(model: TableModel) -> list[tuple[RunSpec, list[TableRow]]]:
    """The rows of each task, with a run of it. The training data are left aside: the test sets are the same."""
    found: dict[str, tuple[RunSpec, list[TableRow]]] = {}
    for row in model.rows:
        run = row.runs[0][0]
        key = run.task.model_dump_json(exclude={"data_seed", "train_sequences"})
        found.setdefault(key, (run, []))[1].append(row)
    return list(found.values())


def _names(rows: Sequence[TableRow], model: TableModel) -> str:
    """The labels that only these rows of a table have in common, or else their names."""
    common = set.intersection(*(set(row.labels.items()) for row in rows))
    if common and [row for row in model.rows if common <= set(row.labels.items())] == list(rows):
        return " · ".join(
            named_label(model.axes[key], label) for key, label in rows[0].labels.items() if (key, label) in common
        )
    return ", ".join(row.short for row in rows)


def _split(column: Column) -> str | None:
    """The test set of a column of token errors."""
    split, _, quantity = column.name.rpartition("/")
    return split if quantity == ERROR and "/" not in split else None


def _alike(rows: Sequence[TableRow], errors: Mapping[Column, Mapping[str, float]]) -> Iterator[str]:
    """A sentence for each rule and column with the rows that score like the rule."""
    for column, found in errors.items():
        alike: dict[str, list[str]] = {}
        for row in rows:
            cell = row.metrics[column.name]
            near = {
                rule: sum(abs(value - error) <= NEAR * error for value in cell.values.values())
                for rule, error in found.items()
            }
            rule = max(near, key=lambda rule: near[rule], default=None)
            if rule is not None and near[rule] > len(cell.values) / 2:
                alike.setdefault(rule, []).append(f"{row.short} ({cell.summary.median:.{decimals_of(column, cell)}f})")
        for rule, names in alike.items():
            error = f"{found[rule]:.{column.decimals}f} {column.unit}"
            yield f"{column.label} like “{rule}” ({error}): {', '.join(names)}"


def thresholds(model: TableModel, curves: pd.DataFrame) -> Layout | None:
    """The table of the finished runs; None where no column says from which value on the task is learned, or none has.

    Args:
        model: The table of results.
        curves: The learning curves of its runs, as `Results.curves` has them.
    """
    column = next((column for column in model.columns if column.learned is not None), None)
    if column is None:
        return None
    # A run that has not finished may still learn the task.
    finished = [run.run_id for row in model.rows for run, record in row.runs if record.status == "finished"]
    limits = {run.run_id: stuck_from(row.metrics[column.name].rule_error) for row in model.rows for run, _ in row.runs}
    first_steps = _first_steps(curves[curves["run_id"].isin(finished)], column, limits)
    lines = []
    for row in model.rows:
        train = row.runs[0][0].train
        steps = [first_steps[run.run_id] for run, _ in row.runs if run.run_id in first_steps]
        if steps:
            cells = [row.short, f"{sum(map(math.isfinite, steps))}/{len(steps)}"]
            cells += [_interval(steps, train.steps, sequences) for sequences in (1, train.batch)]
            lines.append(tuple(map(TextCell, cells)))
    if not any(map(math.isfinite, first_steps.values())):
        return None
    headers = [ColumnHeader("row", numeric=False), *map(ColumnHeader, ("seeds", "steps", "sequences"))]
    note = (
        f"The first evaluation with {column.learned_title} {column.unit}: the median "
        f"of the seeds, and its {100 * LEVEL:g} % bootstrap interval. A seed that never reaches it counts as later "
        "than the end of training. A seed that reaches it may lose it again."
    )
    return Layout(tuple(headers), tuple(lines), note)


def bootstrap_median(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and its percentile interval over resampled seeds; infinite values are later than all others."""
    seeds = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(0).choice(seeds, (RESAMPLES, len(seeds)))
    tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    low, high = np.quantile(np.median(drawn, axis=1), tails, method="inverted_cdf")
    return float(np.median(seeds)), float(low), float(high)


def _first_steps(curves: pd.DataFrame, column: Column, limits: Mapping[str, float]) -> dict[str, float]:
    """Run id → the first step at which its value says that the task is learned; infinite if none does.

    `limits` are the errors from which on a run is stuck.
    """
    own = curves[curves["metric"] == column.name]
    is_learned = column.is_learned(own["value"]) & (own["value"] < own["run_id"].map(limits).astype("float64"))
    steps = own["step"].where(is_learned, math.inf).groupby(own["run_id"]).min()
    return {str(run_id): float(step) for run_id, step in steps.items()}


def _interval(steps: Sequence[float], last: int, times: int) -> str:
    """Median and interval, in steps or, with `times` sequences in a step, in sequences."""

    def shown(step: float) -> str:
        return f"> {last * times:,}" if math.isinf(step) else f"{step * times:,.0f}"

    middle, low, high = map(shown, bootstrap_median(steps))
    return middle if low == high == middle else f"{middle} [{low}, {high}]"
