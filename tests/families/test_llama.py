import pytest

from cope_sweep.families import Llama
from cope_sweep.model import Transformer
from tests.helpers.tiny import tiny_run

LLAMA = {"model.family": "llama"}


@pytest.mark.parametrize(("dim", "hidden"), [(8, 64), (24, 64), (25, 128), (256, 704), (768, 2048)])
def test_the_default_width_is_8_thirds_in_multiples_of_64(dim, hidden):
    assert Llama().default_feed_forward_dim(dim) == hidden


def test_there_are_no_biases_and_every_matrix_has_the_same_scale():
    model = Transformer(tiny_run(**LLAMA | {"model.dim": 256, "model.heads": 4, "model.layers": 8}))
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    for name, parameter in model.blocks[3].named_parameters():
        if parameter.dim() > 1:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.03), name
