"""Evaluates a model in training on its task's test sets: sums over its predictions, and metrics computed from them.

Every sum and every metric is declared here; a task names the metrics that it wants (`METRICS`). Sums are completed over
all batches and workers before any division, so a metric weighs every target, answer or word alike.

Shapes: N sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cope_sweep.config import RunSpec
from cope_sweep.config.run import POSITION_PERPLEXITY
from cope_sweep.model import Transformer
from cope_sweep.tasks import IGNORED, Batch
from cope_sweep.train.batches import in_parts, own_range, own_sequences, to_device
from cope_sweep.train.runtime import Runtime
from cope_sweep.train.workers import sum_over_workers

Sums = Mapping[str, float]


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
"""The function of the sums that computes each metric."""


PREDICTION_SUMS = ("nats", "wrong_answers", "wrong_sequences")
"""Sums over the model's predictions. All other sums are over batches alone."""


class EvaluationSums:
    """Adds up the sums over this worker's share of a test set.

    Of batches: `targets`, `answers`, `sequences`, the units of the batches (`words`, `bytes`, `cut`) under their own
    names, and `majority_answers`, the number of answers that equal the most frequent one. Of predictions:
    `PREDICTION_SUMS`.
    """

    def __init__(self, vocabulary_size: int, device: torch.device) -> None:
        self._batch_sums: Counter[str] = Counter()
        self._answers_V = np.zeros(vocabulary_size, dtype=np.int64)
        # On the device, so that adding a batch does not wait for the device.
        self._prediction_sums = torch.zeros(len(PREDICTION_SUMS), dtype=torch.float64, device=device)

    def add_batch(self, batch: Batch) -> None:
        """Add the sums over a batch. Empty batches count too: all workers need the same names of units."""
        targets, answers = int((batch.targets_NT != IGNORED).sum()), int(batch.answers_NT.sum())
        self._batch_sums.update(targets=targets, answers=answers, sequences=len(batch))
        self._batch_sums.update({unit: int(count_N.sum()) for unit, count_N in batch.units_N.items()})
        self._answers_V += np.bincount(batch.targets_NT[batch.answers_NT], minlength=len(self._answers_V))

    def add_predictions(self, nats: Tensor, most_probable_NT: Tensor, targets_NT: Tensor, answers_NT: Tensor) -> None:
        """Add the sums over the predictions for some sequences.

        Args:
            nats: The cross-entropy, summed over the targets, without dimensions.
            most_probable_NT: The most probable token for each target.
            targets_NT: The targets.
            answers_NT: bool: the target is an answer, which the error rates count.
        """
        wrong_NT = (most_probable_NT != targets_NT) & answers_NT
        sums = (nats, wrong_NT.sum(), wrong_NT.any(-1).sum())
        self._prediction_sums += torch.stack([total.double() for total in sums])

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


TEST_SEED = 0
"""Test sets are the same sequences for every run, whatever its seed."""

KEPT_BYTES = 2**26
"""Test sequences up to this size stay on the device from one evaluation to the next."""

TestPart = tuple[Tensor, Tensor, Tensor]
"""Inputs, targets and answers of one forward pass, on the device."""
TestShare = tuple[Batch, list[TestPart]]
"""A worker's share of some test sequences, on the host and in parts on the device."""


