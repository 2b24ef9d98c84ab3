"""Lists of encodings: none, several together, and combinations that are errors."""

import pytest
import torch

from cope_sweep.model import Transformer
from cope_sweep.positions import CoPE
from cope_sweep.testing import EncodingContract
from tests.helpers.errors import raises
from tests.helpers.tiny import tiny_run


class TestNoEncoding(EncodingContract):
    specs = [[]]
    extrapolates = True
    order_matters = False  # with two layers it does, a little; see the next test

    def test_one_layer_ignores_the_order_of_earlier_tokens(self):
        model = self.model([], layers=1)
        tokens = torch.tensor([[0, 3, 4, 1, 5]])
        swapped = torch.tensor([[0, 4, 3, 1, 5]])
        torch.testing.assert_close(model(tokens)[:, -1], model(swapped)[:, -1])


class TestThreeTogether(EncodingContract):
    specs = [["absolute", CoPE(p_max=3, gate="separate"), "alibi"]]
    extrapolates = False


class TestInOneLayer(EncodingContract):
    specs = [["rope", CoPE(layers=(1,))]]
    extrapolates = True


class TestHardAttention(EncodingContract):
    specs = ["cope"]
    model_fields = {"hard_attention": True}
    order_matters = False  # each query attends to one key, which may not be one of the two swapped

    def test_gradients_do_not_reach_later_tokens(self, spec):
        pytest.skip("far below the largest logit the gradient of the softmax underflows even in float64")


@pytest.mark.parametrize(
    ("position", "data"),
    [
        (["cope", "cope"], {"key": "model.position", "kinds": ["cope", "cope"], "layer": 0}),
        ([{"kind": "rope", "layers": [0]}, "rope"], {"key": "model.position", "kinds": ["rope", "rope"], "layer": 0}),
        (["absolute", "absolute"], {"key": "model.position", "kinds": ["absolute", "absolute"]}),
        (["absolute", "sinusoidal"], {"key": "model.position", "kinds": ["absolute", "sinusoidal"]}),
        ([{"kind": "cope", "layers": [5]}], {"key": "cope.layers", "layer": 5, "layers": 1}),
        (
            [{"kind": "cope", "gate": "values", "gate_after_rotation": True}],
            {"key": "cope.gate_after_rotation", "gate": "values"},
        ),
        (
            [{"kind": "cope", "gate": "separate", "rotated_query": True}, "rope"],
            {"key": "cope.rotated_query", "gate": "separate"},
        ),
        (
            [{"kind": "cope", "gate_after_rotation": True, "rotated_query": True}, "rope"],
            {"key": "cope.rotated_query", "other": "gate_after_rotation"},
        ),
        ([{"kind": "alibi", "slopes": [1, 2, 3]}], {"key": "alibi.slopes", "slopes": 3, "heads": 2}),
        ([{"kind": "cope_alibi", "slopes": [1]}], {"key": "cope_alibi.slopes", "slopes": 1, "heads": 2}),
        (["pope", "rope"], {"key": "model.position", "kinds": ["pope", "rope"], "layer": 0}),
        (["path", "pope"], {"key": "model.position", "kinds": ["pope", "path"], "layer": 0}),
        (["path", "wall"], {"key": "model.position", "kinds": ["path", "wall"], "layer": 0}),
        (["mapformer_em", "path"], {"key": "model.position", "kinds": ["mapformer_em", "path"], "layer": 0}),
        ([{"kind": "mapformer_em", "product": "s"}, "wall"], {"key": "model.position", "layer": 0}),
        ([{"kind": "fox", "scaled": False}, "path"], {"key": "model.position", "kinds": ["fox", "path"], "layer": 0}),
        (["dape", "path"], {"key": "model.position", "kinds": ["dape", "path"], "layer": 0}),
        (["dape", {"kind": "fox", "scaled": False}], {"key": "model.position", "kinds": ["dape", "fox"], "layer": 0}),
        (["stick_breaking", "tra"], {"key": "model.position", "kinds": ["stick_breaking", "tra"], "layer": 0}),
        ([{"kind": "t5", "buckets": 32, "max_distance": 16}], {"key": "t5.max_distance", "value": 16, "buckets": 32}),
        ([{"kind": "rope", "scaling": "yarn", "factor": 2}], {"key": "rope.trained", "scaling": "yarn"}),
    ],
)
def test_impossible_combinations_are_errors_that_name_the_key(position, data):
    with raises("invalid_value", **data):
        tiny_run(**{"model.position": position})


POSITIONS_ALONE = {"kind": "mapformer_em", "product": "s"}


@pytest.mark.parametrize(
    ("position", "key"),
    [
        ([{"kind": "cope_mlp", "rotated_query": True}], "cope_mlp.rotated_query"),
        ([{"kind": "cope", "gate_after_rotation": True}], "cope.gate_after_rotation"),
        (
            [{"kind": "cope", "rotated_query": True, "layers": [0]}, {"kind": "rope", "layers": [1]}],
            "cope.rotated_query",
        ),
        ([{"kind": "cope_alibi", "slopes": "learned", "slope_sign": 1}], "cope_alibi.slope_sign"),
        ([{"kind": "rope", "factor": 2}], "rope.factor"),
        ([{"kind": "rope", "scaling": "ntk"}], "rope.scaling"),
        ([{"kind": "rope", "scaling": "yarn", "trained": 6}], "rope.scaling"),
        ([{"kind": "rope", "scaling": "pi", "factor": 2, "trained": 6}], "rope.trained"),
        ([{"kind": "cope", "p_max": 8, "cut": 8}], "cope.cut"),
        ([{"kind": "relative", "positions": 8, "cut": 9}], "relative.cut"),
        ([{"kind": "t5", "cut": 129}], "t5.cut"),
        (["tra", "temperature"], "model.position"),
        ([POSITIONS_ALONE, "rope"], "model.position"),
        ([POSITIONS_ALONE, "short_convolution"], "model.position"),
    ],
)
def test_fields_that_cannot_act_are_errors(position, key):
    with raises("no_effect", key=key):
        tiny_run(**{"model.position": position, "model.layers": 2})


