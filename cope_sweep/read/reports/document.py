"""One HTML document with all ablations: tables, figures, verdicts, provenance, and what is missing.

It is self-contained: figures are `data:` URIs, and it has no script.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from cope_sweep.api.questions import GetReport
from cope_sweep.config import Plan, SpecError
from cope_sweep.errors import NotFoundError
from cope_sweep.read.queries import AblationFiles, recorded_plan
from cope_sweep.read.reports.evidence import EXPLORATORY, Evidence, ReportError, evidence
from cope_sweep.read.reports.provenance import Provenance, duration, provenance
from cope_sweep.read.reports.runs import read_report, runs_file
from cope_sweep.read.tables import Results, read_results
from cope_sweep.read.tables.claims import Finding, place_in_paper
from cope_sweep.read.tables.comparisons import p_text
from cope_sweep.read.tables.layout import Layout
from cope_sweep.read.tables.render import html_table
from cope_sweep.store import Store

TEMPLATE = Path(__file__).with_name("document.html.jinja")
TITLE = "Ablations of position encodings"
NO_SCALE = "base"
"""Heading of an ablation without a scale."""


@dataclass(frozen=True)
class ScaleReport:
    """An ablation at one scale, with its report if runs are finished."""

    scale: str | None
    runs: int
    finished: int
    evidence: Evidence | None
    """None: no run is finished."""
    problem: str = ""
    """Why the report cannot be shown."""

    @property
    def name(self) -> str:
        """Its heading in the document."""
        return self.scale or NO_SCALE


@dataclass(frozen=True)
class Chapter:
    """The part of the document about one ablation."""

    name: str
    title: str
    reproduces: str
    hypothesis: str
    scales: tuple[ScaleReport, ...]
    error: str = ""
    """Why its file cannot be read; the other fields are then empty."""

    @property
    def reports(self) -> list[Evidence]:
        """The scales with finished runs."""
        return [scale.evidence for scale in self.scales if scale.evidence is not None]

    @property
    def untrained(self) -> list[ScaleReport]:
        """The scales without finished runs."""
        return [scale for scale in self.scales if scale.evidence is None]


@dataclass(frozen=True)
class Document:
    """All ablations of a folder, and the provenance of their runs."""

    chapters: tuple[Chapter, ...]
    provenance: Provenance

    def to_html(self) -> str:
        """The document. All text is escaped. The same store gives the same text."""
        template = Environment(
            autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        ).from_string(TEMPLATE.read_text(encoding="utf-8"))
        return template.render(
            title=TITLE, chapters=self.chapters, claims=self._claims(), provenance=self.provenance,
            missing=list(self._missing()), exploratory=EXPLORATORY, tables=_tables, further_table=_further_table,
            images=_images, no_scale=NO_SCALE, compute=duration(self.provenance.compute_s), p_text=p_text,
        )  # fmt: skip

    def _claims(self) -> list[tuple[Evidence, Finding]]:
        """Every claim with its report, in the order of the paper's tables and figures; other claims come last."""
        claims = [
            (report, finding) for chapter in self.chapters for report in chapter.reports for finding in report.findings
        ]
        return sorted(claims, key=lambda pair: place_in_paper(pair[1].source))

    def _missing(self) -> Iterator[tuple[str, str, str]]:
        """(ablation, scale, what is missing)"""
        for chapter in self.chapters:
            if chapter.error:
                yield chapter.name, "", chapter.error
            for scale in chapter.scales:
                if scale.evidence is None:
                    yield chapter.name, scale.name, scale.problem or f"not run: {scale.runs} runs"
                else:
                    yield from ((chapter.name, scale.name, line) for line in scale.evidence.missing)


