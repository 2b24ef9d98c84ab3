"""A run: one training, fully resolved, and the id that its content gives it."""

from __future__ import annotations

import hashlib
import json
import math
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, Strict, model_validator

from cope_sweep.frozen import Frozen
from cope_sweep.positions import AnyEncoding, Dims, check_together
from cope_sweep.tasks import AnyTask

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


NUMERIC_FACTS = ("parameters", "tokens_per_s", "peak_memory_bytes", "train_s", "wall_s")
"""Facts of a finished run that a table may show, as `facts.tokens_per_s`."""


class ModelSpec(Frozen):
    """A decoder-only transformer and its list of position encodings."""

    family: Literal["gpt2", "llama", "post_norm"] = Field(
        default="gpt2",
        description="gpt2: pre-norm, GELU. llama: pre-norm, RMSNorm, SwiGLU, no biases. "
        "post_norm: the decoder of the released counting runs, ReLU.",
    )
    layers: Positive = 2
    dim: Positive = 64
    heads: Positive = 2
    ffn_dim: Positive | None = Field(
        default=None, description="Hidden units of the feed-forward net; null: 4 × dim (llama: 8/3)."
    )
    context: Positive | None = Field(default=None, description="Longest sequence in tokens; null: the task's longest.")
    dropout: Fraction = 0.0
    tied: bool = Field(default=True, description="The output layer is the token embedding.")
    hard_attention: bool = Field(
        default=False, description="Attend to the largest logit alone; the gradient is that of the softmax."
    )
    position: Annotated[tuple[AnyEncoding, ...], Strict(False)] = Field(
        default=(), description="Position encodings; they compose. Empty: none."
    )

    @property
    def feed_forward_dim(self) -> int:
        """Hidden units of the feed-forward net; SwiGLU's, by default, as many parameters' worth, in multiples of 64."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        return 64 * math.ceil(8 * self.dim / 3 / 64) if self.family == "llama" else 4 * self.dim

    @model_validator(mode="after")
    def _heads_divide_dim(self) -> Self:
        if self.dim % self.heads:
            fits = [h for h in range(1, self.dim + 1) if self.dim % h == 0]
            near = sorted(sorted(fits, key=lambda h: abs(h - self.heads))[:3])
            raise ValueError(
                f"model.heads = {self.heads} does not divide model.dim = {self.dim}; "
                f"heads that do: {', '.join(map(str, near))}"
            )
        return self


class TrainSpec(Frozen):
    """AdamW on generated batches."""

    steps: Positive = 1000
    batch: Positive = Field(default=64, description="Sequences in a step, over all workers.")
    lr: Annotated[float, Field(gt=0)] = 1e-3
    betas: Annotated[tuple[Fraction, Fraction], Strict(False)] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.01, description="On matrices; never on biases, norms or position parameters."
    )
    warmup: Count = Field(default=0, description="Steps of linear warm-up.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="After the warm-up: hold, or fall to 0 at the last step."
    )
    clip: Annotated[float, Field(gt=0)] | None = Field(default=1.0, description="Largest gradient norm; null: none.")


class EvaluateSpec(Frozen):
    """When the test sets are measured, and on how many of their sequences."""

    every: Positive = Field(
        default=100,
        description="Steps from one evaluation to the next; the first is after as many, the last at the end.",
    )
    sequences: Positive = Field(default=256, description="Sequences of each test set, each time.")
    final_sequences: Positive = Field(default=1024, description="Sequences of each test set, after the last step.")
    contexts: Annotated[tuple[Positive, ...], Strict(False)] = Field(
        default=(),
        description="Of a text: window lengths in tokens at which its test sets are measured, too, after the last "
        "step, as `validation/perplexity@2048`; longer ones than trained show length generalisation.",
    )
    stride: Positive | None = Field(
        default=None,
        description="Tokens from one of these windows to the next; null: their length, so that they are disjoint. "
        "A smaller stride gives every scored token more context, at a cost.",
    )

    @model_validator(mode="after")
    def _windows_are_whole(self) -> Self:
        twice = [context for context in self.contexts if self.contexts.count(context) > 1]
        if twice:
            raise ValueError(f"evaluate.contexts has {twice[0]} twice; each is measured once")
        if self.stride is not None and self.stride > min(self.contexts, default=self.stride):
            raise ValueError(
                f"evaluate.stride = {self.stride} leaves out tokens; it is at most the shortest of evaluate.contexts, "
                f"{min(self.contexts)}"
            )
        return self


class RunSpec(Frozen):
    """ONE training: task, model, optimiser, evaluation and seed. Its content is its identity."""

    task: AnyTask
    model: ModelSpec = ModelSpec()
    train: TrainSpec = TrainSpec()
    evaluate: EvaluateSpec = EvaluateSpec()
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0

    @model_validator(mode="after")
    def _encodings_fit(self) -> Self:
        if self.model.context is not None and self.model.context < self.task.context:
            raise ValueError(
                f"model.context = {self.model.context} is shorter than the task's longest sequence, "
                f"{self.task.context} tokens; leave it out, or raise it"
            )
        if self.evaluate.contexts and not self.task.has_windows:
            raise ValueError(
                f"evaluate.contexts = {list(self.evaluate.contexts)} slides windows over a text, and {self.task.kind} "
                "generates sequences of its own lengths; leave it out, or choose the lengths of its test sets"
            )
        if self.train.warmup > self.train.steps:
            raise ValueError(f"train.warmup = {self.train.warmup} is more than train.steps = {self.train.steps}")
        check_together(self.model.position, self.dims)
        return self

    @property
    def dims(self) -> Dims:
        """The sizes that position encodings see."""
        model = self.model
        return Dims(model.dim, model.heads, model.layers, model.context or self.task.context)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of what the finished run measures: `test/perplexity`, `test/perplexity@2048`, `train/loss`."""
        at = ("", *(f"@{context}" for context in self.evaluate.contexts))
        task = self.task
        return (*(f"{split}/{name}{c}" for split in task.TESTS for c in at for name in task.METRICS), "train/loss")

    @cached_property
    def run_id(self) -> str:
        """16 hex digits of the SHA-256 of `identity`."""
        text = json.dumps(self.identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def identity(self) -> dict[str, Any]:
        """What the run is, as literals: every field that is not at its default, and the VERSION of task and encodings.

        A new field, at its default, re-keys nothing; a bumped VERSION re-keys every run that uses it.
        """
        return {"spec": _non_defaults(self), "versions": self.versions}

    @property
    def versions(self) -> dict[str, int]:
        """What the code's VERSIONs are, of the task and the encodings that the run uses."""
        return {part.qualified_kind(): part.VERSION for part in (self.task, *self.model.position)}


def _non_defaults(value: Any) -> Any:
    """`value` as JSON literals, fields at their default left out, `kind` always kept."""
    if isinstance(value, BaseModel):
        fields, places = type(value).model_fields, getattr(value, "NON_IDENTITY_FIELDS", ())
        return {
            name: _non_defaults(item)
            for name, item in value
            # Iterating a model gives its cached properties, too; where data lies is no part of what a run is.
            if name in fields
            and name not in places
            and (name == "kind" or fields[name].is_required() or item != fields[name].get_default())
        }
    if isinstance(value, (tuple, list)):
        return [_non_defaults(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a run's identity is made of literals; {value!r} is a {type(value).__name__}")
