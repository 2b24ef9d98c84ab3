import pytest

from cope_sweep.positions import ALiBi
from cope_sweep.positions.dape import DAPE
from cope_sweep.positions.kerple import Kerple
from cope_sweep.testing import EncodingContract
from tests.positions import naive


class TestDAPE(EncodingContract):
    specs = [DAPE(), DAPE(bias="alibi", hidden=3), [DAPE(bias="fire", layers=(1,)), "rope"]]
    extrapolates = True


@pytest.mark.parametrize("bias", ["alibi", "kerple"])
def test_a_net_over_the_heads_adapts_the_static_bias(bias):
    attention = naive.attention(queries=3)
    own = {"p": naive.normal(2), "a": naive.normal(2, seed=2)} if bias == "kerple" else {}
    net = {"w1": naive.normal(3, 4, seed=3), "b1": naive.normal(3, seed=4)}
    net |= {"w2": naive.normal(2, 3, seed=5), "b2": naive.normal(2, seed=6)}
    parameters = {f"{bias}_{name}": x for name, x in own.items()} | {f"mlp_{name}": x for name, x in net.items()}
    score = DAPE(bias=bias, hidden=3).score(parameters, attention)
    static = (Kerple() if bias == "kerple" else ALiBi()).score(own, attention).expand(1, 2, 3, 6)
    for h, row, _, j in naive.pairs(attention):
        inputs = [*attention.logits_BHQS[0, :, row, j], *static[0, :, row, j]]
        units = [
            float(b) + sum(float(w * x) for w, x in zip(row_of_w, inputs, strict=True))
            for row_of_w, b in zip(net["w1"], net["b1"], strict=True)
        ]
        units = [unit if unit > 0 else 0.01 * unit for unit in units]
        adapted = sum(float(w) * unit for w, unit in zip(net["w2"][h], units, strict=True)) + float(net["b2"][h])
        assert score[0, h, row, j] == pytest.approx(float(static[0, h, row, j]) + adapted, abs=1e-12)
