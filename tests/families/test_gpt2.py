import math

import pytest
import torch
import torch.nn.functional as F

from cope_sweep.model import Transformer
from tests.tiny import tiny_run


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


def test_a_block_is_its_equation():
    model = Transformer(tiny_run()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    w, x = dict(model.blocks[0].named_parameters()), torch.randn(1, 5, 8, dtype=torch.float64)

    def norm(name, h):
        return (h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt() * w[
            f"{name}.weight"
        ] + w[f"{name}.bias"]

    q, k, v = (norm("attention_norm", x) @ w["attention.qkv.weight"].T + w["attention.qkv.bias"]).split(8, dim=-1)
    heads = []
    for head in (slice(0, 4), slice(4, 8)):
        logits = q[..., head] @ k[..., head].transpose(-1, -2) / 2
        visible = torch.ones(5, 5).tril().bool()
        heads.append(logits.masked_fill(~visible, -math.inf).softmax(-1) @ v[..., head])
    h = x + torch.cat(heads, -1) @ w["attention.out.weight"].T + w["attention.out.bias"]
    up = norm("ffn_norm", h) @ w["feed_forward.up.weight"].T + w["feed_forward.up.bias"]
    expected = h + F.gelu(up, approximate="tanh") @ w["feed_forward.down.weight"].T + w["feed_forward.down.bias"]
    torch.testing.assert_close(model.blocks[0](x, []), expected)


def test_the_output_is_normalised():
    run = tiny_run()
    states = run.model.family.final_norm({"norm.weight": torch.ones(8), "norm.bias": torch.zeros(8)}, torch.randn(2, 8))
    torch.testing.assert_close(states.mean(-1), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(states.var(-1, unbiased=False), torch.ones(2), atol=1e-3, rtol=0)