class Evaluator:
    """Computes the metrics of a run's test sets. Every rank has to call its methods with the same arguments."""

    def __init__(self, spec: RunSpec, runtime: Runtime, model: Transformer) -> None:
        self._spec, self._runtime, self._model = spec, runtime, model
        self._device = torch.device(runtime.device)
        self._kept: dict[tuple[str, int, int], TestShare] = {}
        self._kept_bytes = 0

    def evaluate(self, sequences: int) -> dict[str, float]:
        """The task's metrics on the first `sequences` sequences of each test set, or on all of a shorter set."""
        measured: dict[str, float] = {}
        for split in self._spec.test_sets:
            sums = self._sums(self._test_shares(split, sequences))
            measured |= {f"{split}/{name}": value for name, value in metrics(sums, self._spec.task.METRICS).items()}
        return measured

    def sample_sequences(self, count: int) -> list[Tensor]:
        """At most `count` sequences, (T,), of this worker's share of the first test set, up to their last target.

        Sequences without a target are left out.
        """
        share = next(self._test_shares(self._spec.test_sets[0], self._spec.evaluate.sequences))
        inputs_NT, targets_NT, _ = share[1][0]
        places = [(targets_T != IGNORED).nonzero() for targets_T in targets_NT[:count]]
        found = zip(inputs_NT, places, strict=False)
        return [tokens_T[: int(places_A[-1]) + 1] for tokens_T, places_A in found if len(places_A)]

    def evaluate_windows(self, context: int, sequences: int) -> dict[str, float]:
        """The task's metrics on windows of `context` tokens, named `test/perplexity@2048`.

        The windows cover as much of each test set's text as `sequences` sequences do. A forward pass takes no more
        tokens than in training, but at least one window.
        Raises ValueError where an encoding has no position for so many tokens.
        """
        task = self._spec.task
        stride = self._spec.evaluate.stride or context
        measured: dict[str, float] = {}
        for split in task.TESTS:
            sums = self._sums(self._window_shares(split, context, stride, sequences))
            measured |= {f"{split}/{name}@{context}": value for name, value in metrics(sums, task.METRICS).items()}
        return measured

    def _window_shares(self, split: str, context: int, stride: int, sequences: int) -> Iterator[TestShare]:
        """The worker's shares of the windows that cover as much of a test set's text as `sequences` sequences do."""
        task, runtime = self._spec.task, self._runtime
        share = runtime.micro_batch or math.ceil(self._spec.train.batch / runtime.world_size)
        at_once = max(1, share * task.length("train") // context)
        windows = task.windows(split, context, stride)
        # The first window scores `context` tokens, each further one `stride`.
        wanted = min(1 + math.ceil(max(0, sequences * task.length(split) - context) / stride), len(windows))
        size = at_once * runtime.world_size
        for start in range(0, wanted, size):
            own = own_range(start, min(size, wanted - start), runtime)
            yield self._on_device(windows[own.start : own.stop], at_once)

    def evaluate_positions(self, context: int, sequences: int) -> dict[str, float]:
        """The perplexity by place in windows of `context` tokens: `test/position_perplexity@64` for 33 to 64.

        The windows are disjoint, and cover as much of each test set's text as `sequences` sequences do.
        Raises ValueError where an encoding has no position for so many tokens.
        """
        task, ends = self._spec.task, self._spec.evaluate.position_ends
        measured: dict[str, float] = {}
        for split in task.TESTS:
            sums = torch.zeros(2, len(ends), dtype=torch.float64, device=self._device)
            for share in self._window_shares(split, context, context, sequences):
                self._add_stretches(share[1], ends, sums)
            nats, targets = sum_over_workers(self._runtime, sums).tolist()
            for end, nat, target in zip(ends, nats, targets, strict=True):
                measured[f"{split}/{POSITION_PERPLEXITY}@{end}"] = _exp(nat / max(1, target))
        return measured

    @torch.no_grad()
    def _add_stretches(self, parts: Iterable[TestPart], ends: Sequence[int], sums: Tensor) -> None:
        """Add the nats and the number of targets of each stretch of places to `sums`, (2, S)."""
        self._model.eval()
        for inputs_NT, targets_NT, _ in parts:
            with self._runtime.autocast():
                sums[0] += self._model.nats_of_stretches(inputs_NT, targets_NT, ends)
            counts_T = (targets_NT != IGNORED).sum(0).cumsum(0)
            totals = counts_T[torch.tensor(ends, device=counts_T.device) - 1]
            sums[1] += torch.diff(totals, prepend=totals.new_zeros(1))

    def evaluate_longer(self, times: int, sequences: int) -> dict[str, float]:
        """The task's metrics on sequences of the first test set that are `times` times as long.

        They are named `in_dist/token_error@4x`. A forward pass takes no more tokens than in training, but at least one
        sequence. Raises ValueError where an encoding has no position for so many tokens, or the task no such sequences.
        """
        task, runtime = self._spec.task.longer(times), self._runtime
        at_once = max(1, (runtime.micro_batch or math.ceil(self._spec.train.batch / runtime.world_size)) // times)
        size, split = at_once * runtime.world_size, task.TESTS[0]
        counts = ((start, min(size, sequences - start)) for start in range(0, sequences, size))
        own = (own_sequences(task, split, TEST_SEED, start, count, runtime) for start, count in counts)
        measured = metrics(self._sums(self._on_device(batch, at_once) for batch in own), task.METRICS)
        return {f"{split}/{name}@{times}x": value for name, value in measured.items()}

    def _test_shares(self, split: str, sequences: int) -> Iterator[TestShare]:
        """The worker's shares of the first `sequences` sequences of a test set, or of all of a shorter one."""
        size = self._spec.train.batch
        for start in range(0, sequences, size):
            count = min(size, sequences - start)
            share = self._test_share(split, start, count)
            yield share
            if len(share[0]) < len(own_range(start, count, self._runtime)):
                return

    def _test_share(self, split: str, start: int, count: int) -> TestShare:
        """The worker's share of `count` test sequences, from memory if every evaluation uses them."""
        key = split, start, count
        if key in self._kept:
            return self._kept[key]
        batch = own_sequences(self._spec.task, split, TEST_SEED, start, count, self._runtime)
        share = self._on_device(batch, self._runtime.micro_batch)
        size_bytes = sum(tensor.nbytes for part in share[1] for tensor in part)
        if start + count <= self._spec.evaluate.sequences and self._kept_bytes + size_bytes <= KEPT_BYTES:
            self._kept[key] = share
            self._kept_bytes += size_bytes
        return share

    def _on_device(self, share: Batch, at_once: int | None) -> TestShare:
        def tensors(part: Batch) -> TestPart:
            arrays = (part.inputs_NT, part.targets_NT, part.answers_NT)
            inputs_NT, targets_NT, answers_NT = (to_device(torch.from_numpy(array), self._device) for array in arrays)
            return inputs_NT, targets_NT, answers_NT

        return share, [tensors(part) for part in in_parts(share, at_once)]

    @torch.no_grad()
    def _sums(self, shares: Iterable[TestShare]) -> dict[str, float]:
        """The sums over the model's predictions for the shares, over all workers."""
        self._model.eval()
        sums = EvaluationSums(self._model.vocabulary_size, self._device)
        for batch, parts in shares:
            sums.add_batch(batch)
            for inputs_NT, targets_NT, answers_NT in parts:
                with self._runtime.autocast():
                    nats, most_probable_NT = self._model.predict(inputs_NT, targets_NT)
                sums.add_predictions(nats, most_probable_NT, targets_NT, answers_NT)
        return sums.result(partial(sum_over_workers, self._runtime))
