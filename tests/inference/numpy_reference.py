"""The matrices of a layer in numpy, by their definitions, from what the layer reads. It shares no code with the model.

Shapes: T tokens, D dim, H heads, K head dim, P positions.
"""

from dataclasses import dataclass, field
from math import sqrt

import numpy as np


@dataclass
class Layer:
    attention: np.ndarray | None = None
    position_only: np.ndarray | None = None
    gates: dict = field(default_factory=dict)
    positions: dict = field(default_factory=dict)
    scores: dict = field(default_factory=dict)


def layer_of(predictor, layer, x, q, k, v, rotated_q, rotated_k):
    """The matrices of a layer whose attention reads `x`, shape (T, D), as these queries, keys and values."""
    H, T, K = q.shape
    distance = np.arange(T)[:, None] - np.arange(T)
    causal = distance >= 0
    for window in predictor.run.model.position:
        if window.kind == "window" and window.serves(layer):
            is_chunk = np.arange(T)[:, None] // window.size == np.arange(T) // window.size
            causal = causal & (is_chunk if window.chunks else distance < window.size)
    found, total = Layer(), np.zeros((H, T, T))
    for index, encoding in enumerate(predictor.run.model.position):
        if not encoding.serves(layer):
            continue
        e = {
            name.split(".")[-1]: value.numpy()
            for name, value in predictor.model.state_dict().items()
            if name.startswith((f"position.{index}.shared.", f"position.{index}.layers.{layer}."))
        }
        if encoding.kind.startswith("cope"):
            gate_q, gate_k = q, k
            if encoding.gate == "values":
                gate_k = v
            elif encoding.gate == "separate":
                gate_k = (x @ e["gate_weight"].T + e["gate_bias"]).reshape(T, H, K).swapaxes(0, 1)
            elif encoding.gate_after_rotation:
                gate_q, gate_k = rotated_q, rotated_k
            gates = causal / (1 + np.exp(-(gate_q @ gate_k.swapaxes(1, 2)) / sqrt(K)))
            positions = causal * gates[..., ::-1].cumsum(-1)[..., ::-1]  # from the query backwards
            score = np.zeros((H, T, T))
            for head, i, j in np.ndindex(H, T, T):
                score[head, i, j] = contextual(encoding, e, head, q[head, i], positions[head, i, j])
            found.gates[encoding.kind], found.positions[encoding.kind] = gates, positions
        elif encoding.kind == "relative":
            score = np.einsum("hik,ijk->hij", q, e["e"][np.maximum(distance, 0)])
        elif encoding.kind == "alibi":
            score = -np.array(encoding.slopes)[:, None, None] * distance
        else:
            continue
        found.scores[encoding.kind] = score * causal
        total += score
    found.attention = softmax(rotated_q @ rotated_k.swapaxes(1, 2) / sqrt(K) + total, causal)
    if found.scores:
        weights = softmax(total, causal)
        found.position_only = weights / weights.max(-1, keepdims=True)
    return found


def contextual(encoding, e, head, q, p):
    if encoding.kind == "cope_alibi":
        return encoding.slope_sign * encoding.slopes[head] * p
    if encoding.kind == "cope_mlp":
        p = p if encoding.p_max is None else min(p, encoding.p_max - 1)
        return q @ (e["w2"] @ np.maximum(e["w1"] * p + e["b1"], 0) + e["b2"])
    z = (e["e"][head] if encoding.per_head else e["e"]) @ q
    return np.interp(p, np.arange(len(z)), z)  # np.interp is constant beyond the last point


def softmax(x, causal):
    e = causal * np.exp(x)
    return e / e.sum(-1, keepdims=True)
