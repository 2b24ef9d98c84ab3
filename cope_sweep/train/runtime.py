"""The settings with which a worker executes a run: device, precision, threads and rank."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from cope_sweep.config import Resources
from cope_sweep.errors import InvalidValue
from cope_sweep.kernels import Implementation, using

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Runtime:
    """The settings with which one worker executes runs. They do not affect a run's id."""

    device: str = "cpu"
    precision: str = "fp32"
    threads: int = 1
    attention: Implementation = "auto"
    micro_batch: int | None = None
    """Sequences in a forward pass; None: all of this worker's share."""
    checkpoint_activations: bool = False
    compile: bool = False
    """Training steps go through CUDA graphs or torch.compile, see `compiled`."""
    shard: bool = False
    """The workers divide the optimiser's state among them; with several workers only."""
    checkpoint_every_s: float = 30.0
    """Shortest time between two resume files; 0: one after every step."""
    rank: int = 0
    world_size: int = 1
    worker_id: str = "local"
    """The worker's name in events and results."""

    def autocast(self) -> torch.autocast:
        """The context in which the model computes: bfloat16 where `precision` says so."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bf16")

    def at_once(self, batch: int) -> int:
        """The number of sequences of a batch that this worker's model takes in one forward pass."""
        share = math.ceil(batch / self.world_size)
        return min(self.micro_batch or share, share)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block, torch has these threads, and attention this implementation; after it, the previous ones.

        Both are settings of the whole process: a notebook that trains a run then continues with its own. On a CPU,
        subnormal numbers (below 1.2e-38) are 0 within the block: where attention is peaked, many gradients are such
        numbers, and products of matrices take many times as long with them.
        """
        threads, flushes = torch.get_num_threads(), _flushes_subnormals()
        # Threads that torch starts within the block inherit it from this one, and keep it.
        torch.set_flush_denormal(flushes or self.device == "cpu")
        torch.set_num_threads(self.threads)
        try:
            with using(self.attention):
                yield
        finally:
            torch.set_num_threads(threads)
            torch.set_flush_denormal(flushes)

    @staticmethod
    def of(resources: Resources, *, worker_id: str, rank: int = 0, world_size: int = 1) -> Runtime:
        """The settings that `resources` mean on this machine.

        Raises InvalidValue if `resources.device` is `cuda` and torch sees no CUDA device.
        """
        cuda = torch.cuda.is_available()
        if resources.device == "cuda" and not cuda:
            raise InvalidValue(
                "resources.device = cuda, but torch sees no CUDA device here; use auto or cpu",
                code="no_device",
                key="resources.device",
                value="cuda",
            )
        device = "cuda" if cuda and resources.device != "cpu" else "cpu"
        precision = resources.precision
        if precision == "auto":
            precision = "bf16" if device == "cuda" else "fp32"
        warn_of_emulated_bf16(device, precision)
        return Runtime(
            device=device,
            precision=precision,
            threads=resources.cpus,
            attention=resources.attention,
            micro_batch=resources.micro_batch,
            checkpoint_activations=resources.checkpoint_activations,
            compile=resources.compile == "auto" and device == "cuda",
            shard=resources.shard == "optimizer" and world_size > 1,
            checkpoint_every_s=resources.checkpoint_every_s,
            rank=rank,
            world_size=world_size,
            worker_id=worker_id,
        )


def has_bf16(capabilities: dict[str, bool] | None = None) -> bool:
    """The CPU multiplies matrices in bfloat16: AVX512-BF16 or AMX on x86, BF16 on Arm."""
    found = torch.cpu.get_capabilities() if capabilities is None else capabilities
    return any(bool(present) for name, present in found.items() if "bf16" in name)


def warn_of_emulated_bf16(device: str, precision: str) -> None:
    """Log a warning where a CPU has to emulate bfloat16."""
    if device == "cpu" and precision == "bf16" and not has_bf16():
        log.warning(
            "resources.precision = bf16, but this CPU has no bfloat16 instructions, so it is emulated and slower than "
            "float32; use fp32 here"
        )


def _flushes_subnormals() -> bool:
    """Whether torch rounds subnormal numbers to 0 in this thread; torch can be told so, but not asked."""
    return not torch.tensor(1e-38).mul(0.1).item()
