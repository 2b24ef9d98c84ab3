"""Reports that are kept with the code (`ablations/results`): read again, checked, and summed up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cope_sweep.config import Plan, expand, load_ablation, with_overrides
from cope_sweep.errors import UserError
from cope_sweep.report.evidence import reference
from cope_sweep.report.runs import read_records
from cope_sweep.results import Table
from cope_sweep.results.layout import layout
from cope_sweep.results.render import markdown_text
from cope_sweep.store import RunRecord


@dataclass(frozen=True)
class Committed:
    """The runs of a report, and today's plan of its ablation at its scale."""

    path: Path
    """The file of its runs: `<ablation>.<scale>.parquet`."""
    scale: str | None
    plan: Plan
    records: Mapping[str, RunRecord]

    @property
    def stale(self) -> str:
        """Why the results are not those of today's ablation file; empty if they are."""
        planned = {run.run_id for run in self.plan.runs}
        gone, new = self.records.keys() - planned, planned - self.records.keys()
        if not gone and not new:
            return ""
        option = f" --scale {self.scale}" if self.scale else ""
        command = f"cope-sweep run {self.plan.name}{option}"
        return (
            f"{self.path.name} is stale: {len(gone)} of its runs are not in the plan of {self.plan.name}{option} "
            f"today, and {len(new)} of the plan are missing; train them with `{command}`, "
            f"then `cope-sweep report {self.plan.name}{option} --out {self.path.parent.name}`"
        )

    @property
    def table(self) -> Table:
        """The table of the runs, with the comparisons of a report. Raises UserError where they are stale."""
        if self.stale:
            raise UserError(self.stale)
        return Table(self.plan, self.records, reference(self.plan))


def read_committed(results: Path, ablations: Path) -> Iterator[Committed]:
    """The reports of a folder by name. Raises UserError for one without ablation file, or without its scale."""
    for path in sorted(results.glob("*.parquet")):
        name, _, scale = path.stem.partition(".")
        file = ablations / f"{name}.yaml"
        if not file.exists():
            raise UserError(f"{path}: there is no ablation {name!r} in {ablations}; delete the report")
        plan = expand(with_overrides(load_ablation(file), scale=scale or None))
        yield Committed(path, scale or None, plan, read_records(path))


def overview(reports: Iterable[Committed], folder: str) -> str:
    """A Markdown table: for each report the values of the table's first metric, with a link into `folder`.

    Raises UserError where a report is stale.
    """
    lines = ["| ablation | scale | metric | mean ± standard deviation over seeds |", "| --- | --- | --- | --- |"]
    for each in reports:
        drawn, model = layout(each.table.model), each.table.model
        column = next(i for i, header in enumerate(drawn.headers) if header.text == model.columns[0].title)
        values = ", ".join(
            f"{markdown_text(row.row)} {cells[column].text}" for row, cells in zip(model.rows, drawn.rows, strict=True)
        )
        link = f"[{markdown_text(model.title)}]({folder}/{each.path.stem}.md)"
        lines.append(f"| {link} | {each.scale or 'own'} | {markdown_text(model.columns[0].title)} | {values} |")
    return "\n".join(lines) + "\n"
