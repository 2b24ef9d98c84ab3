"""One HTML document of all ablations: every table and figure, verdicts, provenance, and what is missing.

It loads nothing from elsewhere: its figures are `data:` URIs, and it has no script.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from cope_sweep.api.questions import GetReport
from cope_sweep.config import Plan, SpecError
from cope_sweep.errors import NotFoundError
from cope_sweep.read.queries import AblationFiles, recorded_plan
from cope_sweep.read.reports.evidence import (
    EXPLORATORY,
    Evidence,
    Provenance,
    ReportError,
    duration,
    evidence,
    provenance,
)
from cope_sweep.read.reports.runs import read_report, runs_file
from cope_sweep.read.tables import Results, read_results
from cope_sweep.read.tables.claims import Finding, place_in_paper
from cope_sweep.read.tables.model import p_text
from cope_sweep.read.tables.render import Layout, html_table
from cope_sweep.store import Store

TEMPLATE = Path(__file__).with_name("document.html.jinja")
TITLE = "Ablations of position encodings"


@dataclass(frozen=True)
class Size:
    """An ablation at one scale."""

    scale: str | None
    runs: int
    finished: int
    evidence: Evidence | None
    """None: no run is finished."""
    problem: str = ""
    """The reason why a report cannot be shown."""

    @property
    def name(self) -> str:
        """Its name in the document."""
        return self.scale or "base"


@dataclass(frozen=True)
class Chapter:
    """An ablation of the document."""

    name: str
    title: str
    reproduces: str
    hypothesis: str
    sizes: tuple[Size, ...]
    error: str = ""
    """The reason why its file cannot be read; the other fields are then empty."""

    @property
    def reports(self) -> list[Evidence]:
        """The scales with finished runs."""
        return [each.evidence for each in self.sizes if each.evidence is not None]

    @property
    def idle(self) -> list[Size]:
        """The scales without finished runs."""
        return [each for each in self.sizes if each.evidence is None]


@dataclass(frozen=True)
class Document:
    """All ablations of a folder, and what made their runs."""

    chapters: tuple[Chapter, ...]
    provenance: Provenance

    def to_html(self) -> str:
        """The document. All text is escaped. The same store gives the same text."""
        template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
            TEMPLATE.read_text(encoding="utf-8")
        )
        return template.render(
            title=TITLE, chapters=self.chapters, claims=self._claims(), provenance=self.provenance,
            missing=list(self._missing()), exploratory=EXPLORATORY, tables=_tables, further_table=_further_table,
            pictures=_pictures, compute=duration(self.provenance.compute_s), p_text=p_text,
        )  # fmt: skip

    def _claims(self) -> list[tuple[Evidence, Finding]]:
        """Every claim with its report, in the order of the paper's tables and figures; others come last."""
        found = [(report, each) for chapter in self.chapters for report in chapter.reports for each in report.findings]
        return sorted(found, key=lambda pair: place_in_paper(pair[1].claim.source))

    def _missing(self) -> Iterator[tuple[str, str, str]]:
        """Ablation, scale, and what is missing."""
        for chapter in self.chapters:
            if chapter.error:
                yield chapter.name, "", chapter.error
            for size in chapter.sizes:
                if size.evidence is None:
                    yield chapter.name, size.name, size.problem or f"not run: {size.runs} runs"
                else:
                    yield from ((chapter.name, size.name, line) for line in size.evidence.missing)


def document(files: AblationFiles, source: Store | Path, scale: str | None = None) -> Document:
    """The document of all ablations in a folder.

    Args:
        files: The ablation files.
        source: The store, or a folder of reports.
        scale: Only this scale, of the ablations that have it; None: each ablation's own size and all its scales.

    Raises ReportError where no run is finished, or no ablation has the scale; StoreError, OSError.
    """
    chapters = [_chapter(files, source, name, None if scale is None else (scale,)) for name in files.files()]
    if scale is not None:
        chapters = [each for each in chapters if each.sizes or each.error]
    found = [each for chapter in chapters for each in chapter.reports]
    if not found:
        option = f" at the scale {scale}" if scale else ""
        place = f"the store {source.location}" if isinstance(source, Store) else f"a report of {source}"
        raise ReportError(
            f"no run of an ablation in {files.folder}{option} is finished in {place}; train one with: cope-sweep run "
            f"{shlex.join(['quickstart', *(source.option if isinstance(source, Store) else [])])}",
            folder=str(files.folder),
            scale=scale,
        )
    return Document(tuple(chapters), provenance(each.runs for each in found))


def report_file(results: Results, question: GetReport, figure_url: Callable[[str], str] | None = None) -> bytes:
    """The report of one ablation at one scale. In Markdown, `figure_url` gives the addresses of its figures.

    Without `figure_url`, they are the files that `write_evidence` writes. Raises ReportError where no run is finished,
    StoreError.
    """
    found = evidence(results)
    if question.format == "markdown":
        urls = {name: file if figure_url is None else figure_url(name) for name, file in found.pictures.items()}
        return found.to_markdown(urls).encode()
    return ablation_document(found).to_html().encode()


def ablation_document(found: Evidence) -> Document:
    """The document of one ablation at one scale."""
    return Document((_sized(found.plan, (_size(found.results, found),)),), found.provenance)


def _chapter(files: AblationFiles, source: Store | Path, name: str, wanted: Sequence[str] | None) -> Chapter:
    """The chapter of an ablation at some scales (None: all)."""
    try:
        base = files.load(name)
        content = base.ablation.content
        scales: Sequence[str | None] = [None, *content.scales] if wanted is None else wanted
        sizes = []
        for each in scales:
            if each is None or each in content.scales:
                plan = base if each is None else files.load(name, each)
                sizes.append(_source_size(plan, source))
    except (SpecError, NotFoundError) as error:
        return Chapter(name, "", "", "", (), str(error))
    return _sized(base, tuple(sizes))


def _source_size(plan: Plan, source: Store | Path) -> Size:
    """The size of a plan, of a store or of the report that is named as it."""
    if isinstance(source, Store):
        return _size(read_results(recorded_plan(plan, source), source))
    scale = plan.ablation.scale
    path = runs_file(source, plan)
    results = read_report(plan, path) if path.exists() else None
    if results is None or results.stale:
        return Size(scale, len(plan.runs), 0, None, results.stale if results else "no report")
    return _size(results)


def _sized(plan: Plan, sizes: tuple[Size, ...]) -> Chapter:
    content = plan.ablation.content
    return Chapter(plan.name, content.title, content.reproduces, " ".join(content.hypothesis.split()), sizes)


def _size(results: Results, found: Evidence | None = None) -> Size:
    finished = sum(record.status == "finished" for record in results.records.values())
    found = found or (evidence(results) if finished else None)
    return Size(results.plan.ablation.scale, len(results.plan.runs), finished, found)


def _tables(found: Evidence) -> tuple[Markup, Markup]:
    """The table of the rows, and that of the runs."""
    text = found.table.to_html(anchors=f"{found.stem}-")
    rows, separator, runs = text.partition('<table class="runs">')
    return Markup(rows), Markup(separator + runs)  # noqa: S704 - `results.render` escapes all text


def _further_table(layout: Layout, name: str) -> Markup:
    return Markup(html_table(layout, name))  # noqa: S704 - escaped


def _pictures(found: Evidence) -> list[dict[str, str]]:
    """Source, text and origin of each figure that was drawn."""
    return [
        {
            "uri": "data:image/svg+xml;base64," + base64.b64encode(each.svg()).decode(),
            "title": each.title,
            "source": each.source,
        }
        for each in found.figures
        if each.svg
    ]
