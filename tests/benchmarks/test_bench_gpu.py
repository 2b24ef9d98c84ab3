"""The benchmark of GPU kernels and their tuning, as far as a CPU can run them; `test_gpu_stages.py` interprets kernels."""

import sys

import pytest
import torch
from cope_benchmarks import compiling, gpu, sanitizer, step, tune
from cope_benchmarks.gpu import CASES, LISTING, MEMORY, OF_SDPA, TRITON, Case, tiny
from cope_benchmarks.gpu_problems import Problem
from cope_benchmarks.gpu_timing import Journal, times
from cope_benchmarks.report import GOALS

from cope_sweep.kernels import tuning
from cope_sweep.kernels.tuning import KERNELS, incompatible, read_table
from cope_sweep.train import compiled


def test_the_most_important_shapes_are_the_first_and_have_the_goals():
    with_goals = list(dict.fromkeys(name.partition(": ")[0] for name in GOALS["gpu"]))
    assert with_goals == [case.name for case in CASES[:5]]
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.problem.batch * case.problem.tokens <= gpu.TOKENS for case in CASES)


def test_rows_are_written_as_they_come_and_the_same_command_continues(tmp_path, monkeypatch):
    """A step that could outlast the budget does not begin."""
    clock = [0.0]
    monkeypatch.setattr("cope_benchmarks.gpu_timing.time.monotonic", lambda: clock[0])

    def row(case):
        clock[0] += 40.0
        return {"alternatives": {TRITON: {"failed": case.name}}, "ratios": {}}

    monkeypatch.setattr(gpu, "_row", lambda case, device: row(case))
    first = gpu.measure(tmp_path, "cpu", 100.0, CASES[:4])  # after two, 20 s are left
    assert ([row["key"] for row in first["rows"]], first["left"]) == (
        ["T 4096", "T 1024"], ["T 16384", "T 4096, never saturating"],
    )  # fmt: skip
    assert "Not measured yet: T 16384, T 4096, never saturating." in (tmp_path / "gpu.md").read_text()
    assert gpu.measure(tmp_path, "cpu", 100.0, CASES[:4])["left"] == []
    assert len((tmp_path / "gpu.jsonl").read_text().splitlines()) == 5


def test_a_journal_is_continued_on_the_same_machine_only(tmp_path):
    path = tmp_path / "gpu.jsonl"
    Journal(path, {"device": "A"}).add({"key": "x", "ms": 1})
    with path.open("a") as file:
        file.write('{"key": "y", "m')  # the process ended
    journal = Journal(path, {"device": "A"})
    assert list(journal.rows) == ["x"]
    journal.add({"key": "y", "ms": 2})
    assert list(Journal(path, {"device": "A"}).rows) == ["x", "y"]
    with pytest.raises(ValueError, match=r"gpu\.jsonl: measured elsewhere .*Delete the file, or use another folder"):
        Journal(path, {"device": "B"})


def test_alternatives_are_checked_and_timed(monkeypatch):
    row = gpu._row(tiny(next(case for case in CASES if LISTING in case.beside)), "cpu")
    found = row["alternatives"]
    # Triton does not interpret in this process.
    assert "not fused: it needs a GPU" in found.pop(TRITON)["failed"]
    assert set(found) == {"SDPA, flash", "SDPA, math", "blocked", LISTING}
    assert all(each["forward"]["median_ms"] > 0 and each["error"] < 0.1 for each in found.values())
    assert set(row["configurations"]) == set(KERNELS)
    correct = gpu._sdpa
    monkeypatch.setattr(gpu, "_sdpa", lambda *given: correct(*given) * 1.05)
    row = gpu._row(Case("one", Problem(heads=1, tokens=20, head_dim=16), ("SDPA, math",)), "cpu")
    assert "output is off by" in row["alternatives"]["SDPA, math"]["failed"]


def alternative(ms, mib=7.0, host_ms=0.1, **more):
    found = {name: {"median_ms": each, "host_ms": host_ms} for name, each in zip(gpu.PHASES, (1, 2, ms), strict=True)}
    return {**found, "extra_mib": mib, "error": 2e-3, **more}


