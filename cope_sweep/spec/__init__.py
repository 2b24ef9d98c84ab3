"""Declarations: runs, ablation files and resources."""

from cope_sweep.spec.ablation import Ablation, LoadedAblation, Metric, Published, load_ablation
from cope_sweep.spec.labels import default_label
from cope_sweep.spec.metric_names import current_metric_name
from cope_sweep.spec.overrides import with_overrides
from cope_sweep.spec.resources import Resources
from cope_sweep.spec.run import NUMERIC_FACTS, EvaluateSpec, ModelSpec, RunSpec, TrainSpec
from cope_sweep.spec.source import SpecError

__all__ = [
    "NUMERIC_FACTS",
    "Ablation",
    "EvaluateSpec",
    "LoadedAblation",
    "Metric",
    "ModelSpec",
    "Published",
    "Resources",
    "RunSpec",
    "SpecError",
    "TrainSpec",
    "current_metric_name",
    "default_label",
    "load_ablation",
    "with_overrides",
]
