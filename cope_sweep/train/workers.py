"""Operations of all data-parallel workers of one run: sums, the same data, and a divided optimiser's state.

With one worker, each function of communication returns its argument. Where the optimiser's state is divided (ZeRO,
stage 1; Rajbhandari et al. 2020), each worker keeps the state of a part of the parameters, updates these, and sends
them to the others. Weights and gradients are whole on every worker. Updates equal a single worker's, to the bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor

from cope_sweep.config import RunSpec
from cope_sweep.errors import CheckpointError, UserError
from cope_sweep.train.runtime import Runtime

T = TypeVar("T")


def broadcast_flag(runtime: Runtime, flag: bool) -> bool:
    """Rank 0's flag, on every rank. Every rank has to call this."""
    return bool(broadcast_number(runtime, int(flag)))


def broadcast_number(runtime: Runtime, number: int) -> int:
    """Rank 0's number, on every rank. Every rank has to call this."""
    if runtime.world_size == 1:
        return number
    value = torch.tensor(number, device=runtime.device)
    torch.distributed.broadcast(value, src=0)
    return int(value.item())


def broadcast_choice(runtime: Runtime, choices: Sequence[T], choice: T | None) -> T | None:
    """Rank 0's choice, or None, on every rank. Every rank has to call this with the same choices."""
    number = broadcast_number(runtime, -1 if choice is None else choices.index(choice))
    return None if number < 0 else choices[number]


def sum_over_workers(runtime: Runtime, value: Tensor) -> Tensor:
    """The elementwise sum of the workers' tensors, computed in place. Every rank has to call this."""
    if runtime.world_size > 1:
        torch.distributed.all_reduce(value)
    return value


def gather(runtime: Runtime, value: Any) -> list[Any]:
    """The values of all ranks, in the order of ranks. Every rank has to call this."""
    values = [value] * runtime.world_size
    if runtime.world_size > 1:
        torch.distributed.all_gather_object(values, value)
    return values


class DataError(UserError):
    """The data differ from the data that the run was started on, or from other workers' data."""

    default_code = "changed_data"


def prepare_data(spec: RunSpec, runtime: Runtime) -> str | None:
    """Prepare the task's data and return their fingerprint; None where the task generates its data.

    Raises UserError where the data cannot be used, and DataError where workers read different data.
    """
    task = spec.task
    task.prepare()
    for context in spec.evaluate.contexts:
        for split in task.TESTS:
            task.windows(split, context, spec.evaluate.stride or context)  # raises where a text is too short
    if (places := spec.evaluate.positions) is not None:
        for split in task.TESTS:
            task.windows(split, places, places)
    fingerprints = gather(runtime, task.fingerprint())
    if len(set(fingerprints)) > 1:
        listed = ", ".join(f"rank {rank}: {data}" for rank, data in enumerate(fingerprints))
        raise DataError(
            f"the workers read different data ({listed}); give every node the same files", fingerprints=fingerprints
        )
    return fingerprints[0]


def check_steps(runtime: Runtime, step: int) -> None:
    """Raise CheckpointError where the ranks are at different steps. Every rank has to call this."""
    steps = gather(runtime, step)
    if len(set(steps)) > 1:
        listed = ", ".join(f"rank {rank}: {number}" for rank, number in enumerate(steps))
        raise CheckpointError(
            f"the workers would continue after different steps ({listed}); every node has to read the same resume file",
            code="steps_differ",
            steps=steps,
        )


def shard(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimiser with its state divided among the workers of torch's default group."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # imported here: it takes a second

    accepted = inspect.signature(type(optimizer)).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    return ZeroRedundancyOptimizer(optimizer.param_groups, type(optimizer), **settings)


def place_steps(optimizer: torch.optim.Optimizer) -> None:
    """Move the counts of steps to their parameters' device, where fused and capturable updates need them.

    `ZeroRedundancyOptimizer.load_state_dict` moves them to the CPU (pytorch issue 124133).
    """
    divided = getattr(optimizer, "optim", optimizer)
    for group in divided.param_groups:
        if not (group.get("fused") or group.get("capturable")):
            continue
        for parameter in group["params"]:
            state = divided.state.get(parameter, {})
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(parameter.device)


def collect_state(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Send the state to rank 0, whose `state_dict` is then whole. Every rank has to call this."""
    for optimizer in optimizers:
        if hasattr(optimizer, "consolidate_state_dict"):  # a ZeroRedundancyOptimizer
            optimizer.consolidate_state_dict(to=0)
