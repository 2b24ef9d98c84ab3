"""Attention with position encodings for models of others."""

import copy

import pytest
import torch
import torch.nn.functional as F

from cope_sweep.kernels import Inputs, LayerEncoding, attend, using
from cope_sweep.model import Transformer
from cope_sweep.model.attention import self_attention
from cope_sweep.nn import PositionalAttention, positional_attention
from cope_sweep.positions import ENCODINGS, CoPE, CoPEALiBi, RoPE
from cope_sweep.registry import BUILT_IN
from tests.helpers.errors import raises
from tests.helpers.tiny import tiny_run

B, T, H, K = 2, 11, 4, 6
IN_THE_EMBEDDINGS = {"absolute", "sinusoidal"}
KINDS = [
    kind for kind, cls in ENCODINGS.items() if cls.__module__.startswith(BUILT_IN) and kind not in IN_THE_EMBEDDINGS
]
READING_HIDDEN = {
    *("fox", "path", "tra", "grape_ap", "darope", "selective_rope", "wall", "inkling"),
    *("mapformer_wm", "mapformer_em", "carope", "repo"),
}


def attention(*encodings, **options):
    """Attention in float64 with random parameters: at their initial zeros many tests would pass by accident."""
    module = PositionalAttention(encodings, **{"heads": H, "head_dim": K, "context": 32} | options).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def tensors(tokens=T, kv_heads=H, batch=B):
    """Queries, keys, values and the layer's input."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((batch, heads, tokens, K) for heads in (H, kv_heads, kv_heads))
    qkv = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return *qkv, torch.randn(batch, tokens, H * K, generator=generator, dtype=torch.float64)


def test_five_lines():
    module = PositionalAttention([CoPE(p_max=8)], heads=H, head_dim=K)
    q, k, v, _ = (x.float() for x in tensors())
    out = module(q, k, v)
    # CoPE starts with zeros: attention without positions
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("position", [["cope"], ["rope", {"kind": "cope", "p_max": 4}], ["fox"], ["short_convolution"]])
def test_it_is_the_attention_of_the_model_of_a_run(position):
    run = tiny_run(**{"model.position": position, "model.dim": H * K, "model.heads": H, "task.blanks": 9})
    model = Transformer(run).double().eval()
    module = attention(*position)
    for given, own in zip(model.position, module.position, strict=True):
        given.load_state_dict(own.state_dict())
    block, x = model.blocks[0], tensors()[3]
    attended = self_attention(block.parameters_by_name, x, model._positions(0), heads=H)
    weight, bias = block.attention.qkv.weight, block.attention.qkv.bias
    q, k, v = (part.unflatten(-1, (H, K)).transpose(1, 2) for part in F.linear(x, weight, bias).chunk(3, -1))
    own = module(q, k, v, hidden=x).transpose(1, 2).flatten(2)
    out = F.linear(own, block.attention.out.weight, block.attention.out.bias)
    torch.testing.assert_close(out, attended, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
class TestEveryEncoding:
    def test_grouped_keys_are_keys_of_each_head(self, kind):
        module = attention(kind)
        q, k, v, hidden = tensors(kv_heads=2)
        repeated = [x.repeat_interleave(2, dim=1) for x in (k, v)]
        torch.testing.assert_close(
            module(q, k, v, kv_heads=2, hidden=hidden), module(q, *repeated, hidden=hidden), rtol=0, atol=1e-12
        )

    @pytest.mark.parametrize("kv_heads", [H, 2])
    def test_decoding_with_a_cache_equals_one_pass(self, kind, kv_heads):
        module = attention(kind)
        q, k, v, hidden = tensors(kv_heads=kv_heads)
        whole, past, parts = module(q, k, v, hidden=hidden), {}, []
        for part in (slice(0, 6), slice(6, 7), slice(7, 11)):
            new = (x[:, :, part] for x in (q, k, v))
            parts.append(module(*new, hidden=hidden[:, part], past=past))
        torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("side", ["left", "right", "within"])
    def test_padding_does_not_exist(self, kind, side):
        module = attention(kind)
        q, k, v, hidden = tensors(kv_heads=2)
        mask = torch.ones(B, T, dtype=torch.bool)
        mask[0, {"left": slice(0, 4), "right": slice(7, 11), "within": slice(3, 7)}[side]] = False
        out = module(q, k, v, hidden=hidden, mask=mask)
        for row in range(B):
            tokens = mask[row]
            alone = (x[row : row + 1, :, tokens] for x in (q, k, v))
            expected = module(*alone, hidden=hidden[row : row + 1, tokens])
            torch.testing.assert_close(out[row : row + 1, :, tokens], expected, rtol=0, atol=1e-12)
        assert not out[0, :, ~mask[0]].any()

    def test_decoding_after_padding(self, kind):
        module = attention(kind)
        q, k, v, hidden = tensors(kv_heads=2)
        mask = torch.ones(B, T, dtype=torch.long)
        mask[0, :4] = 0
        whole, past, parts = module(q, k, v, hidden=hidden, mask=mask), {}, []
        for part in (slice(0, 3), slice(3, 9), slice(9, 10), slice(10, 11)):  # the first has padding alone in a row
            new = (x[:, :, part] for x in (q, k, v))
            parts.append(module(*new, hidden=hidden[:, part], past=past, mask=mask[:, : part.stop]))
        torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=0, atol=1e-12)

    def test_gradients_reach_everything_but_padding(self, kind):
        module = attention(kind)
        q, k, v, hidden = (x.requires_grad_() for x in tensors(kv_heads=2))
        mask = torch.ones(B, T, dtype=torch.bool)
        mask[0, :4] = False
        module(q, k, v, hidden=hidden, mask=mask).square().sum().backward()
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
        assert not v.grad[0, :, :4].any()
        assert v.grad[0, :, 4:].any()

    def test_state_dict_and_copy(self, kind):
        module, other = attention(kind), PositionalAttention([kind], heads=H, head_dim=K, context=32).double()
        q, k, v, hidden = tensors()
        other.load_state_dict(module.state_dict())
        torch.testing.assert_close(
            other(q, k, v, hidden=hidden), copy.deepcopy(module)(q, k, v, hidden=hidden), rtol=0, atol=0
        )

    def test_it_says_that_it_needs_the_input_of_the_layer(self, kind):
        module = attention(kind)
        q, k, v, _ = tensors()
        if kind in READING_HIDDEN:
            with raises("missing_argument", argument="hidden", kind=kind):
                module(q, k, v)
        else:
            module(q, k, v)

    def test_an_input_of_other_width(self, kind):
        module = attention(kind, hidden_dim=10)
        q, k, v, _ = tensors()
        assert module(q, k, v, hidden=torch.randn(B, T, 10, dtype=torch.float64)).shape == (B, H, T, K)

    def test_bfloat16(self, kind):
        module = attention(kind)
        # the same numbers in both precisions, so that only the computation differs
        module = module.bfloat16()
        exact = copy.deepcopy(module).double()
        q, k, v, hidden = (x.bfloat16() for x in tensors(kv_heads=2))
        out = module(q, k, v, hidden=hidden)
        assert out.dtype == torch.bfloat16
        expected = exact(*(x.double() for x in (q, k, v)), hidden=hidden.double())
        limit = 0.1 if kind in READING_HIDDEN else 0.04  # those round their features, too
        assert (out.double() - expected).abs().mean() < limit * expected.abs().mean()


@pytest.mark.slow
@pytest.mark.parametrize("encodings", [[CoPE(p_max=8)], [RoPE(), CoPE(p_max=8)], ["fox", "rope"]])
@pytest.mark.parametrize("masked", [False, True])
def test_it_compiles_without_a_graph_break(encodings, masked):
    torch._dynamo.reset()
    module = attention(*encodings).float()
    q, k, v, hidden = (x.float() for x in tensors(tokens=32, kv_heads=2))
    mask = torch.ones(B, 32, dtype=torch.bool)
    mask[0, :5] = False
    options = {"hidden": hidden, "mask": mask if masked else None}
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    out = compiled(q.requires_grad_(), k, v, **options)
    gradient = torch.autograd.grad(out.square().sum(), q)[0]
    expected = module(q, k, v, **options)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), q)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_decoding_compiles_without_a_graph_break(masked):
    torch._dynamo.reset()
    module = attention(RoPE(), CoPE(p_max=8)).float()
    q, k, v, _ = (x.float() for x in tensors(kv_heads=2))
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[0, :5] = False

    def decode(step):
        past = {}
        step(*(x[:, :, :10] for x in (q, k, v)), past=past, mask=mask[:, :10] if masked else None)
        return step(*(x[:, :, 10:] for x in (q, k, v)), past=past, mask=mask if masked else None)

    torch.testing.assert_close(decode(torch.compile(module, fullgraph=True, backend="aot_eager")), decode(module))


def test_the_function_takes_the_parameters():
    q, k, v, _ = tensors()
    table = torch.randn(8, K, dtype=torch.float64)
    encodings = [LayerEncoding(CoPE(p_max=8), {"e": table})]
    expected = attend(Inputs(q, k, v, q, k, [None]), encodings)
    torch.testing.assert_close(positional_attention(q, k, v, encodings), expected, rtol=0, atol=0)
    last = positional_attention(q[:, :, 9:], k, v, encodings)  # the queries of the last tokens
    torch.testing.assert_close(last, expected[:, :, 9:], rtol=0, atol=1e-12)


def test_fused_kernels_with_grouped_keys_and_padding():
    module = attention(CoPE(p_max=8)).float()
    q, k, v, _ = (x.float() for x in tensors(tokens=160, kv_heads=2))
    mask = torch.ones(B, 160, dtype=torch.bool)
    mask[0, :70] = False
    with using("reference"):
        expected = module(q, k, v, mask=mask)
    torch.testing.assert_close(module(q, k, v, mask=mask), expected, rtol=1e-4, atol=1e-5)


def test_dropout_only_in_training():
    module = attention("cope", dropout=0.5)
    q, k, v, _ = tensors()
    assert not torch.equal(module(q, k, v), module(q, k, v))
    module.eval()
    assert torch.equal(module(q, k, v), module(q, k, v))


def test_initial_values_follow_the_global_seed():
    torch.manual_seed(3)
    one = PositionalAttention([CoPE(std=0.1)], heads=H, head_dim=K)
    torch.manual_seed(3)
    other = PositionalAttention([CoPE(std=0.1)], heads=H, head_dim=K)
    assert torch.equal(*(module.position[0].of_layer(0)["e"] for module in (one, other)))


@pytest.mark.parametrize("encoding", ["wall", CoPE(p_max=4), "kerple", CoPEALiBi(gate_bias=-2.0), "mapformer_wm"])
def test_initial_values_do_not_depend_on_what_was_there(encoding):
    """Before, the parameters hold other numbers, or memory that nothing has written, as after `to_empty`."""
    states = []
    for route in ("made", "again", "empty"):
        torch.manual_seed(3)
        with torch.device("meta" if route == "empty" else "cpu"):
            module = PositionalAttention([encoding], heads=H, head_dim=K)
        if route != "made":
            module.to_empty(device="cpu")
            for parameter in module.parameters():
                torch.nn.init.constant_(parameter, 7.0)
            torch.manual_seed(3)
            module.reset_parameters()
        states.append(module.state_dict())
    for name, value in states[0].items():
        assert all(torch.equal(value, state[name]) for state in states[1:]), name


@pytest.mark.parametrize("dropout", [-0.1, 1.5])
def test_a_dropout_that_is_no_probability_is_refused(dropout):
    with raises("invalid_value", argument="dropout"):
        PositionalAttention(["rope"], heads=H, head_dim=K, dropout=dropout)
    q, k, v, _ = tensors()
    with raises("invalid_value", argument="dropout"):
        positional_attention(q, k, v, [], dropout=dropout)


@pytest.mark.parametrize("tokens", [T, 140])
@pytest.mark.parametrize("kind", ["cope", "cope_mlp", "cope_alibi"])
def test_gradients_of_gradients_are_refused(kind, tokens):
    """In PyTorch, and in the kernels, which long sequences use. They would lack a part, without a word."""
    q, k, v = (torch.randn(1, H, tokens, K, requires_grad=True) for _ in range(3))
    module = PositionalAttention([kind], heads=H, head_dim=K)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    (gradient,) = torch.autograd.grad(module(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|cannot be differentiated again"):
        gradient.sum().backward()


@pytest.mark.parametrize("kind", sorted(IN_THE_EMBEDDINGS))
def test_positions_in_the_embeddings_are_refused(kind):
    with raises("not_in_attention", kind=kind):
        PositionalAttention([kind], heads=H, head_dim=K)


def test_sampled_positions_are_refused():
    with raises("not_in_attention", key="rope.sampled", kind="rope"):
        PositionalAttention([RoPE(sampled=64)], heads=H, head_dim=K)


def test_the_span_of_gates_is_that_of_the_context():
    module = PositionalAttention([CoPE(gate_bias={"span": 8})], heads=H, head_dim=K, context=32)
    q, k, v, _ = (x.float() for x in tensors())
    assert module(q, k, v).shape == (B, H, T, K)
    (layer,) = module.layer_encodings()
    assert layer.parameters["shift"].sigmoid().tolist() == pytest.approx(H * [8 / 32])


def test_layers_are_refused():
    with raises("invalid_value", key="cope.layers"):
        PositionalAttention([CoPE(layers=(0,))], heads=H, head_dim=K)


@pytest.mark.parametrize("encoding", [CoPE(p_max="full"), CoPE(gate_bias={"span": 8}), "relative"])
def test_what_depends_on_the_number_of_tokens_needs_it(encoding):
    kind = encoding if isinstance(encoding, str) else encoding.kind
    with raises("missing_argument", argument="context", kind=kind):
        PositionalAttention([encoding], heads=H, head_dim=K)


@pytest.mark.parametrize(
    ("change", "code", "argument"),
    [
        (lambda q, k, v: {"q": q[0]}, "invalid_shape", "q"),
        (lambda q, k, v: {"q": q[:, :2]}, "invalid_shape", "q"),
        (lambda q, k, v: {"k": k[:, :, :5]}, "invalid_shape", "k"),
        (lambda q, k, v: {"v": v[:, :2]}, "invalid_shape", "k"),
        (lambda q, k, v: {"k": k[:, :3], "v": v[:, :3]}, "invalid_heads", "kv_heads"),
        (lambda q, k, v: {"kv_heads": 2}, "invalid_shape", "k"),
        (lambda q, k, v: {"past": {}, "k": torch.cat((k, k), 2), "v": torch.cat((v, v), 2)}, "invalid_shape", "k"),
        (lambda q, k, v: {"mask": torch.ones(B, T + 1)}, "invalid_shape", "mask"),
        (lambda q, k, v: {"mask": torch.zeros(B, T).index_fill(1, torch.tensor([0]), -1e9)}, "invalid_mask", "mask"),
        (lambda q, k, v: {"hidden": torch.ones(B, T + 1, H * K)}, "invalid_shape", "hidden"),
        (lambda q, k, v: {"hidden": torch.ones(B, T, H * K + 1)}, "invalid_shape", "hidden"),
        (lambda q, k, v: {"hidden": torch.ones(T, H * K)}, "invalid_shape", "hidden"),
    ],
)
def test_shapes_that_do_not_fit(change, code, argument):
    q, k, v, _ = tensors()
    with raises(code) as caught:
        attention("fox" if argument == "hidden" else "cope")(**{"q": q, "k": k, "v": v} | change(q, k, v))
    assert caught.value.data["argument"] == argument


@pytest.mark.parametrize("mask", [None, torch.ones(B, T)])
def test_a_short_convolution_needs_the_earlier_queries(mask):
    q, k, v, _ = tensors()
    with raises("missing_argument", argument="q", kind="short_convolution"):
        attention("short_convolution")(q[:, :, 4:], k, v, mask=mask)


def test_a_call_that_is_refused_leaves_the_cache_as_it_was():
    module, past, parts = attention("rope"), {}, []
    q, k, v, _ = tensors()
    for part in (slice(0, 6), slice(6, 11)):
        new = [x[:, :, part] for x in (q, k, v)]
        with raises("invalid_shape", argument="mask"):
            module(*new, past=past, mask=torch.ones(B, part.stop + 1))
        parts.append(module(*new, past=past, mask=torch.ones(B, part.stop)))
    torch.testing.assert_close(torch.cat(parts, dim=2), module(q, k, v), rtol=0, atol=1e-12)


def test_a_cache_stays_with_or_without_a_mask():
    module, past = attention("rope"), {}
    q, k, v, _ = tensors()
    module(q, k, v, past=past)
    with raises("another_cache", argument="mask"):
        module(q, k, v, past=past, mask=torch.ones(B, 2 * T))
    padded = {}
    module(q, k, v, past=padded, mask=torch.ones(B, T))
    with raises("another_cache", argument="mask"):
        module(q, k, v, past=padded)
