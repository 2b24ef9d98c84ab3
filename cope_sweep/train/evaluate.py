"""Evaluates a model in training on its task's test sets: sums over its predictions, and metrics computed from them.

Every sum and every metric is declared here; a task names the metrics that it wants (`Task.metrics`). Sums are completed
over all batches and workers before any division, so a metric weighs every target, answer or word alike.

Shapes: N sequences, T tokens, V vocabulary, G partial errors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cope_sweep.config import RunSpec
from cope_sweep.config.run import POSITION_PERPLEXITY
from cope_sweep.model import Transformer, next_token_loss, perplexity
from cope_sweep.tasks import IGNORED, Batch, Task
from cope_sweep.tasks.base import BLOCK
from cope_sweep.train.batches import in_parts, own_range, own_sequences, to_device
from cope_sweep.train.runtime import Runtime
from cope_sweep.train.workers import sum_over_workers

Sums = Mapping[str, float]


METRICS: dict[str, Callable[[Sums], float]] = {
    # Cross-entropy: nats per target.
    "loss": lambda sums: _ratio(sums, "nats", "targets"),
    "perplexity": lambda sums: perplexity(_ratio(sums, "nats", "targets")),
    # A text without spaces has a word per line, and e to the power of a line's nats may exceed the largest float.
    "word_perplexity": lambda sums: math.exp(_ratio(sums, "nats", "words")),
    "bits_per_byte": lambda sums: _ratio(sums, "nats", "bytes") / math.log(2),
    # Wrong answers, in percent.
    "token_error": lambda sums: 100 * _ratio(sums, "wrong_answers", "answers"),
    # The error of always giving the most frequent answer, in percent.
    "majority_baseline_error": lambda sums: (
        100 * (sums.get("answers", 0) - sums.get("majority_answers", 0)) / sums.get("answers", 0)
    ),
    # Sequences with at least one wrong answer, in percent. Without any answer it counts nothing, as the others.
    "sequence_error": lambda sums: (
        100 * _ratio(sums, "wrong_sequences", "sequences" if sums.get("answers") else "answers")
    ),
    # Sequences that were truncated to the context, in percent.
    "cut": lambda sums: 100 * _ratio(sums, "cut", "sequences"),
    # 100 % − F1 of the probability of valid tokens, and of the share of them that are more probable than all others
    # together (`f1_sums`).
    "f1_error": lambda sums: 100 * (1 - _f1(_ratio(sums, "valid_mass", "targets"), _ratio(sums, "beats", "targets"))),
}
"""The function of the sums that computes each metric. A task's partial errors have `100 * wrong / counted`.

It raises ZeroDivisionError where nothing is counted, and OverflowError where the value is too large. `perplexity` is
infinite instead, which fails the run: training has diverged.
"""


PREDICTION_SUMS = ("nats", "wrong_answers", "wrong_sequences", "valid_mass", "beats")
"""Sums over the model's predictions, to which each partial error adds its own. All others are over batches alone."""


class EvaluatedPart(NamedTuple):
    """What one forward pass is measured on, on the device."""

    inputs_NT: Tensor
    targets_NT: Tensor
    answers_NT: Tensor
    """bool: the target is an answer, which the error rates count."""
    counted_GNT: Tensor | None
    """bool: the targets that each partial error counts; None if the task has none."""
    valid_NTV: Tensor | None
    """bool: the tokens that may follow; None if the task does not tell."""

    @property
    def nbytes(self) -> int:
        """Memory of all tensors."""
        return sum(tensor.nbytes for tensor in self if tensor is not None)


class Predictions(NamedTuple):
    """What a model predicts for an `EvaluatedPart`."""

    nats: Tensor
    """The cross-entropy, summed over the targets, without dimensions."""
    most_probable_NT: Tensor
    """The most probable token for each target."""
    chosen_GNT: Tensor | None = None
    """The token that each partial error takes; None: all take `most_probable_NT`."""
    f1: tuple[Tensor, Tensor] | None = None
    """The two sums of `f1_sums`."""


