"""Communication between the data-parallel workers of one run; with one worker, each function returns its argument."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor

from cope_sweep.train.runtime import Runtime


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
