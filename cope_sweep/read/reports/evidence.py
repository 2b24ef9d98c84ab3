"""The report on one ablation at one scale: table with comparisons, figures, and provenance.

`provenance` has commits, versions, machines, commands, dates and training time of the finished runs. `shortcuts` has
the errors of simple rules that do not solve the task (`Task.shortcuts`), and `thresholds` the steps until the task is
learned (`learned` of a metric).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
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
from cope_sweep.read.figures.available import Declared, claimed_figures, declared_figures, draw_declared
from cope_sweep.read.figures.figure import Figure
from cope_sweep.read.reports.aggregates import aggregates
from cope_sweep.read.reports.runs import (
    CURVE_COLUMNS,
    CURVES,
    HEAD_COLUMNS,
    HEADS,
    ExtendedResults,
    ReportResults,
    run_frame,
    to_parquet,
)
from cope_sweep.read.tables import Results, Table, summarise
from cope_sweep.read.tables.best import rank_rows
from cope_sweep.read.tables.claims import (
    Finding,
    claim_findings,
    claims_layout,
    head_findings,
    hypothesis_verdict,
)
from cope_sweep.read.tables.comparisons import reference
from cope_sweep.read.tables.model import Column, TableModel, TableRow, named_label
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
from cope_sweep.store import STATUSES
from cope_sweep.store.files import write_bytes

EXPLORATORY = "Exploratory: the recipe was chosen by looking at results like these."
UNKNOWN = "not recorded"
PROVENANCE_COLUMNS = [
    "run_id", "status", "commit", "versions", "cpu", "cores", "system", "command", "created_ms", "ended_ms",
    "facts.wall_s", "facts.device", "facts.threads", "facts.python", "facts.torch",
]  # fmt: skip
"""Columns of a frame of `reports.runs` about provenance."""
SHORTCUTS_NOTE = (
    f"Errors of simple rules that do not solve the task, on the first {SEQUENCES} sequences of each test set (on fewer "
    f"if they are longer, but at least {LEAST_SEQUENCES}). A seed is stuck if it does no better than the best rule: "
    f"its error is at least {100 * (1 - NEAR):g} % of the rule's."
)
LIKE_RULES_NOTE = (
    f" Some rows score like a rule: most of their seeds have an error within {100 * NEAR:g} % of the rule's (median in "
    "parentheses):"
)
RESAMPLES = 9_999
"""Bootstrap samples of a median."""
MOST_HEADS = 16
"""If a model has more heads than this, only the chosen ones are listed."""
AUC_NOTES = {
    "gates": "AUC: the probability that a marked token has a larger mean gate than an unmarked one. ",
    "position_attention": "AUC: the probability that a key after the last marked token gets more position-only "
    "attention than an earlier key at the same distance. ",
}
"""Quantity that a figure shows → what its AUC means."""
CHOSEN_NOTE = (
    "In each seed, the head is chosen on separate sequences, because heads of different seeds do not correspond. "
    "Untrained: the same measure with the initial weights. In brackets: the 95 % interval of the mean over seeds."
)


class ReportError(UserError):
    """There is nothing to report. The message names the command that trains the runs."""

    default_code = "nothing_to_report"


@dataclass(frozen=True)
class ReportFigure:
    """A figure of a report, or why it could not be drawn."""

    name: str
    title: str
    source: str
    """The figure of the paper that it reproduces; may be empty."""
    svg: Callable[[], bytes] | None
    """Draws the figure, or reads it from a report if that needs a checkpoint. None: it cannot be drawn."""
    problem: str = ""


@dataclass(frozen=True)
class Evidence:
    """The report on an ablation's finished runs: table, figures, provenance, and what is missing."""

    results: Results
    table: Table
    figures: tuple[ReportFigure, ...]
    heads: pd.DataFrame
    """How well heads mark what figures claim: the frame of `figures.marks.measure_run`; empty without claims."""

    @property
    def plan(self) -> Plan:
        """The plan of the ablation at its scale."""
        return self.results.plan

    @property
    def scale(self) -> str | None:
        """None: the ablation without a scale."""
        return self.plan.ablation.scale

    @cached_property
    def runs(self) -> pd.DataFrame:
        """The runs, with the columns of `reports.runs`."""
        return run_frame(self.results)

    @property
    def provenance(self) -> Provenance:
        """Commits, versions, machines and commands of the finished runs."""
        return provenance([self.runs])

    @property
    def stem(self) -> str:
        """The start of its file names: `<ablation>.<scale>`, or the ablation's name alone."""
        return f"{self.plan.name}.{self.scale}" if self.scale else self.plan.name

    @property
    def scale_description(self) -> str:
        """The description of the scale in the ablation file; may be empty."""
        if self.scale is None:
            return ""
        return " ".join(self.plan.ablation.content.scales[self.scale].description.split())

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """What is missing in the table and the figures, and why."""
        counts: Counter[str] = Counter()
        for row in self.table.model.rows:
            counts.update(row.counts)
        unfinished = [f"{counts[status]} {status}" for status in STATUSES if counts[status] and status != "finished"]
        lines = []
        if unfinished:
            total = counts.total()
            lines.append(f"{total - counts['finished']} of {total} runs: {', '.join(unfinished)}")
        if self.plan.open_samples:
            lines.append(f"{self.plan.open_samples} rows that the search has not suggested yet")
        not_measured = self._finished_without_heads()
        if not_measured:
            lines.append(f"heads of {not_measured} finished runs: no checkpoint or text on this machine")
        return (*lines, *(f"{figure.name}: {figure.problem}" for figure in self.figures if figure.svg is None))

    def _finished_without_heads(self) -> int:
        """Number of finished runs whose heads a figure makes a claim about, but which could not be measured."""
        return len(set(_claimed_figures_by_run(self.results)) - set(self.heads["run_id"]))

    @property
    def answer(self) -> str:
        """The verdicts in a sentence; empty without a comparison."""
        return self.table.model.answer

    @cached_property
    def aggregates(self) -> Layout | None:
        """Scores over all tasks; None if the ablation has no axis of tasks, or too few runs are finished."""
        return aggregates(self.table.model, (self.table.compare or "").partition("=")[2] or None)

    @cached_property
    def draws(self) -> Layout | None:
        """The best rows of a search; None if the ablation has no search."""
        return rank_rows(self.results).layout() if self.plan.is_drawn else None

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """The claims of the ablation and of its figures, with their verdicts."""
        about_rows = claim_findings(self.plan, self.table.model)
        return about_rows + head_findings(claimed_figures(self.plan), self.heads)

    @property
    def heads_layout(self) -> Layout | None:
        """The measures of heads by seed; None if no figure claims anything about heads."""
        return None if self.heads.empty else heads_layout(claimed_figures(self.plan), self.heads)

    @property
    def claims(self) -> Layout | None:
        """The claims as a table; None if the file has no claims about these rows."""
        return claims_layout(self.findings) if self.findings else None

    @property
    def hypothesis_verdict(self) -> str:
        """The verdict on the hypothesis, such as `supported`; empty without claims."""
        return hypothesis_verdict(self.findings)

    @cached_property
    def shortcuts(self) -> Shortcuts | None:
        """The errors of simple rules that do not solve the tasks; None if the tasks have no such rules."""
        return shortcuts(self.table.model)

    @cached_property
    def structure(self) -> Layout | None:
        """What makes the tasks hard; None if the tasks do not describe it."""
        return structure(self.table.model)

    @cached_property
    def thresholds(self) -> Layout | None:
        """Steps and sequences until the task is learned; None if no metric defines `learned`."""
        return thresholds(self.table.model, self.results.curves)

    def files(self) -> dict[str, bytes]:
        """File name → content: runs, learning curves, report and figures. The same results give the same bytes."""
        files = {f"{self.stem}.parquet": to_parquet(self.runs)}
        if not self.results.curves.empty:
            files[f"{self.stem}{CURVES}"] = to_parquet(self.results.curves[CURVE_COLUMNS])
        if not self.heads.empty:
            files[f"{self.stem}{HEADS}"] = to_parquet(self.heads)
        files |= {self.pictures[figure.name]: figure.svg() for figure in self.figures if figure.svg}
        return files | {f"{self.stem}.md": self.to_markdown(self.pictures).encode()}

    @property
    def pictures(self) -> dict[str, str]:
        """Name of a drawn figure → its file."""
        return {figure.name: f"{self.stem}.{figure.name}.svg" for figure in self.figures if figure.svg}

    def to_markdown(self, pictures: dict[str, str]) -> str:
        """The report as Markdown, with the pictures of some figures (name → file or URL)."""
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
        parts += [f"Scale `{self.scale}`: {markdown_text(self.scale_description)}"] if self.scale else []
        if self.claims is not None:
            parts += ["## Claims", markdown_table(self.claims), markdown_text(self.claims.note)]
        parts += ["## Results", self.table.to_markdown().strip()]
        if self.aggregates is not None:
            parts += _markdown_section("Over all tasks", self.aggregates)
        if self.draws is not None:
            parts += _markdown_section("Best rows", self.draws)
        if self.structure is not None:
            parts += _markdown_section("Structure of the task", self.structure)
        if self.shortcuts is not None:
            parts += _markdown_section("Shortcuts", self.shortcuts.layout)
            if self.shortcuts.rows_like_rules:
                parts.append("\n".join(f"- {markdown_text(text)}" for text in self.shortcuts.rows_like_rules))
        if self.thresholds is not None:
            parts += _markdown_section("Until the task is learned", self.thresholds)
        if self.heads_layout is not None:
            parts += _markdown_section("Heads", self.heads_layout)
        for figure in self.figures:
            if figure.name in pictures:
                title = markdown_text(figure.title) + (f", as {markdown_text(figure.source)}" if figure.source else "")
                parts.append(f"![{title}]({pictures[figure.name]})")
        parts += ["## Missing", "\n".join(f"- {line}" for line in self.missing)] if self.missing else []
        rows = [
            *self.provenance.lines,
            ("This report", f"`cope-sweep report {self.plan.ablation.cli_args}{self._compare_option}`"),
        ]
        cells = [(name, text.replace("|", r"\|")) for name, text in rows]
        provenance_lines = ["| | |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in cells)]
        parts += ["## Provenance", "\n".join(provenance_lines)]
        return "\n\n".join(parts) + "\n"

    @property
    def _compare_option(self) -> str:
        return f" --compare {_quote(self.table.compare)}" if self.table.compare else ""


def _markdown_section(title: str, layout: Layout) -> list[str]:
    return [f"### {title}", markdown_table(layout), markdown_text(layout.note)]


def evidence(results: Results, compare: str | None = None) -> Evidence:
    """The report on a plan's finished runs.

    Args:
        results: The plan and its runs.
        compare: What to compare the rows with, as in `tables.Table`; None: `reference(plan)`.

    Raises ReportError if no run is finished, StoreError.
    """
    plan = results.plan
    if not any(record.status == "finished" for record in results.records.values()):
        raise ReportError(
            f"{results.place} has no finished run of {plan.ablation.cli_args}; train them with: {results.training}",
            ablation=plan.name,
        )
    heads = measured_heads(results)
    figures = tuple(_report_figure(results, declared, heads) for declared in declared_figures(plan))
    if not figures:
        kind = "budget" if plan.is_drawn else "summary"
        figure = FIGURES[kind].make(results, GetFigure(name=plan.name, figure=kind))
        figures = (ReportFigure(kind, plan.ablation.content.title, "", _svg(figure)),)
    return Evidence(results, Table(results, compare or reference(plan)), figures, heads)


def measured_heads(results: Results) -> pd.DataFrame:
    """How well the heads of finished runs mark what figures claim; the frame of `figures.marks.measure_run`.

    A report has these measures. The heads of a store's runs are measured now; a run whose checkpoint or text cannot be
    read is left out.
    """
    if isinstance(results, ReportResults):
        return results.heads
    parts: list[pd.DataFrame] = []
    if isinstance(results, ExtendedResults):
        parts.append(results.report.heads[results.is_from_report(results.report.heads)])
    measured = {run_id for part in parts for run_id in part["run_id"]}
    figures_by_run = _claimed_figures_by_run(results)
    if figures_by_run and results.store is not None:
        from cope_sweep.read.figures.marks import measure_run  # torch

        for run_id, figures in figures_by_run.items():
            if run_id not in measured:
                with suppress(UserError):  # `Evidence.missing` counts it
                    parts.append(measure_run(results.store.run(run_id).fetch_checkpoint(), figures))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=HEAD_COLUMNS)


