"""The table of an ablation, and the report on it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cope_sweep.api.question import Answer, OfAblation, option

TableFormat = Literal["json", "csv", "markdown", "latex", "terminal"]
ReportFormat = Literal["html", "markdown"]

Compare = Annotated[
    str | None,
    *option(
        "Compare every row with one row, named by its labels (`RoPE, layers 2`); with the published numbers (`paper`); "
        "or, as in `CoPE` or `model.position=CoPE`, with the row that has this label and otherwise the same labels. A "
        "note below the table explains the test.",
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
        "Group rows by this axis; the best of each group is bold. Default: by the first axis, with the bold values of "
        "the other formats.",
        metavar="AXIS",
        latex=True,
        max_length=200,
    ),
]
Caption = Annotated[str | None, *option("The caption, as LaTeX code. Default: the title.", latex=True, max_length=2000)]
Label = Annotated[str | None, *option("The label. Default: tab:NAME.", latex=True, max_length=200)]
Notes = Annotated[bool, *option("Print the notes below the table.", "--notes/--no-notes", latex=True)]


Margin = Annotated[
    str | None,
    *option(
        "The smallest difference that matters, for verdicts in JSON: in the units of the primary metric (0.5), or a "
        "share of the other row's mean (1 %). With it, rows may be equivalent.",
        "--margin",
        metavar="NUMBER|PERCENT",
        max_length=50,
    ),
]
VerdictWord = Literal["better", "worse", "equivalent", "unclear", "too few seeds"]


class Verdict(Answer):
    """Whether a row of a table is better than another one, by the primary metric."""

    row: str
    than: str
    metric: str = Field(description="The title of the primary metric.")
    verdict: VerdictWord = Field(
        description="The first that applies. too few seeds: no data of so many runs could be significant, or planned "
        "runs are not finished: `command` trains what is missing. equivalent: the 95 % interval lies within ± the "
        "margin. better, worse: p is at most 0.05. unclear: otherwise."
    )
    text: str = Field(description="The verdict with its numbers in one line.")
    difference: float | None = Field(description="`row` minus `than`, not scaled; null without finished runs.")
    ci_low: float | None = Field(description="Lower end of its 95 % interval; null if no data could exclude a value.")
    ci_high: float | None = Field(description="Upper end.")
    p: float | None = Field(description="Of an exact test, corrected for `compared` pairs of rows (Holm).")
    compared: int
    n: tuple[int, int] = Field(description="Finished seeds of the two rows; of paired runs, the number of pairs twice.")
    paired: bool = Field(description="Whether runs of the same seed are compared in pairs.")
    margin: float | None = Field(description="The smallest difference that matters, not scaled; null: not given.")
    unfinished: int = Field(description="Planned runs of the two rows that are not finished.")
    more_seeds: int = Field(
        description="How many seeds a row needs beside the planned ones before any data could be significant."
    )
    command: str | None = Field(
        description="Trains what is missing for a verdict; null if nothing is, or if more seeds would make a search "
        "suggest other rows."
    )
    declared: str = Field(
        description="Whether a claim of the ablation that compares these rows by this metric stood in its file before "
        "the runs started: `before (2026-11-24, abc1234)`, `after`, `not recorded`; `not claimed` if none does."
    )


class GetTable(OfAblation[bytes]):
    """The result table: mean ± standard deviation over seeds, and the published numbers."""

    PATH = "/ablations/{name}/table"
    MEDIA_TYPES = {
        "json": "application/json",
        "csv": "text/csv",
        "markdown": "text/markdown",
        "latex": "application/x-tex",
        "terminal": "text/plain",
    }

    format: Annotated[TableFormat | None, Field(description="Default: json.")] = None
    compare: Compare = None
    sort: SortRows = None
    top: Top = None
    runs: OneLinePerRun = False
    stars: Stars = False
    group: Group = None
    caption: Caption = None
    label: Label = None
    notes: Notes = True
    margin: Margin = None


class GetVerdict(OfAblation[Verdict]):
    """Is a row better than another one? One word, with the numbers behind it.

    It is by the primary metric and corrected for all rows, so that neither the metric nor the pair is chosen
    afterwards, and there is none before all planned runs of both rows are finished and have a value. Of `too few
    seeds`, the answer says how many more to train, and how.
    """

    PATH = "/ablations/{name}/verdict"

    row: Annotated[str, Field(max_length=500, description="The row, named by its labels: `CoPE, layers 2`.")]
    than: Annotated[str, Field(max_length=500, description="The row to compare it with.")]
    margin: Margin = None


class GetReport(OfAblation[bytes]):
    """The report on the finished runs: table with comparisons, figures, what is missing, and provenance."""

    PATH = "/ablations/{name}/report"
    MEDIA_TYPES = {"html": "text/html", "markdown": "text/markdown"}
    WORK = "reports"

    format: Annotated[ReportFormat | None, Field(description="Default: html.")] = None


QUESTIONS = (GetTable, GetVerdict, GetReport)
"""A service has a route for each."""
