"""The time that a run takes over all its attempts, and the speed of its training steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from cope_sweep.train.trainer import Trainer


class Clock:
    """Measures a run's attempt from the clock's creation; `start` marks the first training step.

    A device computes asynchronously, so every reading waits for it.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._created_s = self._started_s = now_s()
        self._paused_s = self._warm_up_s = 0.0
        self._warm_up_tokens = 0
        self._earlier: Mapping[str, float] = {}

    def start(self, trainer: Trainer, earlier: Mapping[str, float]) -> None:
        """Training starts now; `earlier` are the `durations` that were stored with the trainer's state."""
        self._trainer, self._earlier = trainer, earlier
        self._started_s = self._now_s()

    def end_warm_up(self) -> None:
        """Exclude the steps so far from the speed: the first step may build kernels."""
        self._warm_up_s, self._warm_up_tokens = self._training_s(), self._trainer.tokens

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time within the block from the training time."""
        training_s = self._training_s()
        try:
            yield
        finally:
            self._paused_s += self._training_s() - training_s

    def durations(self) -> dict[str, float]:
        """Seconds over all attempts: `train_s` in training steps, `wall_s` in total."""
        seconds = {"train_s": self._training_s(), "wall_s": self._now_s() - self._created_s}
        return {name: round(self._earlier.get(name, 0.0) + value, 3) for name, value in seconds.items()}

    def tokens_per_s(self) -> float:
        """Tokens per second of training steps, without the warm-up unless there were no other steps."""
        tokens, seconds = self._trainer.tokens, self._training_s()
        if tokens > self._warm_up_tokens:
            tokens, seconds = tokens - self._warm_up_tokens, seconds - self._warm_up_s
        return round(tokens / seconds, 1) if tokens else 0.0

    def _training_s(self) -> float:
        """Seconds in training steps of this attempt."""
        self._trainer.wait()
        return self._now_s() - self._started_s - self._paused_s
