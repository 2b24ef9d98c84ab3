"""The native kernels against the reference, on every instruction set that this processor has."""

import re
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings

from cope_sweep.kernels import native, operator
from cope_sweep.kernels.native import abi, build
from cope_sweep.positions import T5, ALiBi, CoPE, CoPEALiBi, CoPEMLP, Relative
from tests.kernels.accuracy import assert_equals_reference
from tests.kernels.cases import Case, attention_by, cases, long_cases, make_inputs, problem_of, random_tensors
from tests.kernels.not_finite import INPUTS, assert_not_finite_is_seen

pytestmark = pytest.mark.slow

TARGETS = ["avx512", "avx2", "portable"]
TARGETS = TARGETS[TARGETS.index(build.best_target()) :]
if len(TARGETS) > 2:  # each is a build of its own
    TARGETS = [*TARGETS[:-1], pytest.param(TARGETS[-1], marks=pytest.mark.thorough)]

ALL_TERMS = [
    Case((), queries=70, head_dim=32),
    Case((CoPE(p_max=9),), queries=90, head_dim=33),
    Case((CoPE(p_max="full", per_head=True),), queries=130, cached=20, head_dim=16),
    Case((CoPE(p_max=20, gate="separate"), Relative(positions=70, per_head=True)), queries=140, lengths=(140, 31)),
    Case((CoPE(p_max=20, gate="values"), T5(), ALiBi()), queries=100, rotated=True, dropout=0.2),
    Case((CoPE(p_max=1),), queries=65),
    Case((CoPE(p_max=20, gate_bias_learned=True),), queries=140, lengths=(140, 31)),
    Case((CoPE(p_max=30, gate="separate", gate_bias_learned=True), Relative(positions=5)), queries=140, dropout=0.2),
    Case((CoPEMLP(hidden=20, gate_bias_learned=True),), queries=140, rotated=True, seed=2),
    Case((CoPEALiBi(slopes="learned", gate_bias_learned=True),), queries=130),
    Case((CoPEMLP(hidden=50),), queries=140, head_dim=7),
    Case((CoPEMLP(hidden=20, p_max=11), Relative(positions=5, far="last")), queries=140),
    Case((CoPEALiBi(slopes="learned"), CoPE(p_max=12)), queries=130, dropout=0.3, lengths=(64, 0)),
]


@pytest.fixture
def target(request, monkeypatch):
    monkeypatch.setattr(build, "best_target", lambda: request.param)
    return request.param


attend_native = attention_by("native")


def assert_correct(case):
    assert_equals_reference(case, attend_native, torch.float32)


@given(cases(max_tokens=300))
@settings(max_examples=40)
def test_output_and_gradients_equal_the_reference(case):
    assert_correct(case)


@pytest.mark.parametrize("target", TARGETS, indirect=True)
@pytest.mark.parametrize(("case", "place", "value"), INPUTS)
def test_numbers_that_are_not_finite(case, place, value, target, poisoned_memory):
    assert_not_finite_is_seen(case, place, value, attend_native)


@given(long_cases())
@settings(max_examples=8)
@example(Case((CoPEMLP(hidden=2), Relative()), 1, 1, 346, head_dim=1, rotated=True, smooth=True, seed=43))
@example(Case((CoPEMLP(hidden=24), Relative()), 1, 1, 325, head_dim=1, rotated=True))  # scores of hundreds
def test_long_sequences(case):
    assert_correct(case)


@pytest.mark.parametrize("target", TARGETS, indirect=True)
@pytest.mark.parametrize("case", ALL_TERMS, ids=range(len(ALL_TERMS)))
def test_all_terms_on_every_instruction_set(case, target, poisoned_memory):
    assert_correct(replace(case, smooth=True))


@pytest.mark.parametrize("logit_shift", [-30.0, 30.0])
@pytest.mark.parametrize("target", TARGETS, indirect=True)
def test_gates_of_0_and_of_1(logit_shift, target):
    for p_max in (1, 3, 40, 131):
        assert_correct(Case((CoPE(p_max=p_max),), batch=1, queries=130, logit_shift=logit_shift))


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("gate", ["keys", "values"])
def test_more_unsaturated_tiles_than_fit_the_scratch_memory(gate, learned):
    # backward.h keeps MAX_HELD_TILES tiles of TILE keys: 1024 keys. Of the sequence, the last 70 tokens have queries.
    cope = CoPE(p_max="full", gate=gate, gate_bias_learned=learned)
    case = Case((cope,), 1, 1, queries=70, cached=1130, head_dim=4, smooth=True)
    assert_correct(case)


@pytest.mark.parametrize(
    "encoding",
    [CoPEMLP(hidden=20), CoPEALiBi(slopes="learned"), CoPEMLP(hidden=20, gate_bias_learned=True)],
    ids=["cope_mlp", "cope_alibi", "gate_bias"],
)
@pytest.mark.parametrize("logit_shift", [0.0, -3.0])
def test_a_bias_that_is_linear_from_some_position_on(encoding, logit_shift):
    """The kernel then computes the gate gradients' sum over the far keys before it visits them."""
    assert_correct(Case((encoding,), batch=1, queries=400, head_dim=8, logit_shift=logit_shift))


