"""The report on one ablation at one scale: its parts, what is missing in it, and its files."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from urllib.parse import quote, urlencode

import pandas as pd

from cope_sweep.api.figures import GetFigure
from cope_sweep.api.question import API
from cope_sweep.api.tables import GetReport
from cope_sweep.config import Plan
from cope_sweep.errors import UserError
from cope_sweep.read.figures.available import (
    MAX_ROWS,
    Declared,
    declared_figures,
    draw_declared,
    draw_figure,
    drawn_lines,
)
from cope_sweep.read.figures.figure import Figure
from cope_sweep.read.reports.aggregates import aggregates
from cope_sweep.read.reports.files import check_keeps, locked, result_files, run_frame, write_files
from cope_sweep.read.reports.heads import claimed_figures, claimed_figures_by_run, heads_layout, measured_heads
from cope_sweep.read.reports.html import html_page
from cope_sweep.read.reports.learned import learned
from cope_sweep.read.reports.provenance import Provenance, provenance
from cope_sweep.read.reports.shortcuts import Shortcuts, shortcuts, structure
from cope_sweep.read.reports.thresholds import thresholds
from cope_sweep.read.reports.trained import trained_lines
from cope_sweep.read.tables import Results, Table
from cope_sweep.read.tables.best import rank_rows
from cope_sweep.read.tables.claims import (
    Finding,
    claim_findings,
    claims_layout,
    head_findings,
    hypothesis_verdict,
    with_q,
)
from cope_sweep.read.tables.comparisons import reference, reference_label
from cope_sweep.read.tables.declared import plan_declarations
from cope_sweep.read.tables.layout import Layout
from cope_sweep.read.tables.model import TASK, TableModel
from cope_sweep.read.tables.render import markdown, markdown_table, markdown_text
from cope_sweep.read.tables.table import sorted_by
from cope_sweep.store import STATUSES, ParquetStore
from cope_sweep.store.results_file import file_name

MOST_COMMANDS = 3
"""The most commands that are not folded."""
EXPLORATORY = "Exploratory: the recipe was chosen by looking at results like these."


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
    """Draws the figure; a map of a folder of results is read. None if it cannot be drawn."""
    problem: str = ""


@dataclass(frozen=True)
class Section:
    """A further table of a report."""

    title: str
    table: Layout
    remarks: tuple[str, ...] = ()
    """Sentences below the table."""


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
        """The runs, with the columns of a file of results: `store.results_file`."""
        return run_frame(self.plan, self.results.records, self.results.store)

    @property
    def provenance(self) -> Provenance:
        """Commits, versions, machines and commands of the finished runs."""
        return provenance(self.runs)

    @property
    def stem(self) -> str:
        """The start of its file names: `<ablation>.<scale>`, or the ablation's name alone."""
        return Path(file_name(self.plan)).stem

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
        return len(set(claimed_figures_by_run(self.results)) - set(self.heads["run_id"]))

    @property
    def answer(self) -> str:
        """The verdicts in a sentence; empty without a comparison."""
        return self.table.model.answer

    @cached_property
    def aggregates(self) -> Layout | None:
        """Scores over all tasks; None if the ablation has no axis of tasks, or too few runs are finished."""
        found = reference_label(self.table.model, self.table.compare or "")
        return aggregates(self.table.model, found and found[1])

    @cached_property
    def draws(self) -> Layout | None:
        """The best rows of a search; None if the ablation has no search."""
        return rank_rows(self.results).layout() if self.plan.is_drawn else None

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """The claims of the ablation and of its figures, with their verdicts."""
        declarations = plan_declarations(self.plan, self.results.store)
        about_rows = with_q(claim_findings(self.plan, self.table.model, declarations))
        figures = claimed_figures(self.plan)
        return about_rows + head_findings(figures, self.heads, declarations, self.results.records)

    @cached_property
    def shown(self) -> TableModel:
        """The rows in the tables of the report: the best ones by the primary metric, if there are many.

        All rows of a search, which `draws` has instead of tables of its rows.
        """
        model = self.table.model
        if self.plan.is_drawn or len(model.rows) <= MAX_ROWS:
            return model
        best_first = sorted_by(model, model.primary.name)
        return replace(best_first, rows=best_first.rows[:MAX_ROWS])

    @property
    def _rest(self) -> str:
        """Where the other rows are; empty if the report has all."""
        total = len(self.table.model.rows)
        if len(self.shown.rows) == total:
            return ""
        ablation = self.plan.ablation
        address = ""
        if not ablation.assignments:  # a service knows the file and its scales
            query = {"format": "csv"} | ({"scale": self.scale} if self.scale else {})
            address = f", or `{API}/ablations/{quote(self.plan.name, safe='')}/table?{urlencode(query)}` of a service"
        return (
            f"These are the {MAX_ROWS} best of {total:,} rows by {self.table.model.primary.label}. "
            f"All rows: `cope-sweep table {ablation.cli_args} --format csv`{address}."
        )

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
        return shortcuts(self.shown)

    @cached_property
    def structure(self) -> Layout | None:
        """What makes the tasks hard; None if the tasks do not describe it."""
        return structure(self.shown)

    @cached_property
    def learned(self) -> Layout | None:
        """The seeds that have learned the task, and their errors; None if no metric defines `learned`, or none has."""
        return learned(self.shown)

    @cached_property
    def thresholds(self) -> Layout | None:
        """Steps and sequences until the task is learned; None if no metric defines `learned`."""
        return thresholds(self.shown, self.results.store)

    @property
    def sections(self) -> tuple[Section, ...]:
        """The tables below the main one. A search has none about single rows: most of its rows are draws that lost."""
        shortcuts = self.shortcuts
        tables = {
            "Over all tasks": None if self.plan.is_drawn else self.aggregates,
            "Structure of the task": self.structure,
            "Shortcuts": shortcuts.layout if shortcuts else None,
            "Learned": None if self.plan.is_drawn else self.learned,
            "Until the task is learned": None if self.plan.is_drawn else self.thresholds,
            "Heads": self.heads_layout,
        }
        remarks = {"Shortcuts": shortcuts.rows_like_rules if shortcuts and not self.plan.is_drawn else ()}
        return tuple(
            Section(title, _first_rows(table), remarks.get(title, ()))
            for title, table in tables.items()
            if table is not None
        )

    def files(self) -> dict[str, bytes]:
        """File name → content: runs, learning curves, report and figures. The same results give the same bytes."""
        return result_files(self.plan, self.runs, self.results.curves, self.heads) | self.documents

    @property
    def documents(self) -> dict[str, bytes]:
        """The files that people read: figures and report."""
        return self.drawn | {f"{self.stem}.md": self.to_markdown(self.pictures, folds=True).encode()}

    @property
    def pictures(self) -> dict[str, str]:
        """Name of a drawn figure → its file."""
        return {figure.name: f"{self.stem}.{figure.name}.svg" for figure in self.figures if figure.svg}

    @cached_property
    def drawn(self) -> dict[str, bytes]:
        """File of a figure → its SVG."""
        return {self.pictures[figure.name]: figure.svg() for figure in self.figures if figure.svg}

    def to_markdown(self, pictures: dict[str, str], *, folds: bool = False) -> str:
        """The report as Markdown, with the pictures of some figures (name → file or URL).

        With `folds`, long lists of commands are folded by HTML, which GitHub shows as such.
        """
        content = self.plan.ablation.content
        parts = [f"# {markdown_text(content.title)}"]
        parts += self._result
        parts += [f"Hypothesis: {markdown_text(content.hypothesis)}"] if content.hypothesis else []
        if self.hypothesis_verdict:
            parts.append(f"**The hypothesis is {self.hypothesis_verdict}.**")
        parts += [EXPLORATORY] if content.exploratory else []
        if content.reproduces:
            size = ", at another size than the paper's" if self.table.model.replaced else ""
            parts.append(f"Reproduces: {markdown_text(content.reproduces)}{size}.")
        if content.tuned:
            name = markdown_text(content.tuned)
            parts.append(f"Tuned: each row has the best of the recipes that {name} tried for all rows alike.")
        elif content.claims:
            parts.append("One recipe for all rows.")
        parts += [f"Scale `{self.scale}`: {markdown_text(self.scale_description)}"] if self.scale else []
        if self.claims is not None:
            parts += ["## Claims", markdown_table(self.claims), markdown_text(self.claims.note)]
            notes = [
                f"- {markdown_text(each.claim)}: {markdown_text(each.note)}" for each in self.findings if each.note
            ]
            parts += ["\n".join(notes)] if notes else []
        trained = [f"- {name}: {markdown_text(text)}" for name, text in trained_lines(self.plan)]
        parts += ["## What was trained", "\n".join(trained)]
        parts.append("## Results")
        if self.draws is None:
            parts.append(markdown(self.shown).strip())
            parts += [self._rest] if self._rest else []
        else:
            draws = _first_rows(self.draws)
            parts += [markdown_table(draws), markdown_text(draws.note)]
            parts.append(f"All draws: `cope-sweep table {self.plan.ablation.cli_args}`.")
        for section in self.sections:
            parts += [f"### {section.title}", markdown_table(section.table), markdown_text(section.table.note)]
            if section.remarks:
                parts.append("\n".join(f"- {markdown_text(text)}" for text in section.remarks))
        for figure in self.figures:
            if figure.name in pictures:
                title = markdown_text(figure.title) + (f", as {markdown_text(figure.source)}" if figure.source else "")
                parts.append(f"![{title}]({pictures[figure.name]})")
        parts += ["## Missing", "\n".join(f"- {line}" for line in self.missing)] if self.missing else []
        cells = [(name, text.replace("|", r"\|")) for name, text in self.provenance.lines]
        provenance_lines = ["| | |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in cells)]
        parts += ["## Provenance", "\n".join(provenance_lines)]
        # Their own block: sweeps of single rows have many long ones.
        report = f"cope-sweep report {self.plan.ablation.cli_args}{self._compare_option}"
        about = "The commands that trained these runs and made this report"
        commands = "\n".join(("```bash", *(self.provenance.commands or ("# not recorded",)), report, "```"))
        is_folded = folds and len(self.provenance.commands) > MOST_COMMANDS
        parts += (
            [f"<details><summary>{about}</summary>", commands, "</details>"] if is_folded else [f"{about}:", commands]
        )
        return "\n\n".join(parts) + "\n"

    def to_html(self) -> str:
        """The same as one HTML file, with the figures inside."""
        return html_page(self.plan.ablation.content.title, self.to_markdown(self.pictures), self.drawn)

    @property
    def _result(self) -> list[str]:
        """The paragraphs that answer the ablation's question: a line for each claim, and the comparison of all rows."""
        claims = [f"- **{each.verdict_text}**: {markdown_text(self._statement(each))}" for each in self.findings]
        answer = markdown_text(self.answer)
        if not claims:
            return [f"**Result: {answer}**"] if answer else []
        return ["**Result**", "\n".join(claims), *([re.sub("^By ", "All rows, by ", answer)] if answer else [])]

    def _statement(self, finding: Finding) -> str:
        """The claim; in a table of several tasks with the one that it is about, if it does not say so."""
        tasks = {pair.better.labels.get(TASK, "") for pair in finding.pairs}
        if TASK not in self.table.model.axes or len(tasks) != 1 or (task := tasks.pop()) in finding.claim:
            return finding.claim
        return f"{finding.claim} ({task})"

    @property
    def _compare_option(self) -> str:
        return f" --compare {shlex.quote(self.table.compare)}" if self.table.compare else ""


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
    figures = tuple(_report_figure(results, declared) for declared in declared_figures(plan))
    if not figures:
        kind = "budget" if plan.is_drawn else "summary"
        problem = _too_large(plan, kind, len(plan.rows))
        draw = None if problem else _svg(draw_figure(results, GetFigure(name=plan.name, figure=kind)))
        figures = (ReportFigure(kind, plan.ablation.content.title, "", draw, problem),)
    return Evidence(results, Table.of(results, compare or reference(plan)), figures, measured_heads(results))


def report_file(results: Results, question: GetReport, figure_url: Callable[[str], str] | None = None) -> bytes:
    """The report on one ablation at one scale. In Markdown, `figure_url` returns the URLs of its figures.

    Without `figure_url`, figures are the files that `write_evidence` writes. Raises ReportError if no run is finished,
    StoreError.
    """
    report = evidence(results)
    if question.format == "html":
        return report.to_html().encode()
    urls = {name: file if figure_url is None else figure_url(name) for name, file in report.pictures.items()}
    return report.to_markdown(urls).encode()


def write_evidence(report: Evidence, folder: Path) -> tuple[Path, ...]:
    """Write the files of a report to a folder, see `write_files`.

    Raises NotFinishedError if the folder has finished runs of the plan that the report lacks: see `check_keeps`. Runs
    that are no longer planned are replaced. Raises OSError.
    """
    files = report.files()
    with locked(folder):
        check_keeps(ParquetStore(folder), report.results, report.heads)
        return write_files(folder, files)


def _report_figure(results: Results, declared: Declared) -> ReportFigure:
    title = declared.figure.title or results.plan.ablation.content.title
    source, is_map = declared.figure.source, declared.figure.NEEDS_CHECKPOINT
    kept = results.store.kept(results.plan) if is_map else None
    saved = kept.picture(declared.name) if kept else None
    if saved:  # a folder of results has no checkpoint to draw it again
        return ReportFigure(declared.name, title, source, lambda: saved)
    problem = "" if is_map else _too_large(results.plan, declared.figure.kind, len(declared.rows))
    if problem:
        return ReportFigure(declared.name, title, source, None, problem)
    try:
        figure = draw_declared(results, declared)
    except UserError as error:  # no checkpoint, or no such mark in the tokens
        reason = str(error).replace(f" in {results.place}", "")
        # Readers of the report may have another store.
        reason = reason.replace(results.training, f"cope-sweep run {results.plan.ablation.cli_args}")
        return ReportFigure(declared.name, title, source, None, reason)
    if figure.empty and not is_map:
        return ReportFigure(declared.name, title, source, None, "too few finished runs")
    return ReportFigure(declared.name, title, source, _svg(figure))


def _too_large(plan: Plan, kind: str, rows: int) -> str:
    """Why a figure of this kind is left out; empty if it can be drawn."""
    lines = drawn_lines(plan, kind, rows)
    if lines <= MAX_ROWS:
        return ""
    return (
        f"{lines:,} rows, but an image shows at most {MAX_ROWS}; draw some with `cope-sweep figure "
        f"{plan.ablation.cli_args} --kind {kind} --row ROW`"
    )


def _first_rows(table: Layout) -> Layout:
    """The first MAX_ROWS rows of a table, which then says so."""
    if len(table.rows) <= MAX_ROWS:
        return table
    note = f"{table.note} The first {MAX_ROWS} of {len(table.rows):,} rows.".strip()
    return replace(table, rows=table.rows[:MAX_ROWS], note=note)


def _svg(figure: Figure) -> Callable[[], bytes]:
    return lambda: figure.render("svg")
