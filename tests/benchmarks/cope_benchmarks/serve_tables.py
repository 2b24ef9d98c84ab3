"""Benchmark of the service's tables and runs, on a store of many runs, against a constant route of the same server.

The server is a process of its own, and so are the clients. All routes take turns, and ratios are of one turn: a slow
moment of the machine affects both sides.
"""

from __future__ import annotations

import http.client
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import psutil

from cope_benchmarks.load import Load, Target
from cope_benchmarks.load import measure as load_of
from cope_benchmarks.mlflow_peer import MlflowRuns
from cope_benchmarks.synthetic_store import indexed_row, write_ablation, write_index
from cope_sweep.config import Plan, expand, load_ablation
from cope_sweep.store import Store

if TYPE_CHECKING:
    from rich.table import Table

RUNS = 100_000
TABLE_RUNS = {"hundred": 100, "thousand": 1_000}
"""Ablation → its runs."""
CLIENTS = 10
SECONDS, TURNS = 2.0, 5
PEER_RUNS = 20_000
CHANGES = 5
"""Runs that end while their table is polled."""
API = "/api/v1"
CONSTANT = "constant route"
CONDITIONS = ("model.layers=4", "model.position=cope")
SORT, LIMIT = "in_dist/token_error", 100
PAGE = "filtered page of runs"
GZIP = "Accept-Encoding: gzip\r\n"
GOALS = {"table of 100 runs": 0.5, "table of 100 runs, unchanged (304)": 0.8, PAGE: 0.3}
"""Requests per second, as a share of those of the constant route."""
MAX_P99, MAX_FRESH_S, MIN_MLFLOW = 3.0, 2.0, 50.0
MAX_PAGE_S = 0.5
"""A page that was not asked for before."""


def write(folder: Path, runs: int) -> None:
    """Write a store with an index of `runs` runs, a multiple of 1,000, and the ablations of their first ones."""
    (folder / "ablations").mkdir(parents=True)
    for name, number in TABLE_RUNS.items():
        write_ablation(folder / "ablations" / f"{name}.yaml", number)
    write_index(folder / "store", write_ablation(folder / "all.yaml", runs))


def measure(
    address: tuple[str, int],
    server: psutil.Process,
    folder: Path,
    *,
    turns: int = TURNS,
    seconds: float = SECONDS,
    mlflow: bool = True,
) -> dict[str, Any]:
    """Ask a server for the store of `folder`, which was written by `write`."""
    page = f"{API}/runs?sort={quote(SORT, safe='')}&limit={LIMIT}" + "".join(
        f"&filter={quote(condition)}" for condition in CONDITIONS
    )
    tables = {f"table of {number:,} runs": f"{API}/ablations/{name}/table" for name, number in TABLE_RUNS.items()}
    first_s = {name: _first_s(address, path) for name, path in (*tables.items(), (PAGE, page))}
    targets = {CONSTANT: Target(repeat("/health/live"))}
    for name, path in tables.items():
        etag = _ask(address, path)[1]["etag"]
        targets[name] = Target(repeat(path), GZIP)
        targets[f"{name}, unchanged (304)"] = Target(repeat(path), f"If-None-Match: {etag}\r\n", 304)
    targets[PAGE] = Target(repeat(page), GZIP)
    loads: dict[str, list[Load]] = {name: [] for name in targets}
    for _ in range(turns):
        for name, target in targets.items():
            loads[name].append(load_of(address, server, target, CLIENTS, seconds))
    return {
        "runs": _total(address),
        "clients": CLIENTS,
        "turns": turns,
        "routes": {name: _summary(found, loads[CONSTANT]) for name, found in loads.items()},
        "first_s": {name: round(value, 4) for name, value in first_s.items()},
        "fresh_s": [round(value, 3) for value in _fresh_s(address, folder)],
        **({"mlflow": _mlflow(address, folder, page)} if mlflow else {}),
    }


