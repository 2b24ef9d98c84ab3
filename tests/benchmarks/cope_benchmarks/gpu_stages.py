"""Checks and measures the kernels on a GPU, stage after stage: `make gpu`.

    python -m cope_benchmarks.gpu_stages [--device cpu] [--out FOLDER] [--stage NAME …]

    tests      the kernels against float64; the other stages need it passed
    bench      attention, beside SDPA and the paper's listing
    step       training steps of the paper's models
    prefill    the forward pass of a model of about 1 B parameters over a prompt
    near_far   attention by one kernel for all tiles, and by two, with several sizes of tiles

Each stage takes less than ten minutes, in processes of its own, and writes what it has measured after each row: the same
command continues. With device `cpu`, it is a dry run: tiny shapes, Triton's interpreter. Needs torch, Triton, NumPy and
pytest; `step` and `prefill` also the packages of training, without which they are skipped.

Exit codes: 0 everything is done or skipped; 1 a stage failed; 3 time ended before everything was done: repeat it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "tests" / "benchmarks" / "results" / "gpu"
STAGES = ("tests", "bench", "step", "prefill", "near_far")
MODULES = {"bench": "attention"}
"""The modules that measure a stage, where they have another name."""
LIMIT_S = 580.0
"""Longest time of a stage."""
BUDGET_S = 480.0
"""After this, a stage begins no further row."""
MAX_PROCESSES = 8
TEST_BYTES = 10e9
"""Memory of the GPU for a process of tests."""
BASE = ("torch", "triton", "numpy", "pytest")
NEEDED = ("cachetools", "psutil", "pydantic", "yaml", "safetensors", "sqlalchemy")
"""Packages that `step` and `prefill` need beside `BASE`."""
TESTS = ROOT / "tests" / "kernels" / "test_triton_gpu.py"
SKIPPED, UNFINISHED = 4, 3
"""Exit codes of a stage."""
RESULT = {0: "done", UNFINISHED: "unfinished", SKIPPED: "skipped"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--stage", action="append", choices=STAGES, help="this stage only; may be repeated")
    parser.add_argument("--child", choices=STAGES[1:], help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        return _measure(given.child, given.device, given.out)
    if missing := lacking(BASE):
        return _say(f"{sys.executable} lacks {', '.join(missing)}; make gpu PYTHON=… names another", 1)
    if reason := _why_not(given.device):
        return _say(reason, 1)
    out = (given.out or _default_folder(given.device)).resolve()
    out.mkdir(parents=True, exist_ok=True)
    code = 0
    for stage in given.stage or STAGES:
        start_s = time.monotonic()
        ended = run_tests(given.device, out) if stage == "tests" else _run(stage, given.device, out)
        _say(f"{stage}: {RESULT.get(ended, 'failed')} in {time.monotonic() - start_s:.0f} s (see {out / stage}.log)")
        if ended not in (0, SKIPPED):
            code = ended if ended == UNFINISHED and code != 1 else 1
            if stage == "tests":
                break  # nothing is measured before the kernels are known to be correct
    _say(f"The results are in {out}" + ("; repeat the command to continue" if code else ""))
    return code


def run_tests(device: str, out: Path) -> int:
    """The tests of the kernels, in several processes, whose time is compiling; their outcomes are in `tests.log`."""
    pytest = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    pytest += ["--confcutdir", str(TESTS.parent)]
    environment = _environment(device)
    listed = subprocess.run(
        [*pytest, "-q", "--collect-only", TESTS], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    names = [line for line in listed.stdout.splitlines() if "::" in line]
    if listed.returncode or not names:
        return _say(listed.stdout + listed.stderr, 1)
    shards = min(_processes(device), len(names))
    commands = [[*pytest, "-v", "--maxfail=3", *names[shard::shards]] for shard in range(shards)]
    with (out / "tests.log").open("w", encoding="utf-8") as log:
        codes = _execute(commands, environment, log)
    text = (out / "tests.log").read_text(encoding="utf-8")
    counted = {each: sum(map(int, re.findall(rf"(\d+) {each}", text))) for each in ("passed", "skipped", "failed")}
    counts = ", ".join(f"{number} {each}" for each, number in counted.items())
    _say(f"tests: {counts} of {len(names)}")
    return UNFINISHED if None in codes else int(any(codes))


def _run(stage: str, device: str, out: Path) -> int:
    module = [sys.executable, "-m", "cope_benchmarks.gpu_stages"]
    with (out / f"{stage}.log").open("w", encoding="utf-8") as log:
        command = [*module, "--child", stage, "--device", device, "--out", str(out)]
        (code,) = _execute([command], _environment(device), log)
    _say((out / f"{stage}.log").read_text(encoding="utf-8").strip().rpartition("\n")[2])
    return UNFINISHED if code is None else code


def _execute(commands: Sequence[Sequence[str]], environment: dict[str, str], log: object) -> list[int | None]:
    """Execute commands side by side; their exit codes, or None for one that was ended after `LIMIT_S`, with its children."""
    end_s = time.monotonic() + LIMIT_S
    started = [
        subprocess.Popen(each, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)  # type: ignore[call-overload]
        for each in commands
    ]
    codes: list[int | None] = []
    for process in started:
        try:
            codes.append(process.wait(max(0.0, end_s - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
        with suppress(ProcessLookupError):  # what goes on would share the GPU with the next stage
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return codes


def _environment(device: str) -> dict[str, str]:
    paths = [*(str(ROOT / each) for each in ("", "services", "tests/benchmarks")), os.environ.get("PYTHONPATH", "")]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        found |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return found


def _measure(stage: str, device: str, out: Path) -> int:
    """A stage in a process of its own."""
    if stage in ("step", "prefill") and (missing := lacking(NEEDED)):
        names = " ".join(missing)
        return _say(f"needs {', '.join(missing)}: pip install --target wheels {names}, and PYTHONPATH=wheels", SKIPPED)
    module = importlib.import_module(f"cope_benchmarks.{MODULES.get(stage, stage)}")
    found = module.measure_gpu(out, device, BUDGET_S)
    left = len(found["left"])
    return _say(f"{len(found['done'])} measured" + (f", {left} left" if left else ""), UNFINISHED if left else 0)


def _why_not(device: str) -> str | None:
    """Why nothing can be measured here; None: there is a GPU, or this is a dry run."""
    import torch

    if device == "cpu":
        return None
    if not torch.cuda.is_available():
        return "torch sees no CUDA device here; `make gpu DEVICE=cpu` is a dry run"
    old = torch.cuda.get_device_capability() < (8, 0)
    return "the GPU is older than compute capability 8.0, which the kernels need" if old else None


def _default_folder(device: str) -> Path:
    """tests/benchmarks/results/gpu/<name of the GPU>; for a dry run, a temporary folder."""
    if device == "cpu":
        return Path(tempfile.gettempdir()) / "cope-sweep-gpu-dry-run"
    import torch

    return RESULTS / re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_")


def _processes(device: str) -> int:
    import torch

    if device == "cpu":
        return 1
    return max(
        1, min(MAX_PROCESSES, os.cpu_count() or 1, int(torch.cuda.get_device_properties(0).total_memory / TEST_BYTES))
    )


def lacking(packages: Sequence[str]) -> list[str]:
    """The packages that cannot be imported."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def _say(line: str, code: int = 0) -> int:
    print(line, flush=True, file=sys.stderr if code == 1 else sys.stdout)
    return code


if __name__ == "__main__":
    sys.exit(main())
