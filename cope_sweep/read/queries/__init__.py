"""The typed read side: what the command line and the REST service ask about ablations, runs and sweeps.

Modules are imported when their names are used: a client of the service needs only `answers`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cope_sweep.read.queries.ablations import AblationFiles, LoadedPlan
    from cope_sweep.read.queries.errors import NotFinishedError, NotFoundError
    from cope_sweep.read.queries.filters import parse_filter
    from cope_sweep.read.queries.plans import measured_rates, plan_cost, recorded_plan, worker_groups
    from cope_sweep.read.queries.queries import Queries

_MODULES = {
    "AblationFiles": "ablations",
    "LoadedPlan": "ablations",
    "NotFinishedError": "errors",
    "NotFoundError": "errors",
    "parse_filter": "filters",
    "measured_rates": "plans",
    "plan_cost": "plans",
    "recorded_plan": "plans",
    "worker_groups": "plans",
    "Queries": "queries",
}

__all__ = [
    "AblationFiles", "LoadedPlan", "NotFinishedError", "NotFoundError", "Queries", "measured_rates", "parse_filter",
    "plan_cost", "recorded_plan", "worker_groups",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
