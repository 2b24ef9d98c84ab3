"""Rows and sweeps for tests of the index."""

from cope_sweep.store import RunRecord, SweepSummary
from tests.helpers.tiny import tiny_run


def row(run=None, status="finished", *, metrics=None, facts=None, **columns):
    """The row of a run: a tiny one, unless it is given."""
    run = run or tiny_run()
    spec = run.model_dump(mode="json")
    return RunRecord.of(run.run_id, status, spec, metrics=metrics or {}, facts=facts or {}, **columns)


def summary(sweep_id, status="finished", *, ablation="tiny", started_ms=1, runs=0, reused=0):
    """The summary of a sweep."""
    return SweepSummary(
        sweep_id=sweep_id, ablation=ablation, title="t", status=status, executor="local", started_ms=started_ms,
        ended_ms=None, runs=runs, reused=reused,
    )  # fmt: skip


def members(runs, *, first=0):
    """Runs of a sweep in one row; their label `n` is their place in it."""
    return [
        {"run_id": run.run_id, "row": "CoPE", "seed": 0, "labels": {"n": str(number)}, "reused": False}
        for number, run in enumerate(runs, start=first)
    ]


def write_sweep(index, sweep_id, runs, status="finished", *, ttl_s=None, **fields):
    """Write a sweep of these runs."""
    index.write_sweep(summary(sweep_id, status, runs=len(runs), **fields), members(runs), ttl_s=ttl_s)
