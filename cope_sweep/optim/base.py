"""The base of optimisers and learning-rate schedules.

An optimiser's file decides everything about it: which parameters it updates how, the torch optimisers that do so, and
the memory of their state. An optimiser sees each parameter under its name in the model's state dict. This module does
not import torch, so a plan estimates memory without it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from cope_sweep.registry import Kind

if TYPE_CHECKING:
    import torch

FLOAT32_BYTES = 4
POSITIONS = "position."
"""The names of all parameters of encodings start with it."""

Shape = tuple[int, ...]
NamedParameters = Mapping[str, "torch.nn.Parameter"]
"""Parameters by their names in the model's state dict: `blocks.0.attention.qkv.weight`."""


@dataclass(frozen=True)
class OptimizerSettings:
    """The keys of `train` that every optimiser receives."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    position_lr: float = 1.0
    """Factor on the learning rates of the encodings' parameters. `Optimizer.build_all` applies it, and not `build`."""


class Optimizer(Kind):
    """An optimiser. Subclasses set `kind`, build torch optimisers and state the size of their state."""

    BARE: ClassVar[bool] = True

    @abstractmethod
    def build(self, parameters: NamedParameters, settings: OptimizerSettings) -> list[torch.optim.Optimizer]:
        """The torch optimisers that together update every parameter once.

        The trainer scales the `lr` that each parameter group is built with by the schedule.
        """

    def build_all(self, parameters: NamedParameters, settings: OptimizerSettings) -> list[torch.optim.Optimizer]:
        """The optimisers of `build`, in which the encodings' parameters have groups of their own if their rate differs.

        With a factor of 1 the groups stay as they were: resume files count on their order.
        """
        optimizers = self.build(parameters, settings)
        if settings.position_lr == 1:
            return optimizers
        chosen = {id(value) for name, value in parameters.items() if name.startswith(POSITIONS)}
        for optimizer in optimizers:
            for group in list(optimizer.param_groups):
                moved = [value for value in group["params"] if id(value) in chosen]
                if moved:
                    group["params"] = [value for value in group["params"] if id(value) not in chosen]
                    optimizer.add_param_group({**group, "params": moved, "lr": group["lr"] * settings.position_lr})
        return optimizers

    def rates(self, lr: float) -> dict[str, float]:
        """The full learning rates by the name under which a curve shows them; the schedule applies to each.

        Args:
            lr: `train.lr`.
        """
        return {"train/lr": lr}

    @abstractmethod
    def state_bytes(self, name: str, shape: Shape) -> int:
        """Bytes of optimiser state for each element of the parameter `name`."""


class Schedule(Kind):
    """A learning-rate schedule: what the rate does after the warm-up."""

    BARE: ClassVar[bool] = True

    @abstractmethod
    def factor(self, done: float) -> float:
        """The rate as a fraction of the full one, where `done` in [0, 1) is the share of the steps after warm-up."""

    def rate(self, lr: float, step: int, *, steps: int, warmup: int) -> float:
        """The learning rate of step `step`, counted from 1 to `steps`, for the full rate `lr`.

        It rises linearly during the first `warmup` steps.
        """
        if step <= warmup:
            return lr * step / warmup
        return lr * self.factor((step - 1 - warmup) / max(1, steps - warmup))


def is_decayed(name: str, shape: Shape) -> bool:
    """Weight decay applies: to matrices, but not to position parameters, biases and norms."""
    return len(shape) > 1 and not name.startswith(POSITIONS)


def is_hidden_matrix(name: str, shape: Shape) -> bool:
    """A weight matrix of a block, and not of the embedding, the output layer or an encoding."""
    return len(shape) == 2 and name.startswith("blocks.")
