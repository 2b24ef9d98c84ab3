from dataclasses import replace

import pytest
import torch
from cope_benchmarks.peers import listing
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.config.estimate import parameter_count
from cope_sweep.kernels import Inputs, LayerEncoding, attend, reference
from cope_sweep.model import Transformer
from cope_sweep.positions import Attention, CoPE, CoPEALiBi, CoPEMLP, Dims, Relative
from cope_sweep.positions.cope import GateSpan
from cope_sweep.testing import EncodingContract
from tests.helpers.errors import raises
from tests.helpers.tiny import tiny_run
from tests.positions import naive


class TestCoPE(EncodingContract):
    specs = [
        CoPE(p_max=4, std=0.5),
        CoPE(p_max="full", share_layers=True),
        CoPE(p_max=3, scale_positions=True),
        ["cope", "rope"],
        CoPE(p_max=5, gate="values", per_head=True),
        [CoPE(p_max=5, gate="separate"), "rope"],
        [CoPE(p_max=5, gate_after_rotation=True), "rope"],
        [CoPE(p_max=5, rotated_query=True), "rope"],
        [CoPE(p_max=5, rotated_query=True, per_head=True), "rope", "relative"],
        CoPE(p_max=5, gate_bias=-1.5),
        [CoPE(p_max=5, gate="separate", gate_bias=GateSpan(span=3.0), gate_bias_learned=True), "rope"],
        CoPE(p_max=5, std=0.5, per_head=True, cut=3),
    ]
    extrapolates = True


@given(
    heads=st.integers(1, 3),
    tokens=st.integers(1, 40),
    head_dim=st.integers(1, 12),
    p_max=st.integers(1, 45),
    sharpness=st.sampled_from([0.0, 0.3, 2.0, 8.0]),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=60, deadline=None)
