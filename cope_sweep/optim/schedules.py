"""Learning-rate schedules after the warm-up: constant, or falling to 0 at the end of the last step."""

import math
from typing import Literal

from cope_sweep.optim.base import Schedule


class Constant(Schedule):
    """The full rate until the end."""

    kind: Literal["constant"] = "constant"

    def factor(self, done: float) -> float:
        return 1.0


class Linear(Schedule):
    """A straight line down to 0."""

    kind: Literal["linear"] = "linear"

    def factor(self, done: float) -> float:
        return 1 - done


class Cosine(Schedule):
    """Half a cosine wave down to 0 (Loshchilov & Hutter 2017, without restarts)."""

    kind: Literal["cosine"] = "cosine"

    def factor(self, done: float) -> float:
        return (1 + math.cos(math.pi * done)) / 2
