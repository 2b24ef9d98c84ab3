"""The choices of questions that the help of the command line names. Importing this module costs nothing."""

from typing import Literal, get_args

FigureFormat = Literal["png", "svg", "pdf", "csv"]
FIGURE_FORMATS: tuple[FigureFormat, ...] = get_args(FigureFormat)
FIGURE_SIZE = r"^([1-9]|[1-3]\d)(\.\d+)?x([1-9]|[1-3]\d)(\.\d+)?$"
"""Width and height of a figure in inches, each at least 1 and less than 40: `3.25x2.5`."""
Show = Literal["gates", "positions", "position_attention", "attention"]
"""What maps of heads show."""
ReportFormat = Literal["html", "markdown"]
TableFormat = Literal["json", "csv", "markdown", "latex", "terminal"]
RunsFormat = Literal["parquet", "csv", "json"]
Trainable = Literal["pending", "interrupted", "failed", "stopped"]
"""Statuses of runs that a sweep may train."""
