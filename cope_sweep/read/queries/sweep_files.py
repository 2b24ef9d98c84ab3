"""The files about a sweep that its run in MLflow has: a report, a table with verdicts, and figures."""

from __future__ import annotations

from cope_sweep.config import expand, with_overrides
from cope_sweep.read.queries.plans import recorded_plan
from cope_sweep.read.queries.recorded import recorded_ablation
from cope_sweep.read.tables import read_results
from cope_sweep.store import ACTIVE, Store, SweepRecord


def sweep_files(store: Store, record: SweepRecord) -> dict[str, bytes]:
    """Path → content: the report (HTML), the table (Markdown and CSV) and the figures (SVG) of a sweep's ablation.

    They show all that the store has of the ablation with the scale and values of the sweep, so only the last sweep
    that has ended with these has files. Empty before a run is finished, and for records without an ablation.

    Raises SpecError (a plugin is missing), StoreError, and what drawing raises.
    """
    if not record.data or _has_later(store, record):
        return {}
    loaded = with_overrides(recorded_ablation(record, may_import=True), scale=record.scale, assignments=record.sets)
    results = read_results(recorded_plan(expand(loaded), store), store)
    if not any(row.status == "finished" for row in results.records.values()):
        return {}
    from cope_sweep.read.reports.evidence import evidence  # pandas, matplotlib: not while a sweep trains

    report = evidence(results)
    files = {"table.md": report.table.to_markdown().encode(), "table.csv": report.table.to_csv().encode()}
    files |= {f"figures/{name}": picture for name, picture in report.drawn.items()}
    return {"report.html": report.to_html().encode(), **files}


def _has_later(store: Store, record: SweepRecord) -> bool:
    """Whether another sweep with the same ablation, scale and values has ended after this one."""
    sweeps = [each for each in store.index.sweeps() if each.status not in ACTIVE]
    own = next((each for each in sweeps if each.sweep_id == record.sweep_id), None)
    if own is None:
        return False
    same = [each for each in sweeps if (each.ablation, each.scale, each.sets) == (own.ablation, own.scale, own.sets)]
    return max(same, key=lambda each: (each.ended_ms or each.started_ms, each.sweep_id)) != own
