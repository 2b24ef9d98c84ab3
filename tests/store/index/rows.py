"""Rows and sweeps for tests of the index."""

from cope_sweep.store.index import RunRecord, SweepSummary
from tests.tiny import tiny_run


def row(run=None, status="finished", *, metrics=None, facts=None, **columns):
    """The row of a run: a tiny one, unless it is given."""
    run = run or tiny_run()
    spec = run.model_dump(mode="json")
    return RunRecord.of(run.run_id, status, spec, metrics=metrics or {}, facts=facts or {}, **columns)


def write_sweep(index, sweep_id, runs, status="finished", *, ablation="tiny", started_ms=1, owner=None):
    """Write a sweep of these runs in one row; their label `n` is their place in it."""
    members = [
        {"run_id": run.run_id, "row": "CoPE", "seed": 0, "labels": {"n": str(number)}, "reused": False}
        for number, run in enumerate(runs)
    ]
    summary = SweepSummary(sweep_id, ablation, "t", status, "local", started_ms, None, len(members), 0)
    index.write_sweep(summary, members, owner)
