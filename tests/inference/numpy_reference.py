"""GPT-2 with position encodings in numpy and loops, from the tensors of a checkpoint. It shares no code with the model.

Shapes: T tokens, D dim, H heads, K head dim, P positions.
"""

from dataclasses import dataclass, field
from math import exp, sqrt, tanh

import numpy as np


@dataclass
class Layer:
    attention: np.ndarray
    position_only: np.ndarray | None = None
    gates: dict = field(default_factory=dict)
    positions: dict = field(default_factory=dict)
    scores: dict = field(default_factory=dict)


def run_model(state, run, tokens, attention=None):
    """Logits, shape (T, V), and the matrices of each layer. `attention[layer]`, if given, replaces its attention."""
    w = {name: value.double().numpy() for name, value in state.items()}
    H, T = run.model.heads, len(tokens)
    x = w["embedding.weight"][tokens]
    for index, encoding in enumerate(run.model.position):
        if encoding.kind == "absolute":
            x = x + w[f"position.{index}.shared.e"][:T]
    layers = []
    for layer in range(run.model.layers):
        b = f"blocks.{layer}."
        h = norm(x, w, b + "attention_norm")
        qkv = (h @ w[b + "attention.qkv.weight"].T + w[b + "attention.qkv.bias"]).reshape(T, 3, H, -1)
        q, k, v = (qkv[:, part].swapaxes(0, 1) for part in range(3))
        found = layer_of(w, run, layer, h, q, k, v)
        layers.append(found)
        weights = found.attention if attention is None else attention[layer]
        mixed = np.stack([weights[head] @ v[head] for head in range(H)], axis=1).reshape(T, -1)
        x = x + mixed @ w[b + "attention.out.weight"].T + w[b + "attention.out.bias"]
        up = norm(x, w, b + "ffn_norm") @ w[b + "feed_forward.up.weight"].T + w[b + "feed_forward.up.bias"]
        x = x + gelu(up) @ w[b + "feed_forward.down.weight"].T + w[b + "feed_forward.down.bias"]
    return norm(x, w, "norm") @ w["embedding.weight"].T, layers


def layer_of(w, run, layer, h, q, k, v):
    H, T, K = q.shape
    rq, rk, rotated = q, k, False
    for encoding in run.model.position:
        if encoding.kind == "rope" and encoding.serves(layer):
            rq, rk, rotated = rotated_by(q, encoding.base), rotated_by(k, encoding.base), True
    found = Layer(np.zeros((H, T, T)))
    total = np.zeros((H, T, T))
    for index, encoding in enumerate(run.model.position):
        if not encoding.serves(layer):
            continue
        e = {
            name.split(".")[-1]: value
            for name, value in w.items()
            if name.startswith((f"position.{index}.shared.", f"position.{index}.layers.{layer}."))
        }
        score = np.zeros((H, T, T))
        if encoding.kind.startswith("cope"):
            gate_q, gate_k = q, k
            if encoding.gate == "values":
                gate_k = v
            elif encoding.gate == "separate":
                gate_k = (h @ e["gate_weight"].T + e["gate_bias"]).reshape(T, H, K).swapaxes(0, 1)
            elif rotated and encoding.gate_after_rotation:
                gate_q, gate_k = rq, rk
            gates, positions = np.zeros((H, T, T)), np.zeros((H, T, T))
            for head in range(H):
                for i in range(T):
                    position = 0.0
                    for j in range(i, -1, -1):  # from the query backwards
                        gates[head, i, j] = 1 / (1 + exp(-(gate_q[head, i] @ gate_k[head, j]) / sqrt(K)))
                        position += gates[head, i, j]
                        positions[head, i, j] = position
                        score[head, i, j] = contextual(encoding, e, head, q[head, i], position)
            found.gates[encoding.kind], found.positions[encoding.kind] = gates, positions
        elif encoding.kind == "relative":
            for head in range(H):
                for i in range(T):
                    for j in range(i + 1):
                        score[head, i, j] = q[head, i] @ e["e"][i - j]
        elif encoding.kind == "alibi":
            for i in range(T):
                for j in range(i + 1):
                    score[:, i, j] = -np.array(encoding.slopes) * (i - j)
        else:
            continue
        found.scores[encoding.kind] = score
        total += score
    for head in range(H):
        for i in range(T):
            content = rq[head, i] @ rk[head, : i + 1].T / sqrt(K)
            found.attention[head, i, : i + 1] = softmax(content + total[head, i, : i + 1])
    if found.scores:
        found.position_only = np.zeros((H, T, T))
        for head in range(H):
            for i in range(T):
                row = softmax(total[head, i, : i + 1])
                found.position_only[head, i, : i + 1] = row / row.max()
    return found


def contextual(encoding, e, head, q, p):
    if encoding.kind == "cope_alibi":
        return encoding.slope_sign * encoding.slopes[head] * p
    if encoding.kind == "cope_mlp":
        p = p if encoding.p_max is None else min(p, encoding.p_max - 1)
        return q @ (e["w2"] @ np.maximum(e["w1"] * p + e["b1"], 0) + e["b2"])
    z = (e["e"][head] if encoding.per_head else e["e"]) @ q
    return np.interp(p, np.arange(len(z)), z)  # np.interp is constant beyond the last point


def rotated_by(x, base):
    """RoPE as a product of complex numbers."""
    _, T, K = x.shape
    rotation = np.exp(1j * np.outer(np.arange(T), base ** (-np.arange(0, K, 2) / K)))
    y = (x[..., : K // 2] + 1j * x[..., K // 2 :]) * rotation
    return np.concatenate((y.real, y.imag), axis=-1)


def norm(x, w, name):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w[name + ".weight"] + w[name + ".bias"]


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(tanh)(sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()
