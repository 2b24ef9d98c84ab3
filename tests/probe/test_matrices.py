"""Matrices equal an independent plain computation from the weights, explain the model's output, and stay bounded."""

import numpy as np
import pytest
import torch

from cope_sweep.inference import TokensError
from cope_sweep.kernels import attention_weights, observing, using, visible
from cope_sweep.model import CheckpointError
from cope_sweep.probe import ProbeError, each_layer, matrices, probe
from tests.probe.models import V, tiny_predictor
from tests.probe.plain import run_model

CPU = torch.device("cpu")
TOKENS = np.random.default_rng(3).integers(0, V, 14)

POSITIONS = {
    "keys": [{"kind": "cope", "p_max": 4}],
    "full": [{"kind": "cope", "p_max": "full", "share_layers": True}],
    "values": [{"kind": "cope", "p_max": 5, "gate": "values", "per_head": True}],
    "separate": [{"kind": "cope", "p_max": 5, "gate": "separate"}],
    "before rotation": [{"kind": "cope", "p_max": 5}, "rope"],
    "after rotation": [{"kind": "cope", "p_max": 5, "gate_after_rotation": True}, "rope"],
    "separate, rotated": ["rope", {"kind": "cope", "p_max": 5, "gate": "separate"}],
    "mlp": [{"kind": "cope_mlp", "hidden": 7, "p_max": 6}],
    "mlp, never stopping": [{"kind": "cope_mlp", "hidden": 7, "gate": "values"}],
    "alibi": [{"kind": "cope_alibi", "slopes": [0.5, 0.1]}],
    "alibi, separate": [{"kind": "cope_alibi", "slopes": [0.5, 0.1], "gate": "separate", "slope_sign": 1}],
    "two that count": [{"kind": "cope", "p_max": 4}, {"kind": "cope_alibi", "slopes": [0.3, 0.2], "gate": "values"}],
    "in one layer": [{"kind": "cope", "p_max": 4, "layers": [1]}],
    "cope + relative": [{"kind": "cope", "p_max": 4}, "relative"],
    "relative": ["relative"],
    "plain alibi": [{"kind": "alibi", "slopes": [0.5, 0.25]}],
    "rope": ["rope"],
    "absolute": ["absolute"],
    "none": [],
}


@pytest.mark.parametrize("name", POSITIONS)
def test_all_equals_a_plain_computation_from_the_weights(name):
    predictor = tiny_predictor(POSITIONS[name])
    _, expected = run_model(predictor.model.state_dict(), predictor.run, TOKENS)
    found = probe(predictor, TOKENS)
    assert [each.layer for each in found.layers] == [0, 1]
    for mine, plain in zip(found.layers, expected, strict=True):
        assert mine.heads == (0, 1)
        assert set(mine.counted) == set(plain.gates)
        assert set(mine.scores_HTT) == set(plain.scores)
        for kind, counted in mine.counted.items():
            close(counted.gates_HTT, plain.gates[kind])
            close(counted.positions_HTT, plain.positions[kind])
        for kind, scores_HTT in mine.scores_HTT.items():
            close(scores_HTT, plain.scores[kind])
        close(mine.attention_HTT, plain.attention)
        assert (mine.alone_HTT is None) == (plain.alone is None)
        if mine.alone_HTT is not None:
            close(mine.alone_HTT, plain.alone)


def close(mine, plain):
    assert mine.dtype == np.float32
    np.testing.assert_allclose(mine, plain, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", POSITIONS)
def test_attention_explains_the_models_output(name):
    predictor = tiny_predictor(POSITIONS[name])
    found = probe(predictor, TOKENS)
    for each in found.layers:
        np.testing.assert_allclose(each.attention_HTT.sum(-1), 1, rtol=1e-6)
        assert (np.triu(each.attention_HTT, 1) == 0).all()
    attention = [each.attention_HTT.astype(np.float64) for each in found.layers]
    logits, _ = run_model(predictor.model.state_dict(), predictor.run, TOKENS, attention)
    with torch.inference_mode():
        expected = predictor.model(torch.from_numpy(TOKENS)[None])[0].numpy()
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["keys", "two that count", "cope + relative", "plain alibi"])
def test_attention_from_position_alone_has_a_maximum_of_1_for_each_query(name):
    for each in probe(tiny_predictor(POSITIONS[name]), TOKENS).layers:
        np.testing.assert_array_equal(each.alone_HTT.max(-1), 1)
        assert (np.triu(each.alone_HTT, 1) == 0).all()


