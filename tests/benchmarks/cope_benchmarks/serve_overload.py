"""Overload of the service: clients ask for ten times as much perplexity as it can compute.

First, a few clients measure how many requests per second the server answers. Then many clients together ask for
OVERLOAD times as many, whatever the answers are: each asks at fixed times, or, if its last answer came later, at once.
What counts: each answer is 200 or 429 with Retry-After, the latency of accepted requests stays that of a full queue,
and the memory of the server does not grow.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from cope_benchmarks.serve_perplexity import read_answer

if TYPE_CHECKING:
    from rich.table import Table

OVERLOAD = 10
CLIENTS = 300
CAPACITY_CLIENTS, CAPACITY_S = 16, 3.0
QUEUE_TOKENS = 1 << 15
"""Tokens of all requests that the server answers or queues; see COPE_SWEEP_MAX_QUEUE_TOKENS."""
REQUEST = (8, 128)
"""Sequences of a request, and tokens of a sequence: a refusal costs little beside an answer."""
MAX_IDLE_S = 2.0
"""Time after which a client opens another connection: the server closes those that are idle for longer."""
SAMPLE_S = 1.0
"""Time between two samples of the server's memory."""


@dataclass
class _Seen:
    """What the clients have received."""

    accepted_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    without_retry_after: int = 0
    lost: int = 0
    """Requests whose connection ended without an answer."""


def measure(address: tuple[str, int], run_id: str, process: psutil.Process, seconds: float) -> dict[str, Any]:
    """Overload the server for so many seconds."""
    request = _request(address, run_id)
    return asyncio.run(_measure(address, request, process, seconds))


async def _measure(address: tuple[str, int], request: bytes, process: psutil.Process, seconds: float) -> dict[str, Any]:
    capacity = await _capacity(address, request)
    offered = OVERLOAD * capacity
    seen, memory = _Seen(), [process.memory_info().rss]
    end_s = time.perf_counter() + seconds

    async def sample() -> None:
        while time.perf_counter() < end_s:
            await asyncio.sleep(SAMPLE_S)
            memory.append(process.memory_info().rss)

    async with asyncio.TaskGroup() as group:
        group.create_task(sample())
        for number in range(CLIENTS):
            group.create_task(_ask_at_times(address, request, number / offered, CLIENTS / offered, end_s, seen))
    total = sum(seen.statuses.values())
    return {
        "seconds": seconds,
        "capacity_per_s": round(capacity, 1),
        "requests_per_s": round(total / seconds, 1),
        "overload": round(total / seconds / capacity, 1),
        "statuses": {str(status): count for status, count in sorted(seen.statuses.items())},
        "without_retry_after": seen.without_retry_after,
        "lost": seen.lost,
        "accepted_per_s": round(len(seen.accepted_s) / seconds, 1),
        "accepted_s": _quantiles(seen.accepted_s),
        "refused_s": _quantiles(seen.refused_s),
        "queue_s": round(QUEUE_TOKENS / (math.prod(REQUEST) * capacity), 2),
        "memory_mb": [round(rss / 1e6, 1) for rss in _thinned(memory)],
    }


def add_rows(shown: Table, measured: dict[str, Any]) -> None:
    """Add the measurement to a table with the columns name, measured, goal."""
    accepted, memory = measured["accepted_s"], measured["memory_mb"]
    shown.add_row("overload: capacity, requests/s", f"{measured['capacity_per_s']}", "")
    shown.add_row("requests/s, × capacity", f"{measured['requests_per_s']}, {measured['overload']} ×", "")
    shown.add_row(
        "answers by status", f"{measured['statuses']}, without answer: {measured['lost']}", "only 200 and 429"
    )
    shown.add_row("accepted requests/s", f"{measured['accepted_per_s']}", "")
    shown.add_row(
        "latency of accepted requests, s: median, p99, most",
        f"{accepted['median']}, {accepted['p99']}, {accepted['most']}",
        f"a full queue takes {measured['queue_s']} s without overload",
    )
    shown.add_row("server's memory over time, MB", " ".join(f"{each:.0f}" for each in memory), "flat")


async def _capacity(address: tuple[str, int], request: bytes) -> float:
    """Requests per second that the server answers to a few clients; the first ones load the model."""
    for _ in range(2):
        seen, end_s = _Seen(), time.perf_counter() + CAPACITY_S
        async with asyncio.TaskGroup() as group:
            for _ in range(CAPACITY_CLIENTS):
                group.create_task(_ask_at_times(address, request, 0, 0, end_s, seen))
    if set(seen.statuses) != {200}:
        raise RuntimeError(f"the server answered {dict(seen.statuses)} to {CAPACITY_CLIENTS} clients")
    return len(seen.accepted_s) / CAPACITY_S


async def _ask_at_times(
    address: tuple[str, int], request: bytes, first_s: float, interval_s: float, end_s: float, seen: _Seen
) -> None:
    reader, writer = await asyncio.open_connection(*address)
    last_s = time.perf_counter()
    due_s = last_s + first_s
    while (now_s := time.perf_counter()) < end_s:
        if due_s > now_s:
            await asyncio.sleep(due_s - now_s)
        due_s = max(due_s + interval_s, time.perf_counter())
        if time.perf_counter() - last_s > MAX_IDLE_S:
            writer.close()
            reader, writer = await asyncio.open_connection(*address)
        start_s = time.perf_counter()
        try:
            writer.write(request)
            status, head, _ = await read_answer(reader)
        except (ConnectionError, asyncio.IncompleteReadError):
            seen.lost += 1
            reader, writer = await asyncio.open_connection(*address)
            continue
        last_s = time.perf_counter()
        taken_s = last_s - start_s
        seen.statuses[status] += 1
        (seen.accepted_s if status == 200 else seen.refused_s).append(taken_s)
        if status == 429 and b"retry-after: " not in head:
            seen.without_retry_after += 1
    writer.close()


def _request(address: tuple[str, int], run_id: str) -> bytes:
    sequences, length = REQUEST
    body = json.dumps({"tokens": np.random.default_rng(0).integers(0, 510, (sequences, length)).tolist()})
    head = f"POST /api/v1/runs/{run_id}/perplexity HTTP/1.1\r\nhost: {address[0]}:{address[1]}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {"median": math.nan, "p99": math.nan, "most": math.nan}
    median, p99, most = np.quantile(seconds, [0.5, 0.99, 1])
    return {"median": round(float(median), 3), "p99": round(float(p99), 3), "most": round(float(most), 3)}


def _thinned(samples: Sequence[int], count: int = 21) -> list[int]:
    """At most `count` samples at equal distances, with the first and the last."""
    places = np.linspace(0, len(samples) - 1, min(count, len(samples))).round().astype(int)
    return [samples[place] for place in places]
