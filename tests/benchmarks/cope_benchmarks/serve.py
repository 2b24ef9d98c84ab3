"""Benchmark of the service's perplexity: many clients, against the same sequences in one offline batch and one by one.

The server is a process of its own. The three ways take turns, so that a slow moment of the machine affects all of them.
"""

from __future__ import annotations

import http.client
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import psutil

from cope_sweep.cli.output import grid
from cope_sweep.inference import Predictor
from cope_sweep.plan import expand
from cope_sweep.spec import load_ablation
from cope_sweep.store import Store
from cope_sweep.store.provenance import versions

if TYPE_CHECKING:
    from rich.table import Table

CLIENTS = 32
SEQUENCES = 320
LENGTHS = (16, 256)
"""Shortest and longest sequence, in tokens."""
TURNS = 3
IDLE_REQUESTS = 40
IDLE_TOKENS = 32
START_S = 120
MIN_OFFLINE_RATIO, MIN_SINGLE_RATIO, MAX_ADDED_MS = 0.9, 3.0, 5.0
"""Goals: tokens/s of the clients against offline and against one by one; latency that an idle service adds."""
ABLATION = """\
title: A model to serve
base:
  task: {kind: selective_copy, tokens: 16, blanks: 224, dense_blanks: 112, sparse_blanks: 224, vocabulary: 512}
  model: {layers: 2, dim: 64, heads: 2, position: [cope]}
  train: {steps: 1, batch: 1}
  evaluate: {every: 1, sequences: 1, final_sequences: 1}
metrics:
  - {name: in_dist/loss}
"""


def measure(sequences: int = SEQUENCES, turns: int = TURNS) -> dict[str, Any]:
    """Train a model for one step, serve it, and measure: about a minute."""
    load = psutil.getloadavg()[0]
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 510, length).tolist() for length in rng.integers(*LENGTHS, sequences, endpoint=True)]
    scored = sum(map(len, tokens)) - len(tokens)
    with tempfile.TemporaryDirectory(prefix="cope-sweep-bench-") as folder:
        run_id = _train(Path(folder))
        predictor = Predictor.load(Store(f"{folder}/store").run(run_id).checkpoint)
        with _serving(Path(folder)) as address:
            ways: dict[str, Callable[[], object]] = {
                "offline": lambda: predictor.log_probabilities(tokens),
                "clients": lambda: _ask_all(address, run_id, tokens, CLIENTS),
                "one by one": lambda: _ask_all(address, run_id, tokens, 1),
            }
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for turn in range(turns + 1):
                for name, way in ways.items():
                    start_s = time.perf_counter()
                    way()
                    if turn:  # the first turn loads and compiles
                        seconds[name].append(time.perf_counter() - start_s)
            speeds = {name: scored / statistics.median(times) for name, times in seconds.items()}
            idle = _idle_ms(address, run_id, predictor)
    return {
        "machine": {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count(), "load": load},
        "versions": versions(),
        "workload": {"sequences": sequences, "tokens": scored, "lengths": LENGTHS, "clients": CLIENTS, "turns": turns},
        "tokens_per_s": {name: round(speed) for name, speed in speeds.items()},
        "clients_to_offline": round(speeds["clients"] / speeds["offline"], 3),
        "clients_to_one_by_one": round(speeds["clients"] / speeds["one by one"], 3),
        "idle_ms": {name: round(value, 3) for name, value in idle.items()},
        "idle_added_ms": round(idle["service"] - idle["model"], 3),
    }


def table(measured: dict[str, Any]) -> Table:
    """The measurement beside the goals."""
    shown = grid("perplexity", "measured", "goal")
    for name, speed in measured["tokens_per_s"].items():
        shown.add_row(f"{name}, tokens/s", f"{speed:,}", "")
    rows = [
        (f"{CLIENTS} clients : offline", "clients_to_offline", f"≥ {MIN_OFFLINE_RATIO}", " ×"),
        (f"{CLIENTS} clients : one by one", "clients_to_one_by_one", f"≥ {MIN_SINGLE_RATIO}", " ×"),
        ("added to one request when idle", "idle_added_ms", f"≤ {MAX_ADDED_MS}", " ms"),
    ]
    for name, key, goal, unit in rows:
        shown.add_row(name, f"{measured[key]:.2f}{unit}", goal + unit)
    return shown


def _train(folder: Path) -> str:
    """Train the model; its run id."""
    ablations = folder / "ablations"
    ablations.mkdir()
    (ablations / "served.yaml").write_text(ABLATION, encoding="utf-8")
    command = [sys.executable, "-m", "cope_sweep.cli", "run", "served", "--local", "--no-mlflow"]
    options = ["--store", str(folder / "store"), "--ablations", str(ablations)]
    subprocess.run([*command, *options], check=True, capture_output=True)
    return expand(load_ablation(ablations / "served.yaml")).runs[0].run_id


@contextmanager
def _serving(folder: Path) -> Iterator[tuple[str, int]]:
    """Host and port of a server for the store of `folder`."""
    command = [sys.executable, "-m", "cope_sweep.cli", "serve", "--port", "0"]
    options = ["--store", str(folder / "store"), "--ablations", str(folder / "ablations")]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = urlsplit(server.stdout.readline().split()[0])
            address = url.hostname or "", url.port or 0
            _wait_until_ready(address)
            yield address
        finally:
            server.terminate()


def _wait_until_ready(address: tuple[str, int]) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            connection = http.client.HTTPConnection(*address, timeout=10)
            connection.request("GET", "/health/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the server was not ready within {START_S} s")
        time.sleep(0.05)


def _ask_all(address: tuple[str, int], run_id: str, tokens: Sequence[list[int]], clients: int) -> None:
    """Each client asks for every `clients`-th sequence, one after the other, over one connection."""
    with ThreadPoolExecutor(clients) as threads:
        shares = [tokens[client::clients] for client in range(clients)]
        list(threads.map(lambda share: _ask(address, run_id, share), shares))


def _ask(address: tuple[str, int], run_id: str, tokens: Sequence[list[int]]) -> list[float]:
    """Ask for one sequence at a time; seconds of each request."""
    connection = http.client.HTTPConnection(*address, timeout=600)
    taken = []
    for sequence in tokens:
        start_s = time.perf_counter()
        body = json.dumps({"tokens": [sequence]})
        connection.request("POST", f"/api/v1/runs/{run_id}/perplexity", body, {"content-type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise RuntimeError(f"the server answered {response.status}: {answer[:500]!r}")
        taken.append(time.perf_counter() - start_s)
    connection.close()
    return taken


def _idle_ms(address: tuple[str, int], run_id: str, predictor: Predictor) -> dict[str, float]:
    """Median milliseconds of one short request while nothing else is asked, and of the model alone."""
    sequence = list(range(IDLE_TOKENS + 1))
    service: list[float] = []
    model: list[float] = []
    for _ in range(IDLE_REQUESTS):
        service += _ask(address, run_id, [sequence])
        start_s = time.perf_counter()
        predictor.log_probabilities([sequence])
        model.append(time.perf_counter() - start_s)
    return {"service": 1e3 * statistics.median(service), "model": 1e3 * statistics.median(model)}
