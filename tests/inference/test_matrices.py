"""Matrices equal an independent computation, are those of the model's attention, and are limited in size."""

import numpy as np
import pytest
import torch

from cope_sweep.inference import probe as module
from cope_sweep.inference.probe import matrix_count, probe, probe_layers
from cope_sweep.kernels import attention_weights, observing, using, visible
from cope_sweep.model import transformer
from cope_sweep.model.attention import self_attention
from tests.helpers.errors import raises
from tests.helpers.tiny_models import V, tiny_predictor
from tests.inference.numpy_reference import layer_of

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
    "two contextual": [{"kind": "cope", "p_max": 4}, {"kind": "cope_alibi", "slopes": [0.3, 0.2], "gate": "values"}],
    "in one layer": [{"kind": "cope", "p_max": 4, "layers": [1]}],
    "cope + relative": [{"kind": "cope", "p_max": 4}, "relative"],
    "in a window": ["rope", {"kind": "cope", "p_max": 3}, {"kind": "window", "size": 5}],
    "in chunks of a layer": ["relative", {"kind": "window", "size": 4, "chunks": True, "layers": [1]}],
    "window": ["rope", {"kind": "window", "size": 4}],
    "relative": ["relative"],
    "plain alibi": [{"kind": "alibi", "slopes": [0.5, 0.25]}],
    "rope": ["rope"],
    "absolute": ["absolute"],
    "none": [],
}


@pytest.mark.parametrize("name", POSITIONS)
def test_matrices_equal_an_independent_computation(name, monkeypatch):
    predictor, expected, read = tiny_predictor(POSITIONS[name]), [], []

    def observe(inputs, positions):
        parts = (inputs.q_BHTK, inputs.k_BHSK, inputs.v_BHSK, inputs.rotated_q_BHTK, inputs.rotated_k_BHSK)
        arrays = (each[0].numpy() for each in (read[-1], *parts))
        expected.append(layer_of(predictor, len(expected), *arrays))

    def attention(parameters, x_BTD, *more, **options):
        read.append(x_BTD)
        return self_attention(parameters, x_BTD, *more, **options)

    monkeypatch.setattr(transformer, "self_attention", attention)
    with observing(observe):
        predictor.model(torch.from_numpy(TOKENS)[None])
    found = probe(predictor, TOKENS)
    assert [each.layer for each in found.layers] == [0, 1]
    for layer, reference in zip(found.layers, expected, strict=True):
        assert layer.heads == (0, 1)
        assert set(layer.contextual) == set(reference.gates)
        assert set(layer.scores_HTT) == set(reference.scores)
        for kind, contextual in layer.contextual.items():
            close(contextual.gates_HTT, reference.gates[kind])
            close(contextual.positions_HTT, reference.positions[kind])
        for kind, scores_HTT in layer.scores_HTT.items():
            close(scores_HTT, reference.scores[kind])
        close(layer.attention_HTT, reference.attention)
        assert (layer.position_only_attention_HTT is None) == (reference.position_only is None)
        if layer.position_only_attention_HTT is not None:
            close(layer.position_only_attention_HTT, reference.position_only)


def close(found, reference):
    # The model computes in float64 and rounds once to float32, so half a unit in the last place would do.
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, reference, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["keys", "separate, rotated", "after rotation", "two contextual", "in a window"])
def test_the_block_size_does_not_change_the_matrices(name, monkeypatch):
    predictor = tiny_predictor(POSITIONS[name])
    whole = probe(predictor, TOKENS).arrays()
    monkeypatch.setattr(module, "SCRATCH_BYTES", 40 * 2 * 14 * 3)  # three queries at a time
    parts = probe(predictor, TOKENS).arrays()
    assert whole.keys() == parts.keys()
    for key, value in whole.items():
        np.testing.assert_allclose(parts[key], value, rtol=1e-6, atol=1e-7, err_msg=key)


def test_the_matrices_do_not_depend_on_the_kernel():
    predictor = tiny_predictor(POSITIONS["keys"])
    with using("reference"):
        expected = probe(predictor, TOKENS).arrays()
    for key, value in probe(predictor, TOKENS).arrays().items():
        np.testing.assert_allclose(value, expected[key], rtol=1e-6, atol=1e-7)