class EvaluationSums:
    """Adds up the sums over this worker's share of a test set.

    Of batches: `targets`, `answers`, `sequences`, the units of the batches (`words`, `bytes`, `cut`) under their own
    names, and `majority_answers`, the number of answers that equal the most frequent one. Of predictions:
    `PREDICTION_SUMS`, and for each of the task's partial errors the targets that it counts, and the wrong ones.
    """

    def __init__(self, vocabulary_size: int, device: torch.device, partial_errors: Sequence[str] = ()) -> None:
        self._batch_sums: Counter[str] = Counter()
        self._answers_V = np.zeros(vocabulary_size, dtype=np.int64)
        of_parts = [total(name) for total in (_counted, _wrong) for name in partial_errors]
        self._names = (*PREDICTION_SUMS, *of_parts)
        # On the device, so that adding a batch does not wait for the device.
        self._prediction_sums = torch.zeros(len(self._names), dtype=torch.float64, device=device)

    def add_batch(self, batch: Batch) -> None:
        """Add the sums over a batch. Empty batches count too: all workers need the same names of units."""
        targets, answers = int((batch.targets_NT != IGNORED).sum()), int(batch.answers_NT.sum())
        self._batch_sums.update(targets=targets, answers=answers, sequences=len(batch))
        self._batch_sums.update({unit: int(count_N.sum()) for unit, count_N in batch.units_N.items()})
        self._answers_V += np.bincount(batch.targets_NT[batch.answers_NT], minlength=len(self._answers_V))

    def add_predictions(self, part: EvaluatedPart, predictions: Predictions) -> None:
        """Add the sums over the predictions for some sequences."""
        nats, most_probable_NT, chosen_GNT, f1 = predictions
        is_wrong_NT = most_probable_NT != part.targets_NT
        wrong_NT = is_wrong_NT & part.answers_NT
        sums = [nats, wrong_NT.sum(), wrong_NT.any(-1).sum(), *(f1 or (nats.new_zeros(()), nats.new_zeros(())))]
        if part.counted_GNT is not None:
            is_wrong = is_wrong_NT if chosen_GNT is None else chosen_GNT != part.targets_NT
            sums += [*part.counted_GNT.sum((1, 2)), *(part.counted_GNT & is_wrong).sum((1, 2))]
        self._prediction_sums += torch.stack([total.double() for total in sums])

    def result(self, sum_over_workers: Callable[[Tensor], Tensor] = lambda vector: vector) -> dict[str, float]:
        """The sums by name; `sum_over_workers` adds the workers' vectors."""
        units = sorted(self._batch_sums)
        counts = np.concatenate(([self._batch_sums[name] for name in units], self._answers_V))
        vector = torch.cat((self._prediction_sums, torch.from_numpy(counts).to(self._prediction_sums)))
        values = sum_over_workers(vector).tolist()
        sums = dict(zip((*self._names, *units), values, strict=False))
        return sums | {"majority_answers": max(values[len(sums) :])}


def metrics(sums: Sums, names: Iterable[str]) -> dict[str, float]:
    """The metrics with these names, without those that count nothing or cannot be represented (`METRICS`)."""
    measured = {}
    for name in names:
        with suppress(ZeroDivisionError, OverflowError):
            measured[name] = METRICS[name](sums) if name in METRICS else _partial_error(sums, name)
    return measured


def f1_sums(logits_NTV: Tensor, targets_NT: Tensor, valid_NTV: Tensor) -> tuple[Tensor, Tensor]:
    """The probability of valid tokens, and the share of them that are more probable than all other tokens together.

    Both are summed over all places with a target (MapFormer, 2511.19279, B.4, calls them P_val and BT).
    """
    p_NTV = logits_NTV.float().softmax(-1)
    counted_NT = targets_NT != IGNORED
    valid_mass_NT = (p_NTV * valid_NTV).sum(-1)
    invalid_mass_NT = (p_NTV * ~valid_NTV).sum(-1)
    beats_NT = ((p_NTV > invalid_mass_NT[..., None]) & valid_NTV).sum(-1) / valid_NTV.sum(-1)
    return valid_mass_NT[counted_NT].double().sum(), beats_NT[counted_NT].double().sum()


