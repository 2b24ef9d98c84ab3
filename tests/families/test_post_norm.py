import math

import pytest
import torch
import torch.nn.functional as F

from cope_sweep.model import Transformer
from tests.tiny import tiny_run

POST_NORM = {"model.family": "post_norm"}


def test_initial_scales():
    model = Transformer(tiny_run(**POST_NORM | {"model.dim": 256, "model.heads": 4, "task.vocabulary": 500}))
    assert model.embedding.weight.std().item() == pytest.approx(256**-0.5, rel=0.03)
    block = model.blocks[0]
    for linear in (block.attention.qkv, block.feed_forward.up, block.feed_forward.down):
        bound = linear.weight.shape[1] ** -0.5
        assert linear.weight.abs().max().item() == pytest.approx(bound, rel=0.01)
        assert linear.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
        # The largest of n uniform numbers is bound·n/(n + 1) in the mean; n is 256 at least.
        assert bound * 0.95 < linear.bias.abs().max().item() <= bound


def test_a_block_is_its_equation():
    block = Transformer(tiny_run(**POST_NORM)).double().blocks[0]
    with torch.no_grad():
        block.attention.out.weight.zero_()  # so that attention adds its bias alone
    w, x = dict(block.named_parameters()), torch.randn(1, 5, 8, dtype=torch.float64)
    h = F.layer_norm(x + w["attention.out.bias"], (8,))
    up = (h @ w["feed_forward.up.weight"].T + w["feed_forward.up.bias"]).clamp(min=0)
    expected = F.layer_norm(h + up @ w["feed_forward.down.weight"].T + w["feed_forward.down.bias"], (8,))
    torch.testing.assert_close(block(x, []), expected)


def test_there_is_no_final_norm():
    run = tiny_run(**POST_NORM)
    assert not [name for name, _ in Transformer(run).named_parameters() if name.startswith("norm.")]
    x = torch.randn(2, 8)
    assert run.model.family.final_norm({}, x) is x