def test_hard_attention_is_one_hot_but_position_only_attention_is_soft():
    each = probe(tiny_predictor(POSITIONS["keys"], hard_attention=True), TOKENS).layers[0]
    np.testing.assert_allclose(np.sort(each.attention_HTT, -1)[..., -1], 1, atol=1e-6)
    np.testing.assert_allclose(each.attention_HTT.sum(-1), 1, atol=1e-6)
    assert ((each.position_only_attention_HTT > 0) & (each.position_only_attention_HTT < 1)).any()


@pytest.mark.parametrize("family", ["gpt2", "llama", "post_norm"])
def test_every_family_is_probed_layer_by_layer(family):
    predictor, weights = tiny_predictor(["cope"], family=family, layers=3), []
    with observing(
        lambda inputs, positions: weights.append(attention_weights(inputs, positions, visible(14, 14, CPU))[0])
    ):
        predictor.model(torch.from_numpy(TOKENS)[None])
    found = probe(predictor, TOKENS)
    assert [each.layer for each in found.layers] == [0, 1, 2]
    for each, weights_HTT in zip(found.layers, weights, strict=True):
        close(each.attention_HTT, weights_HTT.numpy())


def test_names_of_arrays():
    arrays = probe(tiny_predictor(POSITIONS["cope + relative"], layers=1), TOKENS).arrays()
    layer = [
        "heads",
        "cope/gates",
        "cope/positions",
        "cope/stopped",
        "cope/scores",
        "relative/scores",
        "position_only_attention",
        "attention",
    ]
    assert list(arrays) == ["tokens", *(f"layer0/{name}" for name in layer)]


@pytest.mark.parametrize(
    ("ids", "chosen", "code", "data"),
    [
        ([], {}, "too_short", {"tokens": 0}),
        ([0, 6], {}, "token_out_of_range", {"position": 1, "value": "6", "largest": 5}),
        ([0, 1.5], {}, "invalid_tokens", {"position": 1, "value": "1.5"}),
        ([0], {"layers": [2]}, "no_such_layer", {"value": 2, "largest": 1}),
        ([0], {"heads": [-1]}, "no_such_head", {"value": -1, "largest": 1}),
    ],
)
def test_invalid_requests(ids, chosen, code, data):
    with raises(code, **data):
        probe(tiny_predictor(POSITIONS["keys"]), ids, **chosen)


def test_a_sequence_beyond_absolute_positions_is_refused():
    predictor = tiny_predictor(["absolute"])
    with raises("too_long", tokens=40):
        probe(predictor, [0] * 40)


def test_too_large_probes_are_refused_before_the_model_runs(monkeypatch):
    predictor = tiny_predictor(POSITIONS["keys"])
    monkeypatch.setattr(module, "MAX_BYTES", 4 * 14**2 * 2 * 5)  # one layer's: 2 heads, 5 matrices
    monkeypatch.setattr(predictor.model, "forward", None)
    with raises("matrices_too_large", tokens=14, layers=2, heads=2):
        probe(predictor, TOKENS)
    monkeypatch.undo()
    monkeypatch.setattr(module, "MAX_BYTES", 4 * 14**2 * 2 * 5)
    found = []
    probe_layers(predictor, TOKENS, found.append)
    assert len(found) == 2
    held = sum(array.nbytes for name, array in probe(predictor, TOKENS, layers=[0]).arrays().items() if "/" in name)
    assert held == 4 * 14**2 * 2 * 6 + 16  # `stopped` is computed on access


@pytest.mark.parametrize("name", ["separate", "mlp", "rope", "none", "in a window"])
def test_damaged_weights_are_reported(name):
    for parameter in ("embedding.weight", "blocks.1.attention.qkv.weight", "position.0"):
        predictor = tiny_predictor(POSITIONS[name])
        damaged = [each for known, each in predictor.model.named_parameters() if known.startswith(parameter)]
        for each in damaged:
            each.fill_(torch.nan)
        if damaged:
            with raises("not_finite", run_id=predictor.run.run_id):
                probe(predictor, [5, 5, 5])


@pytest.mark.parametrize("name", POSITIONS)
def test_matrix_count_is_the_number_of_matrices_of_a_head(name):
    predictor = tiny_predictor(POSITIONS[name])
    for layer in (0, 1):
        arrays = probe(predictor, TOKENS, layers=[layer]).arrays()
        matrices = [key for key, value in arrays.items() if value.ndim == 3 and not key.endswith("/stopped")]
        assert matrix_count(predictor.run, layer) == len(matrices)
