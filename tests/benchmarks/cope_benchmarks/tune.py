"""Measures configurations of the Triton kernels, and writes a table for them: the stage `tune` of `make gpu`.

For each kind of problem, the kernels are tuned one after another: those of the backward pass with the best forward
kernel. Only tile sizes that fit together are tried. A configuration whose results differ from float64 is not used.
Candidates are compiled in several processes before they are measured.
The table is written after each kind of problem, and the same command continues.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cope_benchmarks.attention import configurations
from cope_benchmarks.compiling import compiled_ahead
from cope_benchmarks.exact import computed_by
from cope_benchmarks.gpu_problems import DTYPES, Problem
from cope_benchmarks.report import Measured, Row, machine
from cope_benchmarks.timing import one_line, resumed, times
from cope_sweep.kernels import tuning
from cope_sweep.kernels.tuning import Configurations, Entry, Table, incompatible

TOKENS = 32768
"""Tokens of a batch."""

Sizes = tuple[int, int, int, int, int]
"""BLOCK_T, BLOCK_S, PLAIN_S or PLAIN_T, warps, stages."""
_HALF: dict[str, tuple[Sizes, ...]] = {
    "forward": (
        (64, 32, 64, 4, 2), (64, 32, 64, 4, 3), (128, 32, 64, 8, 2), (128, 32, 64, 8, 3), (128, 32, 128, 8, 2),
        (128, 64, 64, 8, 2), (64, 64, 64, 4, 3),
    ),
    "backward_rows": (
        (64, 32, 64, 4, 2), (64, 32, 64, 4, 1), (64, 32, 32, 4, 3), (64, 32, 64, 8, 2), (32, 32, 64, 4, 2),
    ),
    "backward_keys": (
        (32, 64, 64, 4, 2), (32, 64, 64, 4, 1), (16, 64, 64, 4, 2), (32, 64, 32, 4, 3), (64, 64, 64, 4, 2),
        (64, 64, 64, 8, 2), (32, 32, 64, 4, 2),
    ),
}  # fmt: skip
_SINGLE: dict[str, tuple[Sizes, ...]] = {
    "forward": ((32, 32, 32, 4, 1), (64, 32, 32, 4, 1), (64, 32, 32, 8, 2)),
    "backward_rows": ((16, 32, 32, 4, 1), (32, 32, 32, 4, 1), (32, 32, 32, 8, 1)),
    "backward_keys": ((16, 32, 16, 4, 1), (32, 32, 32, 4, 1), (32, 32, 32, 8, 1)),
}
_INTERPRETER: dict[str, tuple[Sizes, ...]] = {
    "forward": ((32, 16, 32, 4, 1),), "backward_rows": ((16, 16, 32, 4, 1),), "backward_keys": ((16, 32, 32, 4, 1),),
}  # fmt: skip


def _kind(tokens: int, head_dim: int = 64, **options: Any) -> Problem:
    return Problem(batch=TOKENS // tokens, heads=1024 // head_dim, tokens=tokens, head_dim=head_dim, **options)


KINDS = (
    _kind(4096),
    _kind(1024),
    _kind(16384),
    _kind(4096, p_max="full"),
    _kind(4096, head_dim=128),
    _kind(4096, head_dim=32),
    _kind(4096, dtype="float32"),
    _kind(4096, p_max=None, alibi=True),
    _kind(1024, head_dim=128),
    _kind(4096, head_dim=128, p_max=None, alibi=True),
    _kind(1024, p_max="full"),
    _kind(4096, head_dim=256),
)
"""Kinds of problems that get an entry each, the most important first. Float16 uses the entries of bfloat16."""
TINY = (Problem(batch=1, heads=1, tokens=20, head_dim=16, p_max=6),)


def trials(kernel: str, best: Configurations, problem: Problem, device: str) -> list[Configurations]:
    """`best` with each candidate for one kernel that fits the others, the table's first.

    A forward kernel may change those that it binds.
    """
    table = (_SINGLE if problem.dtype == "float32" else _HALF) if device == "cuda" else _INTERPRETER
    names = ("BLOCK_T", "BLOCK_S", "PLAIN_T" if kernel == "backward_keys" else "PLAIN_S", "num_warps", "num_stages")
    now = configurations(problem, device)[kernel]
    others = (dict(zip(names, sizes, strict=True)) for sizes in table[kernel])
    candidates = [now, *(each for each in others if each != now and each.keys() == now.keys())]
    tried: list[Configurations] = [{**best, kernel: candidate} for candidate in candidates]
    return [trial for trial in tried if incompatible(trial) is None]


def trials_of(problem: Problem, device: str) -> list[Configurations]:
    """The trials of all kernels, each with the table's configurations of the others."""
    best = configurations(problem, device)
    return [trial for kernel in tuning.KERNELS for trial in trials(kernel, best, problem, device)]


