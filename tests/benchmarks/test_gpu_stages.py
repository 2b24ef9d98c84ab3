"""`make gpu`: the stages, their order and what is repeated; and the whole of it as a dry run on this CPU."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cope_benchmarks import gpu_stages, sanitizer
from cope_benchmarks.gpu_stages import Setting, lacking, main, run_stages
from cope_benchmarks.outcomes import journal_of

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


@pytest.mark.parametrize(
    ("results", "code", "first", "second"),
    [
        ({"tests": "failed"}, 1, ["tests"], ["tests", "tune", "bench", "step"]),  # no times of wrong kernels
        ({"tests": "unfinished"}, gpu_stages.UNFINISHED, ["tests"], ["tests", "tune", "bench", "step"]),
        ({"tune": "failed", "bench": "unfinished"}, 1, list(gpu_stages.STAGES), ["tune", "bench"]),
        ({"bench": "unfinished", "step": "skipped"}, gpu_stages.UNFINISHED, list(gpu_stages.STAGES), ["bench", "step"]),
    ],
)
def test_the_same_command_continues_with_what_is_not_done(ran, tmp_path, results, code, first, second):
    setting = Setting("cpu", tmp_path)
    ran.results = results
    assert run_stages(setting, list(gpu_stages.STAGES)) == code
    assert ran == first
    assert results.items() <= stages_of(tmp_path).items()
    ran.results = {}
    assert run_stages(setting, list(gpu_stages.STAGES)) == 0
    assert ran == first + second
    assert stages_of(tmp_path) == dict.fromkeys(gpu_stages.STAGES, "done")


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
def test_outcomes_are_written_and_the_same_command_runs_what_has_not_passed(tmp_path, monkeypatch, capsys):
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import os, pytest\n"
        "broken = []\n"
        "def test_a(): pass\n"
        "@pytest.mark.skip(reason='never')\ndef test_b(): pass\n"
        "def test_c():\n"
        "    if os.environ.get('FIXED'): return\n"
        "    broken.append(1)\n"
        "    raise RuntimeError('CUDA error: an illegal memory access')\n"
        "def test_d(): assert not broken\n"
        "def test_e(): os.environ.get('FIXED') or os._exit(9)\n"
    )
    monkeypatch.setattr(gpu_stages, "TESTS", tests)
    monkeypatch.setattr(gpu_stages, "_shards", lambda: 2)
    monkeypatch.setattr(sanitizer, "sanitize", lambda folder: ("nothing found", False))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))

    def run():
        code = main(["--child", "tests", "--out", str(tmp_path)])
        rows = journal_of(tmp_path / "tests.jsonl").rows
        return code, {test.split("::")[1]: row["outcome"] for test, row in rows.items()}

    # One process runs a, c and e, and ends at the error of CUDA; the other runs b and d.
    outcomes = {"test_a": "passed", "test_b": "skipped", "test_c": "failed", "test_d": "passed"}
    assert run() == (1, outcomes)
    assert "2 passed, 1 skipped, 1 failed; wrong: " in capsys.readouterr().out
    # A test without an outcome comes before one that has failed.
    assert run() == (1, outcomes | {"test_e": "begun"})
    monkeypatch.setenv("FIXED", "1")
    assert run() == (0, outcomes | {"test_c": "passed", "test_e": "passed"})
    assert "4 passed, 1 skipped, 0 failed; nothing found" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "tests.jsonl").read_text().splitlines()[1:]]
    assert [row["outcome"] for row in lines if row["key"].endswith("test_a")] == ["begun", "passed"]


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
    outcomes = [row["outcome"] for row in journal_of(tmp_path / "out" / "tests.jsonl").rows.values()]
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