def _claimed_figures_by_run(results: Results) -> dict[str, dict[str, Maps]]:
    """Id of a finished run → the figures, by name, that claim something about its heads."""
    rows = {row.name: row for row in results.plan.rows}
    rows_of_figure = {declared.name: declared.rows for declared in declared_figures(results.plan)}
    figures_by_run: dict[str, dict[str, Maps]] = {}
    for name, figure in claimed_figures(results.plan).items():
        for run in (run for row in rows_of_figure[name] for run in rows[row].runs):
            if results.records[run.run_id].status == "finished":
                figures_by_run.setdefault(run.run_id, {})[name] = figure
    return figures_by_run


def heads_layout(figures: Mapping[str, Maps], heads: pd.DataFrame) -> Layout:
    """The AUC by head and seed, with mean and interval; only the chosen heads if there are more than MOST_HEADS."""
    seeds = sorted(set(heads["seed"]))
    lines = []
    for name, figure in figures.items():
        of_figure = heads[heads["figure"] == name]
        kinds = [("chosen head", of_figure[of_figure["chosen"]], "auc")]
        kinds.append(("chosen head, untrained", of_figure[of_figure["initial_chosen"]], "initial_auc"))
        by_head = list(of_figure.groupby(["layer", "head"]))
        if len(by_head) <= MOST_HEADS:
            kinds += [(f"layer {layer} · head {head}", measures, "auc") for (layer, head), measures in by_head]
        for label, measures, column in kinds:
            auc_by_seed = dict(zip(measures["seed"], measures[column], strict=True))
            texts = [f"{auc_by_seed[seed]:.2f}" if seed in auc_by_seed else MISSING for seed in seeds]
            summary = summarise(auc_by_seed.values())
            mean = f"{summary.mean:.2f}" if summary.n else MISSING
            if summary.n > 1:
                mean += f" [{summary.ci_low:.2f}, {summary.ci_high:.2f}]"
            lines.append(tuple(map(TextCell, (figure.mark or "", label, *texts, mean))))
    headers = [ColumnHeader("mark", numeric=False), ColumnHeader("head", numeric=False)]
    headers += [ColumnHeader(f"seed {seed}") for seed in seeds] + [ColumnHeader("mean")]
    shown_quantities = dict.fromkeys(figure.show for figure in figures.values())
    note = "".join(AUC_NOTES[quantity] for quantity in shown_quantities)
    return Layout(tuple(headers), tuple(lines), note + CHOSEN_NOTE)


