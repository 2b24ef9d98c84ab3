"""What a machine with a GPU needs to check, tune and measure the kernels: torch with Triton, NumPy and pytest."""

import subprocess
import sys
from pathlib import Path

import pytest

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
assert "pydantic" in others and "rich" in others and "hypothesis" in others, sorted(others)
for module in sys.argv[1].split(","):
    __import__(module)
"""


def import_with_few_packages(*modules):
    return subprocess.run(
        [sys.executable, "-c", BLOCKER, ",".join(modules), ",".join(ALLOWED)],
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
        "cope_sweep.kernels.tuning",
        "tests.kernels.test_triton_gpu",
        "cope_benchmarks.gpu",
        "cope_benchmarks.gpu_small",
        "cope_benchmarks.gpu_stages",
        "cope_benchmarks.outcomes",
        "cope_benchmarks.tune",
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_the_blocker_blocks():
    done = import_with_few_packages("cope_sweep.positions.cope")
    assert done.returncode == 1
    assert "blocked" in done.stderr
