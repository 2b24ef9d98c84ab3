"""Benchmark of training steps (forward, backward, clipping and AdamW): ours, plain PyTorch's and x-transformers'.

On a CPU: `cope-sweep bench step`. On a GPU: the stage `step` of `make gpu`, with models of the sizes of the paper's tasks, in
bfloat16, and without those of others. Every step makes its batch, as ours does. Before anything is timed:

- the gradients of one sequence are compared with those of another implementation of attention;
- plain PyTorch has to give the logits of our model with the same weights;
- x-transformers' model has to be causal, and its CoPE to be the bias of our reference for the same table.

An alternative that fails is not timed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cope_sweep.model.attention as model_attention
from cope_benchmarks import peers
from cope_benchmarks.report import OF_OURS, OF_SDPA, Measured, Row, Rows, add_ratios
from cope_benchmarks.timing import Run, one_line, resumed, times
from cope_sweep.config import RunSpec
from cope_sweep.kernels import Implementation, Inputs, LayerEncodings, using, visible
from cope_sweep.model import Transformer, next_token_loss
from cope_sweep.positions import Attention, CoPE
from cope_sweep.train import Runtime, Trainer, compiled

LOGITS_ERROR = 1e-3
"""Limit of an error of logits and biases of the order of 1."""
MEAN_ERROR = 2e-3
"""Limit of a gradient's mean error, relative to its largest entry: rounding in float32 can move positions across integers."""

AttendAs = Callable[[Inputs, LayerEncodings, float, Tensor | None], Tensor]
Model = dict[str, dict[str, Any]]

FLIP_FLOP: Model = {
    "task": {"kind": "flip_flop", "pairs": 256}, "model": {"layers": 4, "dim": 256, "heads": 4}, "train": {"batch": 16},
}  # fmt: skip
SMALL: dict[str, Model] = {
    "2 layers × 128, T 511": {
        "task": {"kind": "flip_flop", "pairs": 256, "loss": "all"},
        "model": {"layers": 2, "dim": 128, "heads": 2},
        "train": {"batch": 16},
    },
    "quick start: 2 layers × 64, T 40": {
        "task": {"kind": "selective_copy", "tokens": 8, "blanks": 24, "dense_blanks": 12, "sparse_blanks": 48},
        "model": {"layers": 2, "dim": 64, "heads": 2},
        "train": {"batch": 64},
    },
}
"""Models of CPUs and GPUs."""
MODELS: dict[str, Model] = {
    **SMALL,
    "4 layers × 256, T 511": FLIP_FLOP | {"task": FLIP_FLOP["task"] | {"loss": "all"}},
    "a layer of GPT-2's, T 1023": {
        "task": {"kind": "flip_flop", "pairs": 512, "loss": "all"},
        "model": {"layers": 1, "dim": 768, "heads": 12},
        "train": {"batch": 2},
    },
}


