"""The Triton kernels in Triton's interpreter, on the CPU, against the reference: output and every gradient.

Skipped where Triton does not interpret. `test_triton.py` runs this file in a process with TRITON_INTERPRET=1, which has to
be set before Triton is imported.
"""

import os
from dataclasses import replace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; test_triton.py runs it so", allow_module_level=True)
pytest.importorskip("triton")

import triton
import triton.language as tl

from cope_sweep.kernels import self_check, triton_attention
from cope_sweep.kernels.arguments import Arguments
from cope_sweep.kernels.operator import attention
from cope_sweep.kernels.triton_attention import launch, tables, tiles, workspace
from cope_sweep.positions import T5, ALiBi, CoPE, CoPEALiBi, CoPEMLP, Relative
from cope_sweep.positions.fox import FoX
from cope_sweep.positions.window import Window
from tests.kernels.accuracy import assert_equals_reference
from tests.kernels.cases import Case, attention_by, make_inputs, problem_of, random_tensors

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SLOPE = CoPEALiBi(slopes="learned")
DEFAULTS = {"batch": 1, "heads": 1, "queries": 37, "head_dim": 16}


def case(*encodings, dtype=torch.float32, **options):
    return Case(encodings, **{**DEFAULTS, **options}), dtype


CASES = {
    "cope": case(CoPE(p_max=8), heads=2),
    "one token": case(CoPE(p_max=8), queries=1),
    "two tokens": case(CoPE(p_max=2), queries=2),
    "full blocks": case(CoPE(p_max=4), queries=48),
    "never saturates": case(CoPE(p_max="full")),
    "saturates at once": case(CoPE(p_max=1)),
    "saturates late": case(CoPE(p_max=4), queries=48, logit_shift=-4.0),
    "two embeddings": case(CoPE(p_max=2)),
    "odd head dim": case(CoPE(p_max=8), head_dim=24),
    "small head dim": case(CoPE(p_max=8), head_dim=5),
    "large head dim": case(CoPE(p_max=8), head_dim=80, queries=20),
    "all gates 0": case(CoPE(p_max=8), logit_shift=-40.0),
    "all gates 1": case(CoPE(p_max=20), logit_shift=40.0),
    "all gates one half": case(CoPE(p_max=12), query_std=0.0),
    "keys of zeros": case(CoPE(p_max=12), queries=48, key_std=0),
    "keys of zeros, cope-mlp": case(CoPEMLP(hidden=7), key_std=0),
    "keys of zeros, cope-mlp, saturated": case(CoPEMLP(hidden=7, p_max=9), queries=48, key_std=0),
    "gates 0 or 1": case(CoPE(p_max=6), query_std=60.0),
    "gates 1, infinite logits": case(CoPE(p_max=40), queries=48, logit_shift=3e4),
    "gates 1, bfloat16": case(CoPE(p_max=60), queries=70, logit_shift=40.0, dtype=torch.bfloat16),
    "gates near 1, bfloat16": case(CoPE(p_max=30), queries=48, logit_shift=6.0, dtype=torch.bfloat16),
    "values as gate keys": case(CoPE(p_max=4, gate="values"), rotated=True),
    "separate gate keys": case(CoPE(p_max=8, gate="separate"), head_dim=12),
    "separate gate keys, saturated, a table for each head": case(
        CoPE(p_max=3, gate="separate", per_head=True), heads=2, queries=48
    ),
    "gates after rotation": case(
        CoPE(p_max=5, gate_after_rotation=True, scale_positions=True), rotated=True, queries=20
    ),
    "relative": case(Relative()),
    "relative, one": case(Relative(positions=1)),
    "relative, near only": case(Relative(positions=5)),
    "relative, capped": case(Relative(positions=5, far="last")),
    "relative, capped at one": case(Relative(positions=1, far="last")),
    "cope and relative": case(CoPE(p_max=4), Relative(positions=7)),
    "cope and relative, capped": case(CoPE(p_max=4), Relative(positions=7, far="last"), queries=48),
    "gate bias": case(CoPE(p_max=5, gate_bias_learned=True), heads=2, queries=48),
    "gate bias, separate gate keys": case(
        CoPE(p_max=5, gate="separate", gate_bias_learned=True), rotated=True, heads=2
    ),
    "gate bias, bfloat16": case(CoPE(p_max=8, gate_bias_learned=True), dtype=torch.bfloat16),
    "gate bias, padding, cached keys": case(
        CoPE(p_max=4, gate_bias_learned=True), batch=2, queries=20, cached=19, lengths=(30, 39)
    ),
    "gate bias, cope-mlp": case(CoPEMLP(hidden=6, p_max=9, gate_bias_learned=True), queries=48),
    "gate bias, cope-alibi": case(CoPEALiBi(slopes="learned", gate_bias_learned=True), queries=48),
    "cope-alibi": case(SLOPE),
    "cope-alibi, separate gate keys": case(CoPEALiBi(slopes="learned", gate="separate"), heads=2),
    "cope and cope-alibi": case(CoPE(p_max=5), SLOPE),
    "cope-mlp": case(CoPEMLP(hidden=5), heads=2),
    "cope-mlp, one unit": case(CoPEMLP(hidden=1), queries=20),
    "cope-mlp, many knots": case(CoPEMLP(hidden=40), queries=48),
    "cope-mlp, saturated": case(CoPEMLP(hidden=6, p_max=4), queries=70),
    "cope-mlp, saturated at 0": case(CoPEMLP(hidden=6, p_max=1), queries=48),
    "cope-mlp, gates 0 or 1": case(CoPEMLP(hidden=9), query_std=60.0),
    "cope-mlp, bfloat16": case(CoPEMLP(hidden=9, p_max=9), dtype=torch.bfloat16, queries=48),
    "cope-mlp, padding": case(CoPEMLP(hidden=6, p_max=5), batch=3, lengths=(0, 37, 18)),
    "cope-mlp, cached keys": case(CoPEMLP(hidden=6, p_max=5), queries=20, cached=19),
    "cope-mlp, separate gate keys, dropout": case(CoPEMLP(hidden=7, gate="separate"), dropout=0.3),
    "cope-mlp, cope-alibi and relative": case(CoPEMLP(hidden=7), SLOPE, Relative(positions=7)),
    "alibi": case(ALiBi(), heads=2),
    "cope and alibi": case(CoPE(p_max=3), ALiBi()),
    "t5": case(T5(buckets=6, max_distance=12), heads=2),
    "t5, all distances near": case(T5(buckets=4, max_distance=40), queries=20),
    "cope and t5": case(CoPE(p_max=3), T5(buckets=4, max_distance=9), queries=48, heads=2),
    "relative and t5": case(Relative(positions=4, far="last", per_head=True), T5(buckets=4, max_distance=9), heads=3),
    "window": case(Window(size=9), heads=2, queries=70),
    "window, cope": case(CoPE(p_max=5), Window(size=20), queries=70),
    "window and t5, padding": case(
        T5(buckets=4, max_distance=9), Window(size=17), batch=2, queries=50, cached=9, lengths=(18, 59)
    ),
    "fox": case(FoX(), heads=2, queries=48),
    "cope and fox, saturated": case(CoPE(p_max=3), FoX(), queries=48, heads=2),
    "fox, padding, dropout": case(FoX(), batch=2, queries=30, cached=9, lengths=(18, 39), dropout=0.3),
    "fox, bfloat16": case(FoX(), T5(buckets=4, max_distance=9), dtype=torch.bfloat16),
    "rotated": case(CoPE(p_max=5), rotated=True, heads=2),
    "rotated, relative": case(Relative(positions=9), rotated=True),
    "rotated, separate gate keys": case(CoPE(p_max=5, gate="separate"), Relative(positions=6), rotated=True),
    "rotated query": case(CoPE(p_max=5, rotated_query=True), rotated=True, queries=20),
    "several chunks of a table": case(CoPE(p_max="full", per_head=True), queries=100, heads=2, logit_shift=3.0),
    "several chunks of distances": case(Relative(), T5(buckets=4, max_distance=70), queries=90),
    "head dim 192": case(CoPE(p_max=4), queries=20, head_dim=192),
    "no position": case(),
    "padding": case(CoPE(p_max=8), Relative(positions=6), batch=3, lengths=(0, 37, 18)),
    "padding, all distances": case(CoPE(p_max="full"), Relative(), batch=2, queries=50, lengths=(20, 49)),
    "padding of cope-alibi": case(SLOPE, batch=2, lengths=(5, 33)),
    "dropout": case(CoPE(p_max=8), dropout=0.3, heads=2),
    "dropout, saturated": case(CoPE(p_max=3), dropout=0.6, queries=48, batch=2),
    "cached keys": case(CoPE(p_max=4), queries=5, cached=34),
    "cached keys, padding": case(
        CoPE(p_max=4), Relative(positions=9), batch=2, queries=20, cached=19, lengths=(30, 39)
    ),
    "bfloat16": case(CoPE(p_max=8), dtype=torch.bfloat16),
    "float16": case(CoPE(p_max=3, gate="separate"), dtype=torch.float16),
    "all terms": case(
        CoPE(p_max=6, gate="values"),
        CoPEALiBi(slopes="learned", gate="values"),
        Relative(positions=7, far="last"),
        ALiBi(),
        heads=2,
        queries=24,
        dropout=0.2,
    ),
}


