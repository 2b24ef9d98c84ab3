"""Training one run, step by step. No Ray, no MLflow, no files.

Everything random is a function of (spec, seed, step), so the whole state is: parameters, optimiser moments, step (and
the losses not yet reported).

Shapes: N sequences, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cope_sweep.kernels import set_implementation
from cope_sweep.model import Transformer, next_token_loss
from cope_sweep.spec import RunSpec, TrainSpec
from cope_sweep.tasks import IGNORED, Batch
from cope_sweep.train.evaluate import Totals, metrics
from cope_sweep.train.runtime import Runtime

TEST_SEED = 0
"""Test sets are the same sequences for every run, whatever its seed."""


def learning_rate(spec: TrainSpec, step: int) -> float:
    """The rate of step 1 … `steps`: a linear warm-up, then constant, or falling to 0 after the last step."""
    if step <= spec.warmup:
        return spec.lr * step / spec.warmup
    done = (step - 1 - spec.warmup) / max(1, spec.steps - spec.warmup)
    fall = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return spec.lr * fall[spec.schedule]


class Trainer:
    """A run in training: `train_step` until `done`, `evaluate` whenever wanted.

    With `runtime.world_size` > 1, every rank of the torch.distributed group holds one, and takes its share of each
    batch; with `runtime.micro_batch`, its share goes through the model in parts. The gradient is that of the whole
    batch all the same. Dropout draws its masks per forward pass, so they differ with either.
    """

    def __init__(self, spec: RunSpec, runtime: Runtime) -> None:
        self.spec = spec
        self.runtime = runtime
        self.step = 0
        self.losses: list[Tensor] = []
        """Of the steps that no `mean_loss` has counted yet."""
        self.tokens = 0
        """That this trainer's own steps have gone through, over all workers."""
        torch.set_num_threads(runtime.threads)
        set_implementation(runtime.attention)
        self.device = torch.device(runtime.device)
        self.model = Transformer(spec).to(self.device)
        self.model.checkpoint_activations = runtime.checkpoint_activations
        self._forward: nn.Module = self.model
        self._parallel: DistributedDataParallel | None = None
        if runtime.world_size > 1:
            ids = [self.device] if self.device.type == "cuda" else None
            self._parallel = DistributedDataParallel(self.model, device_ids=ids, gradient_as_bucket_view=True)
            self._forward = self._parallel
        self.optimizer = torch.optim.AdamW(
            _decay_groups(self.model, spec.train.weight_decay),
            lr=spec.train.lr,
            betas=spec.train.betas,
            eps=spec.train.eps,
            fused=True,
        )

    @property
    def done(self) -> bool:
        return self.step >= self.spec.train.steps

    def train_step(self) -> None:
        """One optimiser step, on the gradient of the mean loss over all the batch's targets."""
        train = self.spec.train
        batch = self.spec.task.sequences("train", self.spec.seed, self.step * train.batch, train.batch)
        targets = max(1, int((batch.targets_NT != IGNORED).sum()))
        # Workers must all go backward together: one that has no sequence takes one of which nothing is asked.
        parts = list(self._parts(self._share(batch), self.runtime.micro_batch)) or [_without_targets(batch[:1])]

        self.step += 1
        self.tokens += batch.inputs_NT.size
        if self.spec.model.dropout:
            torch.manual_seed(_seed(self.spec.seed, self.step, self.runtime.rank))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(train, self.step)
        self._forward.train()
        self.optimizer.zero_grad(set_to_none=True)
        losses = [self._backward(part, targets, last=part is parts[-1]) for part in parts]
        if train.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), train.clip)
        self.optimizer.step()
        self.losses.append(self._summed(torch.stack(losses).sum()))

    def _backward(self, part: Batch, targets: int, *, last: bool) -> Tensor:
        """Add the part's gradient to what is there; its share of the batch's mean loss. The last one joins workers'."""
        inputs_NT, targets_NT, _ = self._on_device(part)
        with nullcontext() if last or self._parallel is None else self._parallel.no_sync():
            with self._autocast():
                logits_NTV = self._forward(inputs_NT)
            loss = next_token_loss(logits_NTV, targets_NT) / targets
            # DistributedDataParallel averages the gradients of the workers; the batch's is their sum.
            torch.autograd.backward(loss * self.runtime.world_size)
        return loss.detach()

    def mean_loss(self) -> float:
        """The mean loss, in nats per target, of the steps since this was last asked."""
        mean = torch.stack(self.losses).mean().item()
        self.losses.clear()
        return mean

    def evaluate(self, sequences: int) -> dict[str, float]:
        """What the task measures (`METRICS`) on so many sequences of each test set, or on all where it has fewer."""
        measured: dict[str, float] = {}
        for split in self.spec.task.TESTS:
            sums = self._sums(self._test_batches(split, sequences), self.runtime.micro_batch)
            measured |= {f"{split}/{name}": value for name, value in metrics(sums, self.spec.task.METRICS).items()}
        return measured

    def evaluate_windows(self, context: int, sequences: int) -> dict[str, float]:
        """The same on windows of `context` tokens over each test set's text, as far as so many sequences reach.

        Named `test/perplexity@2048`. A forward pass takes no more tokens than in training (one window, at least).
        Raises ValueError where an encoding does not reach that far.
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

    def _test_batches(self, split: str, sequences: int) -> Iterator[Batch]:
        """A test set from its beginning, until so many sequences came, or it ends."""
        size = self.spec.train.batch
        for start in range(0, sequences, size):
            count = min(size, sequences - start)
            batch = self.spec.task.sequences(split, TEST_SEED, start, count)
            yield batch
            if len(batch) < count:
                return

    @torch.no_grad()
    def _sums(self, batches: Iterable[Batch], at_once: int | None) -> dict[str, float]:
        """What the model's predictions for these add up to, over all workers."""
        self.model.eval()
        totals = Totals(self.model.vocabulary_size, self.device)
        for batch in batches:
            share = self._share(batch)
            totals.count(share)
            for part in self._parts(share, at_once):
                inputs_NT, targets_NT, answers_NT = self._on_device(part)
                with self._autocast():
                    logits_NTV = self.model(inputs_NT)
                totals.score(logits_NTV, targets_NT, answers_NT)
        return totals.sums(self._summed)

    def _share(self, batch: Batch) -> Batch:
        """What is this worker's of a batch."""
        return batch[self.runtime.rank :: self.runtime.world_size]

    def _parts(self, share: Batch, at_once: int | None) -> Iterator[Batch]:
        """The worker's share, so many sequences at a time; None: all."""
        size = at_once or max(1, len(share))
        for start in range(0, len(share), size):
            yield share[start : start + size]

    def _on_device(self, part: Batch) -> tuple[Tensor, Tensor, Tensor]:
        arrays = (part.inputs_NT, part.targets_NT, part.answers_NT)
        inputs_NT, targets_NT, answers_NT = (torch.from_numpy(array).to(self.device) for array in arrays)
        return inputs_NT, targets_NT, answers_NT

    def wait(self) -> None:
        """Until the device has done what it was given: for who reads a clock."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _summed(self, value: Tensor) -> Tensor:
        if self.runtime.world_size > 1:
            torch.distributed.all_reduce(value)
        return value

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.runtime.precision == "bf16")


def _without_targets(batch: Batch) -> Batch:
    nothing_NT = np.full_like(batch.targets_NT, IGNORED)
    return Batch(batch.inputs_NT, nothing_NT, np.zeros_like(batch.answers_NT))


def _seed(*words: int) -> int:
    """One 64-bit seed from several numbers, well mixed."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


def _decay_groups(model: Transformer, weight_decay: float) -> list[dict[str, object]]:
    """Weight decay on matrices; none on biases, norms and position parameters."""
    positional = {id(p) for p in model.position.parameters()}
    decayed = [p for p in model.parameters() if p.dim() > 1 and id(p) not in positional]
    exempt = [p for p in model.parameters() if p.dim() <= 1 or id(p) in positional]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": exempt, "weight_decay": 0.0}]
