"""Server-sent events: one watcher for all listeners, resumption, heartbeats, and listeners that are slow or too many."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from cope_services.http import sweep_events
from cope_services.http.errors import BusyError
from cope_services.http.sweep_actions import EventStream
from cope_services.http.sweep_events import Watchers
from sse_starlette import ServerSentEvent

from cope_sweep.client import EventParser, ServerEvent
from cope_sweep.read.queries import Queries
from cope_sweep.read.queries.progress import ProgressTracker
from cope_sweep.store import Store, SweepRecord, SweepRun
from cope_sweep.store.index.rows import RunRow
from tests.services.sample_store import API, SampleStore, serving
from tests.store.test_store import sweep_record
from tests.tiny import tiny_run

SWEEP = "20260801-000000-aa"


class Sweep:
    """A running sweep of three runs, which a test moves on."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.runs = [tiny_run(seed=seed) for seed in range(3)]
        members = [SweepRun(run_id=run.run_id, row=f"row {run.seed}", labels={}, seed=run.seed) for run in self.runs]
        self.record: SweepRecord = sweep_record(SWEEP, status="running", ended_ms=None).model_copy(
            update={"runs": members, "reused": []}
        )
        store.write_sweep(self.record)

    def set(self, number: int, status: str, step: int = 0, worker: str = "host:1", message: str | None = None) -> None:
        run = self.runs[number]
        spec = run.model_dump(mode="json")
        row = RunRow(run.run_id, status, spec, step=step, worker_id=worker, message=message)  # type: ignore[arg-type]
        self.store.index.write([row])
        if status == "running":
            self.store.index.acquire(row, f"{SWEEP}@elsewhere/machine:1:1", 3600)
            with self.store.index.database.writing() as connection:
                from sqlalchemy import text

                connection.execute(
                    text("UPDATE runs SET step = :step, worker_id = :worker WHERE run_id = :run"),
                    {"step": step, "worker": worker, "run": run.run_id},
                )

    def end(self, status: str = "finished") -> None:
        self.store.write_sweep(self.record.model_copy(update={"status": status, "ended_ms": 5}))


@pytest.fixture
def sweep(own_sample: SampleStore) -> Sweep:
    return Sweep(own_sample.store)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_events, "TICK_S", 0.02)


@pytest.fixture
def client(own_sample: SampleStore, fast: None) -> Iterator[httpx.Client]:
    with serving(own_sample.settings(max_listeners=2)) as client:
        yield client


def events(response: httpx.Response) -> Iterator[ServerEvent]:
    parser = EventParser()
    for part in response.iter_text():
        yield from parser.feed(part)


def test_the_tracker_sums_up_a_sweep(sweep: Sweep) -> None:
    now_s = 0.0
    tracker = ProgressTracker(sweep.store, SWEEP, clock=lambda: now_s)
    first = tracker.poll()
    assert (first.status, first.runs, first.counts, first.groups, first.nodes) == ("running", 3, {"pending": 3}, 0, 0)
    assert (first.steps_per_s, first.eta_s, first.failures) == (None, None, [])

    sweep.set(0, "running", step=1, worker="one:1")
    sweep.set(1, "running", step=2, worker="one:2")
    now_s = 10.0
    second = tracker.poll()
    assert (second.counts, second.groups, second.nodes) == ({"pending": 1, "running": 2}, 2, 1)
    # 3 steps in 10 s; 5 + 4 + 6 steps are left: the pending run counts as long as the others.
    assert (second.steps_per_s, second.eta_s) == (pytest.approx(0.3), pytest.approx(15 / 0.3))

    sweep.set(0, "finished", step=6)
    sweep.set(1, "failed", step=2, message="Diverged")
    now_s = 20.0
    third = tracker.poll()
    assert third.counts == {"pending": 1, "finished": 1, "failed": 1}
    assert [(each.row, each.message) for each in third.failures] == [("row 1", "Diverged")]
    assert third.steps_per_s == pytest.approx((8 - 0) / 20)
    assert third.eta_s == pytest.approx(6 / third.steps_per_s)

    now_s = 200.0
    assert tracker.poll().steps_per_s is None  # nothing has changed for longer than the window
    sweep.end()
    last = tracker.poll()
    assert (last.status, last.groups, last.nodes, last.steps_per_s) == ("finished", None, None, None)


