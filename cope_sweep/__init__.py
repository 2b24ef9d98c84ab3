"""Distributed sweeps and ablations for position encodings in transformers.

`cope_sweep.notebook` has the functions for notebooks and scripts. Each package imports only from those below it:
pyproject.toml has the list (`make lint` checks it).
"""

__version__ = "0.1.0"