def write_evidence(report: Evidence, folder: Path) -> tuple[Path, ...]:
    """Write the files of a report to a folder, which is created if it is missing. Raises OSError.

    Each file is replaced as a whole, so an interrupted call leaves no partial file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / name: content for name, content in report.files().items()}
    for path, content in files.items():
        write_bytes(path, content)
    return tuple(files)


def _report_figure(results: Results, declared: Declared, heads: pd.DataFrame) -> ReportFigure:
    title = declared.figure.title or results.plan.ablation.content.title
    source, is_map = declared.figure.source, isinstance(declared.figure, Maps)
    saved = results.picture(declared.name) if is_map else None
    if is_map and results.store is None:
        problem = "" if saved else "the report has neither the figure nor a checkpoint"
        return ReportFigure(declared.name, title, source, (lambda: saved) if saved else None, problem)
    try:
        head = None
        if isinstance(declared.figure, Maps) and declared.figure.claim:
            seed = declared.figure.seed
            if seed is None:
                seed = results.plan.ablation.content.seeds[0]
            chosen = heads[(heads["figure"] == declared.name) & heads["chosen"].astype(bool) & (heads["seed"] == seed)]
            head = next(zip(chosen["layer"], chosen["head"], strict=True), None)
        figure = draw_declared(results, declared, head=head)
    except UserError as error:  # no checkpoint, or no such mark in the tokens
        if saved:
            return ReportFigure(declared.name, title, source, lambda: saved)
        reason = str(error).replace(f" in {results.place}", "")
        # Readers of the report may have another store.
        reason = reason.replace(results.training, f"cope-sweep run {results.plan.ablation.cli_args}")
        return ReportFigure(declared.name, title, source, None, reason)
    if figure.empty and not is_map:
        return ReportFigure(declared.name, title, source, None, "too few finished runs")
    return ReportFigure(declared.name, title, source, _svg(figure))


def _svg(figure: Figure) -> Callable[[], bytes]:
    return lambda: figure.render("svg")


def _quote(text: str) -> str:
    return f"'{text}'" if set(text) & set(" ()'\"$&|;<>*?") else text


@dataclass(frozen=True)
class Provenance:
    """Where finished runs come from. Lists are sorted by their number of runs."""

    runs: int
    commits: tuple[str, ...]
    """Git commits of the working tree; `-dirty`: with uncommitted changes."""
    versions: tuple[str, ...]
    """`torch 2.15.0`, …"""
    machines: tuple[str, ...]
    """`cpu, 2 threads; AMD EPYC 9B14, 2 cores; Linux`, …"""
    commands: tuple[str, ...]
    """The commands of the sweeps, without options that name folders or hosts."""
    first: str
    """UTC date of the first start of a run: 2026-07-30."""
    last: str
    """UTC date of the last end of a run."""
    compute_s: float
    """Sum of the wall times of the runs, in seconds."""

    @property
    def lines(self) -> tuple[tuple[str, str], ...]:
        """(name, text) of each item."""
        return (
            ("Commit", ", ".join(self.commits) or UNKNOWN),
            ("Versions", ", ".join(self.versions) or UNKNOWN),
            ("Machine", " / ".join(self.machines) or UNKNOWN),
            ("Runs", f"{self.runs} finished, {self.first} to {self.last}"),
            ("Compute", f"{duration(self.compute_s)} (sum of the wall times of the runs)"),
            ("Command", " / ".join(f"`{command}`" for command in self.commands) or UNKNOWN),
        )


def provenance(frames: Iterable[pd.DataFrame]) -> Provenance:
    """Provenance of the finished runs in frames of `reports.runs`. A run in several frames counts once."""
    needed = [frame.reindex(columns=PROVENANCE_COLUMNS).astype(object) for frame in frames]
    runs = pd.concat(needed).drop_duplicates("run_id")
    finished = runs[runs["status"] == "finished"]
    lines = finished.where(finished.notna(), None).to_dict("records")
    return Provenance(
        len(lines),
        _most_frequent_first(line["commit"] for line in lines),
        _most_frequent_first(text for line in lines for text in _versions(line)),
        _most_frequent_first(map(_machine, lines)),
        _most_frequent_first(line["command"] for line in lines),
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
    """`torch 2.15.0`, …: versions recorded with the run, or else with the sweep that trained it."""
    versions = dict(text.split(" ", 1) for text in (line["versions"] or "").split(", ") if text)
    for name in ("python", "torch"):
        if line[f"facts.{name}"]:
            versions[name] = line[f"facts.{name}"]
    return (f"{name} {versions[name]}" for name in sorted(versions))


def _machine(line: Mapping[Any, Any]) -> str:
    """The device of a run; processor, cores and system of the machine on which its sweep was started."""
    device, processor = str(line["facts.device"] or ""), ""
    if line["facts.threads"]:
        device += f", {line['facts.threads']} threads"
    if line["cores"]:
        processor = ", ".join(filter(None, (line["cpu"], f"{line['cores']} cores")))
    return "; ".join(filter(None, (device, processor, line["system"])))


def _most_frequent_first(texts: Iterable[Any]) -> tuple[str, ...]:
    counts = Counter(text for text in texts if text)
    return tuple(sorted(counts, key=lambda text: (-counts[text], text)))


def _date(time_ms: int | None) -> str:
    return UNKNOWN if time_ms is None else time.strftime("%Y-%m-%d", time.gmtime(time_ms / 1000))


@dataclass(frozen=True)
class Shortcuts:
    """The errors of simple rules (`tables.rules`) on the tasks of a table, and the rows that score like a rule."""

    layout: Layout
    rows_like_rules: tuple[str, ...]
    """Sentences that name these rows."""


def shortcuts(model: TableModel) -> Shortcuts | None:
    """The errors of simple rules on a table's tasks; None if no column is a token error, or no task has rules."""
    tasks = _rows_by_task(model)
    columns = [
        column for column in model.columns if column.compared and any(rule_errors(run, column.name) for run, _ in tasks)
    ]
    lines = []
    rows_like_rules: list[str] = []
    for run, rows in tasks:
        errors = {column: rule_errors(run, column.name) for column in columns}
        for rule in dict.fromkeys(rule for errors_of_column in errors.values() for rule in errors_of_column):
            texts = [rule]
            for column in columns:
                error = errors[column].get(rule)
                texts.append(MISSING if error is None else f"{error:.{column.decimals}f}")
            lines.append((_common_name(rows, model), texts))
        rows_like_rules += _rows_like_rules(rows, errors)
    if not lines:
        return None
    headers = [ColumnHeader("rule", numeric=False), *(ColumnHeader(column.title) for column in columns)]
    note = SHORTCUTS_NOTE + (LIKE_RULES_NOTE if rows_like_rules else "")
    return Shortcuts(_layout_by_task(headers, lines, len(tasks), note), tuple(rows_like_rules))


