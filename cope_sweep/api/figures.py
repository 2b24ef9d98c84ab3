"""The figures of an ablation."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from cope_sweep.api.question import Answer, OfAblation, option

FigureFormat = Literal["png", "svg", "pdf", "csv"]
FIGURE_FORMATS: tuple[FigureFormat, ...] = get_args(FigureFormat)
FIGURE_SIZE = r"^([1-9]|[1-3]\d)(\.\d+)?(x([1-9]|[1-3]\d)(\.\d+)?)?$"
"""Width of a figure in inches, and its height, each at least 1 and less than 40: `3.25x2.5`, `3.25`."""
Show = Literal["gates", "positions", "position_attention", "attention"]
"""What maps of heads show."""
CSV = "csv: the data behind the figure."


class FigureInfo(Answer):
    """A figure of an ablation."""

    name: str
    title: str
    kind: str
    declared: bool = Field(description="Whether the ablation's file declares it.")
    formats: list[FigureFormat]
    url: str = Field(description="URL of the figure; add `format`.")


class ListFigures(OfAblation[list[FigureInfo]]):
    """The figures that the ablation's file declares, and the kinds of figures that every ablation has."""

    PATH = "/ablations/{name}/figures"


FigureName = Annotated[
    str,
    Field(
        max_length=100,
        description="A figure that the ablation declares, such as `maps-2`, or a kind of figure, such as `curves`; "
        "`GET …/figures` lists both.",
    ),
]
Metrics = Annotated[
    list[str],
    *option("A metric. May be repeated. Default: the metrics of the table.", "--metric", "-m", max_length=20),
]
X = Annotated[
    str | None,
    *option(
        "What is on the x axis: `step` or `time` of learning curves; for final metrics an axis, another key of a run, "
        "or a fact (`facts.parameters`). Default: step; the first axis with numbers.",
        max_length=200,
    ),
]
Panels = Annotated[str | None, *option("An axis; a panel for each value, if the kind has panels.", max_length=200)]
Rows = Annotated[list[str], *option("A row. May be repeated. Default: all.", max_length=300)]
Log = Annotated[
    bool | None, *option("Use a log scale for the metrics. Default: chosen from the data.", "--log/--linear")
]
Size = Annotated[
    str | None,
    *option(
        "Width and height in inches, such as `3.25x2.5`, or the width alone: the height is then what the panels need. "
        "3.25 fits a column of ICML, 3.03 one of ACL, 5.5 the text of NeurIPS and ICLR. Default: what the panels need.",
        "--size",
        metavar="WIDTH[xHEIGHT]",
        max_length=20,
        pattern=FIGURE_SIZE,
    ),
]


class GetFigure(OfAblation[bytes]):
    """A figure of the finished runs, or its data.

    `figure` is the name of a figure that the ablation's file declares, or a kind; a kind is drawn with these options.
    """

    PATH = "/ablations/{name}/figures/{figure}"
    MEDIA_TYPES = {"svg": "image/svg+xml", "png": "image/png", "pdf": "application/pdf", "csv": "text/csv"}
    WORK = "drawings"

    figure: FigureName
    metric: Metrics = []
    x: X = None
    panels: Panels = None
    row: Rows = []
    log: Log = None
    size: Size = None
    format: Annotated[FigureFormat | None, Field(description=f"{CSV} Default: svg.")] = None


QUESTIONS = (ListFigures, GetFigure)
"""A service has a route for each."""