@pytest.mark.parametrize(
    "position",
    [
        ["tra", "temperature", {"kind": "cope", "gate_after_rotation": True}],
        [POSITIONS_ALONE, "rope", {"kind": "cope", "rotated_query": True}],
        [POSITIONS_ALONE, "short_convolution", "relative"],
        [POSITIONS_ALONE | {"layers": [0]}, "rope", "temperature"],
    ],
)
def test_what_changes_queries_and_keys_acts_where_another_encoding_or_layer_reads_them(position):
    tiny_run(**{"model.position": position, "model.layers": 2, "model.qk_norm": True})


def test_a_norm_of_queries_and_keys_that_nothing_reads_is_an_error():
    with raises("no_effect", key="model.qk_norm"):
        tiny_run(**{"model.position": [POSITIONS_ALONE], "model.qk_norm": True})


def test_a_rotated_query_acts_in_the_layers_with_a_rotation():
    tiny_run(
        **{
            "model.position": [{"kind": "cope", "rotated_query": True}, {"kind": "rope", "layers": [1]}],
            "model.layers": 2,
        }
    )


@pytest.mark.parametrize(
    ("dim", "heads", "position", "data"),
    [
        (9, 3, "rope", {"key": "model.dim", "kind": "rope", "head_dim": 3}),
        (9, 3, "sinusoidal", {"key": "model.dim", "kind": "sinusoidal", "dim": 9}),
        (4, 2, {"kind": "rope", "scaling": "ntk", "factor": 2}, {"key": "rope.scaling", "scaling": "ntk"}),
    ],
)
def test_an_encoding_that_does_not_fit_the_size_is_an_error(dim, heads, position, data):
    with raises("invalid_value", **data):
        tiny_run(**{"model.position": [position], "model.dim": dim, "model.heads": heads})


def test_the_kinds_of_a_layer_that_exclude_each_other_are_those_of_that_layer():
    position = [{"kind": "path", "layers": [0]}, {"kind": "tra", "layers": [1]}, {"kind": "wall", "layers": [1]}]
    with raises("invalid_value", key="model.position", kinds=["tra", "wall"], layer=1):
        tiny_run(**{"model.layers": 2, "model.position": position})


@pytest.mark.parametrize(("kind", "other"), [("cope", {"p_max": 9}), ("rope", {"base": 1e6})])
def test_one_kind_can_occur_twice_in_different_layers(kind, other):
    tiny_run(
        **{
            "model.layers": 2,
            "model.position": [{"kind": kind, "layers": [0]}, {"kind": kind, "layers": [1], **other}],
        }
    )


@pytest.mark.parametrize(
    "position",
    [["fox", "path"], ["mapformer_em", "cope"], ["dape", "cope"]],
)
def test_a_layer_can_have_one_encoding_that_replaces_the_content(position):
    tiny_run(**{"model.position": position})


class TestTwoRotationsInDifferentLayers(EncodingContract):
    specs = [[{"kind": "rope", "layers": [0]}, {"kind": "rope", "base": 100.0, "layers": [1]}]]
    extrapolates = True


@pytest.mark.parametrize(
    ("layers", "serving"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ([0, 5], [0, 5]),
        ({"every": 4}, [3, 7]),
        ({"every": 3}, [2, 5]),
        ({"all_but_every": 4}, [0, 1, 2, 4, 5, 6]),
        ({"every": 8}, [7]),
    ],
)
def test_the_layers_of_an_encoding(layers, serving):
    run = tiny_run(**{"model.layers": 8, "model.position": [{"kind": "cope", "layers": layers}, "rope"]})
    cope = run.model.position[0]
    assert [layer for layer in range(8) if cope.serves(layer)] == serving
    position = Transformer(run).position[0]
    assert [int(layer) for layer in position.layers] == serving
    assert cope.dump()["layers"] == layers


def test_layers_in_another_order_are_the_same_run():
    runs = [
        tiny_run(**{"model.layers": 2, "model.position": [{"kind": "cope", "layers": layers}]})
        for layers in ([0, 1], [1, 0])
    ]
    assert runs[0].run_id == runs[1].run_id


@pytest.mark.parametrize(("form", "period"), [("every", 5), ("all_but_every", 5)])
def test_a_pattern_of_no_or_all_layers_is_an_error(form, period):
    with raises("invalid_value", key="cope.layers", value=period, layers=4):
        tiny_run(**{"model.layers": 4, "model.position": [{"kind": "cope", "layers": {form: period}}]})


@pytest.mark.parametrize(
    "layers", [{"every": 1}, {"every": 2, "all_but_every": 2}, {}, {"evry": 4}, [], "all", [0, 0, 1]]
)
def test_other_forms_of_layers_are_errors(layers):
    with pytest.raises(ValueError, match="layers"):
        tiny_run(**{"model.layers": 4, "model.position": [{"kind": "cope", "layers": layers}]})


def test_layers_without_positions_compute_what_a_list_of_layers_does():
    """RoPE in three of four layers, in a window, and nothing in the fourth."""
    tokens, logits = torch.randint(0, 6, (2, 9)), []
    for layers in ({"all_but_every": 4}, [0, 1, 2]):
        position = [{"kind": "rope", "layers": layers}, {"kind": "window", "size": 3, "layers": layers}]
        logits.append(Transformer(tiny_run(**{"model.layers": 4, "model.position": position}))(tokens))
    assert torch.equal(*logits)