def structure(model: TableModel) -> Layout | None:
    """What makes the tasks of a table hard, with a column per test set; None if no task describes it."""
    splits = [(column, _split(column)) for column in model.columns if column.compared]
    columns = [(column, split) for column, split in splits if split is not None]
    tasks = _rows_by_task(model)
    lines = []
    for run, rows in tasks:
        measures = [run.task.structure(split, SEQUENCES) for _, split in columns]
        names = measures[0] if measures else []
        lines += [
            (_common_name(rows, model), [name, *(f"{measure[name]:.3g}" for measure in measures)]) for name in names
        ]
    if not lines:
        return None
    headers = [ColumnHeader("structure", numeric=False), *(ColumnHeader(column.label) for column, _ in columns)]
    return _layout_by_task(headers, lines, len(tasks), f"Measured on the first {SEQUENCES} sequences of each test set.")


def _layout_by_task(
    headers: Sequence[ColumnHeader], lines: Iterable[tuple[str, Sequence[str]]], tasks: int, note: str
) -> Layout:
    """A table whose lines are (names of rows, texts); the names are a column only if there are several tasks."""
    if tasks == 1:
        return Layout(tuple(headers), tuple(tuple(map(TextCell, texts)) for _, texts in lines), note)
    rows = tuple(tuple(map(TextCell, (names, *texts))) for names, texts in lines)
    return Layout((ColumnHeader("rows", numeric=False), *headers), rows, note)


