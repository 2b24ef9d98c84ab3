"""Training one run, step by step, without Ray, MLflow and files.

All randomness is a function of (spec, seed, step). The state of a training is therefore: parameters, optimiser state,
step, and the losses that were not reported yet.

Shapes: N sequences, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cope_sweep.kernels import set_implementation
from cope_sweep.model import Transformer
from cope_sweep.spec import RunSpec
from cope_sweep.tasks import IGNORED, Batch
from cope_sweep.train.collective import sum_over_workers
from cope_sweep.train.evaluate import EvaluationSums, Predictions, metrics
from cope_sweep.train.runtime import Runtime

TEST_SEED = 0
"""Test sets are the same sequences for every run, whatever its seed."""


class Trainer:
    """A run in training: call `train_step` until `done`, and `evaluate` at any time.

    With `runtime.world_size` > 1, every rank of the torch.distributed group has a trainer and takes its share of each
    batch. With `runtime.micro_batch`, the share goes through the model in parts. In either case, the gradient is
    that of the whole batch. Dropout masks are drawn for each forward pass, so they depend on both.
    """

    def __init__(self, spec: RunSpec, runtime: Runtime) -> None:
        self.spec = spec
        self.runtime = runtime
        self.step = 0
        self.losses: list[Tensor] = []
        """The losses of the steps since the last `mean_loss`."""
        self.tokens = 0
        """Tokens that this trainer's own steps have processed, over all workers."""
        torch.set_num_threads(runtime.threads)
        set_implementation(runtime.attention)
        self.device = torch.device(runtime.device)
        self.model = Transformer(spec).to(self.device)
        self.model.checkpoint_activations = runtime.checkpoint_activations
        self._forward: nn.Module = _Loss(self.model)
        self._parallel: DistributedDataParallel | None = None
        if runtime.world_size > 1:
            ids = [self.device] if self.device.type == "cuda" else None
            self._parallel = DistributedDataParallel(self._forward, device_ids=ids, gradient_as_bucket_view=True)
            self._forward = self._parallel
        train = spec.train
        self.optimizers = train.optimizer.build(dict(self.model.named_parameters()), train.optimizer_settings)
        for group in self._parameter_groups():
            group["initial_lr"] = group["lr"]

    @property
    def done(self) -> bool:
        return self.step >= self.spec.train.steps

    def train_step(self) -> None:
        """One optimiser step on the gradient of the mean loss over all targets of the batch."""
        train = self.spec.train
        batch = self.spec.task.sequences("train", self.spec.seed, self.step * train.batch, train.batch)
        targets = max(1, int((batch.targets_NT != IGNORED).sum()))
        # All workers must run a backward pass: one without a sequence takes one without targets.
        parts = list(self._parts(self._share(batch), self.runtime.micro_batch)) or [_without_targets(batch[:1])]

        self.step += 1
        self.tokens += batch.inputs_NT.size
        if self.spec.model.dropout:
            torch.manual_seed(_mixed_seed(self.spec.seed, self.step, self.runtime.rank))
        for group in self._parameter_groups():
            group["lr"] = train.learning_rate(group["initial_lr"], self.step)
        self._forward.train()
        self.model.zero_grad(set_to_none=True)
        losses = [self._backward(part, targets, last=part is parts[-1]) for part in parts]
        if train.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), train.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        self.losses.append(sum_over_workers(self.runtime, torch.stack(losses).sum()))

    def mean_loss(self) -> float:
        """The mean loss, in nats per target, of the steps since the last call."""
        mean = torch.stack(self.losses).mean().item()
        self.losses.clear()
        return mean

    def evaluate(self, sequences: int) -> dict[str, float]:
        """The task's metrics on the first `sequences` sequences of each test set, or on all of a shorter set."""
        measured: dict[str, float] = {}
        for split in self.spec.task.TESTS:
            sums = self._sums(self._test_batches(split, sequences), self.runtime.micro_batch)
            measured |= {f"{split}/{name}": value for name, value in metrics(sums, self.spec.task.METRICS).items()}
        return measured

    def evaluate_windows(self, context: int, sequences: int) -> dict[str, float]:
        """The task's metrics on windows of `context` tokens, named `test/perplexity@2048`.

        The windows cover as much of each test set's text as `sequences` sequences do. A forward pass takes no more
        tokens than in training, but at least one window.
        Raises ValueError where an encoding has no position for so many tokens.
        """
        task, workers = self.spec.task, self.runtime.world_size
        stride = self.spec.evaluate.stride or context
        share = self.runtime.micro_batch or math.ceil(self.spec.train.batch / workers)
        at_once = max(1, share * task.length("train") // context)
        measured: dict[str, float] = {}
        for split in task.TESTS:
            windows = task.windows(split, context, stride)
            # The first window scores `context` tokens, each further one `stride`.
            wanted = 1 + math.ceil(max(0, sequences * task.length(split) - context) / stride)
            starts = range(0, min(wanted, len(windows)), at_once * workers)
            batches = (windows[start : min(start + at_once * workers, starts.stop)] for start in starts)
            sums = self._sums(batches, at_once)
            measured |= {f"{split}/{name}@{context}": value for name, value in metrics(sums, task.METRICS).items()}
        return measured

    def wait(self) -> None:
        """Wait until the device has finished its work; needed before a clock is read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _parameter_groups(self) -> Iterator[dict[str, float]]:
        for optimizer in self.optimizers:
            yield from optimizer.param_groups

    def _backward(self, part: Batch, targets: int, *, last: bool) -> Tensor:
        """Add the part's gradient; returns its share of the batch's mean loss. The last part sums over workers."""
        inputs_NT, targets_NT, _ = self._on_device(part)
        with nullcontext() if last or self._parallel is None else self._parallel.no_sync():
            with self._autocast():
                loss = self._forward(inputs_NT, targets_NT) / targets
            # DistributedDataParallel averages the workers' gradients; the batch's gradient is their sum.
            torch.autograd.backward(loss * self.runtime.world_size)
        return loss.detach()

    def _test_batches(self, split: str, sequences: int) -> Iterator[Batch]:
        """The first `sequences` sequences of a test set, or all of a shorter one."""
        size = self.spec.train.batch
        for start in range(0, sequences, size):
            count = min(size, sequences - start)
            batch = self.spec.task.sequences(split, TEST_SEED, start, count)
            yield batch
            if len(batch) < count:
                return

    @torch.no_grad()
    def _sums(self, batches: Iterable[Batch], at_once: int | None) -> dict[str, float]:
        """The sums over the model's predictions for the batches, over all workers."""
        self.model.eval()
        sums = EvaluationSums(self.model.vocabulary_size, self.device)
        for batch in batches:
            share = self._share(batch)
            sums.add_batch(share)
            for part in self._parts(share, at_once):
                inputs_NT, targets_NT, answers_NT = self._on_device(part)
                with self._autocast():
                    nats, most_probable_NT = self.model.predict(inputs_NT, targets_NT)
                sums.add_predictions(Predictions(nats, most_probable_NT, targets_NT, answers_NT))
        return sums.result(partial(sum_over_workers, self.runtime))

    def _share(self, batch: Batch) -> Batch:
        """The sequences of a batch that this worker takes."""
        return batch[self.runtime.rank :: self.runtime.world_size]

    def _parts(self, share: Batch, at_once: int | None) -> Iterator[Batch]:
        """The share in parts of `at_once` sequences; None: in one part."""
        size = at_once or max(1, len(share))
        for start in range(0, len(share), size):
            yield share[start : start + size]

    def _on_device(self, part: Batch) -> tuple[Tensor, Tensor, Tensor]:
        arrays = (part.inputs_NT, part.targets_NT, part.answers_NT)
        inputs_NT, targets_NT, answers_NT = (torch.from_numpy(array).to(self.device) for array in arrays)
        return inputs_NT, targets_NT, answers_NT

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.runtime.precision == "bf16")


class _Loss(nn.Module):
    """The model's summed loss as a module, for DistributedDataParallel, which wraps a forward pass."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_NT: Tensor, targets_NT: Tensor) -> Tensor:
        return self.model.loss(tokens_NT, targets_NT)


def _without_targets(batch: Batch) -> Batch:
    ignored_NT = np.full_like(batch.targets_NT, IGNORED)
    return Batch(batch.inputs_NT, ignored_NT, np.zeros_like(batch.answers_NT))


def _mixed_seed(*numbers: int) -> int:
    """A 64-bit seed that depends on all the numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
