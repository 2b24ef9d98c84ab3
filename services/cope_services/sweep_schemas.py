"""JSON schemas of submitted sweeps."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cope_services.schemas import UnicodeText
from cope_sweep.store import Status

Trainable = Literal["pending", "interrupted", "failed", "stopped", "damaged"]
"""Statuses of runs that a sweep may train."""
Name = Annotated[UnicodeText, Field(min_length=1, max_length=200)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1 << 31, strict=True)]


class SweepRequest(BaseModel):
    """A sweep to execute: an ablation of this service by its name, or one in the request."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"ablation": "quickstart", "set": ["train.steps=100", "seeds=[0]"]}]},
    )

    ablation: Name | None = Field(default=None, description="The name of an ablation.")
    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")] | None = Field(
        default=None, description="The name of the ablation in `spec`; no ablation file has it."
    )
    spec: UnicodeText | dict[str, Any] | None = Field(
        default=None,
        description="An ablation: the text of a file (YAML), or the same as an object. It may inherit from an ablation "
        "of this service. It names no plugins, files and folders.",
    )
    scale: Annotated[UnicodeText, Field(max_length=100)] | None = None
    set: Annotated[list[Annotated[UnicodeText, Field(max_length=10_000)]], Field(max_length=100)] = Field(
        default=[], description="Values that replace those of the ablation: `KEY=VALUE`, as after `--set`."
    )
    only: Annotated[list[Trainable], Field(min_length=1)] | None = Field(
        default=None,
        description="Train only the runs with these statuses. Default: all that have not ended as planned.",
    )
    time_budget_s: Seconds | None = Field(default=None, description="Runs in training are checkpointed after it.")
    max_runs: Count | None = Field(default=None, description="Number of runs to train.")
    max_failures: Count | None = Field(default=None, description="After so many failed runs, no more are started.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.ablation is None) == (self.spec is None):
            raise ValueError("give either `ablation` or `spec`")
        if (self.name is None) != (self.spec is None):
            raise ValueError("`name` is the name of the ablation in `spec`; give both or none of them")
        return self

    @property
    def leave_out(self) -> list[Status]:
        """The statuses of runs that are not trained."""
        return [each for each in get_args(Trainable) if self.only is not None and each not in self.only]
