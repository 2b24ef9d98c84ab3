"""Answers to the questions of `cope_sweep.api`, for the command line and the REST service."""

from cope_sweep.read.queries.ablations import AblationFiles
from cope_sweep.read.queries.plans import finished_run, measured_rates, plan_cost, recorded_plan, worker_groups
from cope_sweep.read.queries.queries import Queries

__all__ = [
    "AblationFiles", "Queries", "finished_run", "measured_rates", "plan_cost", "recorded_plan",
    "worker_groups",
]  # fmt: skip