attend_triton = attention_by("triton")


@pytest.mark.parametrize(("problem", "dtype"), CASES.values(), ids=CASES.keys())
def test_output_and_gradients_equal_the_reference(problem, dtype):
    assert_equals_reference(problem, attend_triton, dtype)


@pytest.fixture
def near_and_far(monkeypatch):
    """Plain tiles have kernels of their own."""
    monkeypatch.setattr(launch, "NEAR_AND_FAR", True)


NEAR_AND_FAR = [
    "cope",
    "one token",
    "saturates at once",
    "saturates late",
    "never saturates",
    "odd head dim",
    "values as gate keys",
    "cope-mlp, saturated",
    "cope and alibi",
    "relative and t5",
    "cope and fox, saturated",
    "rotated, separate gate keys",
    "several chunks of a table",
    "padding",
    "padding, all distances",
    "dropout, saturated",
    "cached keys, padding",
    "bfloat16",
]


@pytest.mark.parametrize("name", NEAR_AND_FAR)
def test_near_and_far_kernels_equal_the_reference(near_and_far, name):
    problem, dtype = CASES[name]
    assert_equals_reference(problem, attend_triton, dtype)


@pytest.mark.parametrize("name", ["cope", "saturates late", "dropout, saturated", "cope and fox, saturated"])
def test_two_kernels_give_what_one_gives(name, monkeypatch):
    problem, _ = CASES[name]
    given = problem_of(problem, torch.float32)
    inputs = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
    found = []
    for near_and_far in (False, True):
        monkeypatch.setattr(launch, "NEAR_AND_FAR", near_and_far)
        out = attention(given, "triton")
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5)


