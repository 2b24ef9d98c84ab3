"""One HTML document of all ablations: every table and figure, verdicts, provenance, and what is missing.

It loads nothing from elsewhere: its figures are `data:` URIs, and it has no script.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from cope_sweep.api.questions import GetReport
from cope_sweep.config import Plan, SpecError
from cope_sweep.read.queries import AblationFiles, NotFoundError, Queries, recorded_plan
from cope_sweep.read.reports.evidence import (
    EXPLORATORY,
    Evidence,
    Provenance,
    ReportError,
    duration,
    evidence,
    provenance,
)
from cope_sweep.read.tables.render import Layout, html_table
from cope_sweep.store import RunRecord, Store

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

    @property
    def name(self) -> str:
        """Its name in the document."""
        return self.scale or "own size"


@dataclass(frozen=True)
class Chapter:
    """An ablation of the document."""

    name: str
    title: str
    reproduces: str
    hypothesis: str
    sizes: tuple[Size, ...]
    error: str = ""
    """Why its file cannot be read; the other fields are then empty."""

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
            title=TITLE, chapters=self.chapters, provenance=self.provenance, missing=list(self._missing()),
            exploratory=EXPLORATORY, tables=_tables, further_table=_further_table, pictures=_pictures,
            compute=duration(self.provenance.compute_s),
        )  # fmt: skip

    def _missing(self) -> Iterator[tuple[str, str, str]]:
        """Ablation, scale, and what is missing."""
        for chapter in self.chapters:
            if chapter.error:
                yield chapter.name, "", chapter.error
            for size in chapter.sizes:
                if size.evidence is None:
                    yield chapter.name, size.name, f"not run: {size.runs} runs"
                else:
                    yield from ((chapter.name, size.name, line) for line in size.evidence.missing)


def document(files: AblationFiles, store: Store, scale: str | None = None) -> Document:
    """The document of all ablations in a folder.

    Args:
        files: The ablation files.
        store: The store.
        scale: Only this scale, of the ablations that have it; None: each ablation's own size and all its scales.

    Raises ReportError where no run is finished, or no ablation has the scale; StoreError, OSError.
    """
    records: dict[str, RunRecord] = {}
    scales = None if scale is None else (scale,)
    chapters = [_chapter(files, store, name, scales, records) for name in files.files()]
    if scale is not None:
        chapters = [each for each in chapters if each.sizes or each.error]
    if not any(chapter.reports for chapter in chapters):
        option = f" at the scale {scale}" if scale else ""
        raise ReportError(
            f"no run of an ablation in {files.folder}{option} is finished in the store {store.location}; train one "
            "with: cope-sweep run quickstart"
        )
    return Document(tuple(chapters), provenance(records.values(), store))


def report_file(queries: Queries, question: GetReport, figure_url: Callable[[str], str]) -> bytes:
    """The report of one ablation at one scale. In Markdown, `figure_url` gives the addresses of its figures.

    Raises ReportError where no run is finished, NotFoundError, QueryError, SpecError, StoreError.
    """
    found = evidence(queries.load(question.name, question.scale).plan, queries.store, question.scale)
    if question.format == "markdown":
        return found.to_markdown({each.name: figure_url(each.name) for each in found.figures if each.figure}).encode()
    return ablation_document(found, queries.store).to_html().encode()


def ablation_document(found: Evidence, store: Store) -> Document:
    """The document of one ablation at one scale."""
    finished = sum(record.status == "finished" for record in found.table.records.values())
    size = Size(found.scale, len(found.plan.runs), finished, found)
    return Document((_sized(found.plan, (size,)),), provenance(found.table.records.values(), store))


def _chapter(
    files: AblationFiles,
    store: Store,
    name: str,
    wanted: Sequence[str] | None,
    records: dict[str, RunRecord],
) -> Chapter:
    """The chapter of an ablation at some scales (None: all). Adds the records of its finished runs to `records`."""
    try:
        base = files.load(name).plan
        content = base.ablation.content
        scales: Sequence[str | None] = [None, *content.scales] if wanted is None else wanted
        sizes = []
        for each in scales:
            if each is None or each in content.scales:
                plan = base if each is None else files.load(name, each).plan
                sizes.append(_size(recorded_plan(plan, store), store, each))
    except (SpecError, NotFoundError) as error:
        return Chapter(name, "", "", "", (), str(error))
    for size in sizes:
        records |= size.evidence.table.records if size.evidence else {}
    return _sized(base, tuple(sizes))


def _sized(plan: Plan, sizes: tuple[Size, ...]) -> Chapter:
    content = plan.ablation.content
    return Chapter(plan.name, content.title, content.reproduces, " ".join(content.hypothesis.split()), sizes)


def _size(plan: Plan, store: Store, scale: str | None) -> Size:
    statuses = store.index.statuses(run.run_id for run in plan.runs)
    finished = sum(status == "finished" for status in statuses.values())
    found = evidence(plan, store, scale) if finished else None
    return Size(scale, len(plan.runs), finished, found)


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
            "uri": "data:image/svg+xml;base64," + base64.b64encode(each.figure.render("svg")).decode(),
            "title": each.title,
            "source": each.source,
        }
        for each in found.figures
        if each.figure is not None
    ]
