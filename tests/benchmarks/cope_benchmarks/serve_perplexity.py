"""Benchmark of the service's perplexity: many clients, against the same sequences offline and against one at a time.

Every way has the same model, the same windows and as many threads. The clients are coroutines of one process, whose
requests are prepared as bytes, because they share the cores with the server. The ways take turns, so that a slow moment
of the machine affects all of them, and a ratio is the median over the turns of the ratio within a turn.

    offline               one call for all sequences
    offline, one by one   one call for each sequence; offline : this is what batches can gain on this machine
    clients               the server; each client asks for one sequence at a time
    one at a time         the server; one client
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch

from cope_sweep.cli.output import grid

if TYPE_CHECKING:
    from rich.table import Table

    from cope_sweep.inference import Predictor

CLIENTS = 32
SEQUENCES = 512
LENGTHS = (16, 256)
"""Shortest and longest sequence, in tokens."""
TURNS = 5
IDLE_REQUESTS = 40
IDLE_TOKENS = 32
MIN_OFFLINE_RATIO, MIN_SINGLE_RATIO, MAX_ADDED_MS, MAX_START_S = 0.9, 3.0, 5.0, 5.0
"""Goals: tokens/s of the clients against offline and against one at a time; latency that an idle service adds; start."""
ABLATION = """\
title: A model to serve
base:
  task: {kind: selective_copy, tokens: 16, blanks: 224, dense_blanks: 112, sparse_blanks: 224, vocabulary: 512}
  model: {layers: 4, dim: 256, heads: 4, position: [cope]}
  train: {steps: 1, batch: 1}
  evaluate: {every: 1, sequences: 1, final_sequences: 1}
metrics:
  - {name: in_dist/loss}
"""
"""A model as in a small ablation: 3 M weights, and 256 tokens of context."""


@dataclass(frozen=True)
class Served:
    """A server, the model that it serves, and its process."""

    address: tuple[str, int]
    run_id: str
    predictor: Predictor
    process: psutil.Process


def measure(served: Served, *, sequences: int = SEQUENCES, turns: int = TURNS) -> dict[str, Any]:
    """Tokens/s of each way, their ratios, and the latency of an idle service. Answers are compared first."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 510, length).tolist() for length in rng.integers(*LENGTHS, sequences, endpoint=True)]
    scored = sum(map(len, tokens)) - len(tokens)
    predictor, requests = served.predictor, [_request(served, each) for each in tokens]
    _compare(predictor, tokens, ask(served.address, requests, CLIENTS))
    ways: dict[str, Callable[[], object]] = {
        "offline": lambda: predictor.log_probabilities(tokens),
        "clients": lambda: ask(served.address, requests, CLIENTS),
        "one at a time": lambda: ask(served.address, requests, 1),
        "offline, one by one": lambda: [predictor.log_probabilities([each]) for each in tokens],
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    server_cpu: dict[str, list[float]] = {name: [] for name in ways}
    own_cpu: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            start_s, server_s, own_s = time.perf_counter(), _cpu_s(served.process), time.process_time()
            way()
            if turn:  # the first turn compiles, and starts threads
                taken[name].append(time.perf_counter() - start_s)
                server_cpu[name].append(_cpu_s(served.process) - server_s)
                own_cpu[name].append(time.process_time() - own_s)

    def ratio(way: str, other: str) -> float:
        return round(statistics.median(b / a for a, b in zip(taken[way], taken[other], strict=True)), 3)

    idle = _idle_ms(served)
    return {
        "workload": {"sequences": sequences, "tokens": scored, "lengths": LENGTHS, "clients": CLIENTS, "turns": turns},
        "threads": torch.get_num_threads(),
        "tokens_per_s": {name: round(scored / statistics.median(times)) for name, times in taken.items()},
        "cpu_us_per_token": {
            name: {
                "server": round(1e6 * statistics.median(server_cpu[name]) / scored, 1),
                "benchmark": round(1e6 * statistics.median(own_cpu[name]) / scored, 1),
            }
            for name in ways
        },
        "clients_to_offline": ratio("clients", "offline"),
        "clients_to_one_at_a_time": ratio("clients", "one at a time"),
        "offline_to_one_by_one": ratio("offline", "offline, one by one"),
        "idle_ms": {name: round(value, 3) for name, value in idle.items()},
        "idle_added_ms": round(idle["service"] - idle["model"], 3),
    }


def table(measured: dict[str, Any]) -> Table:
    """The measurement beside the goals."""
    shown = grid("perplexity", "measured", "goal")
    for name, speed in measured["tokens_per_s"].items():
        cpu = measured["cpu_us_per_token"][name]
        shown.add_row(
            f"{name}, tokens/s", f"{speed:,} (CPU per token: server {cpu['server']} µs, here {cpu['benchmark']} µs)", ""
        )
    clients = measured["workload"]["clients"]
    rows = [
        (f"{clients} clients : offline", "clients_to_offline", f"≥ {MIN_OFFLINE_RATIO}", " ×"),
        (f"{clients} clients : one at a time", "clients_to_one_at_a_time", f"≥ {MIN_SINGLE_RATIO}", " ×"),
        ("offline : offline, one by one", "offline_to_one_by_one", "", " ×"),
        ("added to one request when idle", "idle_added_ms", f"≤ {MAX_ADDED_MS}", " ms"),
        ("from the start to ready", "start_s", f"≤ {MAX_START_S}", " s"),
    ]
    for name, key, goal, unit in rows:
        shown.add_row(name, f"{measured[key]:.2f}{unit}", goal + unit if goal else "")
    return shown


def ask(address: tuple[str, int], requests: Sequence[bytes], clients: int) -> list[bytes]:
    """The bodies of the answers. Each client has one connection and takes the next request when it has an answer."""
    answers: list[bytes] = [b""] * len(requests)
    waiting = iter(enumerate(requests))

    async def client() -> None:
        reader, writer = await asyncio.open_connection(*address)
        for number, request in waiting:
            writer.write(request)
            answers[number] = await _read_scores(reader)
        writer.close()
        await writer.wait_closed()

    async def all_clients() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())

    asyncio.run(all_clients())
    return answers