UNEVEN_TILES = {
    "forward": {"BLOCK_T": 32, "BLOCK_S": 16, "PLAIN_S": 32},
    "backward_rows": {"BLOCK_T": 32, "BLOCK_S": 16, "PLAIN_S": 32},
    "backward_keys": {"BLOCK_T": 16, "BLOCK_S": 32, "PLAIN_T": 32},
}
UNEVEN_TILES |= {f"{kernel}_near": tiles for kernel, tiles in UNEVEN_TILES.items()}
UNEVEN_TILES |= {
    "forward_far": {"BLOCK_T": 16, "PLAIN_S": 16},
    "backward_rows_far": {"BLOCK_T": 16, "PLAIN_S": 32},
    "backward_keys_far": UNEVEN_TILES["backward_keys"],
}


OTHER_TILES = [
    "padding, all distances",
    "padding",
    "cope and fox, saturated",
    "all terms",
    "saturates late",
    "cope and t5",
]


@pytest.mark.parametrize("split", [False, True], ids=["", "near and far"])
@pytest.mark.parametrize("name", OTHER_TILES)
def test_tiles_of_other_sizes(name, split, monkeypatch):
    monkeypatch.setattr(launch, "NEAR_AND_FAR", split)
    problem, dtype = CASES[name]
    problem = replace(problem, heads=1, queries=75, lengths=problem.lengths and (0, 75, 40)[: problem.batch], seed=5)
    monkeypatch.setattr(launch, "tile_sizes", lambda kernel, *_: UNEVEN_TILES[kernel])
    assert_equals_reference(problem, attend_triton, dtype)


@pytest.fixture
def small_launches(monkeypatch):
    """At most 16 queries in a launch."""
    monkeypatch.setattr(workspace, "MIN_ROWS", 16)
    monkeypatch.setattr(workspace, "MIN_BYTES", 1)
    monkeypatch.setattr(launch, "_LARGEST_TILE", 16)
    monkeypatch.setattr(launch, "_bytes", lambda _: 0)


@pytest.mark.parametrize(
    "name",
    [
        "cope",
        "cope-alibi",
        "gate bias",
        "padding",
        "rotated, separate gate keys",
        "relative and t5",
        "fox, padding, dropout",
    ],
)
def test_queries_in_several_launches(small_launches, name):
    problem, dtype = CASES[name]
    assert_equals_reference(replace(problem, seed=6), attend_triton, dtype)


@pytest.mark.parametrize("name", ["cope", "padding", "rotated, separate gate keys", "cope and fox, saturated"])
def test_near_and_far_queries_in_several_launches(near_and_far, small_launches, name):
    problem, dtype = CASES[name]
    assert_equals_reference(replace(problem, seed=6), attend_triton, dtype)


