"""Answers to the questions of `cope_sweep.api`, for the command line and the REST service."""

from cope_sweep.read.queries.ablations import AblationFiles
from cope_sweep.read.queries.plans import finished_run, plan_cost, recorded_plan
from cope_sweep.read.queries.queries import Queries, check_no_values

__all__ = ["AblationFiles", "Queries", "check_no_values", "finished_run", "plan_cost", "recorded_plan"]