def _rows_by_task(model: TableModel) -> list[tuple[RunSpec, list[TableRow]]]:
    """The rows of each task, with one of its runs. Tasks that differ in training data alone share test sets."""
    rows_of: dict[str, tuple[RunSpec, list[TableRow]]] = {}
    for row in model.rows:
        run = row.runs[0][0]
        key = run.task.model_dump_json(exclude={"data_seed", "train_sequences"})
        rows_of.setdefault(key, (run, []))[1].append(row)
    return list(rows_of.values())


def _common_name(rows: Sequence[TableRow], model: TableModel) -> str:
    """The labels that these rows share and no other row of the table has; if there are none, the names of the rows."""
    common = set.intersection(*(set(row.labels.items()) for row in rows))
    if common and [row for row in model.rows if common <= set(row.labels.items())] == list(rows):
        return " · ".join(
            named_label(model.axes[key], label) for key, label in rows[0].labels.items() if (key, label) in common
        )
    return ", ".join(row.short for row in rows)


def _split(column: Column) -> str | None:
    """The test set of a column of token errors; None for other columns."""
    split, _, quantity = column.name.rpartition("/")
    return split if quantity == ERROR and "/" not in split else None


def _rows_like_rules(rows: Sequence[TableRow], errors: Mapping[Column, Mapping[str, float]]) -> Iterator[str]:
    """A sentence for each rule and column, naming the rows that score like the rule."""
    for column, error_by_rule in errors.items():
        rows_by_rule: dict[str, list[str]] = {}
        for row in rows:
            cell = row.metrics[column.name]
            near_seeds = {
                rule: sum(abs(value - error) <= NEAR * error for value in cell.values.values())
                for rule, error in error_by_rule.items()
            }
            closest = max(near_seeds, key=lambda rule: near_seeds[rule], default=None)
            if closest is not None and near_seeds[closest] > len(cell.values) / 2:
                median = f"{cell.summary.median:.{decimals_of(column, cell)}f}"
                rows_by_rule.setdefault(closest, []).append(f"{row.short} ({median})")
        for rule, names in rows_by_rule.items():
            error_text = f"{error_by_rule[rule]:.{column.decimals}f} {column.unit}"
            yield f"{column.label} like “{rule}” ({error_text}): {', '.join(names)}"


