"""Times and memory of alternatives, on a CPU or a GPU, and measurements that the same command continues."""

from __future__ import annotations

import ctypes
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from cope_benchmarks.report import Measured, Row, machine, save

K = TypeVar("K")
T = TypeVar("T")
Run = Callable[[], object]
Times = dict[str, float]
"""Times of a call in ms: `median_ms`, `spread_ms` of the middle half; `cpu_ms` of a call on a CPU; `host_ms` of one on a GPU."""
MAX_CALLS = 100


def in_turns(ways: Mapping[K, Callable[[], T]], turns: int, warm: bool = True) -> dict[K, list[T]]:
    """The results of each way in so many turns; with `warm`, after one that compiles and starts threads.

    The ways take turns, so that a slow moment of the machine affects all of them.
    """
    found: dict[K, list[T]] = {name: [] for name in ways}
    for turn in range(turns + warm):
        for name, way in ways.items():
            value = way()
            if turn >= warm:
                found[name].append(value)
    return found


def times(
    runs: Mapping[K, Run], turns: int, device: str = "cpu", turn_ms: float = 0.0, warm: bool = True
) -> dict[K, Times]:
    """The times of a call of each.

    On a CPU a turn is one call; with one torch thread its time is CPU time. On a GPU a turn is many calls, for `turn_ms`,
    between two events. Where the host needs longer for them than the device, this is no time of the device.
    """
    if device == "cpu":
        turn, second = {name: partial(_call_ms, run) for name, run in runs.items()}, "cpu_ms"
    else:
        for run in runs.values():
            run()
        turn = {name: partial(_turn_on_gpu_ms, run, _calls(run, turn_ms)) for name, run in runs.items()}
        second = "host_ms"
    return {name: _summary(taken, second) for name, taken in in_turns(turn, turns, warm).items()}


def _calls(run: Run, turn_ms: float) -> int:
    return max(1, min(MAX_CALLS, int(turn_ms / max(_turn_on_gpu_ms(run, 1)[0], 1e-3))))


def _call_ms(run: Run) -> tuple[float, float]:
    """The time of a call, and its CPU time, with that of processes that it has waited for."""
    start_s, start_cpu_s = time.perf_counter(), _cpu_s()
    run()
    cpu_ms = 1e3 * (_cpu_s() - start_cpu_s)
    return cpu_ms if torch.get_num_threads() == 1 else 1e3 * (time.perf_counter() - start_s), cpu_ms


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _turn_on_gpu_ms(run: Run, calls: int) -> tuple[float, float]:
    """The time of a call on the device and on the host."""
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start_s = time.perf_counter()
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    host_ms = 1e3 * (time.perf_counter() - start_s) / calls
    end.synchronize()
    return begin.elapsed_time(end) / calls, host_ms


def _summary(turns: Sequence[tuple[float, float]], second: str) -> Times:
    firsts, seconds = zip(*turns, strict=True)
    quarters = statistics.quantiles(firsts, n=4) if len(firsts) > 1 else [0.0] * 3
    return {
        "median_ms": round(statistics.median(firsts), 4),
        "spread_ms": round(quarters[2] - quarters[0], 4),
        second: round(statistics.median(seconds), 4),
    }


def extra_mb(run: Run, device: str) -> float:
    """Peak memory of a call in MB, beyond what was allocated before: of tensors on a GPU, of the process on a CPU."""
    run()  # allocates what libraries keep
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    from cope_sweep.train.facts import peak_bytes, reset_peak  # needs packages that a machine with a GPU may not have

    libc = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
    if libc:  # free memory goes back to the system, so that the call's allocations raise the peak
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
        run()
        libc.malloc_trim(0)
    reset_peak("cpu")
    before = peak_bytes("cpu")
    run()
    extra = peak_bytes("cpu") - before
    if libc:
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)  # where glibc's own adjustment ends
    return max(0, extra) / 1e6


M_MMAP_THRESHOLD = -3


def resumed(
    path: Path, device: str, budget_s: float, todo: Mapping[str, T], measure: Callable[[T], Mapping[str, Row]]
) -> Measured:
    """Measure what the file `path` does not have yet; write it after each item, with a table beside it.

    `measure` returns the rows of an item by name. An item begins only if one that takes as long as the longest so far ends
    within the budget. Raises ValueError if the file was measured on another machine, or has another form.
    """
    here = {name: value for name, value in machine(device).items() if name != "load"}
    measured: Measured = {"bench": path.stem, "machine": here, "done": [], "rows": {}}
    if path.exists():
        measured = json.loads(path.read_text(encoding="utf-8"))
        if measured["machine"] != here or "done" not in measured:
            measured_on = f"measured on another machine, or by an earlier version: {measured['machine']}"
            raise ValueError(f"{path}: {measured_on}; use another folder, or delete it")
    end_s, longest_s = time.monotonic() + budget_s, 0.0
    for key in [key for key in todo if key not in measured["done"]]:
        begin_s = time.monotonic()
        if begin_s + longest_s >= end_s:
            break
        measured["rows"] |= {f"{key}: {name}": row for name, row in measure(todo[key]).items()}
        measured["done"].append(key)
        if device == "cuda":
            torch.cuda.empty_cache()
        longest_s = max(longest_s, time.monotonic() - begin_s)
        save(path.parent, path.stem, measured)
    return measured | {"left": [key for key in todo if key not in measured["done"]]}


def one_line(error: Exception) -> str:
    """The type and the beginning of an error, for a table."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
