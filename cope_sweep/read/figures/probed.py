"""A probe of a checkpoint that notebooks show as heatmaps of its heads."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from cope_sweep.errors import ProbeError
from cope_sweep.inference.probe import HeadStatistics, LayerProbe, Probe, TokenMarks

MAX_HEADS = 8
"""Maximum number of heads in the picture of a notebook: each takes about a second to draw."""


@dataclass(frozen=True, kw_only=True, repr=False)
class DrawnProbe(Probe):
    """The matrices of a probe, with what their drawing needs."""

    labels: Sequence[str]
    """The text of each token."""
    marks: TokenMarks
    statistics: Sequence[HeadStatistics]
    run_id: str

    def __repr__(self) -> str:
        heads = sum(len(layer.heads) for layer in self.layers)
        return (
            f"Probe of run {self.run_id}: {len(self.tokens_T)} tokens, {len(self.layers)} layers, {heads} heads; "
            "`layers` and `arrays()` have the matrices"
        )

    def _repr_html_(self) -> str:
        """Called by notebooks: a row of heatmaps for each of the first heads, as one picture."""
        from cope_sweep.read.figures.heads import head_figures, picture  # matplotlib

        try:
            shown = self._first_heads()
            figures = head_figures(shown, self.marks, self.statistics)
        except ProbeError as error:
            return f"<p>{escape(repr(self))}. {escape(str(error))}</p>"
        drawing = base64.b64encode(picture(figures, list(self.labels), self.marks, "svg")).decode()
        # An image: inline, the ids of several drawings in a notebook would be the same.
        image = f'<img src="data:image/svg+xml;base64,{drawing}" alt="{escape(repr(self))}" style="background: white">'
        heads = sum(len(layer.heads) for layer in self.layers)
        if heads == len(figures):
            return image
        choice = "choose with <code>layers=</code> and <code>heads=</code>"
        return f"{image}<p>The first {len(figures)} of {heads} heads; {choice}.</p>"

    def _first_heads(self) -> Probe:
        """The probe of whole layers with at most MAX_HEADS heads, or of the first heads of the first layer."""
        layers: list[LayerProbe] = []
        left = MAX_HEADS
        for layer in self.layers:
            if left >= len(layer.heads) or not layers:
                layers.append(replace(layer, heads=layer.heads[:left]))
            left -= len(layer.heads)
        return Probe(self.tokens_T, tuple(layers))