def thresholds(model: TableModel, curves: pd.DataFrame) -> Layout | None:
    """Steps and sequences until finished runs have learned the task.

    None if no column defines `learned`, or no run has learned the task.

    Args:
        model: The table of results.
        curves: The learning curves of its runs, as in `Results.curves`.
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
            cells += [_median_text(steps, train.steps, unit) for unit in (1, train.batch)]
            lines.append(tuple(map(TextCell, cells)))
    if not any(map(math.isfinite, first_steps.values())):
        return None
    headers = [ColumnHeader("row", numeric=False), *map(ColumnHeader, ("seeds", "steps", "sequences"))]
    note = (
        f"Training until the first evaluation with {column.learned_title} {column.unit}: the median over seeds, and "
        f"its {100 * LEVEL:g} % bootstrap interval. A seed that never gets there counts as later than the end of "
        "training; one that gets there may lose it again."
    )
    return Layout(tuple(headers), tuple(lines), note)


def bootstrap_median(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and its percentile interval over resampled seeds. Values may be infinite."""
    seeds = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(0).choice(seeds, (RESAMPLES, len(seeds)))
    tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    low, high = np.quantile(np.median(drawn, axis=1), tails, method="inverted_cdf")
    return float(np.median(seeds)), float(low), float(high)


def _first_steps(curves: pd.DataFrame, column: Column, limits: Mapping[str, float]) -> dict[str, float]:
    """Run id → the first step at which the run has learned the task; infinite if it never has.

    A run whose error is at least its value in `limits` (run id → error) is stuck: it has not learned the task.
    """
    logged = curves[curves["metric"] == column.name]
    is_learned = column.is_learned(logged["value"]) & (logged["value"] < logged["run_id"].map(limits).astype("float64"))
    steps = logged["step"].where(is_learned, math.inf).groupby(logged["run_id"]).min()
    return {str(run_id): float(step) for run_id, step in steps.items()}


def _median_text(steps: Sequence[float], last_step: int, unit: int) -> str:
    """`1,200 [800, > 4,000]`: the median of some steps and its interval, each multiplied by `unit`."""

    def format_step(step: float) -> str:
        return f"> {last_step * unit:,}" if math.isinf(step) else f"{step * unit:,.0f}"

    median, low, high = map(format_step, bootstrap_median(steps))
    return median if low == high == median else f"{median} [{low}, {high}]"