def test_equals_the_papers_listing_in_value_and_gradient(heads, tokens, head_dim, p_max, sharpness, seed):
    rng = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, heads, tokens, head_dim, generator=rng, dtype=torch.float64)
    q = (q * sharpness).requires_grad_()
    k, v = k.requires_grad_(), v.requires_grad_()
    e = torch.randn(p_max, head_dim, generator=rng, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(heads, tokens, head_dim, generator=rng, dtype=torch.float64)

    ours = reference(Inputs.plain(q, k, v), [LayerEncoding(CoPE(p_max=p_max), {"e": e})])[0]
    ours_gradients = torch.autograd.grad((ours * weight).sum(), (q, k, v, e))
    theirs = listing({"q": q, "k": k, "v": v, "e": e})[0]
    theirs_gradients = torch.autograd.grad((theirs * weight).sum(), (q, k, v, e))

    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    if sharpness:  # with gates of ½, positions are whole numbers, where the listing's derivative is 0, and ours is not
        torch.testing.assert_close(ours_gradients, theirs_gradients, rtol=1e-8, atol=1e-8)


def test_gates_come_from_keys_values_or_separate_keys():
    keys = naive.attention(heads=2, tokens=5, head_dim=3)
    separate = torch.randn(1, 2, 5, 3, dtype=torch.float64)
    for gate, source in (("keys", keys.k_BHSK), ("values", keys.v_BHSK), ("separate", separate)):
        gates = torch.sigmoid(keys.q_BHQK @ source.transpose(-1, -2) / 3**0.5).tril()
        expected = gates.flip(-1).cumsum(-1).flip(-1)
        torch.testing.assert_close(CoPE(gate=gate).positions({}, replace(keys, features_BHSF=separate)), expected)


def test_gates_use_queries_and_keys_before_rotation_by_default():
    plain = naive.attention(heads=1, tokens=5, head_dim=4)
    rotated = replace(plain, logits_BHQS=plain.logits_BHQS + 1, rotated=True)
    torch.testing.assert_close(CoPE().positions({}, rotated), CoPE().positions({}, plain))
    after = CoPE(gate_after_rotation=True).positions({}, rotated)
    gates = torch.sigmoid(rotated.logits_BHQS).tril()
    torch.testing.assert_close(after, gates.flip(-1).cumsum(-1).flip(-1))


@pytest.mark.parametrize("implementation", ["reference", "blocked", "native"])
def test_a_rotated_query_is_the_listing_given_rotated_queries_and_keys(implementation):
    q, k, v, rq, rk = naive.normal(5, 1, 2, 30, 6)
    leaves = [x.requires_grad_() for x in (rq, rk, v, naive.normal(9, 6, seed=2))]

    def with_gradients(out):
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    *rotated, v, e = leaves
    positions = [LayerEncoding(CoPE(p_max=9, rotated_query=True), {"e": e})]
    actual = with_gradients(attend(Inputs(q, k, v, *rotated, [None]), positions, implementation=implementation))
    expected = with_gradients(listing(dict(zip("qkve", leaves, strict=True))))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_tables_per_head():
    attention = naive.attention(heads=2, tokens=5, head_dim=3)
    e = torch.randn(2, 4, 3, dtype=torch.float64)
    both = CoPE(p_max=4, per_head=True).score({"e": e}, attention)
    for h in range(2):
        torch.testing.assert_close(both[:, h], CoPE(p_max=4).score({"e": e[h]}, attention)[:, h])


def score(gates, z):
    """CoPE's bias for one query that attends to every key, with given gates and q·e[p] = z[p]."""
    gates = torch.tensor(gates, dtype=torch.float64)
    logits = torch.logit(gates)[None, None, None]
    e = torch.tensor(z, dtype=torch.float64)[:, None]
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    visible = torch.ones(1, gates.numel(), dtype=torch.bool)
    return CoPE(p_max=len(z)).score({"e": e}, Attention(q, q, q, logits, visible))[0, 0, 0]


def test_figure_1_counts_sentence_ends():
    # "Alice was tired . She tried reading . A rabb -it came": gates are 1 at the full stops.
    gates = [0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0]
    assert score(gates, [0.0, 1.0, 2.0, 3.0]).tolist() == [2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0]


def test_fractional_positions_interpolate():
    # p = 0.25 + 0.5, then 0.5; z = 10, 20: 10 + 0.75·10, 10 + 0.5·10.
    torch.testing.assert_close(score([0.25, 0.5], [10.0, 20.0]), torch.tensor([17.5, 15.0], dtype=torch.float64))


def test_positions_are_clamped_to_the_last_embedding():
    assert score([1, 1, 1, 1], [0.0, 10.0, 20.0]).tolist() == [20, 20, 20, 10]


@pytest.mark.parametrize("implementation", [attend, reference])
@pytest.mark.parametrize(
    ("cut", "alone"),
    [
        (CoPE(p_max=9, cut=3), CoPE(p_max=3)),
        (CoPE(p_max=9, per_head=True, cut=3), CoPE(p_max=3, per_head=True)),
        (CoPE(p_max=9, cut=20), CoPE(p_max=9)),
        (Relative(positions=9, cut=3), Relative(positions=3)),
        (Relative(positions=9, per_head=True, far="last", cut=3), Relative(positions=3, per_head=True, far="last")),
    ],
)
def test_a_table_that_is_cut_is_a_smaller_table_and_teaches_no_other_embedding(cut, alone, implementation):
    rng = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 24, 8, generator=rng)
    shape = (2, 9, 8) if cut.per_head else (9, 8)
    whole = torch.randn(*shape, generator=rng).requires_grad_()
    used = whole.detach()[..., : cut.cut, :].clone().requires_grad_()
    ours = implementation(Inputs.plain(q, k, v), [LayerEncoding(cut, {"e": whole})])
    theirs = implementation(Inputs.plain(q, k, v), [LayerEncoding(alone, {"e": used})])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    assert whole.grad[..., : cut.cut, :].equal(used.grad)
    assert not whole.grad[..., cut.cut :, :].any()


def test_gates_of_one_are_relative_positions():
    # Eq. 4: p_ij = i − j + 1.
    T, K = 6, 5
    rng = torch.Generator().manual_seed(0)
    q, e = torch.randn(1, 1, T, K, generator=rng), torch.randn(T + 1, K, generator=rng)
    visible = torch.ones(T, T, dtype=torch.bool).tril()
    bias = CoPE(p_max=T + 1).score({"e": e}, Attention(q, q, q, torch.full((1, 1, T, T), torch.inf), visible))[0, 0]
    for i in range(T):
        for j in range(i + 1):
            torch.testing.assert_close(bias[i, j], q[0, 0, i] @ e[i - j + 1])


def test_scaled_positions_divide_by_the_root_of_the_head_dimension():
    q, e = torch.randn(1, 1, 3, 4), torch.randn(3, 4)
    attention = Attention(q, q, q, torch.randn(1, 1, 3, 3), torch.ones(3, 3, dtype=torch.bool).tril())
    plain = CoPE(p_max=3).score({"e": e}, attention)
    scaled = CoPE(p_max=3, scale_positions=True).score({"e": e}, attention)
    torch.testing.assert_close(scaled, plain / 2)


@pytest.mark.parametrize(("p_max", "rows"), [(64, 64), (1, 1), ("full", 101)])
def test_has_p_max_embeddings_for_all_heads(p_max, rows):
    dims = Dims(dim=12, heads=3, layers=2, context=100)
    assert CoPE(p_max=p_max).parameters(dims)["e"].shape == (rows, 4)


