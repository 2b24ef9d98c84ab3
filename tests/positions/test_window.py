import math

import pytest
import torch

from cope_sweep.kernels import Inputs, LayerEncoding, attention_weights, visible, which
from cope_sweep.positions import T5, CoPE, Dims
from cope_sweep.positions.window import Window
from cope_sweep.testing import EncodingContract
from tests.positions import naive


class TestWindow(EncodingContract):
    specs = [
        Window(size=3),
        ["rope", Window(size=4, layers=(1,))],
        [Window(size=3, chunks=True), "alibi"],
        [CoPE(p_max=3), Window(size=3)],
        [T5(buckets=4, max_distance=9), Window(size=5)],
        ["stick_breaking", Window(size=2)],
        ["path", "fox", Window(size=3)],
    ]
    extrapolates = True
    order_matters = False  # the last token sees neither of the two

    def test_gradients_do_not_reach_later_tokens(self, spec):
        """Nor tokens that are too far for two layers."""
        model, tokens = self.model(spec), self.tokens(batch=1)
        embedded = model.embedding(tokens).detach().requires_grad_()
        model.embedding.register_forward_hook(lambda module, args, output: embedded)
        model(tokens)[0, 4].square().sum().backward()
        reached = embedded.grad[0].abs().sum(-1) > 0
        assert reached[4]
        assert not reached[5:].any()


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("queries", [None, 2])
@pytest.mark.parametrize("size", [1, 2, 4, 6, 9])
def test_a_query_sees_the_last_keys_or_those_of_its_chunk(size, queries, chunks):
    attention = naive.attention(queries=queries)
    score = Window(size=size, chunks=chunks).score({}, attention)
    for _, row, i, j in naive.pairs(attention):
        seen = i // size == j // size if chunks else i - j < size
        assert score[row, j].item() == (0 if seen else -math.inf)


def test_two_keys_by_hand():
    """Logits of 0: the third query halves its weight between the last two keys."""
    zeros = torch.zeros(1, 1, 3, 2, dtype=torch.float64)
    inputs, causal = Inputs.plain(zeros, zeros, zeros), visible(3, 3, torch.device("cpu"))
    weights = attention_weights(inputs, [LayerEncoding(Window(size=2))], causal)
    assert weights[0, 0].tolist() == [[1, 0, 0], [0.5, 0.5, 0], [0, 0.5, 0.5]]
    weights = attention_weights(inputs, [LayerEncoding(Window(size=2, chunks=True))], causal)
    assert weights[0, 0].tolist() == [[1, 0, 0], [0.5, 0.5, 0], [0, 0, 1]]


def test_chunks_have_no_fused_kernel():
    dims = Dims(64, 2, 1, 512)
    assert which([Window(size=64)], dims) == ("native", None)
    name, reason = which([Window(size=64, chunks=True)], dims)
    assert name == "blocked"
    assert "window has no `term` for its score" in reason
