"""Which implementation computes an attention: how it is chosen, what `which` predicts, and who observes it."""

import logging
import threading
from functools import partial

import pytest
import torch

from cope_sweep.config import RunSpec
from cope_sweep.kernels import (
    Inputs,
    LayerEncoding,
    attend,
    dispatch,
    make_problem,
    observing,
    operator,
    reference,
    self_check,
    set_implementation,
    using,
    which,
)
from cope_sweep.kernels.arguments import constant_when_compiled
from cope_sweep.model import Transformer
from cope_sweep.positions import ALiBi, CoPE, CoPEALiBi, CoPEMLP, Dims, Encoding, Relative
from tests.kernels.accuracy import output_and_gradients
from tests.kernels.cases import Case, make_inputs, random_tensors


def attention(dtype=torch.float64, tokens=20, encoding=None):
    rng = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, tokens, 4, generator=rng, dtype=dtype)
    encoding = encoding or CoPE(p_max=3)
    parameters = {"e": torch.ones(3, 4, dtype=dtype)} if isinstance(encoding, CoPE) else {}
    return Inputs.plain(q, k, v), [LayerEncoding(encoding, parameters)]


class Probe(ALiBi):
    """ALiBi that records how it was used: `score` by the reference, `term` by the fused implementations."""

    kind: str = "probe"

    def score(self, parameters, attention):
        CALLS.append("score")
        return super().score(parameters, attention)

    def term(self, parameters, q_BHQK, keys, features_BHSF):
        CALLS.append("term")
        return super().term(parameters, q_BHQK, keys, features_BHSF)


CALLS = []
AUTO = ["term", "score"]
"""In float64 and with few keys, auto and native describe the problem for the kernels, and then use PyTorch."""


def hooks_called(**options):
    CALLS.clear()
    attend(*attention(encoding=Probe()), **options)
    return CALLS


def test_the_argument_comes_before_the_block_and_the_block_before_what_was_set():
    with using("reference"):
        assert hooks_called() == ["score"]
        with using("native"):
            assert hooks_called() == AUTO
        assert hooks_called() == ["score"]
        assert hooks_called(implementation="native") == AUTO
    assert hooks_called() == AUTO


def test_using_resets_the_choice_after_an_exception():
    with pytest.raises(ZeroDivisionError), using("reference"):
        raise ZeroDivisionError
    assert hooks_called() == AUTO


def test_set_implementation_lasts_and_is_of_its_thread():
    chosen = {}

    def choose():
        set_implementation("reference")
        chosen["own thread"] = list(hooks_called())

    thread = threading.Thread(target=choose)
    thread.start()
    thread.join()
    assert chosen == {"own thread": ["score"]}
    assert hooks_called() == AUTO


@pytest.mark.parametrize(
    ("encodings", "reason"),
    [
        ((CoPE(p_max=4, rotated_query=True), Relative(positions=5)), "take different queries"),
        ((CoPE(p_max=4, rotated_query=True), CoPEALiBi()), "gates of contextual encodings differ"),
        ((CoPE(p_max=4), CoPEALiBi(gate="values")), "gates of contextual encodings differ"),
        ((CoPE(p_max=4, gate="values"), CoPEALiBi(gate="separate")), "gates of contextual encodings differ"),
        ((CoPE(p_max=4, gate="separate"), CoPEALiBi(gate="separate")), "gates of contextual encodings differ"),
        ((CoPEMLP(hidden=3, activation="gelu"),), "cope_mlp has no `term` for its score"),
        ((CoPE(p_max=4), CoPE(p_max=5)), "cope is not the only encoding with a LookUp term"),
    ],
)
@pytest.mark.parametrize("implementation", ["auto", "blocked", "native"])
def test_what_fused_kernels_cannot_express_equals_the_reference(implementation, encodings, reason):
    case = Case(encodings, queries=30, rotated=True)
    problem = make_problem(*make_inputs(case, random_tensors(case, torch.float64)), 0.0, None)
    assert isinstance(problem, str)
    assert reason in problem
    computed, expected = (
        output_and_gradients(case, each, torch.float64, torch.float64)
        for each in (partial(attend, implementation=implementation), reference)
    )
    torch.testing.assert_close(computed, expected, rtol=1e-9, atol=1e-11)


def test_hard_attention_equals_the_reference():
    inputs, positions = attention()
    hard = Inputs(inputs.q_BHTK, inputs.k_BHSK, inputs.v_BHSK, inputs.q_BHTK, inputs.k_BHSK, (), hard=True)
    expected = reference(hard, positions)
    for implementation in ("auto", "blocked", "native"):
        torch.testing.assert_close(attend(hard, positions, implementation=implementation), expected, rtol=0, atol=0)


