"""Training one run, step by step, without Ray, MLflow and files.

All randomness is a function of (spec, seed, step). The state of a training is therefore: parameters, optimiser state,
step, and the losses that were not reported yet.

Shapes: N sequences, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cope_sweep.config import RunSpec
from cope_sweep.model import Transformer
from cope_sweep.model.transformer import Hidden
from cope_sweep.train.batches import Batches, BatchPart, make_share, to_device
from cope_sweep.train.compiled import compiled_hidden, record_graphs, runs_as_graphs
from cope_sweep.train.evaluate import Evaluator
from cope_sweep.train.runtime import Runtime
from cope_sweep.train.workers import collect_state, shard, sum_over_workers


class Diverged(Exception):
    """A metric is not finite."""


def check_finite(name: str, value: float, step: int) -> None:
    """Raises Diverged where the value of a metric at a step is not finite."""
    if not math.isfinite(value):
        raise Diverged(f"{name} is {value} at step {step}; lower train.lr, or set train.clip")


class Trainer:
    """A run in training: call `train_step` until `done`, and `evaluate` at any time.

    With `runtime.world_size` > 1, every rank of the torch.distributed group has a trainer and takes its share of each
    batch. With `runtime.micro_batch`, the share goes through the model in parts. In either case, the gradient
    equals the whole batch's, to rounding. Dropout masks are a function of the run's seed and a sequence's number.

    Threads and implementation of attention are settings of the process: use a trainer within `runtime.applied()`.
    """

    def __init__(self, spec: RunSpec, runtime: Runtime) -> None:
        self.spec = spec
        self.runtime = runtime
        self.step = 0
        self.losses: list[Tensor] = []
        """The losses of the steps since the last `mean_loss`, up to the last `sum_losses`."""
        self._own_losses: list[Tensor] = []
        """This worker's parts of the losses of the steps since the last `sum_losses`."""
        self.tokens = 0
        """Tokens that this trainer's own steps have processed, over all workers."""
        self.device = torch.device(runtime.device)
        self.model = Transformer(spec).to(self.device)
        self.model.checkpoint_activations = runtime.checkpoint_activations
        self._forward: nn.Module = _Loss(self.model)
        if runtime.compile and runs_as_graphs(self.model, runtime):
            record_graphs(self._forward, make_share(spec, runtime, 0).parts[0], runtime)
        elif runtime.compile:
            self._forward = _Loss(self.model, compiled_hidden(self.model))
        self._batches = Batches(spec, runtime)
        self.evaluator = Evaluator(spec, runtime, self.model)
        self._parallel: DistributedDataParallel | None = None
        if runtime.world_size > 1:
            ids = [self.device] if self.device.type == "cuda" else None
            self._parallel = DistributedDataParallel(self._forward, device_ids=ids, gradient_as_bucket_view=True)
            self._forward = self._parallel
        train = spec.train
        learned = {name: x for name, x in self.model.named_parameters() if x.requires_grad}
        optimizers = train.optimizer.build_all(learned, train.optimizer_settings)
        self.optimizers = [shard(optimizer) for optimizer in optimizers] if runtime.shard else optimizers
        for group in self._parameter_groups():
            group["initial_lr"] = group["lr"]

    @property
    def done(self) -> bool:
        return self.step >= self.spec.train.steps

    def train_step(self) -> None:
        """One optimiser step on the gradient of the mean loss over all targets of the batch."""
        train = self.spec.train
        share = self._batches.take(self.step)
        targets = self._targets_of_batch(share.targets)

        self.step += 1
        self.tokens += share.tokens
        for group in self._parameter_groups():
            group["lr"] = train.learning_rate(group["initial_lr"], self.step)
        self._forward.train()
        self.model.zero_grad(set_to_none=True)
        losses = [self._backward(part, targets, last=part is share.parts[-1]) for part in share.parts]
        if train.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), train.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        self._own_losses.append(torch.stack(losses).sum())
        if self.runtime.world_size == 1:
            self.sum_losses()

    def collect_state(self) -> None:
        """Collect the state of other ranks on rank 0, before it saves the state. Every rank has to call this."""
        self.sum_losses()
        collect_state(self.optimizers)

    def sum_losses(self) -> None:
        """Sum the losses of the last steps over the workers. Every rank has to call this."""
        if self._own_losses:
            self.losses += sum_over_workers(self.runtime, torch.stack(self._own_losses)).unbind()
            self._own_losses.clear()

    def mean_loss(self) -> float:
        """The mean loss, in nats per target, of the steps since the last call. Every rank has to call this.

        Raises Diverged where it is not finite, with the first such step: only here does the host wait for the losses.
        """
        self.sum_losses()
        losses = torch.stack(self.losses)
        self.losses.clear()
        mean = losses.mean().item()
        if not math.isfinite(mean):
            for step, loss in enumerate(losses.tolist(), self.step - len(losses) + 1):
                check_finite("train/loss", loss, step)
        return mean

    def evaluate(self, sequences: int) -> dict[str, float]:
        """The task's metrics on the first `sequences` sequences of each test set, or on all of a shorter set."""
        return self.evaluator.evaluate(sequences)

    def close(self) -> None:
        """End the thread that makes batches."""
        self._batches.close()

    def wait(self) -> None:
        """Wait until the device has finished its work; needed before a clock is read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _parameter_groups(self) -> Iterator[dict[str, float]]:
        for optimizer in self.optimizers:
            yield from optimizer.param_groups

    def _backward(self, part: BatchPart, targets: float | Tensor, *, last: bool) -> Tensor:
        """Add the part's gradient; returns its share of the batch's mean loss. The last part sums over workers."""
        inputs_NT, targets_NT, seeds_N = (to_device(tensor, self.device) for tensor in part)
        with nullcontext() if last or self._parallel is None else self._parallel.no_sync():
            with self.runtime.autocast():
                loss = self._forward(inputs_NT, targets_NT, seeds_N) / targets
            # DistributedDataParallel averages the workers' gradients; the batch's gradient is their sum.
            torch.autograd.backward(loss * self.runtime.world_size)
        return loss.detach()

    def _targets_of_batch(self, own_targets: int) -> float | Tensor:
        """The number of targets in the whole batch, at least 1, from the number in this worker's share."""
        if self.runtime.world_size == 1:
            return max(1, own_targets)
        # Filled on the device: a copy from the host would wait for it.
        return sum_over_workers(self.runtime, torch.full((), float(own_targets), device=self.device)).clamp_(min=1)


class _Loss(nn.Module):
    """The model's summed loss as a module, for DistributedDataParallel, which wraps a forward pass."""

    def __init__(self, model: Transformer, hidden: Hidden | None = None) -> None:
        """`hidden` computes the model's `hidden`; None: the model does."""
        super().__init__()
        self.model, self._hidden = model, hidden

    def forward(self, tokens_NT: Tensor, targets_NT: Tensor, seeds_N: Tensor) -> Tensor:
        return self.model.loss(tokens_NT, targets_NT, seeds_N, self._hidden)
