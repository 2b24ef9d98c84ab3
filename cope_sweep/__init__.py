"""Ablation at scale for position encodings in transformers.

The rooms, downhill (an import never runs uphill; `import-linter` holds it):
`cli` → `sweep` → `train` → `model` → `record`, `results`, `plan` → `spec` → `positions`, `tasks`.
"""

__version__ = "0.1.0"
