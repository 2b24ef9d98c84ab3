"""What position logits do in the heads of a model: their size, how far gates count, what they explain of attention.

For each encoding that adds to the logits and each head, over some queries i of a sequence and the keys that they see,
j ≤ i, without those that a window hides:

    position, content   means of |s_ij| and of the content's logits, |q_i·k_j/√K|, where s_ij is what the encoding adds
    load                position ÷ content. Near 0 the encoding does nothing: attention is that of the content alone
    beyond              share of the keys whose position p_ij is beyond the last embedding, p_max − 1: there the
                        derivative of all gates is 0. Only for contextual encodings with such a limit
    spans               p_i0, the position of the first key, which is the row's largest, for rows of several numbers of
                        keys. If it grows linearly with them, all gates are alike. Only for contextual encodings
    explained           share of attention's entropy that the encoding's logits alone explain:
                        (D(a‖u) − D(a‖r)) ÷ D(a‖u)

with a_i the softmax of all logits of row i, u_i the uniform distribution over its n keys, and r_i the softmax of the
encoding's logits alone. D is the Kullback–Leibler divergence: D(a‖u) = log n − H(a) is the entropy that attention takes
off the uniform distribution, and D(a‖r) what is left of it if r is known. So `explained` is 1 if attention is that of
the positions alone, 0 if positions prefer no key, and negative if they point to other keys than attention. Rows are
summed before the division.

An encoding that replaces q·k/√K, as PaTH does, mixes positions and content: it has no measures, and the content's
logits are then what it computes instead.

Shapes: B sequences, H heads, T tokens, S keys up to the query of a row, V of them that it sees, N sums.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cope_sweep.kernels import Inputs, LayerEncodings, observing, seen, visible
from cope_sweep.kernels.reference import with_float32
from cope_sweep.model.transformer import Transformer
from cope_sweep.positions import Attention, Encoding
from cope_sweep.positions.cope import ContextualEncoding
from cope_sweep.positions.dape import DAPE
from cope_sweep.positions.window import Window


def replaces_content(encoding: Encoding) -> bool:
    """Whether the encoding's score replaces q·k/√K by other logits. DAPE's only reads q·k/√K, and adds to it."""
    return encoding.replaces and not isinstance(encoding, DAPE)


def has_logits(encoding: Encoding) -> bool:
    """The encoding adds position logits; the score of a window is a mask."""
    return encoding.scores and not replaces_content(encoding) and not isinstance(encoding, Window)


def look(rows: Inputs, positions: LayerEncodings) -> tuple[Tensor, list[Attention], Tensor, Tensor]:
    """What some queries see of the keys up to the last of them.

    Returns q·k/√K, (B, H, Q, S); the argument of each encoding's `score`; and two masks, bool, (Q, S): the keys that
    are not after the query, and those of them that no window hides.
    """
    visible_QS = visible(rows.q_BHTK.shape[2], rows.k_BHSK.shape[2], rows.k_BHSK.device)
    logits_BHQS = rows.rotated_q_BHTK @ rows.rotated_k_BHSK.mT / rows.q_BHTK.shape[-1] ** 0.5
    of_each = seen(rows, positions, logits_BHQS, visible_QS)
    seen_QS = visible_QS
    for position, attention in zip(positions, of_each, strict=True):
        if isinstance(position.encoding, Window):
            seen_QS = seen_QS & (position.encoding.score(position.parameters, attention) == 0)
    return logits_BHQS, of_each, visible_QS, seen_QS


ROWS = 16
"""The most rows of a sequence that are measured, evenly spaced, the last one included."""


@dataclass(frozen=True)
class HeadLoad:
    """The measures of one encoding in one head."""

    layer: int
    head: int
    encoding: str
    """Kind of the encoding."""
    position: float
    content: float
    beyond: float | None
    """None: the encoding has no last embedding."""
    spans: tuple[tuple[int, float], ...]
    """Keys of a row, and its largest position, a mean over the rows; empty: the encoding has no gates."""
    explained: float | None
    """None: an encoding replaces the softmax, or attention is uniform."""

    @property
    def load(self) -> float | None:
        """None: all content logits are 0."""
        return self.position / self.content if self.content else None


@torch.no_grad()  # not inference_mode: a training may use what is cached here, such as angles
def head_loads(model: Transformer, sequences: Sequence[Tensor]) -> list[HeadLoad]:
    """The measures of every head and scoring encoding, by layer, head and order of the encodings.

    `sequences` are token ids, (T,), on the model's device. Each sequence is computed once, and of its attention at most
    `ROWS` rows.
    """
    sums: dict[tuple[int, int], _Sums] = defaultdict(_Sums)  # layer, index of the encoding
    for tokens_T in sequences:
        layers = itertools.count()  # the model calls attention once per layer, in order

        def observe(inputs: Inputs, positions: LayerEncodings, layers: itertools.count[int] = layers) -> None:
            layer = next(layers)
            inputs, positions = with_float32(inputs, positions)
            T = inputs.q_BHTK.shape[2]
            for row in sorted({math.ceil((n + 1) * T / ROWS) - 1 for n in range(ROWS)}):
                _add_row(sums, layer, inputs.of_queries(row, row + 1), positions)

        with observing(observe):
            model.hidden(tokens_T[None])
    loads = [load for (layer, _), total in sorted(sums.items()) for load in total.loads(layer)]
    return sorted(loads, key=lambda load: (load.layer, load.head))  # stable: encodings stay in order


def largest_position(loads: Sequence[HeadLoad]) -> float | None:
    """The largest position of the longest rows, of the head that counts farthest; None without contextual encodings.

    Positions are not clamped here: it is the number of embeddings, less one, that these sequences reach.
    """
    return max((load.spans[-1][1] for load in loads if load.spans), default=None)


MOST_BEYOND = 0.5
"""With more of its keys beyond the last embedding, a head's gates hardly learn from positions."""
LEAST_LOAD = 0.01
"""With smaller position logits, as a share of the content's, an encoding does nothing."""
GUIDE = "docs/how-to/cope-in-practice.md"


