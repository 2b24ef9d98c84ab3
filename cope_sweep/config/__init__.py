"""Runs and their ids, ablation files, and plans: the runs of a file with their estimated cost.

This package reads neither the store nor the clock. Its modules import each other, not the package.
"""

from cope_sweep.config.ablation import Ablation, Metric, Published
from cope_sweep.config.estimate import Estimate, estimates, parameter_count, suggested_estimates, total_seconds
from cope_sweep.config.expand import Plan, Row, expand, plan_of_recorded, row_of
from cope_sweep.config.loading import LoadedAblation, load_ablation
from cope_sweep.config.overrides import with_overrides
from cope_sweep.config.resources import Resources
from cope_sweep.config.run import NUMERIC_FACTS, EvaluateSpec, ModelSpec, RunSpec, TrainSpec
from cope_sweep.config.source import SpecError, default_label

__all__ = [
    "NUMERIC_FACTS", "Ablation", "Estimate", "EvaluateSpec", "LoadedAblation", "Metric", "ModelSpec", "Plan",
    "Published", "Resources", "Row", "RunSpec", "SpecError", "TrainSpec", "default_label",
    "estimates", "expand", "load_ablation", "parameter_count", "plan_of_recorded", "row_of",
    "suggested_estimates", "total_seconds", "with_overrides",
]  # fmt: skip
