"""Maps of a trained model's heads: gates, positions or attention over the tokens, as in the paper's Figures 4 and 6."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, Strict, model_validator

from cope_sweep.errors import FigureError, InvalidValue, ProbeError
from cope_sweep.figures import FIGURES
from cope_sweep.frozen import Count, Positive
from cope_sweep.read.figures.base import FigureData, FigureKind

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.figure import Figure as Drawing

    from cope_sweep.api.figures import GetFigure, Show
    from cope_sweep.config.checks import Planned
    from cope_sweep.inference import Predictor, TokenIds
    from cope_sweep.inference.probe import HeadStatistics, LayerProbe, TokenMarks
    from cope_sweep.read.figures.canvas import Size
    from cope_sweep.read.figures.heads import HeadMatrix
    from cope_sweep.read.tables.results import Results

Head = Annotated[tuple[Count, Count], Strict(False)]
"""Layer and head. Accepts a list too: files have no tuples."""
SEARCHED = 64
"""Number of sequences to search for a mark."""
SHOWN: dict[Show, tuple[str, str]] = {
    "gates": ("Gates", "g"),
    "positions": ("Positions", "p"),
    "position_attention": ("Position-only attention", "position only"),
    "attention": ("Attention", "a"),
}
"""Quantity that maps show → title and symbol of its heatmaps."""


@FIGURES.register
class Maps(FigureKind):
    """Maps of a trained model's heads over a sequence: a probe of the checkpoint of one run."""

    SHOWS = "gates, positions or attention of a model's heads over the tokens"
    ORDER = 70
    ONE_ROW = True
    NEEDS_CHECKPOINT = True
    TAKES = ()

    kind: Literal["maps"] = "maps"
    show: Literal["positions", "attention", "position_attention", "gates"] = Field(
        default="position_attention",
        description="gates; positions (sums of gates); attention; position_attention: attention induced by position "
        "alone, scaled to 1 at the maximum of each query.",
    )
    seed: Count | None = Field(default=None, description="The seed of the run; null: the first of the ablation.")
    split: str | None = Field(default=None, description="The split of the sequence; null: the first test set.")
    index: Count | None = Field(
        default=None,
        description="The index of the sequence in its split; null: the first with a marked token, or else the first.",
    )
    first: Positive | None = Field(default=None, description="Only the first tokens of the sequence; null: all.")
    mark: str | None = Field(
        default=None,
        description="Marked tokens, drawn as signs: `newline`, `section` or `sentence` of a text, or one of the task.",
    )
    heads: Annotated[list[Head], Field(min_length=1)] | Positive = Field(
        default=1,
        description="[layer, head] pairs, counted from 0; or the number of heads to draw: those whose gates separate "
        "the marked tokens best (AUC); with `claim`, those that mark them best on other sequences.",
    )
    claim: str = Field(
        default="",
        description="What the heads do with `mark`, in a sentence. Reports measure it on all runs, and say whether it "
        "is shown. For gates and position_attention.",
    )

    @model_validator(mode="after")
    def _check_claim(self) -> Self:
        if self.claim and (self.mark is None or self.show not in ("gates", "position_attention")):
            raise InvalidValue(
                "a claim about heads needs a mark, and show: gates or position_attention",
                code="unmeasured_claim",
                key="claim",
            )
        return self

    @property
    def has_claim(self) -> bool:
        return bool(self.claim)

    @property
    def claim_identity(self) -> str:
        claimed = json.dumps([self.show, self.mark, self.split, self.rows], sort_keys=True)
        return hashlib.sha256(claimed.encode()).hexdigest()[:16] if self.claim else ""

    def check(self, planned: Planned) -> None:
        super().check(planned)
        if self.seed is not None and self.seed not in planned.seeds:
            message = f"{self.seed} is none of the seeds {planned.seeds}"
            raise planned.error(("seed",), message, "unknown_seed", seed=self.seed, allowed=planned.seeds)

    def of_head(self, head: tuple[int, int]) -> Self:
        """The figure of one head, given layer and head; unchanged if the file names its heads."""
        return self.model_copy(update={"heads": [head]}) if isinstance(self.heads, int) else self

    def data(self, results: Results, question: GetFigure) -> FigureData:
        """Raises FigureError if the run is not finished, and what `of_checkpoint` raises."""
        plan, store = results.plan, results.store
        row = next(row for row in plan.rows if row.name in question.row)
        run = next(run for run in row.runs if self.seed in (None, run.seed))
        status = results.records[run.run_id].status
        if status != "finished":
            raise FigureError(
                f"{question.figure} of {plan.name} shows the checkpoint of run {run.run_id} ({question.row[0]}, seed "
                f"{run.seed}), which is {status} in {results.place}; train it with: "
                f"{results.training}",
                code="not_finished",
                figure=question.figure,
                run_id=run.run_id,
                status=status,
            )
        return self.of_checkpoint(store.run(run.run_id).fetch_checkpoint())

    def of_checkpoint(self, checkpoint: Path, text: str | None = None) -> FigureData:
        """Of a checkpoint's heads over a text or, without a text, over the sequence of the task that the figure names.

        Raises what `of_tokens` and `Predictor.load` raise.
        """
        from cope_sweep.inference import Predictor
        from cope_sweep.read.figures.marks import chosen_head

        predictor = Predictor.load(checkpoint)
        if text is not None:
            return self.of_tokens(predictor, predictor.encode(text)[: self.first])
        chosen = chosen_head(predictor, self) if self.claim and self.heads == 1 else None
        if chosen is None:
            return self.of_tokens(predictor, self._sequence(predictor))
        data = self.of_head(chosen.head).of_tokens(predictor, self._sequence(predictor))
        return replace(data, captions={chosen.head: f"Seed {predictor.run.seed}: {chosen.caption(self.mark or '')}"})

    def _sequence(self, predictor: Predictor) -> list[int]:
        """The tokens of the sequence with this index; by default the first with a marked token, or the first."""
        import numpy as np

        from cope_sweep.inference.probe import split_sequences, token_marks

        task, mark = predictor.run.task, self.mark
        count = SEARCHED if self.index is None and mark else 1
        sequences = [tokens[: self.first] for tokens in split_sequences(task, self.split, self.index or 0, count)]
        for tokens in sequences:
            if mark is not None and np.any(token_marks(predictor, np.array(tokens)).get(mark, False)):
                return tokens
        return sequences[0]

    def of_tokens(self, predictor: Predictor, token_ids: TokenIds) -> MapsData:
        """Of the selected heads over one sequence.

        Raises FigureError for a mark or a quantity that tokens or model do not have, and what
        `cope_sweep.inference.probe.probe` raises.
        """
        import numpy as np

        from cope_sweep.config.explain import suggest
        from cope_sweep.inference import validate_token_ids
        from cope_sweep.inference.probe import head_statistics, probe, token_labels, token_marks
        from cope_sweep.read.figures.heads import MAX_CELLS, gate_means

        run = predictor.run
        tokens_T = validate_token_ids(token_ids, predictor.vocabulary_size)
        labels, all_marks = token_labels(predictor, tokens_T), token_marks(predictor, tokens_T)
        if self.mark is not None and self.mark not in all_marks:
            raise FigureError(
                f"no mark {self.mark!r}{suggest(self.mark, all_marks) or ': these tokens have no marks'}",
                code="unknown_mark",
                mark=self.mark,
                allowed=list(all_marks),
            )
        mark = self.mark or next((name for name, is_marked_T in all_marks.items() if is_marked_T.any()), None)
        marked_T = all_marks[mark] if mark else np.zeros(len(tokens_T), dtype=bool)
        marks: TokenMarks = {mark: marked_T} if mark else {}
        statistics = head_statistics(predictor, [tokens_T], [marks]) if mark else []
        heads = self._chosen_heads(predictor, statistics)
        if len(tokens_T) ** 2 * len(heads) > MAX_CELLS:
            raise FigureError(
                f"{len(heads)} maps of {len(tokens_T)} tokens have more than {MAX_CELLS:,} cells; "
                "choose fewer heads or tokens",
                code="too_many_cells",
                heads=len(heads),
                tokens=len(tokens_T),
                limit=MAX_CELLS,
            )
        probed = probe(predictor, tokens_T, sorted({layer for layer, _ in heads}), sorted({head for _, head in heads}))
        layers = {layer.layer: layer for layer in probed.layers}
        matrices = {(layer, head): _head_map(layers[layer], head, self.show) for layer, head in heads}
        encodings = " + ".join(encoding.kind for encoding in run.model.position) or "no position encoding"
        captions = {(head.layer, head.head): ", ".join(gate_means(head, marks)) for head in statistics}
        if mark and not marked_T.any():
            captions = dict.fromkeys(matrices, f"no {mark} token in this text")
        return MapsData(
            frame=map_frame(matrices, labels), title=f"{SHOWN[self.show][0]}: {run.task.kind}, {encodings} "
            f"(run {run.run_id})", matrices=matrices, captions=captions, labels=labels, marked=np.flatnonzero(marked_T),
            mark=mark,
        )  # fmt: skip

    def _chosen_heads(self, predictor: Predictor, statistics: Sequence[HeadStatistics]) -> list[tuple[int, int]]:
        """The pairs of layer and head: those given, or as many as wanted whose gates separate the marks best."""
        model = predictor.run.model
        existing = [(layer, head) for layer in range(model.layers) for head in range(model.heads)]
        if not isinstance(self.heads, int):
            for pair in self.heads:
                if pair not in existing:
                    raise ProbeError(
                        f"there is no layer {pair[0]} with head {pair[1]}: this model has layers 0 … "
                        f"{model.layers - 1} and heads 0 … {model.heads - 1}",
                        code="no_such_head",
                        layer=pair[0],
                        head=pair[1],
                    )
            return list(dict.fromkeys(self.heads))
        scores: dict[tuple[int, int], float] = {}
        for head in statistics:
            auc_values = [of_mark.auc for of_mark in head.marks.values() if of_mark.auc is not None]
            if auc_values:
                scores[head.layer, head.head] = max(auc_values)
        best = sorted(scores, key=lambda pair: (-scores[pair], pair)) or existing
        return sorted(best[: max(1, self.heads)])