def _copy(tokens: int, vocabulary: int) -> dict[str, Any]:
    """Data of the size of a text, which needs no corpus."""
    return {"kind": "selective_copy", "vocabulary": vocabulary, "tokens": tokens // 2, "blanks": 0}


GPU_MODELS: dict[str, Model] = {
    **SMALL,
    "Flip-Flop: 4 layers × 256, T 511": FLIP_FLOP,
    "WikiText: 12 layers × 768, T 1024": {
        "task": _copy(1024, 50_257), "model": {"layers": 12, "dim": 768, "heads": 12}, "train": {"batch": 16},
    },
    "code: 4 layers × 256, T 4096": {
        "task": _copy(4096, 32_000),
        "model": {"family": "llama", "layers": 4, "dim": 256, "heads": 8, "ffn_dim": 768, "tied": False},
        "train": {"batch": 16},
    },
}  # fmt: skip
TINY: dict[str, Model] = {
    "tiny": {
        "task": {"kind": "flip_flop", "pairs": 9}, "model": {"layers": 1, "dim": 16, "heads": 1}, "train": {"batch": 1},
    },
}  # fmt: skip
"""For a dry run on a CPU."""


def with_sdpa(inputs: Inputs, positions: LayerEncodings, dropout: float, seeds_B: Tensor | None) -> Tensor:
    """Attention without positions."""
    return F.scaled_dot_product_attention(inputs.q_BHTK, inputs.k_BHSK, inputs.v_BHSK, is_causal=True)


def with_listing(inputs: Inputs, positions: LayerEncodings, dropout: float, seeds_B: Tensor | None) -> Tensor:
    """CoPE by the paper's listing."""
    table = positions[0].parameters["e"]
    return peers.listing({"q": inputs.q_BHTK, "k": inputs.k_BHSK, "v": inputs.v_BHSK, "e": table})


COPE: list[Any] = [{"kind": "cope", "p_max": 64}]
SDPA, COMPILED = "SDPA, no positions", ", compile: auto"
Alternatives = Mapping[str, tuple[list[Any], AttendAs | Implementation, Implementation]]
"""By name: the encodings, the implementation or function that computes attention, and the one that it is compared with."""
ALTERNATIVES: Alternatives = {
    SDPA: ([], with_sdpa, "reference"),
    "CoPE, native": (COPE, "native", "reference"),
    "CoPE, blocked": (COPE, "blocked", "reference"),
    "CoPE, the paper's listing": (COPE, with_listing, "reference"),
    "CoPE-MLP(64), native": ([{"kind": "cope_mlp", "hidden": 64}], "native", "blocked"),
    "RoPE": (["rope"], "auto", "reference"),
}
PLAIN_ROPE, X_COPE = "plain PyTorch, RoPE", "x-transformers, CoPE"
PEERS: dict[str, Callable[[peers.Sizes], nn.Module]] = {
    PLAIN_ROPE: partial(peers.Plain, rotate=True),
    "plain PyTorch, no positions": partial(peers.Plain, rotate=False),
    "x-transformers, RoPE": partial(peers.x_transformers_model, cope=False),
    X_COPE: partial(peers.x_transformers_model, cope=True),
}
"""Models of others, on a CPU."""
OURS = "CoPE, native"
GPU_ALTERNATIVES: Alternatives = {  # compared with the blocked path, whose memory is small
    SDPA: ([], with_sdpa, "blocked"),
    "CoPE, triton": (COPE, "triton", "blocked"),
    SDPA + COMPILED: ([], with_sdpa, "blocked"),
    "CoPE, triton" + COMPILED: (COPE, "triton", "blocked"),
    "CoPE, the paper's listing": (COPE, with_listing, "blocked"),
}


def measure(repetitions: int, models: Mapping[str, Model] | None = None) -> Measured:
    """The time of a step of every alternative, and its ratios to SDPA without positions, and to CoPE by our kernel."""
    rows = Rows("step")
    for name, model in (models or MODELS).items():
        rows.add_rows(name, measure_model(model, ALTERNATIVES, "cpu", repetitions, PEERS))
    return rows.measured(repetitions=repetitions)


def measure_gpu(folder: Path, device: str, budget_s: float) -> Measured:
    """The same on a GPU, into `step.json` and `step.md`.

    `compile: auto` means CUDA graphs for models of less than 30 M parameters, and torch.compile for larger ones. With device
    `cpu`, a dry run of a tiny model, without it.
    """
    models = GPU_MODELS if device == "cuda" else TINY
    chosen = {name: each for name, each in GPU_ALTERNATIVES.items() if device == "cuda" or not name.endswith(COMPILED)}
    measure_one = partial(measure_model, alternatives=chosen, device=device)
    return resumed(folder / "step.json", device, budget_s, models, measure_one)


def measure_model(
    model: Model,
    alternatives: Alternatives,
    device: str,
    repetitions: int = 5,
    others: Mapping[str, Callable[[peers.Sizes], nn.Module]] | None = None,
) -> dict[str, Row]:
    """By alternative: the time of a step, and its ratios; or why it is not timed."""
    found: dict[str, Row] = {}
    trainers: list[Trainer] = []
    steps: dict[str, Run] = {}
    precision = "bf16" if device == "cuda" else "fp32"
    for name, (position, compute, expected_from) in alternatives.items():
        runtime = Runtime(
            device=device, precision=precision, threads=torch.get_num_threads(), compile=name.endswith(COMPILED)
        )
        spec = model | {"model": model["model"] | {"position": position}}
        try:
            with attention_by(compute), without_fallback():  # CUDA graphs are recorded now
                trainers.append(Trainer(RunSpec.model_validate_json(json.dumps(spec)), runtime))
            failed = failure(trainers[-1], compute, expected_from)
            step = step_of(trainers[-1], compute)
            step()
        except Exception as error:  # out of memory, for example
            failed = one_line(error)
        found[name] = {"failed": failed} if failed else {}
        if not failed:
            steps[name] = step
    for name, build in (others or {}).items():
        try:
            peer = Peer(model, build)
            failed = peer.failure(name)
            peer.train_step()
        except Exception as error:
            failed = one_line(error)
        found[name] = {"failed": failed} if failed else {}
        if not failed:
            steps[name] = peer.train_step
    taken = times(steps, repetitions, device, turn_ms=400.0)
    for trainer in trainers:
        trainer.close()
    for name, each in taken.items():
        found[name]["a step, ms"] = each
    add_ratios(found, "a step, ms", SDPA, OF_SDPA)
    add_ratios(found, "a step, ms", OURS, OF_OURS)
    return found


class Peer:
    """A model of others in training, on the batches of our trainer."""

    def __init__(self, model: Model, build: Callable[[peers.Sizes], nn.Module]) -> None:
        spec = model | {"model": model["model"] | {"position": ["rope"]}}
        self.spec = RunSpec.model_validate_json(json.dumps(spec))
        shape = self.spec.model
        tokens = self.spec.task.length("train")
        vocabulary = self.spec.task.vocabulary_size
        self.sizes = peers.Sizes(vocabulary, tokens, shape.layers, shape.dim, shape.heads)
        self.model = build(self.sizes)
        train = self.spec.train
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=train.lr, betas=train.betas, weight_decay=train.weight_decay, fused=True
        )
        self._step = 0

    def train_step(self) -> None:
        batch_size = self.spec.train.batch
        batch = self.spec.task.sequences("train", 0, self._step * batch_size, batch_size)
        self._step += 1
        inputs_NT, targets_NT = torch.from_numpy(batch.inputs_NT), torch.from_numpy(batch.targets_NT)
        logits_NTV = self.model(inputs_NT)
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(F.cross_entropy(logits_NTV.flatten(0, 1), targets_NT.flatten()))
        nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.train.clip or float("inf"))
        self._optimizer.step()

    @torch.no_grad()
    def failure(self, name: str) -> str | None:
        """What the model gets wrong; None: nothing."""
        tokens_1T = torch.from_numpy(self.spec.task.sequences("train", 0, 0, 1).inputs_NT)
        if name == PLAIN_ROPE:
            ours = Transformer(self.spec)
            for parameter in ours.parameters():  # as initialised, attention is almost uniform
                parameter.mul_(10)
            kept = self.model.state_dict()
            self.model.load_state_dict({n: x for n, x in ours.state_dict().items() if n in kept})
            expected_1TV = ours(tokens_1T)
            off = (self.model(tokens_1T) - expected_1TV).abs().max() / expected_1TV.abs().max()
            self.model.load_state_dict({n: x / 10 for n, x in self.model.state_dict().items()})
            return None if off < LOGITS_ERROR else f"its logits are off by {off:.1e} of the largest"
        logits_1TV = self.model(tokens_1T)
        changed_1T = tokens_1T.clone()
        changed_1T[0, -1] = (changed_1T[0, -1] + 1) % self.sizes.vocabulary
        if (self.model(changed_1T) - logits_1TV)[0, :-1].abs().max() > LOGITS_ERROR:
            return "it is not causal"
        return _wrong_bias(self.model, self.sizes) if name == X_COPE else None


