"""`make gpu`, as far as a CPU can run it: its stages and their order, and the whole as a dry run."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cope_benchmarks import attention, gpu_stages, step
from cope_benchmarks.gpu_stages import STAGES, UNFINISHED, lacking, main
from cope_benchmarks.report import GOALS, MEMORY, OF_OURS, OF_SDPA, table
from cope_benchmarks.timing import resumed

from cope_sweep.train import compiled

ROOT = Path(__file__).parents[2]


# The stages


@pytest.mark.parametrize(
    ("codes", "code", "ran"),
    [
        ({}, 0, STAGES),
        ({"tests": 1}, 1, ["tests"]),  # no times of wrong kernels
        ({"tests": UNFINISHED}, UNFINISHED, ["tests"]),
        ({"bench": 1, "step": UNFINISHED}, 1, STAGES),
        ({"bench": UNFINISHED, "step": gpu_stages.SKIPPED}, UNFINISHED, STAGES),
    ],
)
def test_stages_run_in_order_and_wrong_kernels_stop_them(codes, code, ran, tmp_path, monkeypatch):
    stages = []

    def run(stage):
        stages.append(stage)
        return codes.get(stage, 0)

    monkeypatch.setattr(gpu_stages, "run_tests", lambda device, out: run("tests"))
    monkeypatch.setattr(gpu_stages, "_run", lambda stage, device, out: run(stage))
    assert main(["--device", "cpu", "--out", str(tmp_path)]) == code
    assert stages == list(ran)


def test_without_a_gpu_the_way_out_is_named(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 1
    assert "make gpu DEVICE=cpu" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert main([]) == 1
    assert "older than compute capability 8.0" in capsys.readouterr().err


def test_packages_that_are_missing_are_named_with_the_command_that_brings_them(tmp_path, monkeypatch, capsys):
    assert lacking(("json", "no_such_package")) == ["no_such_package"]
    monkeypatch.setattr(gpu_stages, "NEEDED", ("json", "no_such_package"))
    assert main(["--child", "step", "--out", str(tmp_path)]) == gpu_stages.SKIPPED
    assert "needs no_such_package: pip install --target wheels no_such_package" in capsys.readouterr().out
    monkeypatch.setattr(gpu_stages, "BASE", ("no_such_package",))
    assert main([]) == 1
    assert "lacks no_such_package; make gpu PYTHON=" in capsys.readouterr().err


@pytest.mark.slow
def test_a_stage_that_takes_too_long_is_ended_with_its_children(tmp_path, monkeypatch):
    marker = tmp_path / "child.pid"
    monkeypatch.setattr(gpu_stages, "LIMIT_S", 5.0)
    with (tmp_path / "log").open("w") as log:
        hangs = ["sh", "-c", f"sleep 600 & echo $! > {marker}; wait"]
        assert gpu_stages._execute([hangs, ["false"]], dict(os.environ), log) == [None, 1]
    state = Path(f"/proc/{marker.read_text().strip()}/stat")
    end = time.monotonic() + 60
    while _runs(state) and time.monotonic() < end:  # a killed process may need a moment
        time.sleep(0.05)
    assert not _runs(state)


def _runs(state):
    try:
        return state.read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_tests_are_shared_out_to_processes_and_a_failure_is_a_failed_stage(tmp_path, monkeypatch, capsys):
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import os\ndef test_a(): pass\ndef test_b(): assert os.environ.get('FIXED')\ndef test_c(): pass\n"
    )
    monkeypatch.setattr(gpu_stages, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_stages, "TESTS", tests)
    monkeypatch.setattr(gpu_stages, "_processes", lambda device: 2)
    assert gpu_stages.run_tests("cpu", tmp_path) == 1
    assert "2 passed, 0 skipped, 1 failed of 3" in capsys.readouterr().out
    monkeypatch.setenv("FIXED", "1")
    assert gpu_stages.run_tests("cpu", tmp_path) == 0
    tests.write_text("raise RuntimeError('no kernels')")
    assert gpu_stages.run_tests("cpu", tmp_path) == 1
    assert "no kernels" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_gpu_as_a_dry_run_on_a_cpu(tmp_path):
    pytest.importorskip("triton")
    # Not as part of the `make` that may run the tests.
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    settings = ["DEVICE=cpu", f"OUT={tmp_path / 'out'}", f"PYTHON={sys.executable}", f"STAGE={' '.join(STAGES)}"]
    done = subprocess.run(["make", "gpu", *settings], cwd=ROOT, env=env, capture_output=True, text=True, timeout=1440)
    logs = "".join(path.read_text()[-3000:] for path in (tmp_path / "out").glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    rows = {
        stage: json.loads((tmp_path / "out" / f"{stage}.json").read_text())["rows"]
        for stage in ("gpu", "step", "prefill", "near_far")
    }
    assert all(attention.BOTH in rows["gpu"][f"{case.name}: triton"] for case in attention.DRY_CASES)
    assert "a step, ms" in rows["step"]["tiny: CoPE, triton"]
    assert "tokens/s" in rows["prefill"]["64 tokens, bf16: CoPE"]
    assert all(attention.BOTH in rows["near_far"][f"T 4096: {form}"] for form in ("triton", "near and far"))
    assert {"gpu.md", "step.md"} <= {path.name for path in (tmp_path / "out").iterdir()}


# What they measure


def test_the_forms_that_are_timed_are_the_ones_there_are():
    forms = pytest.importorskip("cope_benchmarks.forms", reason="needs Triton")
    assert set(forms.FORMS) == set(attention.BY_FORM) - set(attention.BACKENDS)


def test_sizes_are_read_from_a_listing():
    sizes = pytest.importorskip("cope_benchmarks.sizes", reason="needs Triton")
    lines = ["MOV R1, R2 ;", ".L_x_1:", "MUFU.EX2 R1, R1 ;", "MUFU.RCP R1, R1 ;", "@P0 BRA `(.L_x_1) ;", ".L_x_2:"]
    lines += ["MUFU.EX2 R1, R1 ;", "@P0 BRA `(.L_x_2) ;", "EXIT ;"]
    listing = "\n".join(line if line.startswith(".") else f"        /*0000*/  {line}" for line in lines)
    assert sizes.loops("forward", listing) == (3, 2)


def test_rows_are_written_as_they_come_and_the_same_command_continues_on_this_machine(tmp_path, monkeypatch):
    """A row that could outlast the budget does not begin."""
    clock = [0.0]
    monkeypatch.setattr("cope_benchmarks.timing.time.monotonic", lambda: clock[0])

    def row(name):
        clock[0] += 40.0
        return {"row": {"of": name}}

    def measure():
        return resumed(tmp_path / "x.json", "cpu", 100.0, {name: name for name in "abcd"}, row)

    first = measure()  # after two, 20 s are left
    assert (list(first["rows"]), first["left"]) == (["a: row", "b: row"], ["c", "d"])
    assert "| b: row | b |" in (tmp_path / "x.md").read_text()
    assert measure()["left"] == []
    stored = json.loads((tmp_path / "x.json").read_text())
    assert stored["rows"] == {f"{name}: row": {"of": name} for name in "abcd"}
    (tmp_path / "x.json").write_text(json.dumps(stored | {"machine": {"processor": "another"}}))
    with pytest.raises(ValueError, match=r"x\.json: measured on another machine.* use another folder, or delete it"):
        measure()


def test_the_most_important_cases_are_the_first_and_have_the_goals():
    cases = attention.GPU_CASES
    assert list(dict.fromkeys(name.partition(": ")[0] for name in GOALS["gpu"])) == [case.name for case in cases[:5]]
    assert len({case.name for case in cases}) == len(cases)


def test_ratios_are_those_to_the_fastest_sdpa_and_the_table_shows_them():
    def alternative(ms, mb):
        return {attention.BOTH: {"median_ms": ms, "spread_ms": 0.1, "host_ms": 0.2}, "extra MB": mb}

    found = {
        "triton": alternative(1.25, 12.0),
        "SDPA, flash": alternative(0.5, 10.0),
        "SDPA, efficient": alternative(0.2, 6.0),
        "SDPA, cuDNN": {"failed": "no kernel"},
        attention.LISTING: alternative(27.0, 900.0),
    }
    attention.add_all_ratios(found, "triton")
    assert (found["triton"][MEMORY], found["triton"][OF_SDPA]) == (2.0, 6.25)
    assert found[attention.LISTING][OF_OURS] == 21.6
    rows = {f"T 4096: {name}": row for name, row in found.items()}
    text = table({"bench": "gpu", "machine": {"gpu": "H200"}, "rows": rows})
    assert f"| T 4096: triton: {OF_SDPA} | ≤ 1.25 | 6.25 | no |" in text
    assert "| T 4096: triton | 1.25 ± 0.1 | 12 | 6.25 | 2 | 1 |" in text
    assert "| T 4096: SDPA, efficient | 0.2 ± 0.1 (host-bound) |" in text
    assert "| no kernel |" in text
    assert "goal" not in table({"bench": "gpu", "machine": {}, "rows": rows})  # a dry run
    wrong = {"triton": {"failed": "wrong"}}
    attention.add_all_ratios(wrong, "triton")
    assert wrong == {"triton": {"failed": "wrong"}}


# Training steps


@pytest.mark.slow
def test_a_compiled_step_is_not_measured_uncompiled(monkeypatch):
    name = "CoPE, native" + step.COMPILED
    alternatives = {name: (step.COPE, "native", "reference")}
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    assert "a step, ms" in step.measure_model(step.TINY["tiny"], alternatives, "cpu", 2)[name]
    torch.compiler.reset()

    def broken(graph, inputs):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compiled, "BACKEND", broken)
    assert "no compiler here" in step.measure_model(step.TINY["tiny"], alternatives, "cpu", 2)[name]["failed"]
    torch.compiler.reset()
