"""Checks, tunes and measures the kernels on a GPU, stage after stage: `make gpu`.

    python -m cope_benchmarks.gpu_stages [--device cpu] [--out FOLDER] [--force] [--stage NAME …]

    tests      the kernels against float64, and compute-sanitizer where it is installed; the others need it passed
    tune       configurations of the kernels → tuning.json, which the later stages use
    bench      attention, beside SDPA and the paper's listing
    step       training steps of the paper's models

Each stage takes less than ten minutes, in a process of its own. Finished stages are in `stages.json` in the folder; the
same command continues with the others, and a stage continues where it ended. With device `cpu`, it is a dry run: tiny
shapes, Triton's interpreter. Needs torch, Triton, NumPy and pytest; `step` also the packages of training, without which it
is skipped.

Exit codes: 0 everything is done or skipped; 1 a stage failed; 3 time ended before everything was done: repeat it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "tests" / "benchmarks" / "results" / "gpu"
STAGES = ("tests", "tune", "bench", "step")
LIMIT_S = 580.0
"""Longest time of a stage."""
BUDGET_S = 520.0
"""After this, a stage begins nothing more."""
MAX_SHARDS = 8
SHARD_BYTES = 10e9
"""Memory of the GPU for a process of tests: 19 float64 arrays of at most 2²⁴ scores, and torch, need less than half of it."""
BASE = ("torch", "triton", "numpy", "pytest")
NEEDED = ("cachetools", "psutil", "pydantic", "yaml", "safetensors", "sqlalchemy")
"""Packages that `step` needs beside `BASE`."""
TESTS = ROOT / "tests" / "kernels" / "test_triton_gpu.py"
NO_TEST = 5
"""Pytest's exit code where no test was left to run."""
SKIPPED, UNFINISHED = 4, 3
"""Exit codes of a stage's process."""


