"""What a machine with a GPU needs to check and measure the kernels: torch with Triton, NumPy and pytest."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cope_benchmarks.gpu_stages import BASE, NEEDED

ROOT = Path(__file__).parents[2]
ALLOWED = ("torch", "torchgen", "triton", "numpy", "pytest")
BLOCKER = """
import importlib.metadata, sys

allowed = set(sys.argv[2].split(","))
# Everything that torch, NumPy and pytest need themselves.
import numpy, pytest, torch, triton, torch.library, torch.nn.attention.flex_attention, torch._inductor.config

needed = {name.partition(".")[0] for name in sys.modules}
others = {top for top in importlib.metadata.packages_distributions()} - allowed - needed
ours = {"cope_sweep", "cope_services", "cope_benchmarks", "tests"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in others and top not in ours:
            raise ModuleNotFoundError(f"No module named {top!r} (blocked)", name=top)

sys.meta_path.insert(0, Blocker())
assert "ray" in others and "mlflow" in others and "hypothesis" in others, sorted(others)
for module in sys.argv[1].split(","):
    __import__(module)
"""


def import_with_few_packages(*modules, packages=()):
    allowed = (*ALLOWED, *packages)
    return subprocess.run(
        [sys.executable, "-c", BLOCKER, ",".join(modules), ",".join(allowed)],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'benchmarks'}", "TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_kernels_their_gpu_tests_and_benchmarks_need_torch_triton_numpy_and_pytest_only():
    done = import_with_few_packages(
        "cope_sweep.kernels",
        "cope_sweep.kernels.triton_attention",
        "tests.kernels.test_triton_gpu",
        "cope_benchmarks.attention",
        "cope_benchmarks.gpu_stages",
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.thorough
def test_training_steps_need_the_packages_that_make_gpu_names():
    of_those = ("annotated_types", "greenlet", "pydantic_core", "_yaml", "typing_extensions", "typing_inspection")
    done = import_with_few_packages("cope_benchmarks.step", packages=(*NEEDED, *of_those))
    assert done.returncode == 0, done.stderr[-3000:]


WITHOUT = """
import runpy, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name in blocked:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)

blocked = set(sys.argv.pop(1).split(","))
sys.meta_path.insert(0, Blocker())
runpy.run_module("cope_sweep.cli", run_name="__main__", alter_sys=True)
"""


@pytest.mark.thorough
def test_runs_are_trained_without_ray_and_mlflow(tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = {
        re.match(r"[\w.-]+", requirement)[0].lower().replace("-", "_") for requirement in project["dependencies"]
    }
    blocked = requirements - {*BASE, *NEEDED, "matplotlib", "pandas", "pyarrow", "rich", "typer"}
    assert {"ray", "mlflow", "fastapi"} <= blocked
    changes = ["--set", "train.steps=2", "--set", "train.batch=2", "--set", "evaluate.final_sequences=8"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, ",".join(blocked), "run", "quickstart", "--local", "--no-mlflow", "--max-runs", "1",
         "--store", str(tmp_path / "store"), *changes],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 130, done.stderr[-3000:]  # of 6 runs, one was asked for
    assert "Interrupted with 5 runs to do" in done.stdout + done.stderr


@pytest.mark.thorough
def test_the_blocker_blocks():
    done = import_with_few_packages("cope_sweep.positions.cope")
    assert done.returncode == 1
    assert "blocked" in done.stderr
