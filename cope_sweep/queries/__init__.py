"""The typed read side: what the command line and the REST service ask about ablations, runs and sweeps."""

from cope_sweep.queries.ablations import AblationFiles, LoadedPlan
from cope_sweep.queries.errors import NotFinishedError, NotFoundError
from cope_sweep.queries.filters import parse_filter
from cope_sweep.queries.plans import measured_rates, plan_cost, plan_status, recorded_plan, settle, worker_groups
from cope_sweep.queries.queries import Queries

__all__ = [
    "AblationFiles", "LoadedPlan", "NotFinishedError", "NotFoundError", "Queries", "measured_rates", "parse_filter",
    "plan_cost", "plan_status", "recorded_plan", "settle", "worker_groups",
]  # fmt: skip