def test_gates_of_one_count_tokens():
    # Eq. 4: where all gates are 1, p_ij = i − j + 1.
    predictor = tiny_predictor([{"kind": "cope", "p_max": 4}])
    for block in predictor.model.blocks:
        block.attention.qkv.weight.zero_()
        block.attention.qkv.bias.fill_(20.0)  # q·k/√K = 800
    counted = probe(predictor, TOKENS).layers[1].counted["cope"]
    i, j = np.indices((14, 14))
    np.testing.assert_array_equal(counted.gates_HTT[0], np.tril(np.ones((14, 14))))
    np.testing.assert_array_equal(counted.positions_HTT[0], np.where(j <= i, i - j + 1, 0))
    np.testing.assert_array_equal(counted.stopped_HTT[0], np.where(j <= i, np.minimum(i - j + 1, 3), 0))
    assert counted.limit == 3


def test_figure_1():
    # "Alice was tired . She tried reading . A rabb -it came": token 1 is the full stop, and the gates open on it alone.
    predictor = tiny_predictor([{"kind": "cope", "p_max": 8, "gate": "separate"}], layers=1, heads=1, dim=4)
    attention, norm = predictor.model.blocks[0].attention, predictor.model.blocks[0].attention_norm
    separate = predictor.model.position[0].layers["0"]
    predictor.model.embedding.weight.copy_(torch.tensor([[1, -1, 0, 0], [0, 0, 1, -1]]).repeat(3, 1) * 1.0)
    norm.weight.fill_(1)
    norm.bias.zero_()
    attention.qkv.weight.zero_()
    attention.qkv.bias.zero_()
    attention.qkv.bias[:4] = 40.0  # every query is the same
    separate["gate_weight"].copy_(torch.tensor([[0, 0, 1, 0]] * 4))
    separate["gate_bias"].fill_(-0.7)  # the stop's third component is √2 after the norm, all others' 0
    sentence = [0, 2, 4, 1, 0, 2, 4, 1, 0, 2, 4, 0]
    counted = probe(predictor, sentence).layers[0].counted["cope"]
    assert counted.gates_HTT[0, 11].round(3).tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0]
    assert counted.positions_HTT[0, 11].round(3).tolist() == [2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0]
    assert counted.positions_HTT[0, 6].round(3).tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("name", ["keys", "separate, rotated", "after rotation", "two that count", "cope + relative"])
def test_blocks_of_queries_change_nothing(name, monkeypatch):
    predictor = tiny_predictor(POSITIONS[name])
    whole = probe(predictor, TOKENS).arrays()
    monkeypatch.setattr(matrices, "SCRATCH_BYTES", 40 * 2 * 14 * 3)  # three queries at a time
    parts = probe(predictor, TOKENS).arrays()
    assert whole.keys() == parts.keys()
    for key, value in whole.items():
        np.testing.assert_allclose(parts[key], value, rtol=1e-6, atol=1e-7, err_msg=key)


def test_chosen_layers_and_heads_are_those_of_the_whole():
    predictor = tiny_predictor(POSITIONS["keys"], layers=3, heads=4)
    whole, some = probe(predictor, TOKENS), probe(predictor, TOKENS, layers=[1, 0], heads=[3, 1])
    assert [(each.layer, each.heads) for each in some.layers] == [(0, (1, 3)), (1, (1, 3))]
    for mine, all_heads in zip(some.layers, whole.layers[:2], strict=True):
        np.testing.assert_array_equal(mine.attention_HTT, all_heads.attention_HTT[[1, 3]])
        np.testing.assert_array_equal(mine.alone_HTT, all_heads.alone_HTT[[1, 3]])
        for part in ("gates_HTT", "positions_HTT", "stopped_HTT"):
            mine_HTT, all_HTT = (getattr(each.counted["cope"], part) for each in (mine, all_heads))
            np.testing.assert_array_equal(mine_HTT, all_HTT[[1, 3]])


def test_a_layer_at_a_time_is_the_same():
    predictor, layers = tiny_predictor(POSITIONS["keys"]), []
    each_layer(predictor, TOKENS, layers.append)
    for one, other in zip(layers, probe(predictor, TOKENS).layers, strict=True):
        np.testing.assert_array_equal(one.attention_HTT, other.attention_HTT)


