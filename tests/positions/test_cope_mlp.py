import torch

from cope_sweep.positions import CoPE, CoPEMLP, Dims
from cope_sweep.testing import EncodingContract
from tests.positions.test_cope import attention_of


class TestCoPEMLP(EncodingContract):
    specs = [
        CoPEMLP(hidden=5),
        CoPEMLP(hidden=3, layers=(0,), p_max=4, gate="values"),
        CoPEMLP(hidden=5, activation="gelu", scale_positions=True),
        [CoPEMLP(hidden=5, rotated_query=True), "rope"],
    ]
    extrapolates = True


def test_is_q_times_the_mlp_of_the_position():
    attention = attention_of(heads=2, tokens=6, head_dim=3)
    mlp = CoPEMLP(hidden=4)
    rng = torch.Generator().manual_seed(1)
    w = {n: torch.randn(p.shape, generator=rng).double() for n, p in mlp.parameters(Dims(6, 2, 1, 9)).items()}
    score = mlp.score(w, attention)
    p = CoPE().positions(attention)
    for h in range(2):
        for i in range(6):
            for j in range(i + 1):
                hidden = torch.relu(w["w1"] * p[0, h, i, j] + w["b1"])
                e = w["w2"] @ hidden + w["b2"]
                torch.testing.assert_close(score[0, h, i, j], attention.q_BHQK[0, h, i] @ e)
