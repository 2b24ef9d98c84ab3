import pytest
from pydantic import ValidationError

from cope_sweep.positions import ENCODINGS
from tests.positions.contract import EncodingContract
from tests.tiny import tiny_run


class TestThreeTogether(EncodingContract):
    position = ["absolute", {"kind": "cope", "p_max": 3, "gate": "separate"}, "alibi"]
    extrapolates = False


class TestEveryOtherLayer(EncodingContract):
    position = ["rope", {"kind": "cope", "layers": [1]}]


class TestHard(EncodingContract):
    position = ["cope"]

    def run(self, **overrides):
        return super().run(**{"model.hard_attention": True} | overrides)

    def test_order_matters(self):
        """One key is attended to: whether a swap shows depends on which."""

    def test_no_gradient_flows_to_the_future(self):
        """Behind the largest logit the softmax's gradient can vanish in float64, too."""


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (["cope", "cope"], "cope twice in layer 0: two of a kind are one with summed parameters"),
        (["absolute", "absolute"], "absolute twice"),
        (["absolute", "sinusoidal"], "absolute and sinusoidal"),
        ([{"kind": "cope", "layers": [5]}], r"cope.layers names layer 5, and model.layers = 1"),
        ([{"kind": "cope", "layers": []}], "at least 1 item"),
        ([{"kind": "cope", "gate": "values", "gate_after_rotation": True}], "gate_after_rotation needs gate: keys"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(position, message):
    with pytest.raises(ValidationError, match=message):
        tiny_run(**{"model.position": position})


def test_two_of_a_kind_in_different_layers_are_fine():
    tiny_run(
        **{
            "model.layers": 2,
            "model.position": [{"kind": "cope", "layers": [0]}, {"kind": "cope", "layers": [1], "p_max": 9}],
        }
    )


def test_every_encoding_is_registered_by_its_kind():
    assert sorted(ENCODINGS) == [
        "absolute", "alibi", "cope", "cope_alibi", "cope_mlp", "relative", "rope", "sinusoidal", "t5",
    ]  # fmt: skip
