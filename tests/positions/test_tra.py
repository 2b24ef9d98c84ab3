import math
from dataclasses import replace

import pytest
import torch

from cope_sweep.kernels import Inputs, LayerEncoding, attention_weights, visible
from cope_sweep.positions.tra import EPS, TRA
from cope_sweep.testing import EncodingContract
from cope_sweep.testing.encoding_contract import _embedding_leaf
from tests.positions import naive


class TestTRA(EncodingContract):
    specs = [TRA(), ["rope", TRA(layers=(1,))]]
    extrapolates = True

    def test_gradients_do_not_reach_later_tokens(self, spec):
        """A token that is below the threshold of all queries has no gradient, so earlier ones may have none."""
        model, tokens = self.model(spec), self.tokens(batch=1)
        embedded = _embedding_leaf(model, tokens)
        model(tokens)[0, 4].square().sum().backward()
        gradient = embedded.grad[0].abs().sum(-1)
        assert (gradient[:5] > 0).sum() > 1
        assert (gradient[5:] == 0).all()


def test_only_keys_above_the_threshold_count():
    attention = naive.attention(heads=3, tokens=8, features=1, seed=4)
    inputs = Inputs(
        *(getattr(attention, name) for name in ("q_BHQK", "k_BHSK", "v_BHSK", "q_BHQK", "k_BHSK")),
        [attention.features_BHSF],
    )
    weights = attention_weights(inputs, [LayerEncoding(TRA())], visible(8, 8, torch.device("cpu")))
    q, k = (x[0] / (x[0].square().mean(-1, keepdim=True) + EPS).sqrt() for x in (attention.q_BHQK, attention.k_BHSK))
    empty = 0
    for h in range(3):
        for i in range(8):
            s = [max(0.0, float(q[h, i] @ k[h, j]) / 2) for j in range(i + 1)]
            decay = naive.log_sigmoid(attention.features_BHSF[0, h, i, 0])
            terms = [
                math.exp(s[j] + decay * sum(each > 0 for each in s[j:])) if s[j] > 0 else 0.0 for j in range(i + 1)
            ]
            expected = [term / sum(terms) for term in terms] if any(terms) else [0.0] * (i + 1)
            empty += not any(terms)
            assert weights[0, h, i, : i + 1].tolist() == pytest.approx(expected, abs=1e-12)
            assert not weights[0, h, i, i + 1 :].any()
    assert empty, "no row without a key: the case tests less than it says"
    hard = attention_weights(replace(inputs, hard=True), [LayerEncoding(TRA())], visible(8, 8, torch.device("cpu")))
    torch.testing.assert_close(hard.sum(-1), weights.sum(-1))
