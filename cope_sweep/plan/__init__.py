"""Plans: the runs of an ablation and their estimated cost. This package reads neither the store nor the clock."""

from cope_sweep.callable_package import make_callable
from cope_sweep.plan.estimate import Estimate, estimates, parameter_count, suggested_estimates, total_seconds
from cope_sweep.plan.expand import Plan, Row, expand, plan_of_draws, plan_of_recorded, row_of_draw

__all__ = [
    "Estimate",
    "Plan",
    "Row",
    "estimates",
    "expand",
    "parameter_count",
    "plan_of_draws",
    "plan_of_recorded",
    "row_of_draw",
    "suggested_estimates",
    "total_seconds",
]

make_callable(__name__)