def document(files: AblationFiles, source: Store | Path, scale: str | None = None) -> Document:
    """The document of all ablations in a folder.

    Args:
        files: The ablation files.
        source: The store, or a folder of reports.
        scale: Only the ablations with this scale, at this scale; None: every ablation at all scales and without one.

    Raises ReportError if no run is finished, or no ablation has the scale; StoreError, OSError.
    """
    chapters = [_chapter(files, source, name, None if scale is None else (scale,)) for name in files.files()]
    if scale is not None:
        chapters = [chapter for chapter in chapters if chapter.scales or chapter.error]
    reports = [report for chapter in chapters for report in chapter.reports]
    if not reports:
        option = f" at the scale {scale}" if scale else ""
        place = f"the store {source.location}" if isinstance(source, Store) else f"the reports in {source}"
        store_option = source.option if isinstance(source, Store) else []
        raise ReportError(
            f"{place} has no finished runs of the ablations in {files.folder}{option}; train some, for example with: "
            f"cope-sweep run {shlex.join(['quickstart', *store_option])}",
            folder=str(files.folder),
            scale=scale,
        )
    return Document(tuple(chapters), provenance(report.runs for report in reports))


def report_file(results: Results, question: GetReport, figure_url: Callable[[str], str] | None = None) -> bytes:
    """The report on one ablation at one scale. In Markdown, `figure_url` returns the URLs of its figures.

    Without `figure_url`, figures are the files that `write_evidence` writes. Raises ReportError if no run is finished,
    StoreError.
    """
    report = evidence(results)
    if question.format == "markdown":
        urls = {name: file if figure_url is None else figure_url(name) for name, file in report.pictures.items()}
        return report.to_markdown(urls).encode()
    return ablation_document(report).to_html().encode()


def ablation_document(report: Evidence) -> Document:
    """A document with one ablation at one scale."""
    return Document((_make_chapter(report.plan, (_scale_report(report.results, report),)),), report.provenance)


def _chapter(files: AblationFiles, source: Store | Path, name: str, wanted: Sequence[str] | None) -> Chapter:
    """The chapter of an ablation at these scales; None: at all scales, and without a scale."""
    try:
        base = files.load(name)
        content = base.ablation.content
        scales: Sequence[str | None] = [None, *content.scales] if wanted is None else wanted
        scale_reports = []
        for scale in scales:
            if scale is None or scale in content.scales:
                plan = base if scale is None else files.load(name, scale)
                scale_reports.append(_read_scale_report(plan, source))
    except (SpecError, NotFoundError) as error:
        return Chapter(name, "", "", "", (), str(error))
    return _make_chapter(base, tuple(scale_reports))


def _read_scale_report(plan: Plan, source: Store | Path) -> ScaleReport:
    """The report on a plan, from a store or from a folder of reports."""
    if isinstance(source, Store):
        return _scale_report(read_results(recorded_plan(plan, source), source))
    scale = plan.ablation.scale
    path = runs_file(source, plan)
    results = read_report(plan, path) if path.exists() else None
    if results is None or results.stale:
        return ScaleReport(scale, len(plan.runs), 0, None, results.stale if results else "no report")
    return _scale_report(results)


def _make_chapter(plan: Plan, scales: tuple[ScaleReport, ...]) -> Chapter:
    content = plan.ablation.content
    return Chapter(plan.name, content.title, content.reproduces, " ".join(content.hypothesis.split()), scales)


def _scale_report(results: Results, report: Evidence | None = None) -> ScaleReport:
    finished = sum(record.status == "finished" for record in results.records.values())
    if report is None and finished:
        report = evidence(results)
    return ScaleReport(results.plan.ablation.scale, len(results.plan.runs), finished, report)


def _tables(report: Evidence) -> tuple[Markup, Markup]:
    """The table of rows and the table of runs."""
    text = report.table.to_html(anchors=f"{report.stem}-")
    rows, separator, runs = text.partition('<table class="runs">')
    return Markup(rows), Markup(separator + runs)  # noqa: S704 - `results.render` escapes all text


def _further_table(layout: Layout) -> Markup:
    return Markup(html_table(layout, "further"))  # noqa: S704 - escaped


def _images(report: Evidence) -> list[dict[str, str]]:
    """URI, title and source of each figure that was drawn."""
    return [
        {
            "uri": "data:image/svg+xml;base64," + base64.b64encode(figure.svg()).decode(),
            "title": figure.title,
            "source": figure.source,
        }
        for figure in report.figures
        if figure.svg
    ]
