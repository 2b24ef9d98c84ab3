"""The evidence of one ablation at one scale: its runs, its table with comparisons, its figures and its provenance."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cope_sweep.config import Plan
from cope_sweep.config.ablation import Maps
from cope_sweep.errors import UserError
from cope_sweep.read.figures import Figure
from cope_sweep.read.figures.declared import Declared, declared_figures, draw_declared, summary_figure
from cope_sweep.read.reports.provenance import Provenance, provenance, sweeps_of
from cope_sweep.read.reports.runs import CURVES, run_frame, to_parquet
from cope_sweep.read.reports.shortcuts import Shortcuts, shortcuts
from cope_sweep.read.reports.thresholds import thresholds
from cope_sweep.read.tables import Table, table
from cope_sweep.read.tables.compare import PAPER
from cope_sweep.read.tables.frame import curves
from cope_sweep.read.tables.layout import Layout
from cope_sweep.read.tables.render import markdown_table, markdown_text
from cope_sweep.read.tables.table_model import STATUSES
from cope_sweep.store import Store
from cope_sweep.store.files import write_bytes

if TYPE_CHECKING:
    import pandas as pd

EXPLORATORY = "Exploratory: the recipe was chosen by looking at results like these."
POSITION, METHOD = "model.position", "cope"


class ReportError(UserError):
    """There is nothing to report. The message says how to train it."""


@dataclass(frozen=True)
class Drawn:
    """A figure of a report: what was drawn, or why it could not be."""

    name: str
    title: str
    source: str
    """The figure of the paper that it makes again; may be empty."""
    figure: Figure | None
    problem: str = ""


@dataclass(frozen=True)
class Evidence:
    """Evidence of an ablation: table, figures and gaps of its finished runs."""

    plan: Plan
    scale: str | None
    """None: the ablation's own size."""
    table: Table
    figures: tuple[Drawn, ...]
    provenance: Provenance
    store: Store

    @property
    def stem(self) -> str:
        """The beginning of the names of its files: `<ablation>.<scale>`, or the ablation's name alone."""
        return f"{self.plan.name}.{self.scale}" if self.scale else self.plan.name

    @property
    def command(self) -> str:
        """The command that trains the runs."""
        return f"cope-sweep run {self.plan.name}" + (f" --scale {self.scale}" if self.scale else "")

    @property
    def size(self) -> str:
        """Description of the scale, from the file."""
        if self.scale is None:
            return ""
        return " ".join(self.plan.ablation.content.scales[self.scale].description.split())

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Gaps of the table and the figures, with reasons; empty if nothing is missing."""
        counts: Counter[str] = Counter()
        for row in self.table.model.rows:
            counts.update(row.counts)
        runs = [f"{counts[each]} {each}" for each in STATUSES if counts[each] and each != "finished"]
        lines = [f"{sum(counts.values()) - counts['finished']} of {sum(counts.values())} runs: {', '.join(runs)}"]
        lines = lines if runs else []
        if self.plan.open_samples:
            lines.append(f"{self.plan.open_samples} rows that the search has still to suggest")
        return (*lines, *(f"{each.name}: {each.problem}" for each in self.figures if each.figure is None))

    @property
    def answer(self) -> str:
        """The verdicts in a sentence; empty where nothing was compared."""
        return self.table.model.answer

    @cached_property
    def shortcuts(self) -> Shortcuts | None:
        """The errors of rules that do not solve the tasks; None where the tasks have none."""
        return shortcuts(self.table.model)

    @cached_property
    def curves(self) -> pd.DataFrame:
        """The learning curves of the runs, as `results.frame.curves` has them."""
        return curves(self.plan, self.store)

    @cached_property
    def thresholds(self) -> Layout | None:
        """Steps and sequences until the task is learned; None where the file does not say from which value on."""
        return thresholds(self.table.model, self.curves)

    def files(self) -> dict[str, bytes]:
        """File name → content: runs, learning curves, report and figures. The same store gives the same bytes."""
        records = self.table.records
        frame = run_frame(self.plan, records, sweeps_of(records.values(), self.store))
        found = {
            f"{self.stem}.parquet": to_parquet(frame),
            f"{self.stem}{CURVES}": to_parquet(self.curves),
        }
        pictures = {each.name: f"{self.stem}.{each.name}.svg" for each in self.figures if each.figure is not None}
        found |= {pictures[each.name]: each.figure.render("svg") for each in self.figures if each.figure is not None}
        return found | {f"{self.stem}.md": self.to_markdown(pictures).encode()}

    def to_markdown(self, pictures: dict[str, str]) -> str:
        """The report; `pictures` are the files of the figures by their names."""
        content = self.plan.ablation.content
        parts = [f"# {markdown_text(content.title)}"]
        parts += [f"Hypothesis: {markdown_text(content.hypothesis)}"] if content.hypothesis else []
        parts += [f"**Result: {markdown_text(self.answer)}**"] if self.answer else []
        parts += [EXPLORATORY] if content.exploratory else []
        if content.reproduces:
            size = ", at another size than the paper's" if self.table.model.replaced else ""
            parts.append(f"Reproduces: {markdown_text(content.reproduces)}{size}.")
        parts += [f"Scale `{self.scale}`: {markdown_text(self.size)}"] if self.scale else []
        parts += ["## Results", self.table.to_markdown().strip()]
        if self.shortcuts is not None:
            drawn = self.shortcuts.layout
            parts += ["### Shortcuts", markdown_table(drawn), markdown_text(drawn.note)]
            parts += ["\n".join(f"- {markdown_text(text)}" for text in self.shortcuts.alike)] * bool(
                self.shortcuts.alike
            )
        if self.thresholds is not None:
            parts += [
                "### Until the task is learned",
                markdown_table(self.thresholds),
                markdown_text(self.thresholds.note),
            ]
        for each in self.figures:
            if each.name in pictures:
                title = markdown_text(each.title) + (f", as {markdown_text(each.source)}" if each.source else "")
                parts.append(f"![{title}]({pictures[each.name]})")
        parts += ["## Missing", "\n".join(f"- {line}" for line in self.missing)] if self.missing else []
        rows = [*self.provenance.lines, ("This report", f"`cope-sweep report {self.plan.name}{self._options}`")]
        parts += ["## Provenance", "\n".join(["| | |", "| --- | --- |", *(f"| {k} | {_cell(v)} |" for k, v in rows)])]
        return "\n\n".join(parts) + "\n"

    @property
    def _options(self) -> str:
        against = self.table.compare
        scale = f" --scale {self.scale}" if self.scale else ""
        return scale + (f" --compare {_quoted(against)}" if against else "") + " --out ablations/results"


def evidence(plan: Plan, store: Store, scale: str | None = None, *, compare: str | None = None) -> Evidence:
    """The evidence of a plan at a scale, from the runs that are finished.

    Args:
        plan: The plan.
        store: The store.
        scale: The scale that the plan was made with.
        compare: What the rows are compared with, as in `results.Table`; None: `reference(plan)`.

    Raises ReportError where no run is finished, StoreError.
    """
    results = table(plan, store, compare=compare or reference(plan))
    if not any(record.status == "finished" for record in results.records.values()):
        option = f" --scale {scale}" if scale else ""
        raise ReportError(
            f"no run of {plan.name}{option} is finished in the store {store.location}; train them with: "
            f"cope-sweep run {plan.name}{option}"
        )
    figures = tuple(_drawn(plan, store, each, scale) for each in declared_figures(plan))
    if not figures:
        figures = (Drawn("summary", plan.ablation.content.title, "", summary_figure(plan, store)),)
    return Evidence(plan, scale, results, figures, provenance(results.records.values(), store), store)


def reference(plan: Plan) -> str | None:
    """The default reference of a report's rows, as `results.Table` takes it.

    The paper, where it has numbers for a row. Else the first row with CoPE, or the first row; of a table with several
    axes, each row is compared with the one that has this encoding and the same values of the other axes.
    """
    if any(row.published for row in plan.rows):
        return PAPER
    if len(plan.rows) < 2:
        return None
    chosen = next((row for row in plan.rows if _uses_cope(row.runs[0].model.position)), plan.rows[0])
    if POSITION not in chosen.labels or len({row.labels.get(POSITION) for row in plan.rows}) == 1:
        return chosen.name
    return f"{POSITION}={chosen.labels[POSITION]}"


def _uses_cope(encodings: object) -> bool:
    return isinstance(encodings, (list, tuple)) and any(each.kind == METHOD for each in encodings)


def write_evidence(found: Evidence, folder: Path) -> tuple[Path, ...]:
    """Write the files of `found` to a folder, which is made if it is missing; each is replaced as a whole.

    Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, content in found.files().items():
        write_bytes(folder / name, content)
        paths.append(folder / name)
    return tuple(paths)


def _drawn(plan: Plan, store: Store, declared: Declared, scale: str | None) -> Drawn:
    title = declared.figure.title or plan.ablation.content.title
    source = declared.figure.source
    try:
        made = draw_declared(plan, store, declared, scale=scale)
    except UserError as error:  # no checkpoint, or no such mark in the tokens
        return Drawn(declared.name, title, source, None, _without_place(str(error), store))
    if made.empty and not isinstance(declared.figure, Maps):
        return Drawn(declared.name, title, source, None, "too few finished runs")
    return Drawn(declared.name, title, source, made)


def _without_place(text: str, store: Store) -> str:
    return text.replace(f" in the store {store.location}", "")


def _quoted(text: str) -> str:
    return f"'{text}'" if set(text) & set(" ()'\"$&|;<>*?") else text


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
