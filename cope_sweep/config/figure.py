"""Figures that an ablation file declares. `cope_sweep.read.figures` draws them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from cope_sweep.config.metric_names import MetricName
from cope_sweep.config.source import Json
from cope_sweep.frozen import Frozen

Count = Annotated[int, Field(ge=0, le=10**9)]
Positive = Annotated[int, Field(ge=1, le=10**9)]
Head = Annotated[tuple[Count, Count], Strict(False)]
"""Layer and head. Accepts a list too: files have no tuples."""
Metrics = Annotated[list[MetricName], Field(min_length=1)]


class _Figure(Frozen):
    title: str = Field(default="", description="Above the figure.")
    source: str = Field(default="", description="The figure of the paper that it reproduces, for example `Figure 5`.")
    rows: dict[str, Json] = Field(
        default={}, description="The rows to draw: axis keys, and labels or values; of a list, any. Empty: all rows."
    )


class _Curves(_Figure):
    metrics: Metrics = Field(description="One panel for each metric.")
    log: bool = Field(default=False, description="Whether the axis of the metrics is logarithmic.")


class Curves(_Curves):
    """Metrics against the training step: a line for each row, with a band over its seeds."""

    kind: Literal["curves"] = "curves"


class Convergence(_Curves):
    """Curves of test metrics, with the step at which each row is best."""

    kind: Literal["convergence"] = "convergence"


class Values(_Figure):
    """Metrics at the end of training against an axis of the ablation: a line for each combination of the other axes."""

    kind: Literal["values"] = "values"
    x: str = Field(description="The key of the axis, for example `task.train_sequences`.")
    metrics: Metrics = Field(description="One panel for each metric.")
    log_x: bool | None = Field(
        default=None, description="Whether the axis of `x` is logarithmic; null: if its values ask for it."
    )


class Contexts(_Figure):
    """A metric against the length of the evaluated sequences: a line for each row.

    Lengths are those of windows over a text (`evaluate.contexts`), or multiples of the trained length
    (`evaluate.lengths`).

    Variants of the evaluation (`evaluate.variants`) have lines of their own.
    """

    kind: Literal["contexts"] = "contexts"
    metric: MetricName = Field(description="Without context: `validation/perplexity`.")
    panels: str | None = Field(default=None, description="An axis key: a panel for each of its values.")


class Maps(_Figure):
    """Maps of a trained model's heads over a sequence: a probe of the checkpoint of one run."""

    kind: Literal["maps"] = "maps"
    show: Literal["positions", "attention", "position_attention", "gates"] = Field(
        default="position_attention",
        description="gates; positions (sums of gates); attention; position_attention: attention induced by position "
        "alone, scaled to 1 at the maximum of each query.",
    )
    seed: Count | None = Field(default=None, description="The seed of the run; null: the first of the ablation.")
    split: str | None = Field(default=None, description="The split of the sequence; null: the first test set.")
    index: Count = Field(default=0, description="The index of the sequence in its split.")
    first: Positive | None = Field(default=None, description="Only the first tokens of the sequence; null: all.")
    mark: str | None = Field(
        default=None,
        description="Marked tokens, drawn as signs: `newline`, `section` or `sentence` of a text, or one of the task.",
    )
    heads: Annotated[list[Head], Field(min_length=1)] | Positive = Field(
        default=1,
        description="[layer, head] pairs, counted from 0; or the number of heads to draw: those whose gates separate "
        "the marked tokens best (AUC).",
    )


AnyFigure = Annotated[Curves | Convergence | Values | Contexts | Maps, Field(discriminator="kind")]
