import math

import pytest
import torch
import torch.nn.functional as F

from cope_sweep.model import Transformer
from tests.helpers.tiny import tiny_run

POST_NORM = {"model.family": "post_norm"}


def test_initial_scales():
    model = Transformer(tiny_run(**POST_NORM | {"model.dim": 256, "model.heads": 4, "task.vocabulary": 500}))
    assert model.embedding.weight.std().item() == pytest.approx(256**-0.5, rel=0.03)
    block = model.blocks[0]
    for linear in (block.attention.qkv, block.feed_forward.up, block.feed_forward.down):
        bound = linear.weight.shape[1] ** -0.5
        assert linear.weight.abs().max().item() == pytest.approx(bound, rel=0.01)
        assert linear.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
        # The largest of n uniform numbers is bound·n/(n + 1) in the mean; n is 256 at least.
        assert bound * 0.95 < linear.bias.abs().max().item() <= bound


def test_a_model_is_torch_s_post_norm_layers():
    """Against torch.nn.TransformerEncoderLayer with a causal mask, which has the same post-norm block."""
    model = Transformer(tiny_run(**POST_NORM | {"model.layers": 2})).double().eval()
    tokens = torch.randint(0, 6, (3, 6), generator=torch.Generator().manual_seed(0))
    x = F.embedding(tokens, model.embedding.weight)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    for block in model.blocks:
        layer = torch.nn.TransformerEncoderLayer(8, 2, 32, batch_first=True, dtype=torch.float64).eval()
        names = {
            "self_attn.in_proj": "attention.qkv", "self_attn.out_proj": "attention.out", "linear1": "feed_forward.up",
            "linear2": "feed_forward.down", "norm1": "attention_norm", "norm2": "ffn_norm",
        }  # fmt: skip
        state = block.state_dict()
        layer.load_state_dict(
            {
                f"{theirs}{'_' if theirs.endswith('in_proj') else '.'}{part}": state[f"{ours}.{part}"]
                for theirs, ours in names.items()
                for part in ("weight", "bias")
            }
        )
        x = layer(x, src_mask=mask, is_causal=True)
    torch.testing.assert_close(model(tokens), x @ model.embedding.weight.T)


def test_dropout_is_after_attention_after_the_relu_and_after_the_branch():
    run = tiny_run(**POST_NORM)
    block = Transformer(run).blocks[0]
    w, x = dict(block.named_parameters()), torch.randn(2, 5, 8)
    dropped = []

    def halve(h):
        dropped.append(h.detach())
        return h / 2

    out = run.model.family.block(w, x, lambda h: 3 * h, halve)
    h = F.layer_norm(x + 3 * x / 2, (8,))
    up = F.linear(h, w["feed_forward.up.weight"], w["feed_forward.up.bias"]).relu()
    down = F.linear(up / 2, w["feed_forward.down.weight"], w["feed_forward.down.bias"])
    torch.testing.assert_close(out, F.layer_norm(h + down / 2, (8,)))
    for actual, expected in zip(dropped, (3 * x, up, down), strict=True):
        torch.testing.assert_close(actual, expected.detach())


def test_encodings_and_an_untied_output_layer_start_as_in_the_released_decoder():
    """Absolute positions are N(0, 1/D); gate keys and an output layer of its own are `nn.Linear`'s uniform."""
    position = ["absolute", {"kind": "cope", "gate": "separate"}]
    sizes = {"model.dim": 256, "model.heads": 4, "task.vocabulary": 500, "task.blanks": 60, "model.tied": False}
    run = tiny_run(**POST_NORM | sizes | {"model.position": position})
    model = Transformer(run)
    absolute, cope = model.position
    assert absolute.shared["e"].std().item() == pytest.approx(256**-0.5, rel=0.03)
    assert cope.layers["0"]["e"].abs().max() == 0
    for parameter in (cope.layers["0"]["gate_weight"], cope.layers["0"]["gate_bias"], model.head.weight):
        assert 0.95 / 16 < parameter.abs().max().item() <= 1 / 16
        assert parameter.std().item() == pytest.approx(1 / 16 / math.sqrt(3), rel=0.1)
    written = tiny_run(**POST_NORM | sizes | {"model.position": [{"kind": "absolute", "std": 0.5}]})
    assert Transformer(written).position[0].shared["e"].std().item() == pytest.approx(0.5, rel=0.05)


def test_other_families_start_encodings_as_gpt2_does():
    position = ["absolute", {"kind": "cope", "gate": "separate"}]
    for family in ("gpt2", "llama"):
        sizes = {"model.dim": 256, "model.heads": 4, "task.blanks": 60, "model.family": family}
        absolute, cope = Transformer(tiny_run(**sizes | {"model.position": position})).position
        assert absolute.shared["e"].std().item() == pytest.approx(0.02, rel=0.05)
        assert cope.layers["0"]["gate_weight"].std().item() == pytest.approx(0.02, rel=0.05)
        assert cope.layers["0"]["gate_bias"].abs().max() == 0
