"""Distributed sweeps and ablations for position encodings in transformers.

`import cope_sweep` offers the functions of `cope_sweep.notebook` for notebooks and scripts; they are imported on use.
Each package imports only from those below it: pyproject.toml has the list (`make lint` checks it).
"""

import importlib
from typing import Any

__version__ = "0.1.0"

__all__ = ["curves", "figure", "frame", "load_ablation", "plan", "predictor", "probe", "run", "table"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Not an import statement: every module imports this package first.
    return getattr(importlib.import_module("cope_sweep.notebook"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
