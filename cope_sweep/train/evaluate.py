"""What a model's predictions add up to, over batches and workers, and the metrics that the sums make.

    loss               nats / targets
    perplexity         exp(nats / targets)
    word_perplexity    exp(nats / words)
    bits_per_byte      nats / ln 2 / bytes
    token_error        wrong answers / answers, in %
    majority_baseline_error    what always giving the commonest answer would err, in %
    sequence_error     sequences with any wrong answer / sequences, in %
    cut                sequences that lost a part to the context / sequences, in %

Sums come before any division, so a metric weighs every target (answer, word, …) alike, however sequences were batched.

Shapes: N sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from cope_sweep.model import next_token_loss
from cope_sweep.tasks import IGNORED, Batch


class Totals:
    """Sums over the sequences of a test set that this worker is shown."""

    def __init__(self, vocabulary_size: int, device: torch.device) -> None:
        self._counts: Counter[str] = Counter()
        self._answers_V = np.zeros(vocabulary_size, dtype=np.int64)
        self._scores = torch.zeros(3, dtype=torch.float64, device=device)
        """Nats, wrong answers, sequences with any: on the device, and fetched once, at the end."""

    def count(self, batch: Batch) -> None:
        """Count in what a batch asks, be it empty: every worker must have heard of the same units."""
        self._counts.update(
            targets=int((batch.targets_NT != IGNORED).sum()),
            answers=int(batch.answers_NT.sum()),
            sequences=len(batch),
            **{unit: int(count_N.sum()) for unit, count_N in batch.units_N.items()},
        )
        self._answers_V += np.bincount(batch.targets_NT[batch.answers_NT], minlength=len(self._answers_V))

    def score(self, logits_NTV: Tensor, targets_NT: Tensor, answers_NT: Tensor) -> None:
        """Add what the model says of all or some of a batch's sequences."""
        wrong_NT = (logits_NTV.argmax(-1) != targets_NT) & answers_NT
        scores = (next_token_loss(logits_NTV, targets_NT), wrong_NT.sum(), wrong_NT.any(-1).sum())
        self._scores += torch.stack([score.double() for score in scores])

    def sums(self, over_workers: Callable[[Tensor], Tensor] = lambda mine: mine) -> dict[str, float]:
        """The sums by name; `over_workers` adds up the like vectors of all workers."""
        names = sorted(self._counts)
        counted = np.concatenate(([self._counts[name] for name in names], self._answers_V))
        together = over_workers(torch.cat((self._scores, torch.from_numpy(counted).to(self._scores)))).tolist()
        sums = dict(zip(("nats", "wrong", "wrong_sequences", *names), together, strict=False))
        return sums | {"uncommon": sums.get("answers", 0.0) - max(together[len(sums) :])}


def metrics(sums: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    """The metrics of these names. One whose denominator counted nothing is 0; an overflow is infinite."""
    return {name: METRICS[name](sums) for name in names}


def _ratio(sums: Mapping[str, float], above: str, below: str) -> float:
    return sums.get(above, 0) / max(1, sums.get(below, 0))


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


METRICS: dict[str, Callable[[Mapping[str, float]], float]] = {
    "loss": lambda sums: _ratio(sums, "nats", "targets"),
    "perplexity": lambda sums: _exp(_ratio(sums, "nats", "targets")),
    "word_perplexity": lambda sums: _exp(_ratio(sums, "nats", "words")),
    "bits_per_byte": lambda sums: _ratio(sums, "nats", "bytes") / math.log(2),
    "token_error": lambda sums: 100 * _ratio(sums, "wrong", "answers"),
    "majority_baseline_error": lambda sums: 100 * _ratio(sums, "uncommon", "answers"),
    "sequence_error": lambda sums: 100 * _ratio(sums, "wrong_sequences", "sequences"),
    "cut": lambda sums: 100 * _ratio(sums, "cut", "sequences"),
}
"""How each metric that a task may name is made of the sums."""