def _wrong_bias(model: nn.Module, sizes: peers.Sizes) -> str | None:
    """Why the bias of x-transformers' CoPE is not that of our reference; None: it is."""
    from x_transformers.x_transformers import CoPE as TheirCoPE  # type: ignore[import-untyped]

    found = [module for module in model.modules() if isinstance(module, TheirCoPE)]
    if len(found) != sizes.layers:
        return f"{len(found)} of {sizes.layers} layers have CoPE"
    q, k = torch.randn(2, 1, sizes.heads, 100, sizes.head_dim, generator=torch.Generator().manual_seed(0))
    e_PK = torch.randn(found[0].pos_emb.shape, generator=torch.Generator().manual_seed(1))
    logits = q @ k.transpose(-1, -2) / sizes.head_dim**0.5
    seen = visible(100, 100, q.device)
    ours = CoPE(p_max=len(e_PK)).score({"e": e_PK}, Attention(q, k, k, logits, seen))
    kept = found[0].pos_emb.clone()
    found[0].pos_emb.copy_(e_PK)
    theirs = found[0](q, logits.masked_fill(~seen, -torch.finfo(torch.float32).max))
    found[0].pos_emb.copy_(kept)
    off = (ours - theirs)[..., seen].abs().mean()
    return None if off < LOGITS_ERROR else f"the bias of its CoPE is off by {off:.1e}"


def step_of(trainer: Trainer, compute: AttendAs | Implementation) -> Run:
    """A training step with this attention. What cannot be compiled raises, and is not measured uncompiled under this name."""

    def step() -> None:
        with attention_by(compute), without_fallback():
            trainer.train_step()

    return step


def without_fallback() -> AbstractContextManager[Any]:
    """Within the `with` block, what cannot be compiled or recorded raises. A run would warn and go on without."""

    def fail(message: str, *arguments: object) -> None:
        raise RuntimeError(message % arguments)

    return mock.patch.object(compiled.log, "warning", fail)


def failure(trainer: Trainer, compute: AttendAs | Implementation, expected_from: Implementation) -> str | None:
    """The first error in the gradients of the first sequence; None: they are correct."""
    with attention_by(compute):
        got = _gradients(trainer)
    with using(expected_from):
        wanted = _gradients(trainer)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, expected in wanted.items():
        # The gradient of what adds the same to all scores of a row is 0 except for rounding: relative to the other gradients.
        off = (got[name] - expected).abs().mean() / expected.abs().max().clamp(min=1e-3 * largest)
        if not off <= MEAN_ERROR:
            return f"{name} is off by {off:.1e} of its largest"
    return None


def _gradients(trainer: Trainer) -> dict[str, Tensor]:
    spec, model = trainer.spec, trainer.model
    batch = spec.task.sequences("train", 0, 0, 1)
    inputs_NT, targets_NT = (torch.from_numpy(x).to(trainer.device) for x in (batch.inputs_NT, batch.targets_NT))
    loss = next_token_loss(model(inputs_NT), targets_NT)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss / batch.inputs_NT.size, parameters)
    return {"loss": loss.detach(), **dict(zip(names, gradients, strict=True))}


def attention_by(compute: AttendAs | Implementation) -> AbstractContextManager[Any]:
    """Let the model compute attention with this implementation or function within a `with` block."""
    return using(compute) if isinstance(compute, str) else mock.patch.object(model_attention, "attend", compute)