def _head_map(layer: LayerProbe, head: int, show: Show) -> HeadMatrix:
    from cope_sweep.read.figures.heads import layer_heatmaps

    title, symbol = SHOWN[show]
    for heatmap in layer_heatmaps(layer, layer.heads.index(head)):
        if heatmap.symbol == symbol:
            return heatmap
    exist = {"attention", *(["position_attention"] if layer.position_only_attention_HTT is not None else [])}
    raise FigureError(
        f"layer {layer.layer} has no {title.lower()}: its encodings have no "
        f"{'position logits' if show == 'position_attention' else 'gates'}; it has: {', '.join(sorted(exist))}",
        code="no_such_map",
        show=show,
        allowed=sorted(exist),
    )


def map_frame(matrices: Mapping[tuple[int, int], HeadMatrix], labels: Sequence[str]) -> pd.DataFrame:
    """One line per head, query and key ≤ query: layer, head, query, key, query_token, key_token, value (float32)."""
    import numpy as np
    import pandas as pd

    query, key = np.tril_indices(len(labels))
    texts = np.array(labels, dtype=object)
    parts = [
        pd.DataFrame({
            "layer": layer, "head": head, "query": query, "key": key, "query_token": texts[query],
            "key_token": texts[key], "value": heatmap.values_TT[query, key],
        })
        for (layer, head), heatmap in matrices.items()
    ]  # fmt: skip
    return pd.concat(parts, ignore_index=True)