def beyond_warnings(loads: Sequence[HeadLoad]) -> list[tuple[str, str]]:
    """For each encoding by which more than half of the keys of every head are beyond the last embedding.

    A warning is what is wrong, the same words for all seeds, and what was measured.
    """
    return [
        (
            f"{kind}: more than half of the keys of every head are beyond the last embedding, where gates have no "
            f"gradient; see gate_bias and p_max in {GUIDE}",
            f"{100 * min(shares):.0f} to {100 * max(shares):.0f} % of the keys",
        )
        for kind, of_kind in _by_encoding(loads)
        if (shares := [load.beyond for load in of_kind if load.beyond is not None]) and min(shares) > MOST_BEYOND
    ]


def load_warnings(loads: Sequence[HeadLoad]) -> list[tuple[str, str]]:
    """For each encoding whose logits, over all heads, are below 1 % of the content's: warnings as `beyond_warnings`."""
    warnings = []
    for kind, of_kind in _by_encoding(loads):
        position, content = (math.fsum(getattr(load, name) for load in of_kind) for name in ("position", "content"))
        if position < LEAST_LOAD * content:
            text = f"{kind}: its logits are below 1 % of the content's, so it does next to nothing; see {GUIDE}"
            warnings.append((text, f"{100 * position / content:.2g} %"))
    return warnings


def _by_encoding(loads: Sequence[HeadLoad]) -> list[tuple[str, list[HeadLoad]]]:
    kinds = dict.fromkeys(load.encoding for load in loads)
    return [(kind, [load for load in loads if load.encoding == kind]) for kind in kinds]


@dataclass
class _Sums:
    """Sums of one encoding over the rows of a layer so far."""

    encoding: str = ""
    limited: bool = False
    weighs: bool = False
    keys: int = 0
    sums_HN: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    """For each head: |s_ij|, the content's logits, keys beyond the last embedding, D(a‖u), and D(a‖u) − D(a‖r)."""
    spans: dict[int, list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    """Keys of a row → p_i0 of each head, for each row."""

    def loads(self, layer: int) -> list[HeadLoad]:
        return [
            HeadLoad(
                layer=layer,
                head=head,
                encoding=self.encoding,
                position=position / self.keys,
                content=content / self.keys,
                beyond=beyond / self.keys if self.limited else None,
                spans=tuple(
                    (keys, math.fsum(each[head] for each in spans) / len(spans))
                    for keys, spans in sorted(self.spans.items())
                ),
                explained=None if self.weighs or known <= 0 else explained / known,
            )
            for head, (position, content, beyond, known, explained) in enumerate(self.sums_HN.tolist())
        ]


def _add_row(sums: dict[tuple[int, int], _Sums], layer: int, row: Inputs, positions: LayerEncodings) -> None:
    """Add one query, (B, H, 1, K) with B = 1, and its keys."""
    logits_BHQS, of_each, _, seen_QS = look(row, positions)

    def of_seen(x_BHQS: Tensor) -> Tensor:
        return x_BHQS.expand_as(logits_BHQS)[0, :, 0][:, seen_QS[0]].double()

    content_HV, scores_HV = of_seen(logits_BHQS), {}
    for index, (p, attention) in enumerate(zip(positions, of_each, strict=True)):
        score_BHQS = p.encoding.score(p.parameters, attention)
        if score_BHQS is None:
            continue
        if replaces_content(p.encoding):
            content_HV = content_HV + of_seen(score_BHQS)
        elif has_logits(p.encoding):
            scores_HV[index] = of_seen(score_BHQS)
    log_a_HV = (content_HV + sum(scores_HV.values())).log_softmax(-1)
    a_HV, V = log_a_HV.exp(), log_a_HV.shape[-1]
    for index, score_HV in scores_HV.items():
        position, total = positions[index], sums[layer, index]
        encoding = position.encoding
        total.encoding, total.keys = encoding.kind, total.keys + V
        total.weighs = any(p.encoding.weighs for p in positions)
        beyond_HV = torch.zeros_like(score_HV)
        if isinstance(encoding, ContextualEncoding):
            p_HV = of_seen(encoding.positions(position.parameters, of_each[index]))
            total.spans[V].append(p_HV[:, 0].tolist())
            limit = encoding.limit(position.parameters)
            total.limited = limit is not None
            if limit is not None:
                beyond_HV = (p_HV > limit).double()
        # Σ a·log(a/u) and Σ a·log(r/u): a weight of 0 adds 0, whatever the logarithm.
        known_HV = (a_HV * (log_a_HV + math.log(V))).nan_to_num(0)
        explained_HV = (a_HV * (score_HV.log_softmax(-1) + math.log(V))).nan_to_num(0)
        terms = (score_HV.abs(), content_HV.abs(), beyond_HV, known_HV, explained_HV)
        total.sums_HN = total.sums_HN + torch.stack([x_HV.sum(-1) for x_HV in terms], dim=-1)