def add_rows(shown: Table, measured: dict[str, Any]) -> None:
    """Add what was measured to a table of names, values and goals."""
    for name, each in measured["routes"].items():
        goal = f"≥ {GOALS[name]} × the constant route; p99 ≤ {MAX_P99:g} ×" if name in GOALS else ""
        text = f"{each['requests_per_s']:,.0f}/s, p99 {each['p99_ms']:.1f} ms"
        if name != CONSTANT:
            text += f"; {each['ratio']:.2f} × the constant route, p99 {each['p99_ratio']:.2f} ×"
        shown.add_row(name, text, goal)
    for name, seconds in measured["first_s"].items():
        goal = f"≤ {1e3 * MAX_PAGE_S:g} ms" if name == PAGE else ""
        shown.add_row(f"{name}, computed", f"{1e3 * seconds:.0f} ms", goal)
    shown.add_row("table after the end of a run, at most", f"{max(measured['fresh_s']):.2f} s", f"≤ {MAX_FRESH_S:g} s")
    if "mlflow" in measured:
        peer = measured["mlflow"]
        shown.add_row(f"MLflow's search in {peer['mlflow_runs']:,} runs", f"{1e3 * peer['mlflow_s']:.0f} ms", "")
        for name in ("repeated", "first"):
            text = f"{1e3 * peer[f'{name}_s']:.1f} ms: {peer[f'{name}_ratio']:.0f} ×"
            shown.add_row(f"this service, {name}", text, f"≥ {MIN_MLFLOW:g} ×" if name == "repeated" else "")


def _summary(loads: list[Load], constant: list[Load]) -> dict[str, float]:
    """Medians over the turns; ratios to the constant route of the same turn."""
    found = {key: statistics.median(asdict(load)[key] for load in loads) for key in asdict(loads[0])}
    pairs = list(zip(loads, constant, strict=True))
    found["ratio"] = statistics.median(each.requests_per_s / base.requests_per_s for each, base in pairs)
    found["p99_ratio"] = statistics.median(each.p99_ms / base.p99_ms for each, base in pairs)
    return {key: round(value, 3) for key, value in found.items()}


def _ask(address: tuple[str, int], path: str) -> tuple[bytes, dict[str, str]]:
    """Body and headers of an answer, over a connection of its own."""
    connection = http.client.HTTPConnection(*address, timeout=300)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise RuntimeError(f"the server answered {response.status}: {body[:300]!r}")
        return body, {name.lower(): value for name, value in response.getheaders()}
    finally:
        connection.close()


def _seconds(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def _first_s(address: tuple[str, int], path: str) -> float:
    return _seconds(lambda: _ask(address, path))


def _total(address: tuple[str, int]) -> int:
    return int(json.loads(_ask(address, f"{API}/runs?limit=1")[0])["total"])


def _fresh_s(address: tuple[str, int], folder: Path) -> list[float]:
    """Seconds from the end of a run until its table is another one, while clients poll it."""
    name = "thousand"
    plan: Plan = expand(load_ablation(folder / "ablations" / f"{name}.yaml"))
    store, path = Store(folder / "store"), f"{API}/ablations/{name}/table"
    found = []
    for number in range(CHANGES):
        before = _ask(address, path)[1]["etag"]
        store.index.write([indexed_row(plan.runs[number], number, seed=time.time_ns())])
        start_s = time.perf_counter()
        while _ask(address, path)[1]["etag"] == before:
            if time.perf_counter() - start_s > 60:
                raise TimeoutError("the table has not changed within 60 s of the end of a run")
        found.append(time.perf_counter() - start_s)
        time.sleep(1.0)
    return found


def _mlflow(address: tuple[str, int], folder: Path, page: str) -> dict[str, Any]:
    """The time of MLflow's own search, without HTTP, beside that of a whole request here: each the median of several.

    MLflow has at most PEER_RUNS of the runs: all 100,000 take minutes to insert, and its search then takes longer still.
    """
    runs = expand(load_ablation(folder / "all.yaml")).runs[:PEER_RUNS]
    peer = MlflowRuns(folder / "mlflow.db", runs, Store(folder / "store"))
    if not peer.search(CONDITIONS, SORT, LIMIT):
        raise RuntimeError(f"MLflow finds no run with {' and '.join(CONDITIONS)}")
    mlflow_s = statistics.median(_seconds(lambda: peer.search(CONDITIONS, SORT, LIMIT)) for _ in range(3))
    repeated_s = statistics.median(_first_s(address, page) for _ in range(50))
    # A key that is ignored makes another URL, whose answer is not kept.
    first_s = statistics.median(_first_s(address, f"{page}&n={number}") for number in range(10))
    return {
        "mlflow_runs": len(runs),
        "mlflow_s": round(mlflow_s, 4),
        "repeated_s": round(repeated_s, 5),
        "repeated_ratio": round(mlflow_s / repeated_s, 1),
        "first_s": round(first_s, 4),
        "first_ratio": round(mlflow_s / first_s, 1),
    }