@dataclass(frozen=True, kw_only=True)
class MapsData(FigureData):
    """The cells of `map_frame`."""

    matrices: Mapping[tuple[int, int], HeadMatrix]
    """Layer and head → its map."""
    captions: Mapping[tuple[int, int], str]
    """Layer and head → how well it marks, or its mean gates on these tokens."""
    labels: Sequence[str]
    """The text of each token."""
    marked: np.ndarray
    """Indices of the marked tokens."""
    mark: str | None

    def draw(self, title: str, size: Size | None) -> Drawing:
        from cope_sweep.read.figures import canvas
        from cope_sweep.read.figures.heads import SIDE, draw_heatmap

        labels = [canvas.printable(label) for label in self.labels]
        side = SIDE if len(labels) <= 64 else 1.25 * SIDE
        drawing, axes = canvas.panels(len(self.matrices), title=title, size=size, height=side, width=side + 0.9)
        for index, (panel, ((layer, head), heatmap)) in enumerate(zip(axes, self.matrices.items(), strict=True)):
            panel.grid(visible=False)
            draw_heatmap(panel, heatmap, labels, self.marked, gid=f"{index}", side=side, max_label=10)
            lines = [f"Layer {layer} · head {head}{heatmap.colour_note}", self.captions.get((layer, head), "")]
            panel.set_title("\n".join(filter(None, lines)), loc="left")
            panel.set(xlabel="key token", ylabel="query token")
        if self.mark is not None and len(self.marked):
            sign = axes[0].plot([], [], "+k", markersize=7)[0]
            canvas.legend(drawing, [sign], [f"{self.mark} token"])
        return drawing
