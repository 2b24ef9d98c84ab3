"""Responses: models and rows as JSON, rows as CSV, and files with byte ranges."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import Response
from fastapi.responses import FileResponse
from pydantic import BaseModel, TypeAdapter

from cope_services.http.cached_route import matches_etag
from cope_services.models.checkpoints import StoredFile

RowsFormat = Literal["json", "csv"]
_ANY: TypeAdapter[Any] = TypeAdapter(Any, config={"ser_json_inf_nan": "null"})


def json_response(answer: BaseModel | Sequence[BaseModel], *, exclude_unset: bool = False) -> Response:
    """An answer as JSON. It is encoded by the thread that calls, not by the event loop."""
    if isinstance(answer, BaseModel):
        return Response(answer.model_dump_json(exclude_unset=exclude_unset), media_type="application/json")
    return Response(_ANY.dump_json(list(answer)), media_type="application/json")


def download(file: StoredFile, if_none_match: str | None) -> Response:
    """The file or the requested byte range, or 304 if the client has this version."""
    response = FileResponse(file.path, filename=file.path.name, stat_result=file.stat)
    if matches_etag(if_none_match, response.headers["etag"]):
        return Response(status_code=304, headers={"etag": response.headers["etag"]})
    return response


def rows_response(rows: Sequence[Mapping[str, float]], output_format: RowsFormat) -> Response:
    """Rows with any keys. In CSV, the first column is `step`. Numbers that are not finite are null in JSON."""
    if output_format == "json":
        return Response(_ANY.dump_json(list(rows)), media_type="application/json")
    names = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return Response(text.getvalue(), media_type="text/csv")
