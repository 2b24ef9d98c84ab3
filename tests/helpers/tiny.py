"""Runs so small that a test can train them."""

import json
from typing import Any

from cope_sweep.config import RunSpec

TINY: dict[str, Any] = {
    "task": {
        "kind": "selective_copy",
        "tokens": 2,
        "blanks": 2,
        "dense_blanks": 1,
        "sparse_blanks": 4,
        "vocabulary": 6,
    },
    "model": {"layers": 1, "dim": 8, "heads": 2},
    "train": {"steps": 6, "batch": 4},
    "evaluate": {"every": 3, "sequences": 8, "final_sequences": 8},
}


def tiny_run(**overrides: Any) -> RunSpec:
    """The tiny run, with dotted keys set: `tiny_run(**{"model.dim": 16})`."""
    data = json.loads(json.dumps(TINY))
    for key, value in overrides.items():
        *parents, last = key.split(".")
        inner = data
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return RunSpec.model_validate_json(json.dumps(data))
