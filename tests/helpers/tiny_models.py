"""Tiny models with random weights, large enough that gates differ from ½ and attention is not uniform."""

import torch

from cope_sweep.inference import Predictor
from cope_sweep.model import Transformer
from tests.helpers.tiny import tiny_run

V = 6


def set_logits(model, logits_V):
    """Make a model whose output layer is its own give the same logits at every token."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.norm.bias[0] = 1
        model.head.weight[:, 0] = logits_V


def tiny_predictor(position, *, layers=2, heads=2, dim=8, seed=1, **model):
    """A model in float64, for comparisons with tight tolerances."""
    run = tiny_run(
        **{
            "model.position": position,
            "model.layers": layers,
            "model.heads": heads,
            "model.dim": dim,
            "task.blanks": 20,
        }
        | {f"model.{key}": value for key, value in model.items()}
    )
    return random_predictor(run, 0.6, seed)


def random_predictor(run, std, seed=1, dtype=torch.float64):
    """A model whose weights have this standard deviation."""
    net = Transformer(run).to(dtype).eval().requires_grad_(False)
    randomize(net.parameters(), std, seed)
    return Predictor(net, run)


def randomize(parameters, std, seed=1):
    """Draw each parameter from a normal distribution of this standard deviation."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(0, std, generator=rng)
