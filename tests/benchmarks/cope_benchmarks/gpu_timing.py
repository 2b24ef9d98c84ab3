"""Times and memory of alternatives on a GPU, and a file of results that the same command continues.

On a CPU, for dry runs, times are wall clock, and memory is not measured.

Alternatives take turns, so that a change of the clock affects all. A turn is many calls between two events, without
waiting for the device: if the device takes longer than the host, this is the device's time alone. `host_ms` is the time
of the calls on the host; a row whose host time is the longer one (`host_bound`) measured Python and the driver, and is
measured again as a CUDA graph.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from cope_benchmarks.compiling import Compiling, Work
from cope_benchmarks.report import save

T = TypeVar("T")
Run = Callable[[], object]
MAX_CALLS = 100
WARM_UPS = 3


def times(runs: dict[str, Run], device: str, turns: int = 11, turn_ms: float = 20.0) -> dict[str, dict[str, float]]:
    """By name: median and quartiles of the time of a call, in ms, and the median time on the host.

    A turn takes at least `turn_ms`. On a CPU there is one turn of one call.
    """
    if device != "cuda":
        turns, turn_ms = 1, 0.0
    calls = {name: _calls(run, device, turn_ms) for name, run in runs.items()}
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            measured[name].append(_turn(run, calls[name], device))
    return {name: _summary(taken) for name, taken in measured.items()}


def _calls(run: Run, device: str, turn_ms: float) -> int:
    for _ in range(WARM_UPS if device == "cuda" else 1):
        run()
    once, _ = _turn(run, 1, device)
    return max(1, min(MAX_CALLS, int(turn_ms / max(once, 1e-3))))


def _turn(run: Run, calls: int, device: str) -> tuple[float, float]:
    """The time of a call on the device and on the host, in ms."""
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            run()
        taken = 1e3 * (time.perf_counter() - start) / calls
        return taken, taken
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start = time.perf_counter()
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    host = 1e3 * (time.perf_counter() - start) / calls
    end.synchronize()
    return begin.elapsed_time(end) / calls, host


def _summary(turns: Sequence[tuple[float, float]]) -> dict[str, float]:
    device, host = zip(*turns, strict=True)
    quarters = statistics.quantiles(device, n=4) if len(device) > 1 else [device[0]] * 3
    return {
        "median_ms": round(statistics.median(device), 4),
        "quartile_1_ms": round(quarters[0], 4),
        "quartile_3_ms": round(quarters[2], 4),
        "host_ms": round(statistics.median(host), 4),
    }


def host_bound(row: dict[str, Any]) -> bool:
    """Whether the host took as long for its calls as the device for the work, so that this is no time of the device."""
    total = row["forward_backward"]
    return bool(total["host_ms"] > 0.9 * total["median_ms"])


def device_ms(row: dict[str, Any]) -> float:
    """Time of forward and backward on the device: by a CUDA graph, where there is one."""
    found: float = row.get("graph", {}).get("median_ms") or row["forward_backward"]["median_ms"]
    return found


def graph_time(run: Run) -> dict[str, Any]:
    """The time of a call as a CUDA graph, whose kernels follow each other without the host; or why there is none."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    try:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # libraries allocate at their first call on a stream
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, stream=stream):
            run()
        return times({"graph": graph.replay}, "cuda")["graph"]
    except Exception as error:  # an alternative may wait for the device, which a graph cannot
        torch.cuda.synchronize()
        return {"failed": first_line(error)}


def phases(forward: Callable[[], Tensor], leaves: Sequence[Tensor], do: Tensor) -> dict[str, Run]:
    """Forward as in training, backward, and both."""
    out = forward()

    def backward() -> object:
        return torch.autograd.grad(out, leaves, do, retain_graph=True, allow_unused=True)

    def both() -> object:
        return torch.autograd.grad(forward(), leaves, do, allow_unused=True)

    return {"forward": forward, "backward": backward, "forward_backward": both}


def extra_mib(run: Run, device: str) -> float | None:
    """Peak memory of a call in MiB, beyond what was allocated before; None on a CPU."""
    if device != "cuda":
        return None
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def facts(device: str) -> dict[str, Any]:
    """The device and the versions, which times depend on."""
    import numpy
    import triton  # type: ignore[import-untyped]

    found: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "numpy": numpy.__version__}
    if device != "cuda":
        return {"device": "CPU, Triton's interpreter (a dry run)", **found}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        **found,
    }


@dataclass
class Journal:
    """Results as they come: a file of JSON lines, the first of which is `header`. The same header continues it.

    Raises ValueError if the file is of another machine, version or setting.
    """

    path: Path
    header: dict[str, Any]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The last row of each key."""

    def __post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        if not text.endswith("\n"):  # the process ended while it wrote the last line
            text = text[: text.rfind("\n") + 1]
            self.path.write_text(text, encoding="utf-8")
        lines = text.splitlines()
        if not lines:
            self.path.write_text(json.dumps(self.header) + "\n", encoding="utf-8")
        elif json.loads(lines[0]) != json.loads(json.dumps(self.header)):
            raise ValueError(
                f"{self.path}: measured elsewhere or otherwise: {lines[0]}; here: {json.dumps(self.header)}. "
                "Delete the file, or use another folder"
            )
        self.rows |= {row["key"]: row for row in map(json.loads, lines[1:])}

    def add(self, row: dict[str, Any]) -> None:
        self.rows[row["key"]] = row
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def resumed(
    path: Path,
    device: str,
    budget_s: float,
    todo: Mapping[str, T],
    measure: Callable[[T], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
    work: Callable[[T], Work] = lambda _: (),
) -> dict[str, Any]:
    """Measure what the journal `path` does not have yet; write its rows and what is left to `.json` and `.md`, too.

    A step begins only if one as long as the longest so far ends within the budget. `work`: the kernels of a step, which are
    compiled ahead. Raises ValueError if the folder has results of another machine.
    """
    journal, end_s, longest_s = Journal(path, facts(device)), time.monotonic() + budget_s, 0.0
    missing = {key: each for key, each in todo.items() if key not in journal.rows}
    with Compiling({key: work(each) for key, each in missing.items()}, device) as compiling:
        for key, each in missing.items():
            begin_s = time.monotonic()
            if begin_s + longest_s >= end_s:
                break
            compiling.wait(key)
            journal.add({"key": key, **measure(each)})
            free_memory(device)
            longest_s = max(longest_s, time.monotonic() - begin_s)
    left = [key for key in todo if key not in journal.rows]
    measured = {**journal.header, "rows": list(journal.rows.values()), "left": left}
    text = f"{measured['device']}, torch {measured['torch']}, Triton {measured['triton']}\n\n{table(measured)}"
    save(path.parent, path.stem, measured, text + (f"\nNot measured yet: {', '.join(left)}.\n" if left else ""))
    return measured


def free_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def first_line(error: Exception) -> str:
    """The type and the first line of an error, for a table."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
