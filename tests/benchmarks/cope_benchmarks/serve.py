"""Benchmark of the service, a process of its own: perplexity, and tables and pages of a store of many runs.

Perplexity: the same sequences by 32 clients, by one client, and offline by the same model. Reading: ten clients ask for a
table or a page, compared with a constant route. The clients are coroutines of this process, whose requests are prepared as
bytes, because they share the cores with the server. All take turns, and a ratio is the median over the turns of the ratio
within a turn: a slow moment of the machine affects both sides.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np

from cope_benchmarks.report import Measured, Rows
from cope_benchmarks.synthetic import command, environment, finished, write_ablation, write_grid, write_index
from cope_benchmarks.timing import Run, in_turns
from cope_sweep.errors import UserError
from cope_sweep.inference import Predictor
from cope_sweep.store import Store

CLIENTS, SEQUENCES, TURNS = 32, 512, 5
LENGTHS = (16, 256)
"""Shortest and longest sequence, in tokens."""
IDLE_REQUESTS, IDLE_TOKENS = 40, 32
RUNS, TABLE_RUNS, READERS, SECONDS = 100_000, 100, 10, 2.0
CHANGES = 5
"""Runs that end while their table is polled."""
START_S = 120
QUEUE_TOKENS = 1 << 15
"""The queue has room for all clients."""
API = "/api/v1"
TABLE = f"{API}/ablations/table/table"
PAGE = f"{API}/runs?sort=in_dist%2Ftoken_error&limit=100&filter={quote('model.layers=4')}&filter={quote('model.position=cope')}"
MODEL: dict[str, Any] = {
    "task": {
        "kind": "selective_copy", "tokens": 16, "blanks": 224, "dense_blanks": 112, "sparse_blanks": 224,
        "vocabulary": 512, "copy_from": "outputs",
    },
    "model": {"layers": 4, "dim": 256, "heads": 4, "position": ["cope"]},
    "train": {"steps": 1, "batch": 1},
    "evaluate": {"every": 1, "sequences": 1, "final_sequences": 1},
}  # fmt: skip
"""A model as in a small ablation: 3 M weights, and 256 tokens of context."""

MARKER = 511
"""Every token after it is scored."""

Address = tuple[str, int]


def measure(runs: int = RUNS) -> Measured:
    """Train a model for one step, serve it, and measure; then the same with a store of `runs` runs, a multiple of 1,000."""
    if runs < 1000 or runs % 1000:
        raise UserError(f"--runs {runs}: a multiple of 1,000")
    rows = Rows("serve")
    with tempfile.TemporaryDirectory(prefix="cope-sweep-bench-") as name:
        perplexity(rows, Path(name) / "model")
        reading(rows, Path(name) / "reading", runs)
    return rows.measured(runs=runs, clients=CLIENTS, sequences=SEQUENCES, turns=TURNS)


def perplexity(rows: Rows, folder: Path) -> None:
    """Tokens/s of clients and offline, and what an idle service adds to a request. Answers are compared first."""
    (run,) = write_ablation(folder, "served", base=MODEL, metrics=[{"name": "in_dist/loss"}]).runs
    training = command("run", "served", "--local", "--no-mlflow")
    subprocess.run(training, check=True, capture_output=True, env=environment(folder))
    predictor = Predictor.load(Store(folder / "store").run(run.run_id).checkpoint)
    rng = np.random.default_rng(0)
    lengths = rng.integers(*LENGTHS, SEQUENCES, endpoint=True)
    tokens = [[MARKER, *rng.integers(0, 510, length - 1).tolist()] for length in lengths]
    scored = sum(map(len, tokens)) - len(tokens)
    with serving(folder, {"COPE_SWEEP_MAX_QUEUE_TOKENS": str(QUEUE_TOKENS)}) as (address, start_s):
        requests = [_request(address, run.run_id, each) for each in tokens]
        expected = [-float(np.nansum(scores)) for scores in predictor.log_probabilities(tokens)]
        found = [json.loads(answer)["results"][0]["total"]["nll_sum"] for answer in ask(address, requests, CLIENTS)]
        if not np.allclose(found, expected, rtol=1e-5, atol=1e-5):
            raise RuntimeError("the server's log-probabilities are not those of the model: nothing is measured")
        ways: dict[str, Run] = {
            "offline": lambda: predictor.log_probabilities(tokens),
            f"{CLIENTS} clients": lambda: ask(address, requests, CLIENTS),
            "one at a time": lambda: ask(address, requests, 1),
        }
        taken = in_turns({name: partial(_seconds, way) for name, way in ways.items()}, TURNS)
        short = [MARKER, *range(IDLE_TOKENS)]
        one = [_request(address, run.run_id, short)]
        idle: dict[str, Run] = {
            "service": lambda: ask(address, one, 1), "model": lambda: predictor.log_probabilities([short])
        }  # fmt: skip
        idle_s = in_turns({name: partial(_seconds, way) for name, way in idle.items()}, IDLE_REQUESTS)
    for name, times_s in taken.items():
        rows.add(f"perplexity, {name}", scored / statistics.median(times_s), "tokens/s")
    for other in ("offline", "one at a time"):
        rows.add(f"{CLIENTS} clients ÷ {other}", _ratio(taken[other], taken[f"{CLIENTS} clients"]))
    added_s = statistics.median(idle_s["service"]) - statistics.median(idle_s["model"])
    rows.add("added to one request when idle", 1e3 * added_s, "ms")
    rows.add("from the start to ready", start_s, "s")


def reading(rows: Rows, folder: Path, runs: int) -> None:
    """Requests per second for a table and a page of runs, and how soon a table shows a run that has ended."""
    write_grid(folder, "table", TABLE_RUNS)
    write_index(folder, write_grid(folder, "all", runs))
    table, page = f"table of {TABLE_RUNS} runs", "filtered page of runs"
    with serving(folder) as (address, _):
        first_s = {name: _seconds(partial(fetch, address, path)) for name, path in ((table, TABLE), (page, PAGE))}
        zipped = "Accept-Encoding: gzip\r\n"
        targets = {
            "constant route": (_get(address, "/health/live"), 200),
            table: (_get(address, TABLE, zipped), 200),
            f"{table}, unchanged (304)": (_get(address, TABLE, f"If-None-Match: {fetch(address, TABLE)}\r\n"), 304),
            page: (_get(address, PAGE, zipped), 200),
        }
        rates = in_turns({name: partial(load, address, *target) for name, target in targets.items()}, TURNS)
        fresh_s = _fresh_s(address, folder)
    for name, found in rates.items():
        rows.add(name, statistics.median(found), "requests/s")
        if name != "constant route":
            rows.add(f"{name} ÷ constant route", _ratio(found, rates["constant route"]))
    for name, taken_s in first_s.items():
        rows.add(f"{name}, computed", 1e3 * taken_s, "ms")
    rows.add("table after the end of a run, at most", max(fresh_s), "s")


def _fresh_s(address: Address, folder: Path) -> list[float]:
    """Seconds from the end of a run until its table is another one, while it is polled."""
    plan = write_grid(folder, "table", TABLE_RUNS)
    store, source = Store(folder / "store"), random.Random()
    found = []
    for number in range(CHANGES):
        before = fetch(address, TABLE)
        store.index.write([finished(plan.runs[number], number, source)])
        start_s = time.perf_counter()
        while fetch(address, TABLE) == before:
            if time.perf_counter() - start_s > 60:
                raise TimeoutError("the table has not changed within 60 s of the end of a run")
        found.append(time.perf_counter() - start_s)
        time.sleep(1.0)
    return found


# The server and its clients -------------------------------------------------------------------------------------------


@contextmanager
def serving(folder: Path, settings: Mapping[str, str] | None = None) -> Iterator[tuple[Address, float]]:
    """Host and port of a server for the store of `folder`, and the seconds until it was ready."""
    start_s = time.perf_counter()
    with subprocess.Popen(
        command("serve", "--port", "0"), stdout=subprocess.PIPE, text=True, env=environment(folder, settings)
    ) as server:
        try:
            assert server.stdout is not None
            url = urlsplit(server.stdout.readline().split()[0])
            address = url.hostname or "", url.port or 0
            while not _is_ready(address):
                if time.perf_counter() - start_s > START_S:
                    raise TimeoutError(f"the server was not ready within {START_S} s")
                time.sleep(0.02)
            yield address, time.perf_counter() - start_s
        finally:
            server.terminate()


def _is_ready(address: Address) -> bool:
    try:
        fetch(address, "/health/ready")
    except (OSError, urllib.error.HTTPError):
        return False
    return True


def fetch(address: Address, path: str) -> str | None:
    """The ETag of an answer, over a connection of its own."""
    with urllib.request.urlopen(f"http://{address[0]}:{address[1]}{path}", timeout=300) as response:
        response.read()
        tag: str | None = response.headers["etag"]
        return tag


def _get(address: Address, path: str, headers: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {address[0]}\r\n{headers}\r\n".encode()


def _request(address: Address, run_id: str, tokens: Sequence[int]) -> bytes:
    body = json.dumps({"models": [run_id], "tokens": [list(tokens)]})
    head = f"POST {API}/perplexity HTTP/1.1\r\nhost: {address[0]}:{address[1]}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


def ask(address: Address, requests: Sequence[bytes], clients: int) -> list[bytes]:
    """The bodies of the answers. Each client has one connection and takes the next request when it has an answer."""
    answers: dict[int, bytes] = {}
    waiting = iter(enumerate(requests))
    _run_clients(address, clients, waiting, answers.__setitem__, 200)
    return [answers[number] for number in range(len(requests))]


def load(address: Address, request: bytes, status: int) -> float:
    """Answers per second to `READERS` clients that repeat a request for `SECONDS`."""
    end_s, answers = time.perf_counter() + SECONDS, [0]

    def until_end() -> Iterator[tuple[int, bytes]]:
        for each in repeat(request):
            if time.perf_counter() > end_s:
                return
            yield 0, each

    def count(_: int, __: bytes) -> None:
        answers[0] += 1

    taken_s = _seconds(lambda: _run_clients(address, READERS, until_end(), count, status))
    return answers[0] / taken_s


def _run_clients(
    address: Address,
    clients: int,
    waiting: Iterator[tuple[int, bytes]],
    answered: Callable[[int, bytes], None],
    status: int,
) -> None:
    async def client() -> None:
        reader, writer = await asyncio.open_connection(*address)
        for number, request in waiting:
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = 0 if status == 304 else int(head.split(b"content-length:")[1].split(b"\r\n", 1)[0])
            body = await reader.readexactly(length)
            if int(head[9:12]) != status:
                raise RuntimeError(f"the server answered {head[:300]!r}: {body[:500]!r}")
            answered(number, body)
        writer.close()

    async def all_clients() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())

    import uvloop

    uvloop.run(all_clients())  # a client then takes a third of the time of asyncio's


def _ratio(values: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(values, others, strict=True))


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s