def test_embeddings_start_at_zero_or_normal_and_other_weights_are_the_same():
    models = [
        Transformer(tiny_run(**{"model.position": [{"kind": "cope", "p_max": 400, "std": std}], "model.dim": 32}))
        for std in (0.0, 0.02)
    ]
    zeros, normal = (dict(model.named_parameters()) for model in models)
    tables = [name for name in zeros if name.endswith(".e")]
    assert tables
    for name in zeros:
        if name in tables:
            assert not zeros[name].any()
            assert normal[name].std().item() == pytest.approx(0.02, rel=0.05)
            assert normal[name].mean().item() == pytest.approx(0, abs=0.001)
        else:
            assert torch.equal(zeros[name], normal[name])


def test_gates_get_a_gradient_at_the_start_if_embeddings_do_not_start_at_zero():
    """Separate keys of gates: with zeros, the first gradient reaches the embeddings alone."""
    for std, reached in ((0.0, False), (0.02, True)):
        position = {"kind": "cope", "p_max": 8, "gate": "separate", "std": std}
        model = Transformer(tiny_run(**{"model.position": [position]}))
        tokens = torch.randint(model.vocabulary_size, (2, 9), generator=torch.Generator().manual_seed(0))
        model.loss(tokens, tokens).backward()
        gates = [x.grad for name, x in model.named_parameters() if "gate_weight" in name]
        assert gates
        assert all(bool(gradient.any()) == reached for gradient in gates)


ENCODINGS = [CoPE, CoPEMLP, CoPEALiBi]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("gate", ["keys", "values", "separate"])
def test_a_bias_is_added_to_the_logits_of_the_gates_of_each_head(encoding, gate):
    attention = replace(naive.attention(heads=2, tokens=5, head_dim=3), features_BHSF=naive.normal(1, 2, 5, 3))
    biased = encoding(gate=gate, gate_bias_learned=True)
    plain, gates = (
        encoding(gate=gate).gates({}, attention),
        biased.gates({"shift": torch.tensor([0.0, -2.0])}, attention),
    )
    torch.testing.assert_close(gates[:, 0], plain[:, 0])
    torch.testing.assert_close(gates[:, 1], (plain[:, 1].logit() - 2).sigmoid())


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_row_of_the_context_spans_the_positions_that_were_asked_for(encoding):
    dims = Dims(dim=12, heads=3, layers=2, context=100)
    (name, shift) = next(
        item for item in encoding(gate_bias={"span": 16}).parameters(dims).items() if item[0] == "shift"
    )
    assert shift.shape == (3,)
    zeros = torch.zeros(1, 3, 100, 4)
    attention = Attention(zeros, zeros, zeros, zeros @ zeros.mT, torch.ones(100, 100, dtype=torch.bool).tril())
    p = encoding().positions({name: torch.full(shift.shape, shift.centre)}, attention)
    torch.testing.assert_close(p[0, :, -1, 0], torch.full((3,), 16.0))


def test_a_span_has_to_fit_into_the_context():
    with raises("invalid_value", value=100.0, below=100):
        CoPE(gate_bias={"span": 100}).check(Dims(dim=12, heads=3, layers=2, context=100))
    CoPE(gate_bias={"span": 99}).check(Dims(dim=12, heads=3, layers=2, context=100))


@pytest.mark.parametrize("learned", [False, True])
def test_a_bias_is_a_constant_of_the_model_or_learned(learned):
    position = {"kind": "cope", "p_max": 8, "std": 0.5, "gate_bias": -1.0, "gate_bias_learned": learned}
    run, plain = (tiny_run(**{"model.position": [p]}) for p in (position, {"kind": "cope", "p_max": 8, "std": 0.5}))
    model = Transformer(run)
    shifts = {name: x for name, x in model.named_parameters() if name.endswith("shift")}
    assert len(shifts) == run.model.layers
    assert all(x.tolist() == [-1.0] * run.model.heads for x in shifts.values())
    assert {name: x for name, x in model.state_dict().items() if name in shifts}.keys() == shifts.keys()
    # All other weights start as without a bias.
    before = dict(Transformer(plain).named_parameters())
    assert all(torch.equal(x, before[name]) for name, x in model.named_parameters() if name not in shifts)
    more = run.model.layers * run.model.heads if learned else 0
    assert parameter_count(run) == parameter_count(plain) + more
    tokens = torch.randint(model.vocabulary_size, (2, 9), generator=torch.Generator().manual_seed(0))
    model.loss(tokens, tokens).backward()
    assert all((x.grad is not None and bool(x.grad.any())) == learned for x in shifts.values())


def test_no_bias_is_no_parameter():
    dims = Dims(dim=12, heads=3, layers=2, context=100)
    for encoding in ENCODINGS:
        assert "shift" not in encoding().parameters(dims)
        assert "shift" not in encoding(gate_bias=0.0).parameters(dims)
        assert encoding(gate_bias_learned=True).parameters(dims)["shift"].centre == 0
