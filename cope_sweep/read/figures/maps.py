"""Maps of heads over the tokens of one sequence: gates, positions, position-only attention or attention.

The paper's Figure 4 is position-only attention, its Figure 6 gates, both with a plus on each token that ends a
paragraph or is part of a section's title.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cope_sweep.config.explain import suggest
from cope_sweep.inference import Predictor, TokenIds, validate_token_ids
from cope_sweep.inference.probe import (
    LayerProbe,
    ProbeError,
    TokenMarks,
    head_statistics,
    probe,
    token_labels,
    token_marks,
)
from cope_sweep.read.figures.base import Figure, FigureError
from cope_sweep.read.figures.kinds import MAP_DEFAULTS, MapOptions, Show

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure as Drawing

    from cope_sweep.read.figures.heads import Heatmap

MAX_CELLS = 8 << 20
"""Limit for the cells of all maps of a figure."""
TITLES: dict[Show, str] = {
    "gates": "Gates",
    "positions": "Positions",
    "position_attention": "Position-only attention",
    "attention": "Attention",
}
SIDE = 3.0
"""Inches of a map with up to MAX_TOKENS_OF_SIDE tokens at its axes; longer ones are larger."""


@dataclass(frozen=True)
class HeadMap:
    """The map of one head."""

    layer: int
    head: int
    heatmap: Heatmap


def maps(predictor: Predictor, token_ids: TokenIds, options: MapOptions = MAP_DEFAULTS) -> Figure:
    """Maps of the selected heads over one sequence.

    Raises FigureError for what the model or the tokens do not have, and what `cope_sweep.inference.probe.probe` raises.
    """
    run = predictor.run
    tokens_T = validate_token_ids(token_ids, predictor.vocabulary_size)
    tokenizer = predictor.tokenizer if predictor.reads_text else None
    labels, known = token_labels(run.task, tokens_T, tokenizer), token_marks(run.task, tokens_T, tokenizer)
    if options.mark is not None and options.mark not in known:
        raise FigureError(f"no mark {options.mark!r}{suggest(options.mark, known) or ': these tokens have none'}")
    mark = options.mark or next((name for name, on in known.items() if on.any()), None)
    marked_T = known[mark] if mark else np.zeros(len(tokens_T), dtype=bool)
    heads = _heads(predictor, tokens_T, {mark: marked_T} if mark else {}, options.heads)
    if len(tokens_T) ** 2 * len(heads) > MAX_CELLS:
        raise FigureError(
            f"{len(heads)} maps of {len(tokens_T)} tokens have more than {MAX_CELLS:,} cells; "
            "choose fewer heads or tokens"
        )
    found = probe(predictor, tokens_T, sorted({layer for layer, _ in heads}), sorted({head for _, head in heads}))
    layers = {layer.layer: layer for layer in found.layers}
    drawn = [_head_map(layers[layer], head, options.show) for layer, head in heads]
    data = map_frame(drawn, labels)
    encodings = " + ".join(encoding.kind for encoding in run.model.position) or "no position encoding"
    title = options.title or f"{TITLES[options.show]}: {run.task.kind}, {encodings} (run {run.run_id})"
    return Figure("maps", title, data, partial(_draw, drawn, labels, np.flatnonzero(marked_T), mark, title))


def _heads(
    predictor: Predictor, tokens_T: np.ndarray, marks: TokenMarks, wanted: Sequence[tuple[int, int]] | int
) -> list[tuple[int, int]]:
    """The selected pairs of layer and head: those given, or those whose gates separate the marks best."""
    model = predictor.run.model
    existing = [(layer, head) for layer in range(model.layers) for head in range(model.heads)]
    if not isinstance(wanted, int):
        for pair in wanted:
            if tuple(pair) not in existing:
                raise ProbeError(
                    f"there is no layer {pair[0]} with head {pair[1]}: this model has layers 0 … {model.layers - 1} "
                    f"and heads 0 … {model.heads - 1}"
                )
        return [(layer, head) for layer, head in dict.fromkeys(map(tuple, wanted))]
    scores: dict[tuple[int, int], float] = {}
    for each in head_statistics(predictor, [tokens_T], [marks]) if marks else ():
        for found in each.marks.values():
            if found.auc is not None:
                scores[each.layer, each.head] = max(found.auc, scores.get((each.layer, each.head), 0.0))
    best = sorted(scores, key=lambda pair: (-scores[pair], pair)) or existing
    return sorted(best[: max(1, wanted)])


def _head_map(layer: LayerProbe, head: int, show: Show) -> HeadMap:
    from cope_sweep.read.figures.heads import layer_heatmaps

    row = layer.heads.index(head)
    symbols = {"gates": "g", "positions": "p", "position_attention": "position only", "attention": "a"}
    for heatmap in layer_heatmaps(layer, row):
        if heatmap.symbol == symbols[show]:
            return HeadMap(layer.layer, head, heatmap)
    exist = {"attention", *(["position_attention"] if layer.position_only_attention_HTT is not None else [])}
    raise FigureError(
        f"layer {layer.layer} has no {TITLES[show].lower()}: its encodings have no "
        f"{'position logits' if show == 'position_attention' else 'gates'}; it has: {', '.join(sorted(exist))}"
    )


def map_frame(drawn: Sequence[HeadMap], labels: Sequence[str]) -> pd.DataFrame:
    """One line per head, query and key ≤ query: layer, head, query, key, query_token, key_token, value (float32)."""
    import pandas as pd

    query, key = np.tril_indices(len(labels))
    texts = np.array(labels, dtype=object)
    parts = [
        pd.DataFrame({
            "layer": each.layer, "head": each.head, "query": query, "key": key, "query_token": texts[query],
            "key_token": texts[key], "value": each.heatmap.values_TT[query, key],
        })
        for each in drawn
    ]  # fmt: skip
    return pd.concat(parts, ignore_index=True)


def _draw(drawn: Sequence[HeadMap], labels: Sequence[str], marked: np.ndarray, mark: str | None, title: str) -> Drawing:
    from cope_sweep.read.figures import canvas
    from cope_sweep.read.figures.heads import draw_heatmap

    side = SIDE if len(labels) <= 64 else 1.25 * SIDE
    drawing, axes = canvas.panels(len(drawn), title=title, height=side, width=side + 0.9)
    for index, (panel, each) in enumerate(zip(axes, drawn, strict=True)):
        panel.grid(visible=False)
        draw_heatmap(panel, each.heatmap, labels, marked, gid=f"{index}", side=side, max_label=10)
        beyond = f" (grey: beyond {each.heatmap.limit})" if each.heatmap.beyond else ""
        panel.set_title(f"Layer {each.layer} · head {each.head}{beyond}", loc="left")
        panel.set(xlabel="key token", ylabel="query token")
    if mark is not None and len(marked):
        sign = axes[0].plot([], [], "+k", markersize=7)[0]
        canvas.legend(drawing, [sign], [f"{mark} token"])
    return drawing
