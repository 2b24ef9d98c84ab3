"""Sums over a model's predictions on a test set, and the metrics that are computed from them.

Every sum and every metric is declared here; a task names the metrics that it wants (`METRICS`). Sums are completed over
all batches and workers before any division, so a metric weighs every target, answer or word alike.

Shapes: N sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cope_sweep.tasks import IGNORED, Batch

Sums = Mapping[str, float]


@dataclass(frozen=True)
class Predictions:
    """The model's predictions for some sequences."""

    nats: Tensor
    """The cross-entropy, summed over the targets, without dimensions."""
    most_probable_NT: Tensor
    """The most probable token in place of each target."""
    targets_NT: Tensor
    answers_NT: Tensor
    """bool: the target is an answer, which the error rates count."""

    def wrong(self) -> Tensor:
        """Whether each token is an answer that the most probable token misses; bool, (N, T)."""
        return (self.most_probable_NT != self.targets_NT) & self.answers_NT


BATCH_SUMS: dict[str, Callable[[Batch], int]] = {
    "targets": lambda batch: int((batch.targets_NT != IGNORED).sum()),
    "answers": lambda batch: int(batch.answers_NT.sum()),
    "sequences": len,
}
"""Sums over batches alone. The units of a batch (`words`, `bytes`, `cut`) are summed as well, under their own names,
and `majority_answers` is the number of answers that equal the most frequent one."""

PREDICTION_SUMS: dict[str, Callable[[Predictions], Tensor]] = {
    "nats": lambda predictions: predictions.nats,
    "wrong_answers": lambda predictions: predictions.wrong().sum(),
    "wrong_sequences": lambda predictions: predictions.wrong().any(-1).sum(),
}
"""Sums over the model's predictions, as tensors without dimensions."""

METRICS: dict[str, Callable[[Sums], float]] = {
    # Cross-entropy: nats per target.
    "loss": lambda sums: _ratio(sums, "nats", "targets"),
    "perplexity": lambda sums: _exp(_ratio(sums, "nats", "targets")),
    "word_perplexity": lambda sums: _exp(_ratio(sums, "nats", "words")),
    "bits_per_byte": lambda sums: _ratio(sums, "nats", "bytes") / math.log(2),
    # Wrong answers, in percent.
    "token_error": lambda sums: 100 * _ratio(sums, "wrong_answers", "answers"),
    # The error of always giving the most frequent answer, in percent.
    "majority_baseline_error": lambda sums: (
        100 * (sums.get("answers", 0) - sums.get("majority_answers", 0)) / max(1, sums.get("answers", 0))
    ),
    # Sequences with at least one wrong answer, in percent.
    "sequence_error": lambda sums: 100 * _ratio(sums, "wrong_sequences", "sequences"),
    # Sequences that were truncated to the context, in percent.
    "cut": lambda sums: 100 * _ratio(sums, "cut", "sequences"),
}
"""How each metric is computed from the sums."""


class EvaluationSums:
    """Adds up the sums over this worker's share of a test set."""

    def __init__(self, vocabulary_size: int, device: torch.device) -> None:
        self._batch_sums: Counter[str] = Counter()
        self._answers_V = np.zeros(vocabulary_size, dtype=np.int64)
        # On the device, so that adding a batch does not wait for the device.
        self._prediction_sums = torch.zeros(len(PREDICTION_SUMS), dtype=torch.float64, device=device)

    def add_batch(self, batch: Batch) -> None:
        """Add the sums over a batch. Empty batches count too: all workers need the same names of units."""
        self._batch_sums.update({name: compute(batch) for name, compute in BATCH_SUMS.items()})
        self._batch_sums.update({unit: int(count_N.sum()) for unit, count_N in batch.units_N.items()})
        self._answers_V += np.bincount(batch.targets_NT[batch.answers_NT], minlength=len(self._answers_V))

    def add_predictions(self, predictions: Predictions) -> None:
        """Add the sums over the predictions for some sequences."""
        sums = [compute(predictions).double() for compute in PREDICTION_SUMS.values()]
        self._prediction_sums += torch.stack(sums)

    def result(self, sum_over_workers: Callable[[Tensor], Tensor] = lambda vector: vector) -> dict[str, float]:
        """The sums by name; `sum_over_workers` adds the workers' vectors."""
        units = sorted(self._batch_sums)
        counts = np.concatenate(([self._batch_sums[name] for name in units], self._answers_V))
        vector = torch.cat((self._prediction_sums, torch.from_numpy(counts).to(self._prediction_sums)))
        values = sum_over_workers(vector).tolist()
        sums = dict(zip((*PREDICTION_SUMS, *units), values, strict=False))
        return sums | {"majority_answers": max(values[len(sums) :])}


def metrics(sums: Sums, names: Iterable[str]) -> dict[str, float]:
    """The metrics with these names. A metric with an empty denominator is 0; an overflow gives infinity."""
    return {name: METRICS[name](sums) for name in names}


def _ratio(sums: Sums, numerator: str, denominator: str) -> float:
    return sums.get(numerator, 0) / max(1, sums.get(denominator, 0))


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
