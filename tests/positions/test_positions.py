"""Lists of encodings: none, several together, and combinations that are errors."""

import pytest
import torch
from pydantic import ValidationError

from cope_sweep.positions import ENCODINGS, CoPE
from cope_sweep.testing import EncodingContract
from tests.tiny import tiny_run


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
    ("position", "message"),
    [
        (["cope", "cope"], "cope twice in layer 0, and one cope with summed parameters can represent both"),
        (["absolute", "absolute"], "absolute twice"),
        (["absolute", "sinusoidal"], "absolute and sinusoidal"),
        ([{"kind": "cope", "layers": [5]}], r"cope.layers names layer 5, and model.layers = 1"),
        ([{"kind": "cope", "layers": []}], "at least 1 item"),
        (
            [{"kind": "cope", "gate": "values", "gate_after_rotation": True}],
            r"cope\.gate_after_rotation needs gate: keys, and gate is values",
        ),
        (
            [{"kind": "cope", "gate": "separate", "rotated_query": True}, "rope"],
            r"cope\.rotated_query needs gate: keys, and gate is separate",
        ),
        (
            [{"kind": "cope", "gate_after_rotation": True, "rotated_query": True}, "rope"],
            r"cope\.rotated_query includes gate_after_rotation; remove",
        ),
        ([{"kind": "cope_mlp", "rotated_query": True}], r"cope_mlp\.rotated_query has no effect.*add rope"),
        ([{"kind": "alibi", "slopes": [1, 2, 3]}], r"alibi\.slopes has 3 slopes, and model\.heads = 2"),
        ([{"kind": "cope_alibi", "slopes": [1]}], r"cope_alibi\.slopes has 1 slopes, and model\.heads = 2"),
        (["stick_breaking", "tra"], "stick_breaking and tra in layer 0, and each replaces the softmax"),
        ([{"kind": "t5", "buckets": 32, "max_distance": 16}], "must be more than half"),
        ([{"kind": "rope", "scaling": "yarn", "factor": 2}], r"rope\.scaling: yarn needs rope\.trained"),
        ([{"kind": "rope", "factor": 2}], r"rope\.factor has no effect with scaling: none"),
    ],
)
def test_impossible_combinations_are_errors_with_the_reason(position, message):
    with pytest.raises(ValidationError, match=message):
        tiny_run(**{"model.position": position})


@pytest.mark.parametrize(
    ("dim", "heads", "position", "message"),
    [
        (9, 3, "rope", "head dimension 9/3 = 3 is odd"),
        (9, 3, "sinusoidal", "model.dim = 9 is odd"),
        (4, 2, {"kind": "rope", "scaling": "ntk", "factor": 2}, "ntk needs a head dimension above 2"),
    ],
)
def test_an_encoding_that_does_not_fit_the_size_is_an_error(dim, heads, position, message):
    with pytest.raises(ValidationError, match=message):
        tiny_run(**{"model.position": [position], "model.dim": dim, "model.heads": heads})


def test_one_kind_can_occur_twice_in_different_layers():
    tiny_run(
        **{
            "model.layers": 2,
            "model.position": [{"kind": "cope", "layers": [0]}, {"kind": "cope", "layers": [1], "p_max": 9}],
        }
    )


def test_the_built_in_encodings():
    built_in = [kind for kind, cls in ENCODINGS.items() if cls.__module__.startswith("cope_sweep.")]
    assert sorted(built_in) == [
        "absolute", "alibi", "cope", "cope_alibi", "cope_mlp", "dape", "darope", "fire", "fox", "grape_ap", "kerple",
        "path", "relative", "rope", "selective_rope", "sinusoidal", "stick_breaking", "t5", "tra", "xpos",
    ]  # fmt: skip