def test_a_fallback_is_logged_once_with_its_reason(caplog):
    dispatch._cached_log.cache_clear()  # as in a new process
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            attend(*attention(encoding=ALiBi()), implementation="triton")
    [message] = [message for message in caplog.messages if "triton" in message]
    assert "falling back to PyTorch" in message


# What `which` predicts, without data: the path that the attention of a model takes

LISTS = {
    "none": [],
    "absolute": ["absolute"],
    "rope": ["rope"],
    "cope": ["cope"],
    "cope, separate gates": [{"kind": "cope", "gate": "separate"}],
    "cope and rope": ["cope", "rope"],
    "rotated table beside another": [{"kind": "cope", "rotated_query": True}, "relative", "rope"],
    "cope_mlp": ["cope_mlp"],
    "cope_mlp of gelu": [{"kind": "cope_mlp", "activation": "gelu"}],
    "both tables": ["cope", "cope_mlp"],
    "t5 and alibi": ["t5", "alibi"],
    "gates differ": ["cope", {"kind": "cope_alibi", "gate": "values"}],
}


def model(position, blanks, **fields):
    task = {"kind": "selective_copy", "tokens": 2, "vocabulary": 6, "dense_blanks": 1, "sparse_blanks": 4}
    sizes = {"layers": 1, "dim": 8, "heads": 2}
    return Transformer(
        RunSpec.model_validate({"task": task | {"blanks": blanks}, "model": sizes | {"position": position} | fields})
    )


@pytest.fixture
def used(monkeypatch):
    """The names of the paths that attention takes."""
    names = []
    monkeypatch.setattr(self_check, "why_not", lambda *_: None)  # checks compute attention, too

    def record(module, function, name_of):
        original = getattr(module, function)

        def recorded(*arguments):
            names.append(name_of(arguments))
            return original(*arguments)

        monkeypatch.setattr(module, function, recorded)

    record(operator, "attention", lambda arguments: arguments[1])
    record(dispatch, "attend_in_blocks", lambda _: "blocked")
    record(dispatch, "reference", lambda _: "reference")
    record(dispatch, "_without_scores", lambda _: "sdpa")
    return names


SITUATIONS = [
    ("auto", 8, torch.float32, {}),
    ("auto", 40, torch.bfloat16, {}),
    ("auto", 300, torch.float32, {"dropout": 0.1}),
    ("auto", 300, torch.float64, {}),
    ("auto", 300, torch.bfloat16, {}),
    ("auto", 40, torch.float32, {"hard": True}),
    ("auto", 300, torch.float64, {"padded": True}),
    ("native", 40, torch.float64, {}),
    ("native", 20, torch.float32, {}),
    ("blocked", 8, torch.float32, {}),
    ("reference", 40, torch.float32, {}),
]


OF_ANY_LIST = ("blocked", "reference")
"""Implementations that are taken whatever the encodings are: one list is enough."""


@pytest.mark.parametrize(
    ("position", "implementation", "tokens", "dtype", "options"),
    [
        pytest.param(position, *situation, id=f"{number}-{name}")
        for number, situation in enumerate(SITUATIONS)
        for name, position in LISTS.items()
        if situation[0] not in OF_ANY_LIST or name == "cope"
    ],
)
def test_the_path_is_the_one_that_attention_takes(used, position, implementation, tokens, dtype, options):
    fields = {"dropout": options.get("dropout", 0.0), "hard_attention": options.get("hard", False)}
    built = model(position, tokens - 4, **fields).to(dtype)
    encodings = [each.encoding for each in built.position]
    lengths = torch.tensor([tokens, 3]) if options.get("padded") else None
    with using(implementation), torch.no_grad():
        built(torch.zeros(2, tokens, dtype=torch.int64), lengths_B=lengths)
    name, reason = which(
        encodings,
        Dims(8, 2, 1, tokens),
        dtype=dtype,
        implementation=implementation,
        **options,
    )
    assert used == [name]
    if implementation not in ("auto", name):
        assert implementation in reason


def test_reasons_name_what_prevents_a_fused_kernel():
    dims = Dims(8, 2, 1, 300)
    assert which([CoPE()], dims) == ("native", None)
    assert which([], dims, dtype=torch.bfloat16) == ("sdpa", None)
    name, reason = which([CoPE()], dims, dtype=torch.float64)
    assert name == "blocked"
    assert reason.endswith("the tensors are torch.float64; falling back to PyTorch (blocked)")