def measure_gpu(folder: Path, device: str, budget_s: float) -> Measured:
    """Tune the kinds of problems that `folder` does not have yet; write `tune.json`, `tune.md` and `tuning.json` there.

    The new table is a copy of the committed one with other entries. Raises ValueError for a bad table.
    """
    path = folder / "tuning.json"
    todo = {kind.name: kind for kind in (KINDS if device == "cuda" else TINY)}
    with compiled_ahead(device) as compile_all:

        def tune(kind: Problem) -> dict[str, Row]:
            compile_all(kind, trials_of(kind, device))
            entry, rows = tuned(kind, device)
            if entry is not None:
                table = Table(tuning.read_table(path if path.exists() else tuning.PATH).entries, path)
                path.write_text(table.updated([entry]).to_json(), encoding="utf-8")
                tuning.read_table.cache_clear()
            return rows

        return resumed(folder / "tune.json", device, budget_s, todo, tune)


def tuned(problem: Problem, device: str) -> tuple[Entry | None, dict[str, Row]]:
    """The new entry of the table, and by kernel its configuration and its times with the table's and with this one.

    The entry is None if no configuration of a kernel is correct.
    """
    best: Configurations = configurations(problem, device)
    rows: dict[str, Row] = {}
    for kernel in tuning.KERNELS:
        timed, failures = [], {}
        for trial in trials(kernel, best, problem, device):
            if wrong := _wrong(trial, problem, device):
                failures[str(trial[kernel])] = wrong
            else:
                timed.append((_time_ms(trial, kernel == "forward", problem, device), trial))
        if not timed:
            reason = f"no configuration of {kernel} is correct: {list(failures.values())[-1]}"
            return None, rows | {kernel: {"failed": reason, "failures": failures}}
        before_ms = next((ms for ms, trial in timed if trial == best), float("nan"))
        after_ms, best = min(timed, key=lambda pair: pair[0])
        rows[kernel] = {
            "configuration": " ".join(f"{name}={value}" for name, value in best[kernel].items()),
            "ms with the table's": before_ms, "ms with this": after_ms, "failures": failures,
        }  # fmt: skip
    here = machine(device)
    entry = Entry(
        tuning.architecture_of(torch.device(device)), DTYPES[problem.dtype].itemsize * 8, problem.contextual,
        problem.head_dim, problem.entries, problem.keys, best,
        f"measured on {here.get('gpu', 'a CPU')} with torch {here['torch']} and Triton {here.get('triton', '–')}",
    )  # fmt: skip
    return entry, rows


def _time_ms(trial: Configurations, forward: bool, problem: Problem, device: str) -> float:
    """The time of the forward pass, or of both."""
    leaves, do = problem.leaves(device)
    given = {name: x.requires_grad_() for name, x in leaves.items()}
    phases = {
        True: lambda: problem.attend(given),
        False: lambda: torch.autograd.grad(problem.attend(given), list(given.values()), do),
    }
    with tuning.using_configurations(trial):
        turns = 5 if device == "cuda" else 1
        return times({"": phases[forward]}, turns, device, turn_ms=10.0)[""]["median_ms"]


def _wrong(trial: Configurations, problem: Problem, device: str) -> str | None:
    """Why a configuration cannot be used: it needs more registers or memory than there are, or gives wrong results."""
    small = replace(problem.one_sequence(), tokens=min(1024, problem.tokens))
    leaves, weight = small.leaves(device)
    try:
        with tuning.using_configurations(trial):
            computed = computed_by(small.attend, leaves, weight)
    except Exception as error:  # Triton's errors have many types
        return one_line(error)
    return small.wrong(leaves, weight, computed)
