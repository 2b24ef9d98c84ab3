"""Rows for tests of the index."""

from cope_sweep.store.index import RunRow
from tests.tiny import tiny_run


def row(run=None, status="finished", *, metrics=None, facts=None, **columns):
    """The row of a run: a tiny one, unless it is given."""
    run = run or tiny_run()
    spec = run.model_dump(mode="json")
    return RunRow(run.run_id, status, spec, metrics=metrics or {}, facts=facts or {}, **columns)
