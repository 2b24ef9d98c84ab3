"""Distributed sweeps and ablations for position encodings in transformers.

The packages, from the highest layer to the lowest. A module imports only from lower layers (`make lint` checks this):
`cli` → `sweep` → `figures`, `queries` → `results`, `train`, `probe` → `inference` → `model` → `record`, `plan` →
`spec` → `kernels`, `tasks` → `positions`, `text`.
"""

__version__ = "0.1.0"
