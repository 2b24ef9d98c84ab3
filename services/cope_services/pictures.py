"""Figures and reports of ablations. They are made one at a time, on a thread of their own: drawing takes seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from urllib.parse import quote, urlencode

from cope_services.errors import BusyError
from cope_services.schemas import FigureFormat, FigureInfo
from cope_sweep.config import SpecError
from cope_sweep.errors import UserError
from cope_sweep.queries import NotFinishedError, NotFoundError, Queries
from cope_sweep.store import QueryError, StoreError

MAX_WAITING = 32
"""Figures and reports that wait to be made. Answers that are known do not wait."""
MEDIA_TYPES: dict[str, FigureFormat] = {
    "image/svg+xml": "svg", "image/png": "png", "application/pdf": "pdf", "text/csv": "csv",
}  # fmt: skip
REPORT_MEDIA_TYPES = {"text/html": "html", "text/markdown": "markdown"}
REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""A report has its styles and pictures in itself, and no script."""

T = TypeVar("T")


class Pictures:
    """Makes figures and reports. Its coroutines belong to one event loop."""

    def __init__(self, queries: Queries) -> None:
        self._queries = queries
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pictures")
        self._waiting = 0

    def listing(self, name: str, scale: str | None) -> list[FigureInfo]:
        """The figures of an ablation. Raises UserError."""
        from cope_sweep.figures.available import available_figures

        query = f"?{urlencode({'scale': scale})}" if scale else ""
        return [
            FigureInfo(
                name=each.name,
                title=each.title,
                kind=each.kind,
                formats=["png", "svg", "pdf", "csv"],
                url=f"/api/v1/ablations/{quote(name, safe='')}/figures/{quote(each.name)}{query}",
            )
            for each in available_figures(self._queries.load(name, scale).plan)
        ]

    async def figure(self, name: str, scale: str | None, figure: str, file_format: FigureFormat) -> bytes:
        """The file of a figure. Raises UserError, BusyError."""
        return await self._made(lambda: self._figure(name, scale, figure, file_format))

    async def report(self, name: str, scale: str | None, output_format: str) -> bytes:
        """The report of an ablation. Raises UserError, BusyError."""
        return await self._made(lambda: self._report(name, scale, output_format))

    async def _made(self, make: Callable[[], T]) -> T:
        if self._waiting >= MAX_WAITING:
            raise BusyError(f"{MAX_WAITING} figures and reports are being made; ask again later", 5)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, make)
        finally:
            self._waiting -= 1

    def _figure(self, name: str, scale: str | None, figure: str, file_format: FigureFormat) -> bytes:
        from cope_sweep.figures.available import draw_available

        plan = self._queries.load(name, scale).plan
        try:
            return draw_available(plan, self._queries.store, figure, file_format, scale=scale)
        except (NotFoundError, QueryError, SpecError, StoreError):
            raise
        except UserError as error:  # no finished run, no checkpoint, no such mark in the tokens
            raise NotFinishedError(str(error)) from error

    def _report(self, name: str, scale: str | None, output_format: str) -> bytes:
        from cope_sweep.report import ReportError, evidence
        from cope_sweep.report.document import ablation_document

        try:
            if output_format == "html":
                document = ablation_document(self._queries.files, self._queries.store, name, scale)
                return document.to_html().encode()
            found = evidence(self._queries.load(name, scale).plan, self._queries.store, scale)
            query = urlencode({"format": "svg"} | ({"scale": scale} if scale else {}))
            base = f"/api/v1/ablations/{quote(name, safe='')}/figures"
            drawn = [each.name for each in found.figures if each.figure is not None]
            return found.to_markdown({each: f"{base}/{quote(each)}?{query}" for each in drawn}).encode()
        except ReportError as error:
            raise NotFinishedError(str(error)) from error
