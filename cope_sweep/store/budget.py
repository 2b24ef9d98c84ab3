"""The budget of a sweep, as requests and submissions have it."""

from typing import Annotated

from pydantic import Field

from cope_sweep.frozen import Frozen

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, le=1 << 31)]


class Budget(Frozen):
    """Limits of a sweep. Runs that are left then are trained by the next one."""

    time_budget_s: Seconds | None = Field(default=None, description="Runs in training are checkpointed after it.")
    max_runs: Count | None = Field(default=None, description="Number of runs to train.")
    max_failures: Count | None = Field(default=None, description="After so many failed runs, no more are started.")
