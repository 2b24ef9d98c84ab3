"""Times and memory of alternatives, on a CPU or a GPU, and measurements that the same command continues."""

from __future__ import annotations

import ctypes
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from cope_benchmarks.report import Measured, machine, save

K = TypeVar("K")
T = TypeVar("T")
Run = Callable[[], object]
MAX_CALLS = 100


def in_turns(ways: Mapping[K, Callable[[], T]], turns: int) -> dict[K, list[T]]:
    """What each way returns in so many turns, after one that compiles and starts threads.

    The ways take turns, so that a slow moment of the machine affects all of them.
    """
    found: dict[K, list[T]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            value = way()
            if turn:
                found[name].append(value)
    return found


def times(runs: Mapping[K, Run], device: str, turns: int, turn_ms: float = 0.0) -> dict[K, dict[str, float]]:
    """The time of a call of each in ms: median, spread of the middle half, and the median on the host.

    On a GPU a turn is many calls, for `turn_ms`, between two events. Where the host needs longer for them than the device,
    this is no time of the device. On a CPU a turn is one call; with one torch thread, CPU time is measured.
    """
    for run in runs.values():
        run()
    calls = {name: 1 if device == "cpu" else _calls(run, turn_ms) for name, run in runs.items()}
    taken = in_turns({name: partial(_turn_ms, run, calls[name], device) for name, run in runs.items()}, turns)
    return {name: _summary(each) for name, each in taken.items()}


def _calls(run: Run, turn_ms: float) -> int:
    return max(1, min(MAX_CALLS, int(turn_ms / max(_turn_ms(run, 1, "cuda")[0], 1e-3))))


def _turn_ms(run: Run, calls: int, device: str) -> tuple[float, float]:
    """The time of a call on the device and on the host."""
    if device == "cpu":
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        start_s = clock()
        run()
        return (taken_ms := 1e3 * (clock() - start_s)), taken_ms
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


def _summary(turns: Sequence[tuple[float, float]]) -> dict[str, float]:
    device, host = zip(*turns, strict=True)
    quarters = statistics.quantiles(device, n=4) if len(device) > 1 else [0.0] * 3
    return {
        "median_ms": round(statistics.median(device), 4),
        "spread_ms": round(quarters[2] - quarters[0], 4),
        "host_ms": round(statistics.median(host), 4),
    }


def median_and_spread(summary: Mapping[str, float]) -> str:
    """For a table: `840 ± 23`, `0.345 ± 0.012`."""
    return " ± ".join(f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}" for ms in (summary["median_ms"], summary["spread_ms"]))


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
    path: Path,
    device: str,
    budget_s: float,
    todo: Mapping[str, T],
    measure: Callable[[T], dict[str, Any]],
    table: Callable[[Measured], str],
) -> Measured:
    """Measure what the file `path` does not have yet; write it after each row, with a table beside it.

    A row begins only if one that takes as long as the longest so far ends within the budget. Raises ValueError if the file
    was measured on another machine.
    """
    here = {name: value for name, value in machine(device).items() if name != "load"}
    measured: Measured = {"bench": path.stem, "machine": here, "rows": {}}
    if path.exists():
        measured = json.loads(path.read_text(encoding="utf-8"))
        if measured["machine"] != here:
            raise ValueError(
                f"{path}: measured on another machine, {measured['machine']}; use another folder, or delete it"
            )
    end_s, longest_s = time.monotonic() + budget_s, 0.0
    for key in [key for key in todo if key not in measured["rows"]]:
        begin_s = time.monotonic()
        if begin_s + longest_s >= end_s:
            break
        measured["rows"][key] = measure(todo[key])
        if device == "cuda":
            torch.cuda.empty_cache()
        longest_s = max(longest_s, time.monotonic() - begin_s)
        save(path.parent, path.stem, measured, table(measured))
    return measured | {"left": [key for key in todo if key not in measured["rows"]]}


def one_line(error: Exception) -> str:
    """The type and the beginning of an error, for a table."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
