"""Bodies with an ETag, files with ranges, and rows as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Literal

from fastapi import Response
from fastapi.responses import FileResponse, JSONResponse

from cope_services.checkpoints import StoredFile
from cope_services.tables import Drawing

RowsFormat = Literal["json", "csv"]


def tagged(drawing: Drawing, if_none_match: str | None) -> Response:
    """The drawing, or 304 where the client has it."""
    etag = f'"{drawing.etag}"'
    # `no-cache` lets a client keep the body, as long as it asks each time whether it still stands.
    headers = {"etag": etag, "cache-control": "no-cache", "vary": "Accept"}
    if _matches(if_none_match, etag):
        return Response(status_code=304, headers=headers)
    return Response(drawing.body, media_type=drawing.media_type, headers=headers)


def download(file: StoredFile, if_none_match: str | None) -> Response:
    """The file, or the Range of it that was asked for; 304 where the client has it."""
    response = FileResponse(file.path, filename=file.path.name, stat_result=file.stat)
    if _matches(if_none_match, response.headers["etag"]):
        return Response(status_code=304, headers={"etag": response.headers["etag"]})
    return response


def rows(content: Sequence[Mapping[str, float]], form: RowsFormat) -> Response:
    """Rows of any keys; as CSV, `step` first."""
    if form == "json":
        return JSONResponse(content)
    names = ["step", *sorted({name for row in content for name in row} - {"step"})]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(content)
    return Response(text.getvalue(), media_type="text/csv")


def _matches(if_none_match: str | None, etag: str) -> bool:
    tags = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
    return etag in tags or "*" in tags
