import torch

from tests.positions.contract import EncodingContract


class TestNone(EncodingContract):
    position = []

    def test_order_matters(self):
        # Causal attention alone tells the order of all but the tokens before the last: with one layer, none.
        model = self.model(**{"model.layers": 1})
        tokens = torch.tensor([[0, 3, 4, 1, 5]])
        swapped = torch.tensor([[0, 4, 3, 1, 5]])
        torch.testing.assert_close(model(tokens)[:, -1], model(swapped)[:, -1])