def test_the_tracker_reads_what_has_changed_only(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    from cope_sweep.read.queries import progress

    read: list[int] = []

    def counted(*arguments: Any) -> Any:
        changes = real(*arguments)
        read.append(len(changes.members))
        return changes

    real = progress.sweep_changes
    monkeypatch.setattr(progress, "sweep_changes", counted)
    tracker = ProgressTracker(sweep.store, SWEEP)
    for number in range(3):
        sweep.set(number, "finished", step=6)
    tracker.poll()
    tracker.poll()
    sweep.set(2, "failed")
    tracker.poll()
    assert read == [3, 0, 1]


@pytest.mark.slow
def test_a_sweep_is_followed_to_its_end(client: httpx.Client, sweep: Sweep) -> None:
    with client.stream("GET", f"{API}/sweeps/{SWEEP}/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        stream = events(response)
        first = next(stream)
        assert (first.kind, json.loads(first.data)["counts"]) == ("progress", {"pending": 3})
        sweep.set(0, "failed", message="Diverged")
        second = next(stream)
        assert json.loads(second.data)["failures"] == [
            {"run_id": sweep.runs[0].run_id, "row": "row 0", "message": "Diverged"}
        ]
        assert int(second.id or "") > int(first.id or "")
        sweep.end("failed")
        last = list(stream)[-1]
    assert (last.kind, last.id, json.loads(last.data)["status"]) == ("end", "end", "failed")
    assert client.get(f"{API}/sweeps/{SWEEP}/events", headers={"last-event-id": "end"}).status_code == 204


@pytest.mark.slow
def test_it_is_resumed_after_the_last_event(client: httpx.Client, sweep: Sweep) -> None:
    with client.stream("GET", f"{API}/sweeps/{SWEEP}/events") as response:
        first = next(events(response))
    with client.stream("GET", f"{API}/sweeps/{SWEEP}/events", headers={"last-event-id": first.id or ""}) as response:
        sweep.set(0, "finished", step=6)
        again = next(events(response))  # not the first one once more
        assert json.loads(again.data)["counts"] == {"pending": 2, "finished": 1}
    sweep.set(1, "finished", step=6)
    with client.stream("GET", f"{API}/sweeps/{SWEEP}/events", headers={"last-event-id": first.id or ""}) as response:
        assert json.loads(next(events(response)).data)["counts"] == {"pending": 1, "finished": 2}


@pytest.mark.slow
def test_listeners_are_limited(client: httpx.Client, sweep: Sweep) -> None:
    url = f"{API}/sweeps/{SWEEP}/events"
    with client.stream("GET", url) as first, client.stream("GET", url) as second:
        streams = [events(first), events(second)]  # a stream that is dropped is closed
        assert [next(stream).kind for stream in streams] == ["progress"] * 2
        refused = client.get(url)
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_requests")
        assert int(refused.headers["retry-after"]) > 0
        del streams
    wait_for(lambda: _is_streamed(client, url))


def _is_streamed(client: httpx.Client, url: str) -> bool:
    with client.stream("GET", url) as response:
        return response.status_code == 200


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_an_unknown_sweep(client: httpx.Client) -> None:
    assert client.get(f"{API}/sweeps/20200101-000000-00/events").status_code == 404


@pytest.mark.slow
def test_comments_keep_a_quiet_connection_open(
    own_sample: SampleStore, sweep: Sweep, fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cope_services.http.routes import sweep_actions

    monkeypatch.setattr(sweep_actions, "HEARTBEAT_S", 0.05)
    with (
        serving(own_sample.settings()) as client,
        client.stream("GET", f"{API}/sweeps/{SWEEP}/events") as response,
    ):
        text = ""
        for part in response.iter_text():
            text += part
            if text.count("\n: ping") >= 2:
                break
    assert text.count("data:") == 1


def test_listeners_share_a_watcher_and_a_slow_one_gets_the_latest(
    own_sample: SampleStore, sweep: Sweep, fast: None
) -> None:
    queries = Queries(own_sample.store)
    watchers = Watchers(lambda: queries.store, 100)

    async def scenario() -> None:
        streams = [watchers.events(SWEEP, None) for _ in range(50)]
        first = [await anext(stream) for stream in streams]
        assert len({id(event) for event in first}) == 1  # one object for all: nothing is kept for each listener
        assert len(watchers.watchers) == 1
        for step in range(5):
            sweep.set(0, "running", step=step)
            sweep.set(1, "failed", message=f"step {step}")
            assert await anext(streams[0])
        slow = json.loads((await anext(streams[1])).data or "")
        assert slow["failures"][0]["message"] == "step 4"
        sweep.end("failed")
        for stream in streams[1:]:
            assert [event.event async for event in stream][-1] == "end"
        await streams[0].aclose()
        assert (watchers.listeners, watchers.watchers) == (0, {})

    asyncio.run(scenario())


def test_a_place_is_needed_to_listen(own_sample: SampleStore, sweep: Sweep) -> None:
    queries = Queries(own_sample.store)
    watchers = Watchers(lambda: queries.store, 0)
    with pytest.raises(BusyError, match="0 clients follow sweeps"):
        watchers.require_place()


@pytest.mark.parametrize("stuck", ["event", "heartbeat"])
def test_a_listener_that_does_not_read_loses_its_place(stuck: str) -> None:
    sent, left = [], []

    async def events() -> AsyncIterator[ServerSentEvent]:
        try:
            yield ServerSentEvent("1")
            if stuck == "event":
                yield ServerSentEvent("2")
            await asyncio.sleep(3600)
        finally:
            left.append(True)

    async def send(message: Any) -> None:
        if len(sent) == 2:  # the head and the first event fill the buffers of the connection
            await asyncio.sleep(3600)
        sent.append(message["type"])

    async def receive() -> Any:
        await asyncio.sleep(3600)

    async def answered() -> None:
        stream = EventStream(events(), ping=1, send_timeout=0.1)
        await asyncio.wait_for(stream({"type": "http", "method": "GET"}, receive, send), 60)

    asyncio.run(answered())
    assert sent == ["http.response.start", "http.response.body"]
    assert left == [True]
