"""`make gpu`: the stages, their order and what is repeated; and the whole of it as a dry run on this CPU."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from cope_benchmarks import gpu_stages
from cope_benchmarks.gpu_stages import Setting, lacking, main, run_stages
from cope_benchmarks.outcomes import read_outcomes

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ran(monkeypatch):
    """The stages that run, in order; `ran.results` replaces their results."""

    class Ran(list):
        results = {}

    ran = Ran()

    def run(stage, setting):
        ran.append(stage)
        return ran.results.get(stage, "done"), ""

    monkeypatch.setattr(gpu_stages, "_run", run)
    return ran


def stages_of(folder):
    return {stage: row["result"] for stage, row in json.loads((folder / "stages.json").read_text()).items()}


def test_finished_stages_are_not_repeated_unless_forced(ran, tmp_path):
    command = ["--device", "cpu", "--out", str(tmp_path)]
    assert main(command) == 0
    assert ran == ["tests", "tune", "bench", "step"]
    (tmp_path / "tune.jsonl").write_text("{}")
    assert main([*command, "--force"]) == 0
    assert ran[4:] == ["tests", "tune", "bench", "step"]
    assert not (tmp_path / "tune.jsonl").exists()


def test_nothing_is_measured_with_wrong_kernels(ran, tmp_path):
    ran.results = {"tests": "failed"}
    assert run_stages(Setting("cpu", tmp_path), ["tests", "tune"]) == 1
    assert ran == ["tests"]
    assert stages_of(tmp_path) == {"tests": "failed"}
    ran.results = {"tests": "unfinished"}
    assert run_stages(Setting("cpu", tmp_path), ["tests", "tune"]) == gpu_stages.UNFINISHED
    assert ran == ["tests", "tests"]


def test_the_other_stages_are_measured_where_one_fails(ran, tmp_path):
    setting = Setting("cpu", tmp_path)
    ran.results = {"tune": "failed", "bench": "unfinished"}
    assert run_stages(setting, ["tests", "tune", "bench", "step"]) == 1
    assert ran == ["tests", "tune", "bench", "step"]
    ran.results = {}
    assert run_stages(setting, ["tests", "tune", "bench", "step"]) == 0
    assert ran[4:] == ["tune", "bench"]


def test_a_stage_whose_time_ended_is_continued_and_a_skipped_one_is_tried_again(ran, tmp_path):
    setting = Setting("cpu", tmp_path)
    ran.results = {"bench": "unfinished", "step": "skipped"}
    assert run_stages(setting, ["tune", "bench", "step"]) == gpu_stages.UNFINISHED
    ran.results = {}
    assert run_stages(setting, ["tune", "bench", "step"]) == 0
    assert ran == ["tune", "bench", "step", "bench", "step"]
    assert stages_of(tmp_path) == {"tune": "done", "bench": "done", "step": "done"}


def test_later_stages_use_the_table_that_was_measured(tmp_path):
    setting = Setting("cuda", tmp_path)
    assert "COPE_SWEEP_TUNING" not in setting.environment
    (tmp_path / "tuning.json").write_text("{}")
    assert setting.environment["COPE_SWEEP_TUNING"] == str(tmp_path / "tuning.json")


def test_without_a_gpu_the_way_out_is_named(capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 1
    assert "make gpu DEVICE=cpu" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert main([]) == 1
    assert "older than compute capability 8.0" in capsys.readouterr().err


def test_packages_that_are_missing_are_named_with_the_command_that_brings_them(tmp_path, monkeypatch, capsys):
    assert lacking(("json", "no_such_package", "no_such.module")) == ["no_such_package", "no_such.module"]
    monkeypatch.setattr(gpu_stages, "NEEDED", ("json", "no_such_package"))
    assert main(["--child", "step", "--out", str(tmp_path)]) == gpu_stages.SKIPPED
    assert "needs no_such_package: pip install --target wheels no_such_package" in capsys.readouterr().out
    monkeypatch.setattr(gpu_stages, "BASE", ("no_such_package",))
    assert main([]) == 1
    assert "lacks no_such_package; make gpu PYTHON=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("memory", "cores", "shards"), [(150e9, 16, 8), (75e9, 16, 7), (85e9, 4, 4), (25e9, 16, 2), (6e9, 16, 1)]
)
def test_the_tests_processes_fit_in_the_gpu_s_memory(memory, cores, shards, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory))
    monkeypatch.setattr(gpu_stages.os, "cpu_count", lambda: cores)
    assert gpu_stages._shards() == shards


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_gpu_passes_its_settings_on():
    def command(*settings):
        # Not as part of the `make` that may run the tests.
        env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
        made = ["make", "-n", "gpu", *settings]
        found = subprocess.run(made, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        return found.stdout.replace("\\\n", " ").split()

    given = command("PYTHON=python9", "STAGE=tests tune", "OUT=there", "FORCE=1", "DEVICE=cpu")
    assert given[1:4] == ["python9", "-m", "cope_benchmarks.gpu_stages"]
    options = "--device cpu --out there --force --stage tests --stage tune"
    assert given[4:] == options.split()
    assert command()[4:] == ["--device", "cuda"]


@pytest.mark.slow
def test_a_stage_that_takes_too_long_is_ended_with_its_children(tmp_path, monkeypatch):
    marker = tmp_path / "child.pid"
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {marker}\nwait\n")
    fake.chmod(0o755)
    monkeypatch.setattr(gpu_stages.sys, "executable", str(fake))
    monkeypatch.setattr(gpu_stages, "LIMIT_S", 5.0)
    assert gpu_stages._run("tests", Setting("cpu", tmp_path)) == ("unfinished", "took longer than 5 s")
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
def test_outcomes_are_written_and_tests_that_passed_are_not_repeated(tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import os, pytest\n"
        "def test_a(): pass\n"
        "def test_b(): assert os.environ.get('FIXED'), 'not yet'\n"
        "@pytest.mark.skip(reason='never')\ndef test_c(): pass\n"
    )
    journal = tmp_path / "tests.jsonl"

    def run(**environment):
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path)]
        command += ["-p", "no:cacheprovider", "-p", "cope_benchmarks.outcomes", str(tmp_path)]
        found = {"PYTHONPATH": str(ROOT / "tests" / "benchmarks"), "COPE_SWEEP_OUTCOMES": str(journal), **environment}
        return subprocess.run(command, env=os.environ | found, capture_output=True, text=True).returncode

    assert run(COPE_SWEEP_SHARD="0/2") == 0  # a and c
    assert run() == 1
    outcomes = {test.split("::")[1]: row["outcome"] for test, row in read_outcomes(journal).items()}
    assert outcomes == {"test_a": "passed", "test_b": "failed", "test_c": "skipped"}
    assert "not yet" in read_outcomes(journal)["test_some.py::test_b"]["message"]
    assert run(FIXED="1") == 0
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [row["test"].split("::")[1] for row in lines if row["outcome"] == "passed"].count("test_a") == 1
    assert read_outcomes(journal)["test_some.py::test_b"]["outcome"] == "passed"


@pytest.mark.slow
def test_after_an_error_of_cuda_another_process_runs_the_other_tests(tmp_path, monkeypatch, capsys):
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import os, pytest\n"
        "broken = []\n"
        "def test_a(): pass\n"
        "def test_b():\n    broken.append(1)\n    raise RuntimeError('CUDA error: an illegal memory access')\n"
        "def test_c(): assert not broken\n"
        "def test_d(): os._exit(9)\n"
        "def test_e(): pass\n"
    )
    monkeypatch.setattr(gpu_stages, "TESTS", tests)
    monkeypatch.setattr(gpu_stages, "_shards", lambda: 1)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "benchmarks"))
    assert main(["--child", "tests", "--out", str(tmp_path)]) == 1
    outcomes = {test.split("::")[1]: row["outcome"] for test, row in read_outcomes(tmp_path / "tests.jsonl").items()}
    expected = {"test_a": "passed", "test_b": "failed", "test_c": "passed", "test_d": "begun", "test_e": "passed"}
    assert outcomes == expected
    assert "3 passed, 0 skipped, 1 failed; wrong: " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1500)  # 45 s of an idle core
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_gpu_as_a_dry_run_on_a_cpu(tmp_path):
    pytest.importorskip("triton")
    command = ["make", "gpu", "DEVICE=cpu", f"OUT={tmp_path / 'out'}", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1440)
    logs = "".join(path.read_text()[-3000:] for path in (tmp_path / "out").glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    stages = json.loads((tmp_path / "out" / "stages.json").read_text())
    assert {stage: row["result"] for stage, row in stages.items()} == dict.fromkeys(
        ["tests", "tune", "bench", "step"], "done"
    )
    outcomes = [row["outcome"] for row in read_outcomes(tmp_path / "out" / "tests.jsonl").values()]
    assert outcomes.count("passed") >= 20
    assert "failed" not in outcomes
    measured = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert measured["left"] == []
    assert all("forward_backward" in row["alternatives"]["triton"] for row in measured["rows"])
    assert {"gpu.md", "step.md", "step.json", "tune.md", "tuning.json"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0
    assert again.stdout.count("done before") == 4