def test_ratios_are_those_of_the_device_s_times_to_the_fastest_sdpa_and_the_table_shows_them():
    found = {
        TRITON: alternative(3.0, 12.0, host_ms=2.9, graph={"median_ms": 1.25}),
        "SDPA, flash": alternative(0.5, 10.0),
        "SDPA, cuDNN": {"failed": "no kernel"},
        LISTING: alternative(27.0),
    }
    ratios = gpu._ratios(found)
    assert ratios == {"SDPA, flash": 0.4, LISTING: 21.6, OF_SDPA: 2.5, MEMORY: 1.2}
    assert gpu._ratios({TRITON: {"failed": "wrong"}, "SDPA, flash": alternative(1.0)}) == {}
    row = {"key": "T 4096", "ratios": ratios, "alternatives": found}
    measured = {"device": "H200", "capability": "9.0", "torch": "2.15", "triton": "3.9", "rows": [row], "left": []}
    text = gpu.table(measured)
    assert f"| T 4096: {OF_SDPA} | ≤ 1.25 | 2.5 | no |" in text
    assert "| T 4096 | triton (host-bound) | 1.000 | 2.000 | 3.000 (graph: 1.250) | 2.50 | – | 12 | 2.0e-03 |" in text
    assert "| T 4096 | SDPA, cuDNN | failed: no kernel |" in text


def test_times_are_those_of_one_call():
    calls = []
    measured = times({"a": lambda: calls.append(1)}, "cpu")["a"]
    assert len(calls) == 1 + 1 + 1
    assert 0 <= measured["quartile_1_ms"] <= measured["median_ms"]


# Tuning


@pytest.mark.parametrize("problem", tune.KINDS, ids=lambda problem: problem.name)
def test_there_are_candidates_whose_tiles_fit_together(problem, monkeypatch):
    monkeypatch.setattr(tuning, "architecture_of", lambda device: "sm_90")
    best = gpu.configurations(problem, "cuda")
    for kernel in KERNELS:
        found = tune.trials(kernel, best, problem, "cuda")
        assert found[0] == best
        assert len(found) > 2 or problem.dtype == "float32" or problem.head_dim == 256
        assert not any(incompatible(trial) for trial in found)


def test_the_fastest_correct_configuration_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "_wrong", lambda trial, *_: "off" if trial["backward_keys"]["BLOCK_S"] == 16 else None)
    speeds = {(16, 16, 16): 3.0, (16, 16, 32): 2.0, (32, 16, 16): 1.0}

    def time_ms(trial, phase, problem, device):
        forward = trial["forward"]
        return speeds.get((forward["BLOCK_T"], forward["BLOCK_S"], trial["backward_keys"]["BLOCK_S"]), 9.0)

    monkeypatch.setattr(tune, "_time_ms", time_ms)
    # The table's own configuration is wrong here: its column kernel has BLOCK_S 16.
    failed = tune.measure(tmp_path / "none", "cpu", 10.0)
    assert failed["rows"][0]["failed"] == "no configuration of forward is correct: off"
    assert "| failed: no configuration of forward is correct: off |" in tune.table_of(failed)
    assert not (tmp_path / "none" / "tuning.json").exists()
    monkeypatch.setattr(tune, "_wrong", lambda *_: None)
    [row] = tune.measure(tmp_path, "cpu", 10.0)["rows"]
    assert row["before_ms"]["forward"] == 3.0
    assert row["after_ms"] == {"forward": 1.0, "backward_rows": 1.0, "backward_keys": 1.0}
    problem = tune.TINY[0]
    written = read_table(tmp_path / "tuning.json")
    entry = written.nearest("interpreter", 16, True, problem.head_dim, problem.entries, problem.keys)
    assert entry.kernels["forward"]["BLOCK_T"] == 32
    assert len(written.entries) == len(read_table(tuning.PATH).entries) + 1
    monkeypatch.setattr(tune, "_tuned", lambda *_: pytest.fail("this kind has been measured"))
    assert tune.measure(tmp_path, "cpu", 10.0)["left"] == []


# Compiling


SIMPLE = Problem(batch=3, heads=4, tokens=64, p_max=None, alibi=True, projection=True, lengths=(64, 3, 9))


@pytest.mark.slow
def test_all_kernels_of_a_problem_are_compiled_for_a_gpu_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with compiling.compiling_for(90):
        compiling.compile_kernels(SIMPLE, None, "cpu")
    ptx = {path.stem: path.read_text() for path in tmp_path.glob("*/*.ptx")}
    assert set(ptx) == set(KERNELS)
    assert all(".target sm_90a" in text for text in ptx.values())


