"""Saves a measurement as JSON, with machine and versions, and as a Markdown table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text


def save_measurement(folder: Path, name: str, measured: dict[str, Any], table: Table) -> None:
    """Write `<name>.json` and `<name>.md` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(markdown(table), encoding="utf-8")


def markdown(table: Table) -> str:
    """The table in Markdown, without its title."""
    headers = [str(column.header) for column in table.columns]
    alignments = ["---:" if column.justify == "right" else "---" for column in table.columns]
    cells = [[Text.from_markup(str(cell)).plain for cell in column.cells] for column in table.columns]
    lines = [headers, alignments, *zip(*cells, strict=True)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