@dataclass(frozen=True)
class Setting:
    device: str
    out: Path

    @property
    def environment(self) -> Mapping[str, str]:
        paths = [*(str(ROOT / each) for each in ("", "services", "tests/benchmarks")), os.environ.get("PYTHONPATH", "")]
        found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
        table = self.out / "tuning.json"
        if table.exists():
            found["COPE_SWEEP_TUNING"] = str(table)
        if self.device == "cpu":
            found |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--force", action="store_true", help="begin again")
    parser.add_argument("--stage", action="append", choices=STAGES, help="this stage only; may be repeated")
    parser.add_argument("--child", choices=STAGES, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    missing = lacking(BASE)
    if missing:
        print(f"{sys.executable} lacks {', '.join(missing)}; make gpu PYTHON=… names another", file=sys.stderr)  # noqa: T201
        return 1
    if not given.child and (reason := _why_not(given.device)):
        print(reason, file=sys.stderr)  # noqa: T201
        return 1
    if given.out is None:
        given.out = _default_folder(given.device)
    setting = Setting(given.device, given.out.resolve())
    if given.child:
        return _tests(setting) if given.child == "tests" else _measured(setting, given.child)
    return run_stages(setting, given.stage or list(STAGES), force=given.force)


def run_stages(setting: Setting, stages: list[str], *, force: bool = False) -> int:
    """Run the stages that are not finished; returns the exit code."""
    if force and setting.out.exists():
        for name in ("stages.json", "tests.jsonl", "tune.jsonl", "gpu.jsonl", "step.jsonl", "tuning.json"):
            (setting.out / name).unlink(missing_ok=True)
    setting.out.mkdir(parents=True, exist_ok=True)
    path = setting.out / "stages.json"
    done: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    code = 0
    for stage in stages:
        if done.get(stage, {}).get("result") == "done":
            _say(f"{stage}: done before")
            continue
        _say(f"{stage}: begins")
        start = time.monotonic()
        result, note = _run(stage, setting)
        seconds = time.monotonic() - start
        done[stage] = {"result": result, "seconds": round(seconds, 1), **({"note": note} if note else {})}
        path.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
        _say(f"{stage}: {result} in {seconds:.0f} s{': ' + note if note else ''}")
        if result in ("failed", "unfinished"):
            code = 1 if result == "failed" else code or UNFINISHED
            if stage == "tests":
                break  # nothing is measured before the kernels are known to be correct
    _say(f"The results are in {setting.out}" + ("; repeat the command to continue" if code else ""))
    if (setting.out / "tuning.json").exists() and setting.device == "cuda":
        _say(f"To use the measured configurations: cp {setting.out / 'tuning.json'} {ROOT / 'cope_sweep/kernels/'}")
    return code


def _run(stage: str, setting: Setting) -> tuple[str, str]:
    """Run a stage in a process of its own; returns its result and a note."""
    command = [sys.executable, "-m", "cope_benchmarks.gpu_stages", "--child", stage]
    command += ["--device", setting.device, "--out", str(setting.out)]
    with (setting.out / f"{stage}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=setting.environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return "unfinished", f"took longer than {LIMIT_S:.0f} s"
        finally:
            # Nothing that the stage has started goes on: it would share the GPU with the next stage.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = (setting.out / f"{stage}.log").read_text(encoding="utf-8").strip().splitlines()
    last = lines[-1] if lines else ""
    result = {0: "done", SKIPPED: "skipped", UNFINISHED: "unfinished"}.get(code, "failed")
    return result, last if result != "failed" else f"{last} (see {setting.out / f'{stage}.log'})"


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


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


# The stages, each in a process of its own: the last line that it prints is its note in stages.json -------------------


def _tests(setting: Setting) -> int:
    from cope_benchmarks.outcomes import BEGUN, FILE, SHARD, journal_of
    from cope_benchmarks.sanitizer import sanitize

    path = setting.out / "tests.jsonl"
    journal_of(path)  # its header is written once, before several processes add rows
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    command += ["--confcutdir", str(ROOT / "tests" / "kernels"), "-p", "cope_benchmarks.outcomes", str(TESTS)]
    shards = _shards() if setting.device == "cuda" else 1
    environments = [os.environ | {FILE: str(path), SHARD: f"{shard}/{shards}"} for shard in range(shards)]
    processes = [subprocess.Popen(command, cwd=ROOT, env=environment) for environment in environments]
    codes = [process.wait() for process in processes]
    outcomes = {test: row["outcome"] for test, row in journal_of(path).rows.items()}
    wrong = [test for test, outcome in outcomes.items() if outcome in ("failed", BEGUN)]
    passed = list(outcomes.values()).count("passed")
    summary = ", ".join(f"{list(outcomes.values()).count(name)} {name}" for name in ("passed", "skipped", "failed"))
    if wrong or any(code not in (0, NO_TEST) for code in codes):
        _say(f"{summary}; wrong: {'; '.join(wrong) or f'pytest ended with {codes}'}")
        return 1
    if not passed or setting.device == "cpu":
        _say(f"{summary}; no compute-sanitizer in a dry run" if passed else f"no test ran: {summary}")
        return 0 if passed else 1
    note, errors = sanitize(ROOT)
    # What is wrong in the kernels stops the command; a tool can also be wrong, so the next stages can be asked for.
    way_out = f" (see {setting.out / 'tests.log'}; make gpu STAGE=tune goes on all the same)" if errors else ""
    _say(f"{summary}; {note}{way_out}")
    return 1 if errors else 0


def _measured(setting: Setting, stage: str) -> int:
    if stage == "step" and (missing := lacking(NEEDED)):
        _say(f"needs {', '.join(missing)}: pip install --target wheels {' '.join(missing)}, and PYTHONPATH=wheels")
        return SKIPPED
    if stage == "tune":
        from cope_benchmarks.tune import measure

        found = measure(setting.out, setting.device, BUDGET_S - 60)
    elif stage == "bench":
        from cope_benchmarks.gpu import CASES, DRY_CASES
        from cope_benchmarks.gpu import measure as measure_attention

        found = measure_attention(
            setting.out, setting.device, BUDGET_S, CASES if setting.device == "cuda" else DRY_CASES
        )
    else:
        from cope_benchmarks.step import measure_gpu

        found = measure_gpu(setting.out, setting.device, BUDGET_S)
    left = len(found["left"])
    _say(f"{len(found['rows'])} measured" + (f", {left} left" if left else ""))
    return UNFINISHED if left else 0


def _shards() -> int:
    """Processes that run the tests."""
    import torch

    memory = torch.cuda.get_device_properties(0).total_memory
    return max(1, min(MAX_SHARDS, os.cpu_count() or 1, int(memory / SHARD_BYTES)))


def lacking(packages: Sequence[str]) -> list[str]:
    """Those that cannot be imported."""

    def found(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # of the package that it is in
            return False

    return [name for name in packages if not found(name)]


if __name__ == "__main__":
    sys.exit(main())
