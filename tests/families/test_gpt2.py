import math

import pytest
import torch

from cope_sweep.model import Transformer
from tests.helpers.tiny import tiny_run


def test_initial_scales():
    model = Transformer(tiny_run(**{"model.dim": 256, "model.heads": 4, "model.layers": 8, "task.vocabulary": 500}))
    block = model.blocks[3]
    for weight, std in (
        (model.embedding.weight, 0.02),
        (block.attention.qkv.weight, 0.02),
        (block.feed_forward.up.weight, 0.02),
        (block.attention.out.weight, 0.02 / math.sqrt(16)),
        (block.feed_forward.down.weight, 0.02 / math.sqrt(16)),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.03)
        assert abs(weight.mean().item()) < 0.001
    assert not block.attention.qkv.bias.any()
    assert model.head.weight is model.embedding.weight


def test_the_output_is_normalised():
    run = tiny_run()
    states = run.model.family.final_norm({"norm.weight": torch.ones(8), "norm.bias": torch.zeros(8)}, torch.randn(2, 8))
    torch.testing.assert_close(states.mean(-1), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(states.var(-1, unbiased=False), torch.ones(2), atol=1e-3, rtol=0)
