import pytest
import torch

from cope_sweep.model import Packing, Transformer
from tests.helpers.tiny import tiny_run

LENGTHS = [5, 1, 7, 3]
ENCODINGS = [
    ["absolute"],
    ["relative"],
    ["rope"],
    ["alibi"],
    ["t5"],
    ["cope"],
    ["cope", "rope"],
    [{"kind": "cope", "gate": "separate"}],
    [{"kind": "cope_mlp", "hidden": 4}],
]


@pytest.mark.parametrize("position", ENCODINGS, ids=str)
def test_hidden_states_without_padding_are_those_of_each_sequence_alone(position):
    model = Transformer(tiny_run(**{"model.position": position, "model.layers": 2})).double().eval()
    tokens_BT = torch.randint(0, model.vocabulary_size, (len(LENGTHS), max(LENGTHS)))
    packed_1ND = model.hidden(tokens_BT, packing=Packing(LENGTHS))
    alone = [model.hidden(row[None, :length])[0] for row, length in zip(tokens_BT, LENGTHS, strict=True)]
    torch.testing.assert_close(packed_1ND[0], torch.cat(alone))


def test_dropout_of_packed_sequences_is_refused():
    model = Transformer(tiny_run(**{"model.dropout": 0.1}))
    tokens_BT = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64)
    with pytest.raises(ValueError, match="set the model to evaluation mode"):
        model.train().hidden(tokens_BT, packing=Packing(LENGTHS))


@pytest.mark.parametrize("lengths", [LENGTHS, [4, 4], [1]])
def test_pack_and_unpack(lengths):
    padded_BTX = torch.arange(len(lengths) * max(lengths) * 2.0).view(len(lengths), max(lengths), 2)
    packing = Packing(lengths)
    packed_1NX = packing.pack(padded_BTX)
    assert packed_1NX.shape == (1, sum(lengths), 2)
    unpacked_BTX = packing.unpack(packed_1NX)
    for row, length in enumerate(lengths):
        assert torch.equal(unpacked_BTX[row, :length], padded_BTX[row, :length])
        assert not unpacked_BTX[row, length:].any()
