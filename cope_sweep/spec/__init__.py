"""What is to be trained, declared: runs, ablations, resources."""

from cope_sweep.spec.ablation import Ablation, LoadedAblation, Metric, Published, load_ablation, name_of, with_overrides
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
    "load_ablation",
    "name_of",
    "with_overrides",
]
