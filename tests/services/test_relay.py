"""The gateway of Ray Serve, with functions as replicas: repetition, full queues, time limits, broken responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from cope_services.http.access import ApiKey, check_scopes
from cope_services.serve import MAX_ATTEMPTS, Call, Messages, Relay, RelayedRequest, messages_of, run_of
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError
from starlette.types import ASGIApp

RUN = "0123456789abcdef"
PATH = f"/api/v1/runs/{RUN}/probe"
DONE: Messages = [
    {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]},
    {"type": "http.response.body", "body": b"{}"},
]
STREAM: Messages = [
    {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]},
    {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True},
]


class Replicas:
    """Calls of replicas: each does what the next of the `plans` says, which are messages and errors to raise."""

    def __init__(self, *plans: list[Messages | Exception]) -> None:
        self.plans = list(plans)
        self.requests: list[RelayedRequest] = []

    async def __call__(self, request: RelayedRequest) -> AsyncIterator[Messages]:
        self.requests.append(request)
        for step in self.plans.pop(0):
            if isinstance(step, Exception):
                raise step
            yield step


def ask(app: ASGIApp, method: str = "POST", path: str = PATH, **options: object) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


def died() -> ActorDiedError:
    return ActorDiedError()


def test_a_request_is_passed_on_without_its_key() -> None:
    replicas = Replicas([DONE])
    response = ask(Relay(replicas, 10), content=b"[1]", headers={"Authorization": "Bearer cope_secret", "X-A": "b"})
    assert (response.status_code, response.content) == (200, b"{}")
    [request] = replicas.requests
    assert (request.body, request.run_id, request.scope["path"]) == (b"[1]", RUN, PATH)
    headers = dict(request.scope["headers"])
    assert headers[b"x-a"] == b"b"
    assert b"authorization" not in headers


def test_another_replica_answers_for_one_that_dies_before_its_response() -> None:
    replicas = Replicas([died()], [died()], [DONE])
    assert ask(Relay(replicas, 10)).status_code == 200
    assert len(replicas.requests) == 3
    assert replicas.requests[0] == replicas.requests[2]


def test_a_request_that_ends_every_replica_is_given_up() -> None:
    replicas = Replicas(*[[died()] for _ in range(MAX_ATTEMPTS + 1)])
    response = ask(Relay(replicas, 10))
    assert (response.status_code, response.json()["code"]) == (503, "not_ready")
    assert len(replicas.requests) == MAX_ATTEMPTS


def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    response = ask(Relay(Replicas([STREAM, died()]), 10), path="/v1/completions")
    assert response.status_code == 200
    first, last = response.text.strip().split("\n\n")
    assert first == "data: 1"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "not_ready"
    assert "[DONE]" not in response.text


@pytest.mark.parametrize(("path", "is_openai"), [(PATH, False), ("/v1/completions", True)])
def test_full_queues_are_429(path: str, is_openai: bool) -> None:
    busy = BackPressureError(num_queued_requests=4, max_queued_requests=4)
    response = ask(Relay(Replicas([busy]), 10), path=path)
    assert (response.status_code, response.headers["retry-after"]) == (429, "5")
    error = response.json()["error"] if is_openai else response.json()
    assert error["code"] == "too_many_requests"


def test_a_response_has_to_begin_in_time() -> None:
    cancelled = []

    class Waiting:
        def cancel(self) -> None:
            cancelled.append(True)

        def __aiter__(self) -> Waiting:
            return self

        async def __anext__(self) -> Messages:
            await asyncio.Event().wait()
            raise AssertionError

    call: Call = lambda request: Waiting()  # noqa: E731
    response = ask(Relay(call, 0.05))
    assert (response.status_code, response.json()["code"]) == (504, "time_limit")
    assert cancelled == [True]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", PATH), ("POST", "/v1/models"), ("GET", "/api/v1/runs"), ("GET", "/"), ("GET", "/metrics")],
)
def test_other_paths_reach_no_replica(method: str, path: str) -> None:
    replicas = Replicas()
    response = ask(Relay(replicas, 10), method, path)
    assert response.status_code == 404
    assert "cope-sweep serve" in response.text
    assert replicas.requests == []


@pytest.mark.parametrize(
    ("path", "query", "body", "expected"),
    [
        (PATH, b"", b"{}", RUN),
        (f"/openai/{RUN}/v1/completions", b"", b"", RUN),
        ("/v1/completions", b"", f'{{"model": "{RUN}"}}'.encode(), RUN),
        ("/api/v1/perplexity", b"", f'{{"models": ["{RUN}", "x"]}}'.encode(), RUN),
        ("/api/v1/perplexity", b"", b'{"models": [{"row": "CoPE"}]}', ""),
        ("/tokenizer_info", f"model={RUN}".encode(), b"", RUN),
        ("/v1/completions", b"", b'{"model": "../x"}', ""),
        ("/v1/completions", b"", b'{"model": 3, "models": []}', ""),
        ("/v1/completions", b"", b"no json", ""),
        ("/v1/completions", b"", b"[1]", ""),
        ("/v1/models", b"", b"", ""),
    ],
)
def test_the_run_of_a_request(path: str, query: bytes, body: bytes, expected: str) -> None:
    assert run_of(path, query, body) == expected


@pytest.fixture
def routes() -> FastAPI:
    app = FastAPI()

    @app.post("/echo")
    async def echo(request: Request) -> dict[str, str]:
        check_scopes(request, ["infer"])
        return {"body": (await request.body()).decode()}

    @app.post("/stream")
    async def stream() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            for number in range(3):
                yield str(number).encode()
                await asyncio.sleep(0.01)

        return StreamingResponse(parts())

    @app.post("/error")
    async def error() -> None:
        raise RuntimeError("wrong")

    return app


def request_of(path: str, body: bytes = b"", scopes: tuple[str, ...] = ("infer",)) -> RelayedRequest:
    key = ApiKey.model_validate({"name": "a", "scopes": scopes, "sha256": "0" * 64, "created": ""})
    scope = {
        "type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [], "root_path": "",
        "http_version": "1.1", "scheme": "http", "cope_key": key,
    }  # fmt: skip
    return RelayedRequest(scope, body, "")


def collected(app: ASGIApp, request: RelayedRequest) -> list[Messages]:
    async def collect() -> list[Messages]:
        return [messages async for messages in messages_of(app, request)]

    return asyncio.run(collect())


def body_of(groups: list[Messages]) -> bytes:
    return b"".join(message.get("body", b"") for group in groups for message in group)


def test_a_replica_sends_a_short_response_at_once(routes: FastAPI) -> None:
    [group] = collected(routes, request_of("/echo", b"abc"))
    assert [message["type"] for message in group] == ["http.response.start", "http.response.body"]
    assert json.loads(body_of([group])) == {"body": "abc"}


def test_a_replica_sends_a_stream_in_parts(routes: FastAPI) -> None:
    groups = collected(routes, request_of("/stream"))
    assert len(groups) > 1
    assert [message["type"] for message in groups[0]][:2] == ["http.response.start", "http.response.body"]
    assert body_of(groups) == b"012"


def test_an_error_of_a_route_is_a_response(routes: FastAPI) -> None:
    groups = collected(routes, request_of("/error"))
    assert groups[0][0]["status"] == 500


def test_leaving_a_response_cancels_the_route() -> None:
    async def leave() -> bool:
        ended = asyncio.Event()

        async def app(scope: object, receive: Callable[[], object], send: Callable[[object], object]) -> None:
            try:
                await send(STREAM[0])
                await send(STREAM[1])
                await asyncio.Event().wait()
            finally:
                ended.set()

        messages = messages_of(app, request_of("/"))
        await anext(messages)
        await messages.aclose()
        async with asyncio.timeout(10):
            await ended.wait()
        return ended.is_set()

    assert asyncio.run(leave())
