"""Bounds on what requests occupy: no number of readers stops the service, and every slot is free again afterwards."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cache
from typing import Any, get_args
from urllib.parse import urlsplit

import httpx
import pytest
from cope_services.http import reading
from cope_services.http.app import create_app
from cope_services.http.errors import ClientGoneError
from cope_services.http.settings import LIMITS, Limit, Work
from cope_services.http.work import WorkQueue
from fastapi import Request
from fastapi.routing import iter_route_contexts
from prometheus_client.parser import text_string_to_metric_families

from cope_sweep.api.question import Question
from cope_sweep.api.runs import ExportRuns, RunsFormat
from cope_sweep.config import RunSpec
from cope_sweep.read.queries import Queries
from cope_sweep.read.tables import export
from cope_sweep.store import RunQuery, RunRecord
from cope_sweep.store.index import IndexUnavailable
from tests.helpers.errors import raises
from tests.helpers.processes import until
from tests.helpers.sample_store import API, SampleStore, server_process, serving

RUNS = 3_000
EXPORT = f"{API}/runs/export?format=json"
PROBES = ("/health/live", "/health/ready", "/metrics", "/", "/static/main.js")
"""What answers however many other requests there are."""
MOST_S = 1.0
"""Longest time for one of them on a busy machine; without limits, they got no answer in 60 s."""
UNLIMITED = {
    "/", "/docs", "/docs/{name}", "/static", "/openapi.json", "/health/live", "/health/ready", "/metrics",
    "/api/v1/version",
}  # fmt: skip


@pytest.fixture(scope="module")
def many(sample: SampleStore, tmp_path_factory: pytest.TempPathFactory) -> SampleStore:
    """A store with so many runs that an export does not fit into the buffers of a connection."""
    store = sample.copy_to(tmp_path_factory.mktemp("many") / "sample")
    first = sample.plan.runs[0].model_dump(mode="json")
    specs = [RunSpec.model_validate(first | {"seed": seed}) for seed in range(100, 100 + RUNS)]
    store.store.index.write(
        [
            RunRecord.of(spec.run_id, "finished", spec.model_dump(mode="json"), metrics={"in_dist/loss": 1.0})
            for spec in specs
        ]
    )
    return store


@pytest.fixture(scope="module")
def many_client(many: SampleStore) -> Iterator[httpx.Client]:
    with serving(many.settings()) as client:
        yield client


Exported = Callable[[RunsFormat, bool], bytes]


@pytest.fixture(scope="module")
def exported(many: SampleStore) -> Exported:
    """The file that the command line writes in a format, with curves or without: each is written once."""

    @cache
    def file_of(output_format: RunsFormat, curves: bool) -> bytes:
        file = io.BytesIO()
        Queries(many.store).export(ExportRuns(format=output_format, curves=curves), file)
        return file.getvalue()

    return file_of


def work_metrics(client: httpx.Client, kind: str) -> tuple[int, int, int]:
    """Running, waiting and refused requests of a kind of work."""
    found = {
        each.name: int(each.value)
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for each in family.samples
        if each.labels.get("work") == kind
    }
    return found["cope_work_running"], found["cope_work_waiting"], found["cope_work_refused_total"]


def slow_client(url: str, path: str, method: str = "GET", *, accept: str = "*/*", body_bytes: int = 0) -> socket.socket:
    """A client that asks and does not read. It has not yet sent the body that it announces."""
    host, port = urlsplit(url).hostname, urlsplit(url).port
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, port))
    headers = {"Host": host, "Accept": accept, "Content-Type": "application/json", "Content-Length": body_bytes}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    connection.sendall("\r\n".join([*lines, "", ""]).encode())
    return connection


def assert_probes_answer(client: httpx.Client) -> None:
    for path in PROBES:
        started_s = time.monotonic()
        assert client.get(path).status_code == 200, path
        assert time.monotonic() - started_s < MOST_S, path


def assert_refused(answer: httpx.Response, kind: Work) -> None:
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == str(LIMITS[kind].retry_after_s)
    problem = answer.json()
    assert (problem["code"], problem["data"]["work"]) == ("too_many_requests", kind)


# -- declarations ------------------------------------------------------------------------------------------------------


def test_every_route_has_one_kind_of_work(sample: SampleStore) -> None:
    found: dict[str, Work | None] = {}
    for context in iter_route_contexts(create_app(sample.settings()).routes):
        found[context.path or ""] = getattr(context.original_route, "work", None)
    assert {path for path, work in found.items() if work is None} == UNLIMITED
    assert {*found.values()} == {*get_args(Work), None} - {"looks"}  # the first step of cached answers


# -- the service under many requests -----------------------------------------------------------------------------------


def test_slow_exports_stop_nothing_and_leave_no_slot_taken(many: SampleStore) -> None:
    limit = LIMITS["exports"]
    with (
        server_process(many.environment(), stderr=subprocess.DEVNULL) as (_, url),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        with ExitStack() as stack:
            for _ in range(limit.running + limit.waiting):
                stack.enter_context(closing(slow_client(url, EXPORT)))
            until(lambda: work_metrics(client, "exports")[:2] == (limit.running, limit.waiting), 30)
            for _ in range(41):
                assert_refused(client.get(EXPORT), "exports")
            assert_probes_answer(client)
            assert client.get(f"{API}/runs").status_code == 200
        until(lambda: work_metrics(client, "exports") == (0, 0, 41), 30)
        assert len(client.get(EXPORT).json()) == RUNS + 3


HANGING: dict[Work, str] = {
    "answers": f"{API}/runs/{{run}}",
    "tables": f"{API}/ablations/tiny/plan",
    "drawings": f"{API}/ablations/tiny/figures/summary",
    "reports": f"{API}/ablations/tiny/report?format=markdown",  # draws nothing
    "exports": EXPORT,
    "downloads": f"{API}/runs/{{run}}/checkpoint",
}
"""Kind of work → a path."""


@pytest.mark.parametrize("kind", HANGING)
def test_requests_that_hang_leave_threads_for_others(
    own_sample: SampleStore, monkeypatch: pytest.MonkeyPatch, kind: Work
) -> None:
    limit = replace(LIMITS[kind], waiting=1)
    monkeypatch.setitem(LIMITS, kind, limit)  # type: ignore[arg-type]
    go_on = threading.Event()
    run_id = own_sample.ids[0]
    paths = {other: path.format(run=run_id) for other, path in HANGING.items()}

    def hang(function: Callable[..., object]) -> Callable[..., object]:
        def hanging(*args: object, **kwargs: object) -> object:
            assert go_on.wait(120)
            return function(*args, **kwargs)

        return hanging

    ask = Queries.ask

    def ask_slowly(queries: Queries, question: Question[Any]) -> Any:
        assert kind != question.WORK or go_on.wait(120)
        return ask(queries, question)

    with monkeypatch.context() as patch, serving(own_sample.settings()) as client, ExitStack() as stack:
        stack.callback(go_on.set)
        if kind == "exports":
            patch.setattr(Queries, "export_chunks", hang(Queries.export_chunks))
        elif kind == "downloads":
            patch.setattr(reading, "checkpoint_listing", hang(reading.checkpoint_listing))
        else:
            patch.setattr(Queries, "ask", ask_slowly)
        clients = [
            # Requests for the same answer would share its computation.
            stack.enter_context(closing(slow_client(str(client.base_url), paths[kind], accept=f"*/*;q=0.{n}")))
            for n in range(1, 1 + limit.running + limit.waiting)
        ]
        until(lambda: work_metrics(client, kind)[:2] == (limit.running, limit.waiting), 30)
        assert_probes_answer(client)
        assert_refused(client.get(paths[kind]), kind)
        for other, path in paths.items():
            assert other == kind or client.get(path).status_code == 200, other
        go_on.set()
        for connection in clients:
            assert connection.recv(15).startswith(b"HTTP/1.1 200")
        until(lambda: work_metrics(client, kind)[:2] == (0, 0), 30)
        assert client.get(paths[kind]).status_code == 200


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_a_body_that_does_not_arrive_takes_no_slot(own_sample: SampleStore, method: str) -> None:
    path = f"{API}/sweeps/preview" if method == "POST" else f"{API}/runs/{own_sample.ids[0]}"
    with serving(own_sample.settings()) as client, ExitStack() as stack:
        for _ in range(LIMITS["answers"].running):
            connection = stack.enter_context(closing(slow_client(str(client.base_url), path, method, body_bytes=100)))
            connection.sendall(b"{")
        until(lambda: b"cope_http_requests_active 9.0" in client.get("/metrics").content, 30)
        assert work_metrics(client, "sweeps" if method == "POST" else "answers")[:2] == (0, 0)


# -- slots are free again ----------------------------------------------------------------------------------------------


def test_slots_of_requests_that_end_otherwise(many: SampleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> Iterator[bytes]:
        raise RuntimeError

    def breaking(error: Exception) -> Callable[..., Iterator[bytes]]:
        def chunks(*args: object) -> Iterator[bytes]:
            yield b"x" * 100_000
            raise error

        return chunks

    run_id = many.ids[0]
    with serving(many.settings()) as client:
        head = client.head(EXPORT)
        assert (head.status_code, head.content) == (200, b"")
        assert client.get(f"{EXPORT}&sort=none").status_code == 422
        assert client.get(f"{EXPORT}&status=none").status_code == 422
        for name in ("none", "model.safetensors"):
            client.get(f"{API}/runs/{run_id}/checkpoint/{name}", headers={"range": "bytes=x"})
            client.head(f"{API}/runs/{run_id}/checkpoint/{name}")
        with monkeypatch.context() as patch:
            patch.setattr(Queries, "export_chunks", broken)
            assert client.get(EXPORT).status_code == 500
        for error in (RuntimeError(), IndexUnavailable("no answer"), TimeoutError()):
            with monkeypatch.context() as patch:
                patch.setattr(Queries, "export_chunks", breaking(error))
                for encoding in ("identity", "gzip"):
                    with pytest.raises(httpx.TransportError):  # not a complete file
                        client.get(EXPORT, headers={"accept-encoding": encoding})
        with client.stream("GET", EXPORT) as left:
            next(left.iter_raw(10))
        for kind in ("exports", "downloads"):
            until(lambda kind=kind: work_metrics(client, kind) == (0, 0, 0), 30)  # type: ignore[misc]


def test_a_client_that_stops_reading_loses_its_slot(many: SampleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "STALLED_S", 0.3)
    with serving(many.settings()) as client, closing(slow_client(str(client.base_url), EXPORT)):
        until(lambda: work_metrics(client, "exports")[0] == 1, 30)
        until(lambda: work_metrics(client, "exports")[0] == 0, 30)


def test_a_waiting_client_that_leaves_gives_up_its_place() -> None:
    async def scenario() -> None:
        queue = WorkQueue("exports", Limit(1, 1, 5))
        leaves = asyncio.Event()

        async def receive() -> dict[str, str]:
            await leaves.wait()
            return {"type": "http.disconnect"}

        async def wait() -> None:
            async with queue.slot(Request({"type": "http"}, receive)):
                raise AssertionError("there was no free slot")

        async with queue.slot():
            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0.01)
            assert (queue.running, queue.waiting) == (1, 1)
            with raises("too_many_requests", work="exports", running=1, waiting=1):
                async with queue.slot():
                    pass
            leaves.set()
            with pytest.raises(ClientGoneError):
                await waiting
            assert (queue.running, queue.waiting, queue.refused) == (1, 0, 1)
        assert queue.running == 0
        with pytest.raises(ZeroDivisionError):
            async with queue.slot():
                raise ZeroDivisionError
        assert queue.running == 0

    asyncio.run(scenario())


# -- exports are whole, and made piece by piece ------------------------------------------------------------------------


@pytest.mark.parametrize("curves", ["", "&curves=true"])
@pytest.mark.parametrize("output_format", ["csv", "parquet", "json"])
def test_an_export_is_the_same_file_as_that_of_the_command_line(
    exported: Exported, many_client: httpx.Client, output_format: RunsFormat, curves: str
) -> None:
    answer = many_client.get(f"{API}/runs/export?format={output_format}{curves}")
    assert answer.content == exported(output_format, bool(curves))
    assert answer.headers["content-disposition"] == f'attachment; filename="runs.{output_format}"'


def test_an_export_has_all_runs_in_order(many: SampleStore, many_client: httpx.Client, exported: Exported) -> None:
    seeds = [line["seed"] for line in many_client.get(f"{EXPORT}&sort=seed&descending=true").json()]
    assert seeds == [*range(99 + RUNS, 99, -1), 1, 0, 0]
    ids = [line["run_id"] for line in json.loads(exported("json", False))]
    assert ids == many.store.index.matching(RunQuery())
    assert len(ids) == RUNS + 3


@pytest.mark.parametrize("output_format", ["csv", "parquet", "json"])
def test_pieces_of_an_export_have_the_size_of_a_batch(
    many: SampleStore, exported: Exported, monkeypatch: pytest.MonkeyPatch, output_format: RunsFormat
) -> None:
    whole = len(exported(output_format, False))
    monkeypatch.setattr(export.run_batches, "__defaults__", (300,))
    pieces = [len(piece) for piece in Queries(many.store).export_chunks(ExportRuns(format=output_format))]
    assert len(pieces) > RUNS / 300
    if output_format != "parquet":  # its footer describes the columns of every batch
        assert sum(pieces) == whole
        assert max(pieces) < whole / 5