@pytest.mark.parametrize("split", [False, True], ids=["", "near and far"])
def test_heads_in_several_launches(small_launches, monkeypatch, split):
    monkeypatch.setattr(launch, "NEAR_AND_FAR", split)
    monkeypatch.setattr(workspace, "MIN_ROWS", 64)
    encodings = CoPE(p_max=4, per_head=True), T5(buckets=4, max_distance=9)
    problem, dtype = case(*encodings, batch=2, heads=3, queries=20)
    assert_equals_reference(problem, attend_triton, dtype)


def float32_arguments(queries, **options):
    """The arguments of the operator for CoPE with 8 embeddings; q, k, v and e have gradients."""
    return problem_of(*case(CoPE(p_max=8), queries=queries, **options))


def test_tensors_need_not_be_contiguous():
    given = float32_arguments(20, heads=2)
    names = ("q", "k", "v")
    permuted = {n: getattr(given, n).detach().permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for n in names}
    torch.testing.assert_close(attention(given._replace(**permuted), "triton"), attention(given, "triton"))


def test_gradients_have_the_same_bits_in_every_run():
    given = float32_arguments(37)
    inputs = given.q, given.k, given.v, given.e
    first, second = (torch.autograd.grad(attention(given, "triton").square().sum(), inputs) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_the_operator_follows_torch_s_rules_for_operators():
    arguments = (*float32_arguments(5), "triton")
    torch.library.opcheck(torch.ops.cope_sweep.attention, arguments, test_utils=("test_schema", "test_faketensor"))


def test_embeddings_and_gate_keys_of_another_type():
    # As under autocast to bfloat16, where gate keys are sums with a float32 bias.
    given, inputs = {}, {}
    for dtype in (torch.bfloat16, torch.float32):
        problem, _ = case(CoPE(p_max=4, gate="separate"), T5(buckets=4, max_distance=9), dtype=torch.bfloat16)
        tensors = random_tensors(problem, torch.bfloat16)
        x = {name: x.to(torch.bfloat16 if name in "qkv" else dtype).requires_grad_() for name, x in tensors.items()}
        x.pop("weight")
        given[dtype], inputs[dtype] = attend_triton(*make_inputs(problem, x), 0.0, None), list(x.values())
    assert torch.equal(given[torch.bfloat16], given[torch.float32])
    assert given[torch.float32].dtype == torch.bfloat16
    gradients = torch.autograd.grad(given[torch.float32].float().square().sum(), inputs[torch.float32])
    expected = torch.autograd.grad(given[torch.bfloat16].float().square().sum(), inputs[torch.bfloat16])
    for gradient, other, x in zip(gradients, expected, inputs[torch.float32], strict=True):
        assert gradient.dtype == x.dtype
        torch.testing.assert_close(gradient.to(other.dtype), other)


def test_gates_are_rounded_to_multiples_of_a_unit():
    # A quotient that is rounded up gives 1 + 2⁻²³, which must not count as more than one table entry.
    gates = [1 + 2**-23, 1.0, 1 - 2**-24, 1 - 2**-19, 0.5, 2**-18, 2**-20, 0.0, *torch.rand(500).tolist()]
    share = torch.tensor(gates) / 64
    high, low = torch.empty(2, len(gates), dtype=torch.float16)
    store_halves[(1,)](share, high, low, len(gates), BLOCK=512)
    total = 64 * (high.double() + low.double())
    torch.testing.assert_close(total, torch.tensor(gates).double(), atol=2**-19, rtol=0)
    assert torch.equal(total * 2**18, (total * 2**18).round())
    assert total[:3].tolist() == [1.0, 1.0, 1.0]


@triton.jit
def store_halves(shares, high, low, N, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    first, second = tiles.halves(tl.load(shares + n, mask=n < N))
    tl.store(high + n, first, mask=n < N)
    tl.store(low + n, second, mask=n < N)


@pytest.mark.parametrize("keys", [16, 32, 64])
def test_sums_of_gates_are_exact(keys):
    # 1 − 2⁻¹⁸ has the largest number of bits; 64 of them and a fraction are a number of 25 bits, which is cut off.
    gates = torch.rand(16, keys)
    gates[0], gates[1], gates[2] = 1.0, 1 - 2**-18, 2**-18
    starts = torch.full((16,), 1 - 2**-18)
    positions, first = torch.empty(16, keys), torch.empty(16)
    store_positions[(1,)](gates / 64, starts, positions, first, ROWS=16, KEYS=keys)
    units = (gates.double() * 2**18).round()
    sums = units.flip(1).cumsum(1).flip(1)
    expected = (sums + starts.double()[:, None] * 2**18) / 2**18
    assert torch.equal(positions.double().floor(), expected.floor())
    assert (expected - positions.double()).max() <= (2**-18 if keys == 64 else 0)
    assert torch.equal(first.double() * 64 * 2**18, sums[:, 0])


@triton.jit
def store_positions(shares, starts, positions, first, ROWS: tl.constexpr, KEYS: tl.constexpr):
    r, c = tl.arange(0, ROWS), tl.arange(0, KEYS)
    at = r[:, None] * KEYS + c[None, :]
    high, low = tiles.halves(tl.load(shares + at))
    sums = tiles.sums_from(high, low, (c[:, None] >= c[None, :]).to(tl.float16), False)
    tl.store(positions + at, tiles.positions_of(sums, tl.load(starts + r)[:, None]))
    tl.store(first + r, tiles.column(sums, 0))


def words_of_a_table(dtype, values):
    """The words that `fill_table` writes for a table with these entries, read again by `entry_and_step`."""
    P = len(values)
    q = torch.zeros(16, 16, dtype=dtype)
    q[:, 0] = 1
    e = torch.zeros(P, 16, dtype=dtype)
    e[:, 0] = torch.tensor(values)
    table = torch.zeros(16, P, dtype=torch.int32)
    entries, steps = torch.empty(2, P)
    read_back[(1,)](q, e, table, entries, steps, P, PAIRS=launch.PAIRS[dtype], BLOCK=16)
    return entries, steps


@triton.jit
def read_back(q, e, table, entries, steps, P, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    q_tile = tiles.load(q, tl.arange(0, 16), 16, tl.arange(0, 16) < 16, 16, 16)
    for start in range(0, P, BLOCK):
        tables.fill_table(table, start, q_tile, e, 1.0, P, PAIRS, "ieee", 16, 16, 16, BLOCK)
    for n in range(P):
        index = tl.full((1,), n, tl.int32) + tables.OFFSET
        entry, step = tables.entry_and_step(table, index, P - 1, PAIRS)
        tl.store(entries + n + tl.arange(0, 1), entry)
        tl.store(steps + n + tl.arange(0, 1), step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tables_hold_entries_and_steps(dtype):
    values = [0.0, 1.0, -1.0, 1e-6, -3e-5, 100.0, -100.0, 0.5, 0.50390625, -0.0, *torch.randn(30).tolist()]
    entries, steps = words_of_a_table(dtype, values)
    exact = torch.tensor(values).to(dtype).float()
    error = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(entries, exact, rtol=error, atol=1e-7 if error else 0.0)
    expected = torch.cat([exact[1:] - exact[:-1], torch.zeros(1)])
    # The interpreter cuts float32 off to bfloat16, where a GPU rounds.
    torch.testing.assert_close(steps, expected, rtol=2 * error, atol=1e-7 if error else 0.0)


def test_tables_keep_numbers_that_are_not_finite():
    entries, steps = words_of_a_table(torch.bfloat16, [1.0, float("nan"), 2.0])
    assert (entries + 0.0 * steps).isnan().tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q": torch.zeros(1, 1, 3, 8, dtype=torch.float64)}, "float64"),
        ({"k": torch.zeros(1, 1, 3, 8, dtype=torch.float16)}, "one type"),
        ({"v": torch.zeros(1, 1, 3, 9)}, "one head dim"),
    ],
)
def test_why_not_names_what_is_not_supported(change, reason):
    q = torch.zeros(1, 1, 3, 8)
    given = Arguments(q, q, q)
    assert triton_attention.why_not(given, q.device) is None
    assert reason in triton_attention.why_not(given._replace(**change), q.device)


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_the_self_check_of_kernels_on_a_new_gpu_tells_right_from_wrong(monkeypatch, factor):
    monkeypatch.setattr(self_check, "TOKENS", 50)
    original = triton_attention.backward

    def changed(*arguments):
        original(*arguments)
        arguments[-1][2].mul_(factor)

    monkeypatch.setattr(triton_attention, "backward", changed)
    names = ("base_q", "e", "relative", "lengths", "dropout")
    errors = self_check.relative_errors("triton", torch.device("cpu"), torch.bfloat16, 12, names)
    wrong = {name for name, error in errors.items() if error > self_check.TOLERANCES[torch.bfloat16]}
    assert wrong == (set() if factor == 1 else {"gradient of v"})
