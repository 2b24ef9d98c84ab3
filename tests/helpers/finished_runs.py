"""A small ablation, and functions that write results of it to a store."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from cope_sweep.config import Plan, RunSpec, expand
from cope_sweep.config.loading import validate
from cope_sweep.config.source import Source
from cope_sweep.read.tables.export import run_batches
from cope_sweep.store import AttemptWriter, RunQuery, Store
from tests.helpers.sweeps import end
from tests.helpers.tiny import TINY

CONTENT: dict[str, Any] = {
    "title": "Does it copy? 100 % & more",
    "hypothesis": "CoPE counts tokens by their content.",
    "base": TINY,
    "grid": {"model.position": {"CoPE": ["cope"], "a_b <c>": ["absolute"], "None": []}},
    "seeds": [0, 1],
    "metrics": [
        {"name": "in_dist/token_error", "label": "In-dist.", "unit": "%"},
        {"name": "dense/loss", "goal": "max", "decimals": 3},
    ],
}

COUNTING: dict[str, Any] = TINY | {"task": {"kind": "counting"}}
"""The base of an ablation whose task reports `majority_baseline_error`."""


def plan_of(name: str = "copying", **changes: Any) -> Plan:
    """The plan of `CONTENT` with some of its keys replaced."""
    return expand(validate(Source(name, CONTENT | changes, {}), name))


def run_table(store: Store, query: RunQuery | None = None) -> pa.Table:
    """The runs of a store that match a query, or all, as one table."""
    schema, found = run_batches(store, query or RunQuery())
    return pa.Table.from_batches(found, schema)


def finish(store: Store, run: RunSpec, metrics: Mapping[str, float], facts: Mapping[str, Any] | None = None) -> None:
    """Write `run` as finished, with a curve and a checkpoint."""
    folder = begin(store, run)
    folder.log({"step": 1, "train/loss": 2.5})
    folder.log({"step": 6, "train/loss": 1.25})
    folder.log({"step": 6, **metrics})
    with folder.save_checkpoint() as path:
        (path / "model.safetensors").write_bytes(b"weights")
        (path / "config.json").write_text("{}")
    folder.finish({"train/loss": 1.25, **metrics}, facts or {"steps": 6, "parameters": 1234, "device": "cpu"})
    end(store, folder)


def fail(store: Store, run: RunSpec, message: str = "Diverged: the loss is nan") -> None:
    """Write `run` as failed."""
    folder = begin(store, run)
    folder.log({"step": 1, "train/loss": 2.5})
    folder.fail(message, f"Traceback (most recent call last):\n{message}\n")
    end(store, folder)


def stop(store: Store, run: RunSpec, message: str = "stopped at step 3 by asha") -> None:
    """Write `run` as stopped by a scheduler."""
    folder = begin(store, run)
    folder.log({"step": 3, "in_dist/token_error": 0.5})
    folder.set_state("stopped", message=message)
    end(store, folder)


def begin(store: Store, run: RunSpec, worker_id: str = "here") -> AttemptWriter:
    """Begin `run`, as a worker does: only its files say so. A result that it has is lost, else nobody trains it again."""
    folder = store.run(run.run_id)
    (folder.path / "result.json").unlink(missing_ok=True)
    return folder.begin(run, worker_id)