def test_what_is_seen_does_not_depend_on_the_kernel_that_computes():
    predictor = tiny_predictor(POSITIONS["keys"])
    with using("reference"):
        expected = probe(predictor, TOKENS).arrays()
    for key, value in probe(predictor, TOKENS).arrays().items():
        np.testing.assert_allclose(value, expected[key], rtol=1e-6, atol=1e-7)


def test_hard_attention_is_one_hot_and_its_positions_are_soft():
    each = probe(tiny_predictor(POSITIONS["keys"], hard_attention=True), TOKENS).layers[0]
    np.testing.assert_allclose(np.sort(each.attention_HTT, -1)[..., -1], 1, atol=1e-6)
    np.testing.assert_allclose(each.attention_HTT.sum(-1), 1, atol=1e-6)
    assert ((each.alone_HTT > 0) & (each.alone_HTT < 1)).any()


@pytest.mark.parametrize("family", ["gpt2", "llama", "post_norm"])
def test_every_family_is_seen_layer_by_layer(family):
    predictor, told = tiny_predictor(["cope"], family=family, layers=3), []
    with observing(
        lambda inputs, positions: told.append(attention_weights(inputs, positions, visible(14, 14, CPU))[0])
    ):
        predictor.model(torch.from_numpy(TOKENS)[None])
    found = probe(predictor, TOKENS)
    assert [each.layer for each in found.layers] == [0, 1, 2]
    for each, weights_HTT in zip(found.layers, told, strict=True):
        close(each.attention_HTT, weights_HTT.numpy())


def test_arrays_have_names():
    arrays = probe(tiny_predictor(POSITIONS["cope + relative"], layers=1), TOKENS).arrays()
    layer = [
        "heads",
        "cope/gates",
        "cope/positions",
        "cope/stopped",
        "cope/scores",
        "relative/scores",
        "alone",
        "attention",
    ]
    assert list(arrays) == ["tokens", *(f"layer0/{name}" for name in layer)]


@pytest.mark.parametrize(
    ("ids", "chosen", "error", "message"),
    [
        ([], {}, TokensError, "no tokens"),
        ([0, 6], {}, TokensError, r"the sequence, position 1: token id 6 is out of range; .* 0 … 5"),
        ([0, 1.5], {}, TokensError, "1.5 is not a token id"),
        ([0], {"layers": [2]}, ProbeError, "there is no layer 2: this model has layers 0 … 1"),
        ([0], {"heads": [-1]}, ProbeError, "there is no head -1: this model has heads 0 … 1"),
    ],
)
def test_bad_questions(ids, chosen, error, message):
    with pytest.raises(error, match=message):
        probe(tiny_predictor(POSITIONS["keys"]), ids, **chosen)


def test_what_absolute_positions_do_not_reach():
    predictor = tiny_predictor(["absolute"])
    with pytest.raises(TokensError, match="the sequence of 40 tokens is too long: absolute .* 24 positions"):
        probe(predictor, [0] * 40)


def test_more_than_the_bound_is_refused_before_any_work(monkeypatch):
    predictor = tiny_predictor(POSITIONS["keys"])
    monkeypatch.setattr(matrices, "MAX_BYTES", 4 * 14**2 * 2 * 5)  # one layer's: 2 heads, 5 matrices
    monkeypatch.setattr(predictor.model, "forward", None)
    with pytest.raises(ProbeError, match="14 tokens, 2 layers and 2 heads would take .* choose fewer layers or heads"):
        probe(predictor, TOKENS)
    monkeypatch.undo()
    monkeypatch.setattr(matrices, "MAX_BYTES", 4 * 14**2 * 2 * 5)
    found = []
    each_layer(predictor, TOKENS, found.append)
    assert len(found) == 2
    held = sum(array.nbytes for name, array in probe(predictor, TOKENS, layers=[0]).arrays().items() if "/" in name)
    assert held == 4 * 14**2 * 2 * 6 + 16  # `stopped` is made when asked for


@pytest.mark.parametrize("name", ["separate", "mlp", "rope", "none"])
def test_damaged_weights_are_said(name):
    for parameter in ("embedding.weight", "blocks.1.attention.qkv.weight", "position.0"):
        predictor = tiny_predictor(POSITIONS[name])
        damaged = [each for known, each in predictor.model.named_parameters() if known.startswith(parameter)]
        for each in damaged:
            each.fill_(torch.nan)
        if damaged:
            with pytest.raises(CheckpointError, match="what layer . computes is not numbers"):
                probe(predictor, [5, 5, 5])
