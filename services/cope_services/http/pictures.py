"""Figures and reports of ablations. They are made one at a time, on a thread of their own: drawing takes seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar
from urllib.parse import quote, urlencode

from cope_services.http.errors import BusyError
from cope_sweep.api.answers import FigureInfo
from cope_sweep.api.questions import GetFigure, GetReport, ListFigures
from cope_sweep.config import SpecError
from cope_sweep.errors import UserError
from cope_sweep.read.queries import NotFinishedError, NotFoundError, Queries
from cope_sweep.store import QueryError, StoreError

MAX_WAITING = 32
"""Figures and reports that wait to be made. Answers that are known do not wait."""
MEDIA_TYPES: dict[str, Literal["svg", "png", "pdf", "csv"]] = {
    "image/svg+xml": "svg", "image/png": "png", "application/pdf": "pdf", "text/csv": "csv",
}  # fmt: skip
REPORT_MEDIA_TYPES: dict[str, Literal["html", "markdown"]] = {"text/html": "html", "text/markdown": "markdown"}
REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""A report has its styles and pictures in itself, and no script."""

T = TypeVar("T")


class Pictures:
    """Makes figures and reports. Its coroutines belong to one event loop."""

    def __init__(self, queries: Queries) -> None:
        self._queries = queries
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pictures")
        self._waiting = 0

    def listing(self, question: ListFigures) -> list[FigureInfo]:
        """The figures of an ablation. Raises UserError."""
        from cope_sweep.read.figures.available import available_figures

        name, scale = question.name, question.scale
        query = f"?{urlencode({'scale': scale})}" if scale else ""
        return [
            FigureInfo(
                name=each.name,
                title=each.title,
                kind=each.kind,
                declared=each.declared,
                formats=["png", "svg", "pdf", "csv"],
                url=f"/api/v1/ablations/{quote(name, safe='')}/figures/{quote(each.name)}{query}",
            )
            for each in available_figures(self._queries.load(name, scale).plan)
        ]

    async def figure(self, question: GetFigure) -> bytes:
        """The file of a figure. Raises UserError, BusyError."""
        return await self._made(lambda: self._figure(question))

    async def report(self, question: GetReport) -> bytes:
        """The report of an ablation. Raises UserError, BusyError."""
        return await self._made(lambda: self._report(question))

    async def _made(self, make: Callable[[], T]) -> T:
        if self._waiting >= MAX_WAITING:
            raise BusyError(f"{MAX_WAITING} figures and reports are being made; ask again later", 5)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, make)
        finally:
            self._waiting -= 1

    def _figure(self, question: GetFigure) -> bytes:
        from cope_sweep.read.figures.available import draw_available

        plan = self._queries.load(question.name, question.scale).plan
        try:
            return draw_available(plan, self._queries.store, question)
        except (NotFoundError, QueryError, SpecError, StoreError):
            raise
        except UserError as error:  # no finished run, no checkpoint, no such mark in the tokens
            raise NotFinishedError(str(error)) from error

    def _report(self, question: GetReport) -> bytes:
        from cope_sweep.read.reports import ReportError
        from cope_sweep.read.reports.document import report_file

        url = f"/api/v1/ablations/{quote(question.name, safe='')}/figures/"
        query = urlencode({"format": "svg"} | ({"scale": question.scale} if question.scale else {}))
        try:
            return report_file(self._queries, question, lambda figure: f"{url}{quote(figure)}?{query}")
        except ReportError as error:
            raise NotFinishedError(str(error)) from error