def _counted(name: str) -> str:
    return f"{name}, counted"


def _wrong(name: str) -> str:
    return f"{name}, wrong"


def _partial_error(sums: Sums, name: str) -> float:
    return 100 * _ratio(sums, _wrong(name), _counted(name))


def _f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0


def _ratio(sums: Sums, numerator: str, denominator: str) -> float:
    return sums.get(numerator, 0) / sums.get(denominator, 0)


TEST_SEED = 0
"""Test sets are the same sequences for every run, whatever its seed."""

KEPT_BYTES = 2**26
"""Test sequences up to this size stay on the device from one evaluation to the next."""


TestShare = tuple[Batch, list[EvaluatedPart]]
"""A worker's share of some test sequences, on the host and in parts on the device."""


class Evaluator:
    """Computes the metrics of a run's test sets. Every rank has to call its methods with the same arguments."""

    def __init__(self, spec: RunSpec, runtime: Runtime, model: Transformer) -> None:
        self._spec, self._runtime, self._model = spec, runtime, model
        self._device = torch.device(runtime.device)
        self._kept: dict[tuple[str, int, int], TestShare] = {}
        self._kept_bytes = 0

    def evaluate(self, sequences: int) -> dict[str, float]:
        """The task's metrics on the first `sequences` sequences of each test set, or on all of a shorter set.

        Without those that count nothing there, such as errors at a distance that no sequence has.
        """
        measured: dict[str, float] = {}
        for split in self._spec.test_sets:
            sums = self._sums(self._test_shares(split, sequences), split)
            measured |= {
                f"{split}/{name}": value for name, value in metrics(sums, self._spec.task.metrics(split)).items()
            }
        return measured

    def sample_sequences(self, count: int) -> list[Tensor]:
        """At most `count` sequences, (T,), of this worker's share of the first test set, up to their last target.

        Sequences without a target are left out.
        """
        _, parts = next(self._test_shares(self._spec.test_sets[0], self._spec.evaluate.sequences))
        rows = ((tokens_T, targets_T) for part in parts for tokens_T, targets_T in zip(part[0], part[1], strict=True))
        places = ((tokens_T, (targets_T != IGNORED).nonzero()) for tokens_T, targets_T in islice(rows, count))
        return [tokens_T[: int(places_A[-1]) + 1] for tokens_T, places_A in places if len(places_A)]

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
            sums = self._sums(self._window_shares(split, context, stride, sequences), split)
            named = metrics(sums, (name for name in task.metrics(split) if "@" not in name))
            measured |= {f"{split}/{name}@{context}": value for name, value in named.items()}
        return measured

    def _window_shares(self, split: str, context: int, stride: int, sequences: int) -> Iterator[TestShare]:
        """The worker's shares of the windows that cover as much of a test set's text as `sequences` sequences do."""
        task, runtime = self._spec.task, self._runtime
        at_once = max(1, runtime.at_once(self._spec.train.batch) * task.length("train") // context)
        windows = task.windows(split, context, stride)
        # The first window scores `context` tokens, each further one `stride`.
        wanted = min(1 + math.ceil(max(0, task.covered(split, sequences) - context) / stride), len(windows))
        size = at_once * runtime.world_size
        for start in range(0, wanted, size):
            own = own_range(start, min(size, wanted - start), runtime)
            yield self._on_device(windows[own.start : own.stop], at_once, split)

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
                if target:
                    measured[f"{split}/{POSITION_PERPLEXITY}@{end}"] = perplexity(nat / target)
        return measured

    @torch.no_grad()
    def _add_stretches(self, parts: Iterable[EvaluatedPart], ends: Sequence[int], sums: Tensor) -> None:
        """Add the nats and the number of targets of each stretch of places to `sums`, (2, S)."""
        self._model.eval()
        for part in parts:
            with self._runtime.autocast():
                sums[0] += self._model.nats_of_stretches(part.inputs_NT, part.targets_NT, ends)
            counts_T = (part.targets_NT != IGNORED).sum(0).cumsum(0)
            totals = counts_T[torch.tensor(ends, device=counts_T.device) - 1]
            sums[1] += torch.diff(totals, prepend=totals.new_zeros(1))

    def evaluate_longer(self, times: int, sequences: int) -> dict[str, float]:
        """The task's metrics on sequences of the first test set that are `times` times as long.

        They are named `in_dist/token_error@4x`. A forward pass takes no more tokens than in training, but at least one
        sequence. Raises ValueError where an encoding has no position for so many tokens, or the task no such sequences.
        """
        task, runtime = self._spec.task.longer(times), self._runtime
        at_once = max(1, runtime.at_once(self._spec.train.batch) // times)
        # Tasks generate whole blocks: asked for fewer sequences, they would generate the same block again and again.
        size, split = max(at_once, BLOCK) * runtime.world_size, task.TESTS[0]
        counts = ((start, min(size, sequences - start)) for start in range(0, sequences, size))
        own = (own_sequences(task, split, TEST_SEED, start, count, runtime) for start, count in counts)
        names = [name for name in task.metrics(split) if "@" not in name]
        measured = metrics(
            self._sums((self._on_device(batch, at_once, split, task) for batch in own), split, task), names
        )
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
        share = self._on_device(batch, self._runtime.micro_batch, split)
        size_bytes = sum(part.nbytes for part in share[1])
        if start + count <= self._spec.evaluate.sequences and self._kept_bytes + size_bytes <= KEPT_BYTES:
            self._kept[key] = share
            self._kept_bytes += size_bytes
        return share

    def _on_device(self, share: Batch, at_once: int | None, split: str, task: Task | None = None) -> TestShare:
        task = task or self._spec.task

        names = task.partial_errors(split)

        def on_device(array: np.ndarray) -> Tensor:
            return to_device(torch.from_numpy(array), self._device)

        def tensors(part: Batch) -> EvaluatedPart:
            valid_NTV = task.valid_next(part.inputs_NT)
            counted = task.counted(part, split) if names else {}
            return EvaluatedPart(
                on_device(part.inputs_NT),
                on_device(part.targets_NT),
                on_device(part.answers_NT),
                on_device(np.stack([counted[name] for name in names])) if names else None,
                None if valid_NTV is None else on_device(valid_NTV),
            )

        return share, [tensors(part) for part in in_parts(share, at_once)]

    @torch.no_grad()
    def _sums(self, shares: Iterable[TestShare], split: str, task: Task | None = None) -> dict[str, float]:
        """The sums over the model's predictions for the shares, over all workers."""
        task = task or self._spec.task
        choices = [task.choices(name) for name in ("token_error", *task.partial_errors(split))]
        self._model.eval()
        sums = EvaluationSums(self._model.vocabulary_size, self._device, task.partial_errors(split))
        for batch, parts in shares:
            sums.add_batch(batch)
            for part in parts:
                sums.add_predictions(part, self._predictions(part, choices))
        return sums.result(partial(sum_over_workers, self._runtime))

    def _predictions(self, part: EvaluatedPart, choices: Sequence[Sequence[int]]) -> Predictions:
        """The model's predictions.

        `choices` are the ids among which answers are chosen, or none for all ids: those of the token error, and of each
        partial error.
        """
        with self._runtime.autocast():
            if not any(choices) and part.valid_NTV is None:
                return Predictions(*self._model.predict(part.inputs_NT, part.targets_NT))
            logits_NTV = self._model(part.inputs_NT)
            nats = next_token_loss(logits_NTV, part.targets_NT)
        chosen_NT, *of_parts = (_most_probable(logits_NTV, among) for among in choices)
        chosen_GNT = torch.stack(of_parts) if of_parts else None
        f1 = None if part.valid_NTV is None else f1_sums(logits_NTV, part.targets_NT, part.valid_NTV)
        return Predictions(nats, chosen_NT, chosen_GNT, f1)


def _most_probable(logits_NTV: Tensor, among: Sequence[int]) -> Tensor:
    """The most probable of some ids, or of all of them if none are named, (N, T)."""
    if not among:
        return logits_NTV.argmax(-1)
    ids = torch.tensor(among, device=logits_NTV.device)
    return ids[logits_NTV[..., ids].argmax(-1)]