@pytest.mark.parametrize("case", ALL_TERMS, ids=range(len(ALL_TERMS)))
def test_the_same_bits_at_any_number_of_threads(case):
    # The operator alone: the tables are made by torch's matrix products, which may depend on the number of threads.
    given = problem_of(replace(case, queries=300, lengths=None), torch.float32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with torch.no_grad():
                outputs, gradients = operator.empty_outputs(given, "native"), operator.empty_gradients(given, "native")
                native.forward(given, *outputs)
                native.backward(given, outputs[0].cos(), *outputs, gradients)
                results.append([*outputs, *(x for x in gradients if x is not None)])
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(result, results[0], strict=True))


@pytest.mark.parametrize("target", TARGETS, indirect=True)
@pytest.mark.parametrize("case", ALL_TERMS, ids=range(len(ALL_TERMS)))
def test_bfloat16_inputs_on_every_instruction_set(case, target, poisoned_memory):
    assert_equals_reference(case, attend_native, torch.bfloat16)


@given(cases(max_tokens=200))
@settings(max_examples=10)
def test_bfloat16_inputs_equal_the_reference(case):
    assert_equals_reference(case, attend_native, torch.bfloat16)


@pytest.mark.parametrize("gate", ["keys", "separate"])
def test_bfloat16_inputs_are_read_as_the_same_numbers_in_float32(gate):
    """Outputs and gradients are those of float32 inputs, rounded to the nearest bfloat16, ties to even."""
    case = Case((CoPE(p_max=9, gate=gate),), queries=150, head_dim=33, rotated=True)
    outputs = []
    for dtype in (torch.bfloat16, torch.float32):
        tensors = {name: x.to(dtype) for name, x in random_tensors(case, torch.bfloat16).items()}
        outputs.append(attend_native(*make_inputs(case, tensors), 0.0, None))
    assert outputs[0].dtype == torch.bfloat16
    assert torch.equal(outputs[0], outputs[1].bfloat16())


def test_types_may_differ():
    """Under autocast, gate keys with a bias in float32 are float32, beside queries in bfloat16."""
    case = Case((CoPE(p_max=9, gate="separate"),), queries=70)
    tensors = {name: x.bfloat16() for name, x in random_tensors(case, torch.bfloat16).items()}
    expected = attend_native(*make_inputs(case, tensors), 0.0, None)
    tensors |= {"features0": tensors["features0"].float(), "k": tensors["k"].float()}
    mixed = {name: x.requires_grad_() for name, x in tensors.items()}
    computed = attend_native(*make_inputs(case, mixed), 0.0, None)
    assert torch.equal(computed, expected)
    gradients = torch.autograd.grad(computed.sum(), [mixed["q"], mixed["k"], mixed["features0"]])
    assert [x.dtype for x in gradients] == [torch.bfloat16, torch.float32, torch.float32]


def test_autocast_does_not_reach_the_kernels():
    case = Case((CoPE(p_max=9), Relative(positions=7)), queries=70)
    with torch.autocast("cpu", torch.bfloat16):
        assert_correct(case)


def compiles(header, tmp_path):
    (tmp_path / "abi.cpp").write_text(header)
    command = [build._compiler(), "-std=gnu++17", "-fsyntax-only", str(tmp_path / "abi.cpp")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("structure", abi.STRUCTURES, ids=lambda structure: structure.__name__)
def test_the_compiler_checks_where_each_field_is(structure, tmp_path):
    header = abi.header()
    assert compiles(header, tmp_path)
    checks = re.findall(rf"offsetof\({structure.__name__}, \w+\) == \d+", header)
    assert len(checks) == len(structure._fields_)
    for check in (checks[0], checks[-1]):
        assert not compiles(header.replace(check, f"{check}1"), tmp_path)


@pytest.fixture
def small_source(tmp_path, monkeypatch):
    """Builds are of one line, since the kernels take the compiler seconds. Returns the folder of the libraries."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "attention.cpp").write_text('#include "abi.h"\n')
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cope-sweep"


def test_builds_at_the_same_time_do_not_disturb_each_other(small_source, monkeypatch):
    both_looked, is_intact = threading.Barrier(2), build._is_intact

    def look(path):
        found = is_intact(path)
        both_looked.wait(timeout=60)
        return found

    monkeypatch.setattr(build, "_is_intact", look)
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(build.build, ["portable", "portable"]))
    assert built[0] == built[1]
    assert {*small_source.iterdir()} == {built[0], built[0].with_suffix(".sha256")}


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", None], ids=["empty", "cut", "no-checksum"])
def test_a_damaged_library_is_built_again(small_source, damage):
    library = build.build("portable")
    whole = library.read_bytes()
    if damage is None:
        library.with_suffix(".sha256").unlink()
    else:
        library.write_bytes(damage)
    assert build.build("portable") == library
    assert library.read_bytes() == whole
    written_ns = library.stat().st_mtime_ns
    build.build("portable")
    assert library.stat().st_mtime_ns == written_ns


def test_scratch_memory_is_filled_where_torch_fills_its_own(request):
    given = problem_of(Case((CoPE(p_max=5),), queries=4), torch.float32)
    assert not abi.problem(given).poison
    request.getfixturevalue("poisoned_memory")
    assert abi.problem(given).poison


def test_without_a_compiler_the_error_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler"):
        build.build("portable")


def test_why_not_names_what_is_not_supported():
    case = Case((CoPE(p_max=5), CoPEMLP(hidden=3)), queries=4)
    assert "CoPE-MLP" in native.why_not(problem_of(case, torch.float32), torch.device("cpu"))
