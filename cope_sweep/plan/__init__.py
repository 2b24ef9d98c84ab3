"""From an ablation to the runs that it stands for: what is done, what is to do, and what it will cost."""

from cope_sweep.plan.estimate import Estimate, estimates, parameter_count, total_seconds
from cope_sweep.plan.expand import Plan, Row, expand
from cope_sweep.plan.overview import catalogue, cost, standing

__all__ = [
    "Estimate",
    "Plan",
    "Row",
    "catalogue",
    "cost",
    "estimates",
    "expand",
    "parameter_count",
    "standing",
    "total_seconds",
]
