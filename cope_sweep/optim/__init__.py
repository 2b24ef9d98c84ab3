"""Optimisers, one file each, and learning-rate schedules. Register a new one below."""

from typing import Annotated

from cope_sweep.optim.adamw import AdamW
from cope_sweep.optim.base import NamedParameters, Optimizer, OptimizerSettings, Schedule
from cope_sweep.optim.muon import Muon
from cope_sweep.optim.schedules import Constant, Cosine, Linear
from cope_sweep.registry import Registry

# mypy refuses an abstract class where a type is asked for. A registry makes no instance of it.
OPTIMIZERS = Registry(
    "optimiser",
    Optimizer,  # type: ignore[type-abstract]
    (AdamW, Muon),
    entry_points="cope_sweep.optimizers",
)
SCHEDULES = Registry(
    "schedule",
    Schedule,  # type: ignore[type-abstract]
    (Constant, Linear, Cosine),
    entry_points="cope_sweep.schedules",
)

AnyOptimizer = Annotated[Optimizer, OPTIMIZERS]
"""Any registered optimiser: its `kind` (`adamw`), or a mapping with its options (`{kind: muon, momentum: 0.9}`)."""

AnySchedule = Annotated[Schedule, SCHEDULES]
"""Any registered schedule: its `kind` (`cosine`), or a mapping with its options."""

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "AdamW",
    "AnyOptimizer",
    "AnySchedule",
    "Constant",
    "NamedParameters",
    "Optimizer",
    "OptimizerSettings",
    "Schedule",
]