@pytest.mark.slow
def test_kernels_that_cannot_be_compiled_ahead_do_not_stop_the_measurement(monkeypatch):
    # There is no GPU, so that the other process fails.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with compiling.Compiling({"some": [(SIMPLE, None)]}, "cuda") as ahead:
        ahead.wait("some")
        [future] = ahead._futures["some"]
        assert future.exception() is not None


def test_failures_are_printed_and_counted(monkeypatch, capsys):
    def compile_or_fail(problem, configurations, device):
        if problem.alibi:
            raise ValueError("first line\nout of registers")

    monkeypatch.setattr(compiling, "compile_kernels", compile_or_fail)
    monkeypatch.setattr(compiling, "everything", lambda: [("a", SIMPLE, None), ("b", Problem(), None)])
    assert compiling.main([]) == 1
    assert capsys.readouterr().out == "a: ValueError: out of registers\nsm_90: 2 problems, 1 failed\n"


# Training steps


@pytest.mark.slow
def test_a_compiled_step_is_checked_timed_and_says_how_it_was_compiled(monkeypatch):
    name = "CoPE(64), blocked" + step.COMPILED
    monkeypatch.setitem(step.GPU_ALTERNATIVES, name, (step.COPE, step.attend_with("blocked"), "blocked"))
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    row = step._row(step.TINY["tiny"], name, "cpu")
    assert row["tokens_per_s"] == pytest.approx(1e3 * 17 / row["step"]["median_ms"], rel=1e-3)
    assert row["compiled"] == {"mode": "default", "graph_breaks": 0, "skipped_cuda_graphs": 0}
    torch.compiler.reset()

    def broken(graph, inputs):
        raise RuntimeError("no compiler here")

    # It is not measured as if it were compiled.
    monkeypatch.setattr(compiled, "BACKEND", broken)
    with pytest.raises(Exception, match="no compiler here"):
        step._row(step.TINY["tiny"], name, "cpu")
    torch.compiler.reset()


def test_the_table_says_what_was_compiled_and_how():
    def row(name, ms, **more):
        found = {"model": "m", "attention": name, "step": {"median_ms": ms}, "tokens_per_s": 1e3, "mfu": None}
        return {**found, "peak_mib": 7, **more}

    graphs = {"mode": "reduce-overhead", "graph_breaks": 0, "skipped_cuda_graphs": 2}
    rows = [row(step.SDPA, 2.0), row("a", 3.0, compiled=graphs)]
    text = step.gpu_table({"device": "H200", "torch": "2.15", "triton": "3.9", "rows": rows, "left": []})
    assert "| m | a (CUDA graphs, 2 skipped cuda graphs) | 3.00 | 1.50 | 1,000 |" in text


# compute-sanitizer, by a stand-in


@pytest.mark.parametrize(
    ("commands", "note", "wrong"),
    [
        ({}, "compute-sanitizer found nothing", False),
        ({"import": 86}, "does not work here: exit code 86", False),
        ({"memcheck": 86}, "--tool memcheck found errors", True),
        ({"racecheck": 86}, "--tool racecheck found errors", True),
        ({"memcheck": 1}, "no result of compute-sanitizer --tool memcheck: exit code 1", False),
    ],
)
def test_only_what_the_tool_finds_in_kernels_is_wrong(commands, note, wrong, tmp_path, monkeypatch):
    tool, calls = tmp_path / "compute-sanitizer", tmp_path / "calls"
    codes = "".join(f"*{words}*) exit {code} ;; " for words, code in ({"import": 0} | commands).items())
    tool.write_text(f'#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING $*" >> {calls}\ncase "$*" in {codes}esac\n')
    tool.chmod(0o755)
    monkeypatch.setattr(sanitizer, "TOOLS", ("compute-sanitizer", str(tool)))
    found = sanitizer.sanitize(tmp_path, ("-c", "pass"))
    assert (note in found[0], found[1]) == (True, wrong)
    if not commands:
        options = f"--error-exitcode {sanitizer.FOUND} {sys.executable} -c"
        works = ("memcheck", sanitizer.PROBE)
        expected = [
            f"1 --tool {tool} {options} {text}" for tool, text in (works, ("memcheck", "pass"), ("racecheck", "pass"))
        ]
        assert calls.read_text().splitlines() == expected
