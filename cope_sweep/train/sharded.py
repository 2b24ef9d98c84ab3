"""The optimiser's state divided among the workers of a run (ZeRO, stage 1; Rajbhandari et al. 2020).

Each worker keeps the state of a part of the parameters, updates these, and sends them to the others. Weights and
gradients are whole on every worker. The updates are those of one worker, to the bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer


def shard(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """The same optimisers with their state divided among the workers of torch's default group."""
    return [_sharded(each) for each in optimizers]


def _sharded(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    accepted = inspect.signature(type(optimizer)).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    return ZeroRedundancyOptimizer(optimizer.param_groups, type(optimizer), **settings)


def collect_state(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Send the state to rank 0, whose `state_dict` is then whole. Every rank has to call this."""
    for optimizer in optimizers:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer.consolidate_state_dict(to=0)