async def _read_scores(reader: asyncio.StreamReader) -> bytes:
    status, _, body = await read_answer(reader)
    if status != 200:
        raise RuntimeError(f"the server answered {status}: {body[:500]!r}")
    return body


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
    """Status, head in lower case, and body of an answer with a Content-Length."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length:")[1].split(b"\r\n", 1)[0])
    return int(head[9:12]), head, await reader.readexactly(length)


def _request(served: Served, tokens: Sequence[int]) -> bytes:
    body = json.dumps({"tokens": [list(tokens)]}).encode()
    head = f"POST /api/v1/runs/{served.run_id}/perplexity HTTP/1.1\r\nhost: {served.address[0]}:{served.address[1]}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def _compare(predictor: Predictor, tokens: Sequence[list[int]], answers: Sequence[bytes]) -> None:
    """Raise RuntimeError unless the server's sums are those of the model."""
    expected = [-float(np.nansum(scores)) for scores in predictor.log_probabilities(tokens)]
    found = [json.loads(answer)["total"]["nll_sum"] for answer in answers]
    if not np.allclose(found, expected, rtol=1e-5, atol=1e-5):
        raise RuntimeError("the server's log-probabilities are not those of the model: nothing is measured")


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _idle_ms(served: Served) -> dict[str, float]:
    """Median milliseconds of one short request while nothing else is asked, and of the model alone."""
    sequence = list(range(IDLE_TOKENS + 1))
    request = _request(served, sequence)
    model: list[float] = []

    async def one_connection() -> list[float]:
        reader, writer = await asyncio.open_connection(*served.address)
        service = []
        for _ in range(IDLE_REQUESTS):
            start_s = time.perf_counter()
            writer.write(request)
            await _read_scores(reader)
            service.append(time.perf_counter() - start_s)
            model.extend(_seconds(lambda: served.predictor.log_probabilities([sequence])))
        writer.close()
        return service

    service = asyncio.run(one_connection())
    return {"service": 1e3 * statistics.median(service), "model": 1e3 * statistics.median(model)}


def _seconds(work: Callable[[], object]) -> Iterator[float]:
    start_s = time.perf_counter()
    work()
    yield time.perf_counter() - start_s
