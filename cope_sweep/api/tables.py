"""The table of an ablation, and the report on it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cope_sweep.api.question import AblationName, Question, Scale, Sets, option

TableFormat = Literal["json", "csv", "markdown", "latex", "terminal"]
ReportFormat = Literal["html", "markdown"]

Compare = Annotated[
    str | None,
    *option(
        "Compare every row with one row, named by its labels (`RoPE, layers 2`); with the published numbers (`paper`); "
        "or, as in `model.position=CoPE`, with the row that has this label and otherwise the same labels. A note below "
        "the table explains the test.",
        "--compare",
        metavar="paper|ROW|AXIS=LABEL",
        max_length=500,
    ),
]
SortRows = Annotated[
    str | None,
    *option(
        "Order the rows by a metric (best first), by an axis, or by `parameters`.", metavar="COLUMN", max_length=200
    ),
]
Top = Annotated[int | None, *option("Only the first N rows, in the order of `sort`.", metavar="N", ge=1, le=1_000_000)]
OneLinePerRun = Annotated[bool, *option("One line per run instead of one per row (terminal, csv).", "--runs")]
Stars = Annotated[
    bool,
    *option("Mark significant differences with stars instead of adding a table of comparisons.", "--stars", latex=True),
]
Group = Annotated[
    str | None,
    *option(
        "Group rows by this axis; the best of each group is bold. Default: the first axis.",
        metavar="AXIS",
        latex=True,
        max_length=200,
    ),
]
Caption = Annotated[str | None, *option("The caption, as LaTeX code. Default: the title.", latex=True, max_length=2000)]
Label = Annotated[str | None, *option("The label. Default: tab:NAME.", latex=True, max_length=200)]
Notes = Annotated[bool, *option("Print the notes below the table.", "--notes/--no-notes", latex=True)]


class GetTable(Question[bytes]):
    """The result table: mean ± standard deviation over seeds, and the published numbers."""

    PATH = "/ablations/{name}/table"
    MEDIA_TYPES = {
        "json": "application/json",
        "csv": "text/csv",
        "markdown": "text/markdown",
        "latex": "application/x-tex",
        "terminal": "text/plain",
    }

    name: AblationName
    format: Annotated[TableFormat | None, Field(description="Default: json.")] = None
    scale: Scale = None
    set: Sets = []
    compare: Compare = None
    sort: SortRows = None
    top: Top = None
    runs: OneLinePerRun = False
    stars: Stars = False
    group: Group = None
    caption: Caption = None
    label: Label = None
    notes: Notes = True


class GetReport(Question[bytes]):
    """The report on the finished runs: table with comparisons, figures, what is missing, and provenance."""

    PATH = "/ablations/{name}/report"
    MEDIA_TYPES = {"html": "text/html", "markdown": "text/markdown"}
    WORK = "reports"

    name: AblationName
    format: Annotated[ReportFormat | None, Field(description="Default: html.")] = None
    scale: Scale = None
    set: Sets = []


QUESTIONS = (GetTable, GetReport)
"""A service has a route for each."""
