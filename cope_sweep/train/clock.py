"""How long a run takes, over all its attempts, and how fast its steps are."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from cope_sweep.train.trainer import Trainer


class Clock:
    """Starts when it is made; `start` says that training steps begin.

    A device works behind the program's back, so every reading waits for it.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._began_s = self._started_s = now_s()
        self._apart_s = self._warm_s = 0.0
        self._warm_tokens = 0
        self._earlier: Mapping[str, float] = {}

    def start(self, trainer: Trainer, earlier: Mapping[str, float]) -> None:
        """The trainer takes its first step now; `earlier` is what `spent` was when its checkpoint was written."""
        self._trainer, self._earlier = trainer, earlier
        self._started_s = self._now_s()

    def warm(self) -> None:
        """The first step is done. It may have built kernels, so speed counts from here."""
        self._warm_s, self._warm_tokens = self._training_s(), self._trainer.tokens

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What is done within is no training step."""
        training_s = self._training_s()
        try:
            yield
        finally:
            self._apart_s += self._training_s() - training_s

    def spent(self) -> dict[str, float]:
        """Seconds, earlier attempts' included: `train_s` in training steps, `wall_s` in all."""
        mine = {"train_s": self._training_s(), "wall_s": self._now_s() - self._began_s}
        return {name: round(self._earlier.get(name, 0.0) + seconds, 3) for name, seconds in mine.items()}

    def tokens_per_s(self) -> float:
        """Tokens through training steps, in a second of them; the first step counts where there is no other."""
        tokens, seconds = self._trainer.tokens, self._training_s()
        if tokens > self._warm_tokens:
            tokens, seconds = tokens - self._warm_tokens, seconds - self._warm_s
        return round(tokens / seconds, 1) if tokens else 0.0

    def _training_s(self) -> float:
        """In steps, by this attempt."""
        self._trainer.wait()
        return self._now_s() - self._started_s - self._apart_s
