"""Training one run, step by step. No Ray, no MLflow, no files.

Everything random is a function of (spec, seed, step), so the whole state is: parameters, optimiser moments, step (and
the losses not yet reported).

Shapes: N sequences, T tokens.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed
from torch import Tensor, nn

from cope_sweep.kernels import set_implementation
from cope_sweep.model import Transformer, next_token_loss
from cope_sweep.spec import RunSpec, TrainSpec
from cope_sweep.tasks import IGNORED, Batch
from cope_sweep.train.execution import Execution

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

    With `execution.world_size` > 1, every rank of the torch.distributed group holds one, and takes its share of each
    batch: the gradient is that of the whole batch.
    """

    def __init__(self, spec: RunSpec, execution: Execution) -> None:
        self.spec = spec
        self.execution = execution
        self.step = 0
        self.losses: list[Tensor] = []
        """Of the steps that no `mean_loss` has counted yet."""
        torch.set_num_threads(execution.threads)
        set_implementation(execution.attention)
        self.device = torch.device(execution.device)
        self.model = Transformer(spec).to(self.device)
        self._forward: nn.Module = self.model
        if execution.world_size > 1:
            ids = [self.device] if self.device.type == "cuda" else None
            self._forward = nn.parallel.DistributedDataParallel(self.model, device_ids=ids)
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
        """One optimiser step."""
        train = self.spec.train
        batch = self.spec.task.sequences("train", self.spec.seed, self.step * train.batch, train.batch)
        targets = max(1, int((batch.targets_NT != IGNORED).sum()))
        inputs_NT, targets_NT = self._on_device(batch)

        self.step += 1
        if self.spec.model.dropout:
            torch.manual_seed(_seed(self.spec.seed, self.step, self.execution.rank))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(train, self.step)
        self._forward.train()
        with self._autocast():
            logits_NTV = self._forward(inputs_NT)
        loss = next_token_loss(logits_NTV, targets_NT) / targets
        self.optimizer.zero_grad(set_to_none=True)
        # DistributedDataParallel averages the gradients of the ranks; the batch's is their sum.
        torch.autograd.backward(loss * self.execution.world_size)
        if train.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), train.clip)
        self.optimizer.step()
        self.losses.append(self._summed(loss.detach()))

    def mean_loss(self) -> float:
        """The mean loss, in nats per target, of the steps since this was last asked."""
        mean = torch.stack(self.losses).mean().item()
        self.losses.clear()
        return mean

    @torch.no_grad()
    def evaluate(self, sequences: int) -> dict[str, float]:
        """Each test set's loss, and its error rates in percent: per answer token, and per sequence with any wrong."""
        self.model.eval()
        metrics: dict[str, float] = {}
        for split in self.spec.task.TESTS:
            totals = torch.zeros(6, dtype=torch.float64, device=self.device)
            for start in range(0, sequences, self.spec.train.batch):
                count = min(self.spec.train.batch, sequences - start)
                totals += self._counts(self.spec.task.sequences(split, TEST_SEED, start, count))
            loss, targets, wrong, answers, spoiled, seen = self._summed(totals).tolist()
            metrics[f"{split}/loss"] = loss / max(1, targets)
            metrics[f"{split}/token_error"] = 100 * wrong / max(1, answers)
            metrics[f"{split}/sequence_error"] = 100 * spoiled / max(1, seen)
        return metrics

    def _counts(self, batch: Batch) -> Tensor:
        """Summed loss, targets, wrong answers, answers, sequences with any wrong, sequences; of this rank's share."""
        inputs_NT, targets_NT = self._on_device(batch)
        if not len(inputs_NT):
            return torch.zeros(6, dtype=torch.float64, device=self.device)
        answers_NT = torch.from_numpy(self._share(batch).answers_NT).to(self.device)
        with self._autocast():
            logits_NTV = self.model(inputs_NT)
        wrong_NT = (logits_NTV.argmax(-1) != targets_NT) & answers_NT
        counts = (
            next_token_loss(logits_NTV, targets_NT),
            (targets_NT != IGNORED).sum(),
            wrong_NT.sum(),
            answers_NT.sum(),
            wrong_NT.any(-1).sum(),
            torch.tensor(len(inputs_NT), device=self.device),
        )
        return torch.stack([count.double() for count in counts])

    def _share(self, batch: Batch) -> Batch:
        return batch[self.execution.rank :: self.execution.world_size]

    def _on_device(self, batch: Batch) -> tuple[Tensor, Tensor]:
        share = self._share(batch)
        return torch.from_numpy(share.inputs_NT).to(self.device), torch.from_numpy(share.targets_NT).to(self.device)

    def _summed(self, value: Tensor) -> Tensor:
        if self.execution.world_size > 1:
            torch.distributed.all_reduce(value)
        return value

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.execution.precision == "bf16")


def _seed(*words: int) -> int:
    """One 64-bit seed from several numbers, well mixed."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


def _decay_groups(model: Transformer, weight_decay: float) -> list[dict[str, object]]:
    """Weight decay on matrices; none on biases, norms and position parameters."""
    positional = {id(p) for p in model.position.parameters()}
    decayed = [p for p in model.parameters() if p.dim() > 1 and id(p) not in positional]
    exempt = [p for p in model.parameters() if p.dim() <= 1 or id(p) in positional]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": exempt, "weight_decay": 0.0}]
