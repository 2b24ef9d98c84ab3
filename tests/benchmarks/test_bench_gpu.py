"""The benchmark of GPU kernels and their tuning, as far as a CPU can run them; `test_gpu_stages.py` interprets kernels."""

import json
from dataclasses import replace

import pytest
import torch
from cope_benchmarks import gpu, gpu_peers, gpu_timing, tune
from cope_benchmarks.exact import compare, exact
from cope_benchmarks.gpu import (
    CASES,
    COMPILED,
    DRY_CASES,
    LISTING,
    MEMORY,
    OF_SDPA,
    TRITON,
    Case,
    measure,
    table,
    tiny,
)
from cope_benchmarks.gpu_problems import Problem
from cope_benchmarks.gpu_timing import Deadline, Effort, Journal, graph_time, times

from cope_sweep.kernels import tuning
from cope_sweep.kernels.tuning import KERNELS, incompatible, read_table


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def interpreted(monkeypatch):
    """The dry run is allowed, but no kernel is: `row` replaces the measurement of a case."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def row(case, device):
        return {"alternatives": {TRITON: {"failed": "no"}}, "ratios": {}, "goals": [], "measured": case.name}

    monkeypatch.setattr(gpu, "_row", row)


def test_without_a_gpu_the_reason_is_reported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in measure()["skipped"]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "needs TRITON_INTERPRET=1" in table(measure(device="cpu"))


def test_the_most_important_shapes_are_the_first_and_have_the_targets():
    targets = {case.name: case.at_most[OF_SDPA] for case in CASES if case.at_most}
    assert targets == {"T 4096": 1.25, "T 1024": 2.0, "T 16384": 1.1, "T 4096, never saturating": 3.0}
    assert [case.at_most.get(MEMORY) for case in CASES[:3]] == [1.2] * 3
    assert next(case for case in CASES if case.at_least).at_least == {LISTING: 10, COMPILED: 4}
    assert list(targets) == [case.name for case in CASES[:4]]
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.problem.head_dim for case in CASES} == {32, 64, 128}
    assert all(case.problem.batch * case.problem.tokens <= gpu.TOKENS for case in CASES)


def test_cases_are_written_as_they_come_and_the_same_command_continues(interpreted, tmp_path, monkeypatch):
    cases = CASES[:3]
    allowed = iter([True, True, False])
    monkeypatch.setattr(Deadline, "allows_another", lambda self: next(allowed))
    first = measure(tmp_path, "cpu", cases=cases)
    assert [row["key"] for row in first["rows"]] == ["T 4096", "T 1024"]
    assert first["left"] == ["T 16384"]
    assert "Not measured yet: T 16384." in (tmp_path / "gpu.md").read_text()
    allowed = iter([True])
    second = measure(tmp_path, "cpu", cases=cases)
    assert [row["key"] for row in second["rows"]] == [case.name for case in cases]
    assert second["left"] == []
    assert json.loads((tmp_path / "gpu.json").read_text()) == second
    assert len((tmp_path / "gpu.jsonl").read_text().splitlines()) == 4


def test_results_of_another_machine_are_not_continued(tmp_path):
    path = tmp_path / "gpu.jsonl"
    Journal(path, {"device": "A"}).add({"key": "x", "ms": 1})
    assert Journal(path, {"device": "A"}).rows == {"x": {"key": "x", "ms": 1}}
    with pytest.raises(ValueError, match=r"gpu\.jsonl: measured elsewhere .*Delete the file, or use another folder"):
        Journal(path, {"device": "B"})


def test_a_line_that_was_not_written_to_its_end_is_measured_again(tmp_path):
    path = tmp_path / "gpu.jsonl"
    Journal(path, {"device": "A"}).add({"key": "x", "ms": 1})
    with path.open("a") as file:
        file.write('{"key": "y", "m')
    journal = Journal(path, {"device": "A"})
    assert list(journal.rows) == ["x"]
    journal.add({"key": "y", "ms": 2})
    assert list(Journal(path, {"device": "A"}).rows) == ["x", "y"]


def test_a_step_that_could_outlast_the_budget_does_not_begin(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("cope_benchmarks.gpu_timing.time.monotonic", lambda: clock[0])
    deadline = Deadline(100)
    assert deadline.allows_another()
    clock[0] = 40.0
    assert deadline.allows_another()  # the longest took 40 s: until 80
    clock[0] = 61.0
    assert not deadline.allows_another()  # until 101


def test_times_are_those_of_one_call():
    calls = []
    measured = times({"a": lambda: calls.append(1)}, "cpu", Effort(turns=3, turn_ms=0.0))["a"]
    assert len(calls) == 1 + 1 + 3
    assert 0 <= measured["quartile_1_ms"] <= measured["median_ms"] <= measured["quartile_3_ms"]


def test_alternatives_are_checked_and_timed():
    case = next(case for case in DRY_CASES if LISTING in case.beside)
    row = gpu._row(tiny(case), "cpu")
    found = row["alternatives"]
    # Triton does not interpret in this process.
    assert "not fused: it needs a GPU" in found.pop(TRITON)["failed"]
    assert set(found) == {"SDPA, flash", "SDPA, math", "blocked", LISTING}
    for name, alternative in found.items():
        assert alternative.get("forward", {}).get("median_ms", 0) > 0, (name, alternative)
        assert alternative["error"] < 0.1
    assert set(row["configurations"]) == set(KERNELS)


def test_an_alternative_with_wrong_results_is_not_timed(monkeypatch):
    correct = gpu_peers.sdpa
    monkeypatch.setattr(gpu_peers, "sdpa", lambda *given: lambda x: correct(*given)(x) * 1.05)
    row = gpu._row(Case("one", Problem(heads=1, tokens=20, head_dim=16), ("SDPA, math",)), "cpu")
    assert "output is off by" in row["alternatives"]["SDPA, math"]["failed"]


@pytest.mark.parametrize(
    "problem",
    [Problem(p_max=None, alibi=True, tokens=40, head_dim=16), Problem(p_max=None, relative="full", tokens=40)],
)
def test_flex_attention_computes_the_same_bias(problem):
    # Its backward pass needs a GPU.
    problem = replace(problem, dtype="float32")
    leaves, weight = problem.leaves()
    with torch.no_grad():
        out = gpu_peers.flex(problem, "cpu")(leaves)
    expected = exact(problem.build, leaves, weight)
    computed = {**expected, "output": out}
    assert compare(problem.build, leaves, weight, computed, torch.float32).wrong is None


def alternative(ms, mib=7.0, host_ms=0.1, **more):
    def taken(ms):
        return {"median_ms": ms, "host_ms": host_ms}

    times = {"forward": taken(1), "backward": taken(2), "forward_backward": taken(ms)}
    return {**times, "extra_mib": mib, "error": 2e-3, **more}


class Stand:
    """Stands for streams and graphs: writes down what is called."""

    def __init__(self, calls):
        self.calls = calls

    def __getattr__(self, name):
        return lambda *_: self.calls.append(name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.calls.append("end")


def test_a_graph_is_recorded_after_a_call_and_its_replays_are_timed(monkeypatch):
    calls = []
    for name in ("Stream", "CUDAGraph", "current_stream", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: Stand(calls))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: Stand(calls))
    monkeypatch.setattr(gpu_timing, "times", lambda runs, *_: {n: {"median_ms": run()} for n, run in runs.items()})
    assert graph_time(lambda: calls.append("run")) == {"median_ms": None}
    assert calls == ["wait_stream", "run", "end", "wait_stream", "run", "end", "replay"]
    assert graph_time(lambda: 1 / 0) == {"failed": "ZeroDivisionError: division by zero"}


def test_ratios_are_those_of_the_device_s_times_to_the_fastest_sdpa():
    found = {
        TRITON: alternative(3.0, 12.0),
        "SDPA, flash": alternative(1.5, 10.0),
        "SDPA, cuDNN": {"failed": "no kernel"},
        "SDPA, efficient": alternative(2.0, 5.0),
        LISTING: alternative(27.0),
    }
    ratios = {"SDPA, flash": 0.5, "SDPA, efficient": 0.667, LISTING: 9.0, OF_SDPA: 2.0, MEMORY: 1.2}
    assert gpu._ratios(found) == ratios
    # The graph's time is the device's.
    found["SDPA, efficient"]["graph"] = {"median_ms": 1.0}
    assert gpu._ratios(found)[OF_SDPA] == 3.0
    assert gpu._ratios(found)[MEMORY] == 2.4
    found["SDPA, efficient"]["graph"] = {"failed": "it waits"}
    assert gpu._ratios(found) == ratios
    case = Case("one", Problem(), at_most={OF_SDPA: 2.5, MEMORY: 1.1}, at_least={LISTING: 10, COMPILED: 4})
    assert gpu._goals(case, ratios) == [
        {"what": OF_SDPA, "goal": "≤ 2.5", "measured": 2.0, "reached": True},
        {"what": MEMORY, "goal": "≤ 1.1", "measured": 1.2, "reached": False},
        {"what": f"time of {LISTING} ÷ ours", "goal": "≥ 10", "measured": 9.0, "reached": False},
    ]
    assert gpu._ratios({TRITON: {"failed": "wrong"}, "SDPA, flash": alternative(1.0)}) == {}


def test_the_table_shows_goals_ratios_and_what_failed():
    row = {
        "key": "T 4096", "ratios": {"SDPA, flash": 0.5, OF_SDPA: 2.0},
        "goals": [{"what": OF_SDPA, "goal": "≤ 1.25", "measured": 2.0, "reached": False}],
        "alternatives": {
            TRITON: alternative(3, host_ms=2.9, graph={"median_ms": 1.25}),
            "SDPA, flash": alternative(1.5),
            "SDPA, cuDNN": {"failed": "no kernel"},
        },
    }  # fmt: skip
    measured = {"device": "H200", "capability": "9.0", "torch": "2.15", "triton": "3.9", "rows": [row], "left": []}
    text = table(measured)
    assert "| T 4096 | time ÷ fastest SDPA | ≤ 1.25 | 2.00 | no |" in text
    assert "| T 4096 | triton (host-bound) | 1.000 | 2.000 | 3.000 (graph: 1.250) | 2.00 | – | 7 | 2.0e-03 |" in text
    assert "| T 4096 | SDPA, flash | 1.000 | 2.000 | 1.500 | – | 0.50 | 7 | 2.0e-03 |" in text
    assert "| T 4096 | SDPA, cuDNN | failed: no kernel |" in text


# Tuning


@pytest.mark.parametrize("kind", tune.KINDS, ids=lambda kind: kind.name)
def test_there_are_candidates_whose_tiles_fit_together(kind, monkeypatch):
    monkeypatch.setattr(tuning, "architecture_of", lambda device: "sm_90")
    best = gpu.configurations(kind.problem, "cuda")
    for kernel in KERNELS:
        found = tune.trials(kernel, best, kind.problem, "cuda")
        assert found[0] == best
        assert len(found) > 2 or kind.problem.dtype == "float32" or kind.problem.head_dim == 256
        assert not any(incompatible(trial) for trial in found)
        assert len({str(trial) for trial in found}) == len(found)


def test_the_fastest_correct_configuration_is_written(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(tune, "_wrong", lambda trial, *_: "off" if trial["backward_keys"]["BLOCK_S"] == 16 else None)
    speeds = {(16, 16, 16): 3.0, (16, 16, 32): 2.0, (32, 16, 16): 1.0}

    def time_ms(trial, phase, problem, device):
        forward = trial["forward"]
        return speeds.get((forward["BLOCK_T"], forward["BLOCK_S"], trial["backward_keys"]["BLOCK_S"]), 9.0)

    monkeypatch.setattr(tune, "_time_ms", time_ms)
    # The table's own configuration is wrong here: its column kernel has BLOCK_S 16.
    failed = tune.measure(tmp_path / "none.json", None, "cpu")
    assert failed["rows"][0]["failed"] == "no configuration of forward is correct: off"
    assert "| failed: no configuration of forward is correct: off |" in tune.table_of(failed)
    assert not (tmp_path / "none.json").exists()
    monkeypatch.setattr(tune, "_wrong", lambda *_: None)
    measured = tune.measure(tmp_path / "table.json", tmp_path, "cpu")
    [row] = measured["rows"]
    assert row["before_ms"]["forward"] == 3.0
    assert row["after_ms"] == {"forward": 1.0, "backward_rows": 1.0, "backward_keys": 1.0}
    written = read_table(tmp_path / "table.json")
    problem = tune.TINY[0].problem
    entry = written.nearest("interpreter", 16, True, problem.head_dim, problem.entries, problem.keys)
    assert entry.kernels["forward"]["BLOCK_T"] == 32
    assert entry.source.startswith("measured on CPU")
    assert len(written.entries) == len(read_table(tuning.PATH).entries) + 1
    assert "| forward |" in tune.table_of(measured)
    monkeypatch.setattr(tune, "_tuned", lambda *_: pytest.fail("this kind has been measured"))
    assert tune.measure(tmp_path / "other.json", tmp_path, "cpu")["left"] == []
