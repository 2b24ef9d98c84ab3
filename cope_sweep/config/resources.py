"""The resources of a sweep: where and how its runs execute. They are not part of a run's identity."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cope_sweep.errors import InvalidValue, counted
from cope_sweep.frozen import Count, Frozen, Positive


class Resources(Frozen):
    """The resources of a sweep, and how it computes. These settings do not change which runs it trains."""

    groups: Positive | Literal["auto"] = Field(
        default="auto", description="Runs that are trained at the same time; auto: as many as the cluster has room for."
    )
    workers: Positive = Field(default=1, description="Ray Train workers of a run; several train it data-parallel.")
    cpus: Positive = Field(default=1, description="CPU cores (and torch threads) per worker.")
    gpus: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        default="auto",
        description="GPUs per worker; auto: one if a node of the cluster has any. Name a number where GPU nodes start "
        "from zero. 0.25: four runs of one worker share a GPU.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: CUDA if the worker has it, else the CPU."
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="Autocast data type; auto: bf16 on CUDA, fp32 on a CPU."
    )
    attention: Literal["auto", "reference", "blocked", "native", "triton"] = Field(
        default="auto", description="Attention implementation; auto: the fastest one that this machine supports."
    )
    micro_batch: Positive | None = Field(
        default=None,
        description="Sequences in one forward and backward pass of a worker; gradients are accumulated. null: the "
        "worker's whole share of the batch. A smaller value needs less memory; the gradient is the same.",
    )
    checkpoint_activations: bool = Field(
        default=False,
        description="Store only the input of each block for the backward pass and recompute the rest: much less "
        "memory, a third more computation, bit-identical results.",
    )
    compile: Literal["auto", "off"] = Field(
        default="auto",
        description="Training steps on CUDA with less work on the host; auto: CUDA graphs for models of less than 30 M "
        "parameters (one worker, no micro_batch), torch.compile for others. off: neither.",
    )
    shard: Literal["off", "optimizer"] = Field(
        default="off",
        description="optimizer: the workers of a run divide the optimiser's state among them (ZeRO stage 1), which "
        "needs less memory and gives the same numbers. off: each worker has all of it.",
    )
    checkpoint_every_s: Annotated[float, Field(gt=0)] = Field(
        default=30.0,
        description="Seconds between resumable checkpoints; more if writing one takes long.",
    )
    max_failures: Count = Field(
        default=3, description="How often a run is restarted from its last checkpoint after its process died."
    )
    step_timeout_s: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="A run that makes no step for this many seconds is ended and restarted, as if its process had died."
        " Preparing data and evaluations count as time without steps. null: no limit.",
    )

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        if self.gpus == "auto" or self.device == "cpu":
            return self
        if 0 < self.gpus < 1 < self.workers:
            raise InvalidValue(
                f"resources.gpus = {self.gpus:g} with workers = {self.workers}: workers of one run cannot share a GPU; "
                "set workers to 1, and let several groups share it",
                key="resources.gpus",
                value=self.gpus,
                workers=self.workers,
            )
        if self.gpus > 1 and self.gpus % 1:
            raise InvalidValue(
                f"resources.gpus = {self.gpus:g}: more than one GPU must be a whole number; use an integer",
                key="resources.gpus",
                value=self.gpus,
            )
        return self

    @property
    def shape(self) -> str:
        """The resources of a run in words: `2 workers × 4 CPUs and 1 GPU`."""
        devices = counted(self.cpus, "CPU")
        if self.gpus not in ("auto", 0):
            devices += f" and {counted(float(self.gpus), 'GPU')}"
        return devices if self.workers == 1 else f"{self.workers} workers × {devices}"
