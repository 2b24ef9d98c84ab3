"""Tiny models with random weights, large enough that gates differ from ½ and attention is not uniform."""

import torch

from cope_sweep.inference import Predictor
from cope_sweep.model import Transformer
from tests.tiny import tiny_run

V = 6


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
    net = Transformer(run).double().eval()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.6, generator=rng)
    return Predictor(net.requires_grad_(False), run)
