"""`cope-sweep bench` through the command line."""

import os
import re
import runpy
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from cope_sweep.cli.application import app


def test_a_folder_that_cannot_be_written_is_reported_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    result = CliRunner().invoke(app, ["bench", "attention", "--keep", str(tmp_path / "file" / "results")])
    assert result.exit_code == 2
    assert re.search(r"--keep .*file/results: .*name a folder", " ".join(result.output.split()))


def test_bench_gpu_without_a_gpu_saves_the_reason(tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: the benchmark would take minutes")
    folder = tmp_path / "new" / "results"
    result = CliRunner().invoke(app, ["bench", "gpu", "--keep", str(folder)])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in folder.iterdir()) == ["gpu.json", "gpu.md"]
    assert "no CUDA device" in (folder / "gpu.json").read_text()


def test_a_device_that_does_not_exist_is_an_error():
    for name in ("gpu", "tune", "step"):
        result = CliRunner().invoke(app, ["bench", name, "--device", "tpu"])
        assert result.exit_code == 2
        assert "--device tpu: no such device; accepted: cuda, cpu" in result.output


def test_the_benchmarks_are_commands():
    output = CliRunner().invoke(app, ["bench", "--help"]).output
    for name in ("attention", "step", "gpu", "tune", "sweep", "store", "serve", "data"):
        assert re.search(rf"\b{name}\b", output)


def test_a_checkout_that_is_not_installed_has_the_commands_too(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cope_benchmarks", "gpu", "--device", "tpu"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("cope_benchmarks", run_name="__main__")
    assert ended.value.code == 2
    assert "--device tpu: no such device" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match="needs typer; `make gpu` needs torch, Triton, NumPy and pytest only"):
        runpy.run_module("cope_benchmarks", run_name="__main__")


LIMITED = """
from cope_benchmarks.instructions import limit_to_avx2
limit_to_avx2()
from cope_sweep.kernels.native import build
print(build.best_target())
"""


@pytest.mark.slow
def test_avx2_limits_torch_and_the_native_kernels():
    """In a process of its own: torch reads the limit when it is imported."""
    torch = pytest.importorskip("torch")
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("the processor has no AVX2")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", LIMITED], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["avx2"]


def test_avx2_is_refused_where_torch_has_read_its_limits():
    pytest.importorskip("torch")
    result = CliRunner().invoke(app, ["bench", "attention", "--avx2"])
    assert result.exit_code == 2
    assert "has not imported torch" in " ".join(result.output.split())
