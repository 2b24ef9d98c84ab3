"""From an ablation to its runs, and what they will cost. Pure: no store, no clock."""

from cope_sweep.plan.estimate import Estimate, estimates, parameter_count, total_seconds
from cope_sweep.plan.expand import Plan, Row, expand

__all__ = ["Estimate", "Plan", "Row", "estimates", "expand", "parameter_count", "total_seconds"]
