"""Evaluates a model in training on its task's test sets, with all workers of the run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from cope_sweep.config import RunSpec
from cope_sweep.model import Transformer
from cope_sweep.tasks import Batch
from cope_sweep.train.batches import in_parts, own_range, own_sequences, to_device
from cope_sweep.train.collective import sum_over_workers
from cope_sweep.train.evaluate import EvaluationSums, Predictions, metrics
from cope_sweep.train.runtime import Runtime

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

    def evaluate_windows(self, context: int, sequences: int) -> dict[str, float]:
        """The task's metrics on windows of `context` tokens, named `test/perplexity@2048`.

        The windows cover as much of each test set's text as `sequences` sequences do. A forward pass takes no more
        tokens than in training, but at least one window.
        Raises ValueError where an encoding has no position for so many tokens.
        """
        task, runtime = self._spec.task, self._runtime
        stride = self._spec.evaluate.stride or context
        share = runtime.micro_batch or math.ceil(self._spec.train.batch / runtime.world_size)
        at_once = max(1, share * task.length("train") // context)
        measured: dict[str, float] = {}
        for split in task.TESTS:
            windows = task.windows(split, context, stride)
            # The first window scores `context` tokens, each further one `stride`.
            wanted = min(1 + math.ceil(max(0, sequences * task.length(split) - context) / stride), len(windows))
            size = at_once * runtime.world_size
            own = (own_range(start, min(size, wanted - start), runtime) for start in range(0, wanted, size))
            sums = self._sums(self._on_device(windows[each.start : each.stop], at_once) for each in own)
            measured |= {f"{split}/{name}@{context}": value for name, value in metrics(sums, task.METRICS).items()}
        return measured

    def evaluate_longer(self, times: int, sequences: int) -> dict[str, float]:
        """The task's metrics on sequences of the first test set that are so many times as long.

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
        """The worker's share of `count` test sequences; of those of every evaluation, from memory."""
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
            inputs_NT, targets_NT, answers_NT = (to_device(torch.from_numpy(each), self._device) for each in arrays)
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
                sums.add_predictions(Predictions(nats, most_probable_NT, targets_NT, answers_NT))
        return sums.result(partial(sum_over_workers, self._runtime))
