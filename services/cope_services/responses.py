"""Responses: cached bodies with an ETag, files with byte ranges, and rows as JSON or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Literal

from fastapi import Response
from fastapi.responses import FileResponse, JSONResponse

from cope_services.checkpoints import StoredFile
from cope_services.tables import RenderedBody

RowsFormat = Literal["json", "csv"]


def conditional_response(rendered: RenderedBody, if_none_match: str | None) -> Response:
    """The body with its ETag, or 304 if the client has this version."""
    etag = f'"{rendered.etag}"'
    # `no-cache` lets a client store the body if it validates the ETag before each use.
    headers = {"etag": etag, "cache-control": "no-cache", "vary": "Accept"}
    if _matches(if_none_match, etag):
        return Response(status_code=304, headers=headers)
    return Response(rendered.body, media_type=rendered.media_type, headers=headers)


def download(file: StoredFile, if_none_match: str | None) -> Response:
    """The file or the requested byte range, or 304 if the client has this version."""
    response = FileResponse(file.path, filename=file.path.name, stat_result=file.stat)
    if _matches(if_none_match, response.headers["etag"]):
        return Response(status_code=304, headers={"etag": response.headers["etag"]})
    return response


def rows_response(rows: Sequence[Mapping[str, float]], output_format: RowsFormat) -> Response:
    """Rows with any keys. In CSV, the first column is `step`."""
    if output_format == "json":
        return JSONResponse(rows)
    names = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return Response(text.getvalue(), media_type="text/csv")


def _matches(if_none_match: str | None, etag: str) -> bool:
    tags = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
    return etag in tags or "*" in tags
