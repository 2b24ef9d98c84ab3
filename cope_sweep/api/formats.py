"""The choices of questions that the help of the command line names. Importing this module costs nothing."""

from typing import Literal

Band = Literal["auto", "interval", "range"]
FigureFormat = Literal["png", "svg", "pdf", "csv"]
ReportFormat = Literal["html", "markdown"]
TableFormat = Literal["json", "csv", "markdown", "latex", "terminal"]
RunsFormat = Literal["parquet", "csv", "json"]
Trainable = Literal["pending", "interrupted", "failed", "stopped"]
"""Statuses of runs that a sweep may train."""