def test_a_machine_without_a_gpu_knows_the_paths_of_one():
    pytest.importorskip("triton")
    dims = Dims(64, 2, 1, 300)
    for encodings in ([CoPE(gate="separate")], [CoPEMLP()]):
        assert which(encodings, dims, device="cuda", dtype=torch.bfloat16) == ("triton", None)
    assert which([], dims, device="cuda", dtype=torch.bfloat16) == ("sdpa", None)
    name, reason = which([CoPE()], Dims(2048, 2, 1, 300), device="cuda")
    assert name == "blocked"
    assert "head dim 1024" in reason
    for keys, instead in ((300, "blocked"), (100, "reference")):
        reason = "triton is not used, it does not compute CoPE and CoPE-MLP in one layer; falling back to PyTorch"
        assert which([CoPE(), CoPEMLP()], Dims(64, 2, 1, keys), device="cuda") == (instead, f"{reason} ({instead})")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_hard_attention_has_no_fused_kernel(device):
    reason = "attention is hard, and fused kernels compute the softmax only"
    for keys, instead in ((300, "PyTorch (blocked)"), (100, "the reference, which needs O(T²) memory")):
        found = which([CoPE()], Dims(64, 2, 1, keys), device=device, hard=True)
        assert found == (
            "blocked" if keys == 300 else "reference",
            f"no fused kernel: {reason}; using {instead}",
        )
    for name in ("native", "triton"):
        found = which([CoPE()], Dims(64, 2, 1, 300), device=device, hard=True, implementation=name)
        assert found == ("blocked", f"{name} is not used, {reason}; falling back to PyTorch (blocked)")


def test_few_queries_as_in_decoding_use_the_reference():
    assert which([CoPE()], Dims(8, 2, 1, 16)) == ("reference", None)


def test_an_encoding_without_a_term_is_named():
    class Plain(Encoding):
        kind: str = "plain"

        def score(self, parameters, attention):
            return attention.logits_BHQS * 0

    name, reason = which([Plain()], Dims(8, 2, 1, 300))
    assert name == "blocked"
    assert "plain has no `term` for its score" in reason


# An observer is called for every attention within its `with` block and its thread only


@pytest.mark.parametrize("implementation", ["auto", "reference", "blocked", "native"])
def test_the_observer_gets_the_inputs_and_changes_nothing(implementation):
    given, calls = attention(torch.float32), []
    with observing(lambda inputs, positions: calls.append((inputs, positions))):
        observed = attend(*given, implementation=implementation)
    assert [(inputs is given[0], positions is given[1]) for inputs, positions in calls] == [(True, True)]
    torch.testing.assert_close(attend(*given, implementation=implementation), observed, rtol=0, atol=0)
    assert len(calls) == 1


def test_the_innermost_observer_is_called_and_an_exception_ends_the_block():
    outer, inner = [], []
    with observing(lambda *arguments: outer.append(arguments)):
        with observing(lambda *arguments: inner.append(arguments)):
            attend(*attention())
        with pytest.raises(ZeroDivisionError), observing(lambda *arguments: 1 / 0):
            attend(*attention())
        attend(*attention())
    assert (len(outer), len(inner)) == (1, 1)


def test_other_threads_are_not_observed():
    calls = []
    with observing(lambda *arguments: calls.append(arguments)):
        thread = threading.Thread(target=lambda: attend(*attention()))
        thread.start()
        thread.join()
    assert calls == []


# Code that torch.compile has traced


@pytest.fixture
def compiled_anew():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_compiled_code_notices_that_another_implementation_is_chosen(compiled_anew):
    inputs, positions = attention(encoding=Probe())

    def named(q):
        CALLS.clear()
        attend(Inputs.plain(q, inputs.k_BHSK, inputs.v_BHSK), positions)
        return len(CALLS)

    call, q = torch.compile(named, backend="eager"), inputs.q_BHTK
    assert call(q) == len(AUTO)
    with using("reference"):
        assert call(q) == 1
        with using("auto"):
            assert call(q) == len(AUTO)
        assert call(q) == 1
    assert call(q) == len(AUTO)


def test_compiled_attention_is_observed(compiled_anew):
    q, k, v = torch.randn(3, 1, 2, 20, 4, generator=torch.Generator().manual_seed(0))
    calls = []

    def compiled(q):
        return attend(Inputs.plain(q, k, v), [], implementation="reference")

    call = torch.compile(compiled, backend="eager")
    expected = call(q)
    with observing(lambda inputs, positions: calls.append(positions)):
        assert torch.equal(call(q), expected)
    assert torch.equal(call(q), expected)
    assert calls == [[]]


def test_the_mark_of_constants_is_that_of_torch():
    def ours():
        return 1

    def theirs():
        return 1

    assert constant_when_compiled(ours) is ours
    assert vars(ours) == vars(torch.compiler.assume_constant_result(theirs)) != {}
