"""The runs of a report as a Parquet file, and back; reports that are kept with the code (`ablations/results`).

One line per run of the plan, finished or not, in the plan's order:

    run_id, status, row, seed, label.<axis key>, …, <key of the spec>, …, <metric>, …, facts.<name>, …: as `tables.runs`
    sweep_id, created_ms, ended_ms
    commit, versions, cpu      of the sweep that trained it last: the Git commit, the packages, the processor

Names of hosts and processes are left out, and so are the messages of failed runs, which may name folders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cope_sweep.config import Plan, expand, load_ablation, with_overrides
from cope_sweep.errors import UserError
from cope_sweep.read.tables import Table
from cope_sweep.read.tables.model import reference
from cope_sweep.read.tables.render import layout, markdown_text
from cope_sweep.read.tables.runs import frame_of_records
from cope_sweep.store import RunRecord, SweepRecord

if TYPE_CHECKING:
    import pandas as pd

CURVES = ".curves.parquet"
"""Suffix of a second file, with the learning curves: run_id, row, seed, step, metric and value of each logged value."""
LEFT_OUT = ("message", "facts.host", "facts.worker_id")
LABEL, FACT = "label.", "facts."
TIMES = ("created_ms", "ended_ms")


def run_frame(
    plan: Plan, records: Mapping[str, RunRecord], sweeps: Mapping[str, SweepRecord] = MappingProxyType({})
) -> pd.DataFrame:
    """The frame; the module describes it. `records` has every run of the plan, `sweeps` those that trained them."""
    import pandas as pd

    results = frame_of_records(plan, records, LABEL)
    ordered = [run for row in plan.rows for run in row.runs]
    own = [records[run.run_id] for run in ordered]
    places: dict[str, Any] = {"sweep_id": pd.Series([each.sweep_id for each in own], dtype="str")}
    places |= {name: pd.Series([getattr(each, name) for each in own], dtype="Int64") for name in TIMES}
    trained = [sweeps.get(each.sweep_id or "") for each in own]
    places |= {
        "commit": pd.Series([each and each.git_commit for each in trained], dtype="str"),
        "versions": pd.Series([each and _versions(each) for each in trained], dtype="str"),
        "cpu": pd.Series([each and each.machine.get("cpu") for each in trained], dtype="str"),
    }
    results = results.drop(columns=[name for name in LEFT_OUT if name in results])
    return pd.concat([results, pd.DataFrame(places)], axis=1)


def _versions(sweep: SweepRecord) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(sweep.versions.items()))


def to_parquet(frame: pd.DataFrame) -> bytes:
    """The content of a Parquet file."""
    content: bytes = frame.to_parquet(None, engine="pyarrow", index=False, compression="zstd")
    return content


def run_files(folder: Path, pattern: str = "*") -> list[Path]:
    """The files of runs in a folder of reports, by name."""
    return [path for path in sorted(folder.glob(f"{pattern}.parquet")) if not path.name.endswith(CURVES)]


def read_records(path: Path) -> dict[str, RunRecord]:
    """Run id → record, from a file of `to_parquet`: status, seed, metrics and facts. Raises OSError."""
    import pandas as pd

    frame = pd.read_parquet(path)
    names = [name for name in frame.columns if "/" in name]
    facts = [name for name in frame.columns if name.startswith(FACT)]
    return {
        line["run_id"]: RunRecord(
            line["run_id"],
            line["status"],
            seed=int(line["seed"]),
            sweep_id=_known(line["sweep_id"]),
            metrics={name: float(line[name]) for name in names if not pd.isna(line[name])},
            facts={name.removeprefix(FACT): _known(line[name]) for name in facts if not pd.isna(line[name])},
            **{name: _known(line[name]) for name in TIMES},
        )
        for line in frame.to_dict("records")
    }


def _known(value: Any) -> Any:
    import pandas as pd

    return None if pd.isna(value) else value


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


def committed_table(folder: Path, ablations: Path, name: str, scale: str | None, compare: str | None) -> Table:
    """The table of one report of a folder.

    Without `scale` it is that of the ablation's own size, or else the only one of the ablation. `compare` is as in
    `tables.Table`; None: the comparison of the report.

    Raises UserError where there is no such report, or a stale one.
    """
    known = {path.stem.partition(".")[2]: path for path in (*run_files(folder, name), *run_files(folder, f"{name}.*"))}
    wanted = scale or ("" if "" in known or len(known) != 1 else next(iter(known)))
    if wanted not in known:
        others = ", ".join(f"--scale {each}" if each else "its own size" for each in known)
        hint = f"; it has reports at: {others}" if known else ""
        option = f" --scale {wanted}" if wanted else ""
        raise UserError(f"{folder} has no report of {name}{option}{hint}")
    found = _read(known[wanted], ablations)
    return found.table if compare is None else replace(found.table, compare=compare)


def read_committed(results: Path, ablations: Path) -> Iterator[Committed]:
    """The reports of a folder by name. Raises UserError for one without ablation file, or without its scale."""
    for path in run_files(results):
        yield _read(path, ablations)


def _read(path: Path, ablations: Path) -> Committed:
    name, _, scale = path.stem.partition(".")
    file = ablations / f"{name}.yaml"
    if not file.exists():
        raise UserError(f"{path}: there is no ablation {name!r} in {ablations}; delete the report")
    plan = expand(with_overrides(load_ablation(file), scale=scale or None))
    try:
        return Committed(path, scale or None, plan, read_records(path))
    except (ValueError, KeyError) as error:  # pyarrow's errors are ValueErrors
        raise UserError(f"{path}: not the runs of a report ({str(error).splitlines()[0]})") from error


MOST_ROWS = 10
"""Rows whose values are listed for a report."""


def overview(reports: Iterable[Committed], folder: str) -> str:
    """A Markdown table: for each report the values of the primary metric and what they say, with a link into `folder`.

    Of more than `MOST_ROWS` rows, the lowest and the highest value.

    Raises UserError where a report is stale.
    """
    lines = ["| ablation | scale | mean ± standard deviation over seeds | result |", "| --- | --- | --- | --- |"]
    for each in reports:
        drawn, model = layout(each.table.model), each.table.model
        column = next(i for i, header in enumerate(drawn.headers) if header.text == model.primary.title)
        named = {
            row.row: f"{markdown_text(row.row)} {cells[column].text}"
            for row, cells in zip(model.rows, drawn.rows, strict=True)
        }
        values = ", ".join(named.values())
        found = {row.row: row.metrics[model.primary.name].summary for row in model.rows}
        means = {row: summary.mean for row, summary in found.items() if summary.n}
        if len(named) > MOST_ROWS and means:
            ends = (min(means, key=means.__getitem__), max(means, key=means.__getitem__))
            values = f"{len(named)} rows, from {' to '.join(named[end] for end in ends)}"
        link = f"[{markdown_text(model.title)}]({folder}/{each.path.stem}.md)"
        values = f"{markdown_text(model.primary.title)}: {values}"
        lines.append(f"| {link} | {each.scale or 'own'} | {values} | {markdown_text(model.answer)} |")
    return "\n".join(lines) + "\n"
