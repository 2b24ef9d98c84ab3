"""Benchmark of the service: a model is trained for one step, and a server of its own process serves it.

What is measured is in `serve_perplexity`, `serve_overload` and `serve_tables`.
"""

from __future__ import annotations

import http.client
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil

from cope_benchmarks import serve_overload, serve_perplexity, serve_tables
from cope_benchmarks.serve_perplexity import Served
from cope_sweep.config import expand, load_ablation
from cope_sweep.inference import Predictor
from cope_sweep.store import Store
from cope_sweep.store.provenance import versions

if TYPE_CHECKING:
    from rich.table import Table

START_S = 120


def measure(overload_s: float = 0, runs: int = 0, **workload: int) -> dict[str, Any]:
    """Train a model for one step, serve it, and measure: about two minutes, and `overload_s` seconds of overload.

    With `runs`, also a store of so many runs: about five minutes more for 100,000.
    """
    load = psutil.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="cope-sweep-bench-") as folder:
        run_id = _train(Path(folder))
        predictor = Predictor.load(Store(f"{folder}/store").run(run_id).checkpoint)
        # The queue has room for all clients of `serve_perplexity`.
        limits = {"COPE_SWEEP_MAX_QUEUE_TOKENS": str(serve_overload.QUEUE_TOKENS)}
        with serving(Path(folder), limits) as (address, process, start_s):
            measured = serve_perplexity.measure(Served(address, run_id, predictor, process), **workload)
            if overload_s:
                measured["overload"] = serve_overload.measure(address, run_id, process, overload_s)
        if runs:
            measured["reading"] = measure_reading(Path(folder) / "reading", runs)
    return {
        "machine": {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count(), "load": load},
        "versions": versions(),
        **measured,
        "start_s": round(start_s, 2),
    }


def measure_reading(folder: Path, runs: int, **options: Any) -> dict[str, Any]:
    """Tables and pages of runs of a store with `runs` runs, which is written to `folder`."""
    serve_tables.write(folder, runs)
    with serving(folder) as (address, process, _):
        return serve_tables.measure(address, process, folder, **options)


def table(measured: dict[str, Any]) -> Table:
    """The measurement beside the goals."""
    shown = serve_perplexity.table(measured)
    if "overload" in measured:
        serve_overload.add_rows(shown, measured["overload"])
    if "reading" in measured:
        serve_tables.add_rows(shown, measured["reading"])
    return shown


def _train(folder: Path) -> str:
    """Train the model; its run id."""
    ablations = folder / "ablations"
    ablations.mkdir()
    (ablations / "served.yaml").write_text(serve_perplexity.ABLATION, encoding="utf-8")
    command = [sys.executable, "-m", "cope_sweep.cli", "run", "served", "--local", "--no-mlflow"]
    options = ["--store", str(folder / "store"), "--ablations", str(ablations)]
    subprocess.run([*command, *options], check=True, capture_output=True)
    return expand(load_ablation(ablations / "served.yaml")).runs[0].run_id


@contextmanager
def serving(
    folder: Path, settings: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[tuple[str, int], psutil.Process, float]]:
    """Host and port of a server for the store of `folder`, its process, and the seconds until it was ready."""
    command = [sys.executable, "-m", "cope_sweep.cli", "serve", "--port", "0"]
    options = ["--store", str(folder / "store"), "--ablations", str(folder / "ablations")]
    environment = {**os.environ, **settings}
    start_s = time.perf_counter()
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            url = urlsplit(server.stdout.readline().split()[0])
            address = url.hostname or "", url.port or 0
            _wait_until_ready(address)
            yield address, psutil.Process(server.pid), time.perf_counter() - start_s
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
        time.sleep(0.02)
