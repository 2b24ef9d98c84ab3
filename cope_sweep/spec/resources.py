"""Where and how runs execute. Never part of a run's identity."""

from typing import Annotated, Literal

from pydantic import Field

from cope_sweep.frozen import Frozen


class Resources(Frozen):
    """What a sweep may use. The same runs, whatever stands here."""

    groups: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto", description="Worker groups that train side by side; auto: as many as the cluster holds."
    )
    workers: Annotated[int, Field(ge=1)] = Field(
        default=1, description="Ray Train workers in a group; more than one train a run data-parallel."
    )
    cpus: Annotated[int, Field(ge=1)] = Field(default=1, description="CPU cores (and torch threads) for each worker.")
    gpus: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        default="auto", description="GPUs for each worker; auto: one where the cluster has any."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: CUDA where a worker has it.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="Autocast type; auto: bf16 on CUDA, fp32 on a CPU."
    )
    attention: Literal["auto", "reference", "blocked", "native", "triton"] = Field(
        default="auto", description="What computes attention; auto: the fastest that is right here."
    )
    micro_batch: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Sequences that a worker takes through the model at a time, their gradients added up; null: all of "
        "its share of a batch. Less memory, the same gradient.",
    )
    checkpoint_activations: bool = Field(
        default=False,
        description="Keep only each block's input for the backward pass, and compute the rest again: much less memory, "
        "a third more work, the same numbers to the bit.",
    )
    checkpoint_every_s: Annotated[float, Field(gt=0)] = Field(
        default=30.0,
        description="Seconds from one resumable checkpoint to the next; more where writing one takes long.",
    )
    max_failures: Annotated[int, Field(ge=0)] = Field(
        default=3, description="How often a run whose worker died is tried again, from its last checkpoint."
    )
