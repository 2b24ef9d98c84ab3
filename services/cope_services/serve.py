"""The routes that ask models, on autoscaled replicas of Ray Serve: `serve run cope_services.serve:app`.

    Gateway       one per cluster or more: keys, hosts, sizes; passes requests on to replicas
    ModelReplica  models in memory, their batches, and the routes, which are those of `cope-sweep serve`

    client ─ Serve's proxy ─▶ Gateway ─ RelayedRequest ─▶ a replica, which runs the routes of the models
                                      ◀─ messages of ASGI ─┘

A request goes to a replica that has its model in memory. Where the replica dies before the response begins, another one
gets the request: inference changes nothing, so it may be repeated.

Serve prefers a replica that has announced the run of a request (`@serve.multiplexed`). How many bytes of models a
replica has in memory is decided as in `cope-sweep serve`, by COPE_SWEEP_MAX_MODEL_BYTES.
"""
# Serve reads the annotation of `app` at run time, so annotations must not be texts here.

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.exceptions import ObjectLostError, RayActorError, WorkerCrashedError
from ray.serve import Application
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cope_services.http.access import KeysFile
from cope_services.http.app import ModelRoutes, create_model_app, guarded
from cope_services.http.errors import (
    NOT_FOUND,
    BusyError,
    NotReadyError,
    ServiceError,
    TimeLimitError,
    error_object,
    error_response,
)
from cope_services.http.middleware import INFERENCE_PATH
from cope_services.http.settings import Settings, load_settings
from cope_sweep.errors import UserError

# -- requests to replicas ----------------------------------------------------------------------------------------------

LOG = logging.getLogger("ray.serve")
READ_PATH = re.compile(r"/api/v1/version|/v1/models(/[^/]+)?|(/openai/[^/]+)?/tokenizer_info")
RUN_PATH = re.compile(r"/(?:api/v1/runs|openai)/([^/]+)/.*")
RUN_ID = re.compile(r"[0-9a-f]{16}")
REPLICA_LOST = (RayActorError, WorkerCrashedError, ObjectLostError, ReplicaUnavailableError)
MAX_ATTEMPTS = 3
"""Replicas that get a request whose replica has died. The request itself may be what ends them."""
RETRY_AFTER_S = 5
"""Wait before clients should repeat a request for which all queues were full."""

Messages = list[Message]


@dataclass(frozen=True)
class RelayedRequest:
    """A request whose key and size have been checked."""

    scope: dict[str, Any]
    """Plain data of the ASGI scope, with the key in `cope_key`."""
    body: bytes
    run_id: str
    """The run whose model it asks; "" where that is not known."""


Call = Callable[[RelayedRequest], AsyncIterator[Messages]]
"""Sends a request to a replica; yields the messages of the response, some at a time."""


class Relay:
    """ASGI application: has replicas answer the requests that ask models."""

    def __init__(self, call: Call, max_seconds: float) -> None:
        """Create the application.

        Args:
            call: Sends a request to a replica.
            max_seconds: Time limit of a request until its response begins.
        """
        self.call = call
        self.max_seconds = max_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await _lifespan(receive, send)
        if scope["type"] != "http":
            return None
        try:
            # Whether replicas have a route for the request.
            paths = READ_PATH if scope["method"] == "GET" else INFERENCE_PATH
            if not paths.fullmatch(scope["path"]):
                raise _UnknownPathError(f"there is no {scope['path']} here; `cope-sweep serve` has the other routes")
            await self._answer(await _read(scope, receive), send)
        except ServiceError as error:
            await error_response(scope, error.status, error.code, str(error), error.headers)(scope, receive, send)

    async def _answer(self, request: RelayedRequest, send: Send) -> None:
        """Send the response. Raises BusyError, NotReadyError, TimeLimitError before it has begun."""
        first, rest = await self._begin(request)
        async with aclosing(rest):
            for message in first:
                await send(message)
            try:
                async for messages in rest:
                    for message in messages:
                        await send(message)
            except REPLICA_LOST:
                LOG.warning("a replica died during a response: %s", request.scope["path"])
                await _end_broken(first[0], send)

    async def _begin(self, request: RelayedRequest) -> tuple[Messages, AsyncGenerator[Messages, None]]:
        """The first messages of a response, and the others, from a replica that lives."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            response = _closed_at_end(self.call(request))
            try:
                async with asyncio.timeout(self.max_seconds) as limit:
                    return await anext(response), response
            except REPLICA_LOST as error:
                LOG.warning("attempt %d: a replica died before its response: %s", attempt, type(error).__name__)
            except BackPressureError as error:
                raise BusyError("the queues of all replicas are full; try again later", RETRY_AFTER_S) from error
            except TimeoutError:
                if not limit.expired():
                    raise
                raise TimeLimitError(self.max_seconds) from None
        raise NotReadyError(f"{MAX_ATTEMPTS} replicas ended while they answered this request; send a smaller one")


class _UnknownPathError(ServiceError):
    status, code = 404, NOT_FOUND


async def _read(scope: Scope, receive: Receive) -> RelayedRequest:
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    names = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")
    plain = {name: scope[name] for name in names if name in scope}
    # The key itself stays here.
    plain["headers"] = [(bytes(k), bytes(v)) for k, v in scope["headers"] if k != b"authorization"]
    plain["cope_key"] = scope.get("cope_key")
    return RelayedRequest(plain, body, run_of(scope["path"], scope["query_string"], body))


def run_of(path: str, query: bytes, body: bytes) -> str:
    """The run whose model a request asks, from its path, query or body; "" if they name none.

    It decides only which replica gets the request, which reads the request itself.
    """
    if in_path := RUN_PATH.fullmatch(path):
        named: object = in_path[1]
    else:
        named = parse_qs(query.decode("latin-1")).get("model", [""])[0]
        try:
            fields = json.loads(body) if body else {}
        except ValueError:
            fields = {}
        if isinstance(fields, dict):
            models = fields.get("models")
            named = fields.get("model") or (models[0] if isinstance(models, list) and models else named)
    return named if isinstance(named, str) and RUN_ID.fullmatch(named) else ""


async def _end_broken(start: Message, send: Send) -> None:
    """End a response that cannot be completed: a stream of events by one with the error; others by an exception."""
    if dict(start["headers"]).get(b"content-type", b"").startswith(b"text/event-stream"):
        error = error_object(503, NotReadyError.code, "the replica of the model ended; send the request again")
        await send({"type": "http.response.body", "body": b"data: " + error + b"\n\n"})
        return
    raise NotReadyError("the replica of the model ended during the response")


async def _closed_at_end(response: AsyncIterator[Messages]) -> AsyncGenerator[Messages, None]:
    """The same messages. Closing it cancels the request, if it is not answered yet."""
    cancel = getattr(response, "cancel", None)
    ended = False
    try:
        async for messages in response:
            yield messages
        ended = True
    finally:
        if not ended and cancel is not None:
            cancel()


async def _lifespan(receive: Receive, send: Send) -> None:
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})


async def messages_of(app: ASGIApp, request: RelayedRequest) -> AsyncGenerator[Messages, None]:
    """Messages of an application for a request: those so far, whenever there are some.

    The first ones include the begin of the body: a response is complete then, or it is a stream. Closing the generator
    cancels the application.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    body = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if body:
            return body.pop()
        await asyncio.Event().wait()  # the client's end cancels this task
        raise AssertionError

    async def run() -> None:
        try:
            await app(dict(request.scope), receive, sent.put)
        finally:
            sent.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        ready: Messages = []
        while (message := await sent.get()) is not None:
            ready.append(message)
            if sent.empty() and message["type"] == "http.response.body":
                yield ready
                ready = []
        if ready:
            yield ready
        await asyncio.wait([task])
        if (error := task.exception()) is not None:  # the application has answered with an error of the server
            LOG.error("%s %s", request.scope["method"], request.scope["path"], exc_info=error)
    finally:
        task.cancel()


# -- deployments -------------------------------------------------------------------------------------------------------

ANNOUNCED = 64
"""Runs for which Serve prefers a replica."""
ONGOING = 64
"""Requests that a replica computes in batches at a time, or that one gateway passes on."""
QUEUED = 256
"""Requests that wait in a gateway for a replica; further ones get 429."""


class Replicas(BaseModel):
    """Arguments of the application: `serve run cope_services.serve:app max_replicas=8 gpus=1`."""

    model_config = ConfigDict(extra="forbid")

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(4, ge=1)
    target_ongoing_requests: float = Field(8, gt=0)
    """Requests per replica that autoscaling aims at."""
    cpus: float = Field(1, ge=0)
    """CPUs of a replica."""
    gpus: float = Field(0, ge=0)
    """GPUs of a replica."""
    max_queued_requests: int = Field(QUEUED, ge=1)


class ModelReplica:
    """Answers requests with the routes of the service."""

    def __init__(self, folders: dict[str, str]) -> None:
        self.app: ModelRoutes = create_model_app(load_settings(**folders))

    @serve.multiplexed(max_num_models_per_replica=ANNOUNCED)  # type: ignore[untyped-decorator]
    async def announce(self, run_id: str) -> str:
        """Have Serve prefer this replica for requests that ask this run. The predictors load and drop the model."""
        return run_id

    async def answer(self, request: RelayedRequest) -> AsyncGenerator[Messages, None]:
        """The messages of the response to a request."""
        if request.run_id:
            with suppress(ServiceError, UserError):  # the route says what is wrong with the run
                await self.app.find_run(request.run_id)
                await self.announce(request.run_id)
        async for messages in messages_of(self.app, request):
            yield messages


class Gateway:
    """The application that Serve's proxies call."""

    def __init__(self, models: DeploymentHandle[Any], folders: dict[str, str]) -> None:
        self.models = models.options(method_name="answer", stream=True)
        self.settings = load_settings(**folders)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        # Serve's proxies choose the address, so a key is always needed.
        return guarded(Relay(self.call, self.settings.max_seconds), self.settings, always=True)

    def call(self, request: RelayedRequest) -> Any:
        """Send a request to a replica."""
        return self.models.options(multiplexed_model_id=request.run_id).remote(request)


def app(replicas: Replicas) -> Application:
    """The application, with the settings of the environment of each node. Raises UserError.

    Folders are those of the environment of the caller, as absolute paths.
    """
    settings = load_settings()
    if not KeysFile(settings.keys_file).protects:
        raise UserError(
            f"Ray Serve needs API keys, and {settings.keys_file.absolute()} has none: make one with `cope-sweep serve "
            "--new-key NAME --scope read --scope infer`, or set COPE_SWEEP_KEYS_FILE"
        )
    models = serve.deployment(
        name="models",
        ray_actor_options={"num_cpus": replicas.cpus, "num_gpus": replicas.gpus},
        max_ongoing_requests=ONGOING,
        max_queued_requests=replicas.max_queued_requests,
        autoscaling_config={
            "min_replicas": replicas.min_replicas,
            "max_replicas": replicas.max_replicas,
            "initial_replicas": replicas.min_replicas,
            "target_ongoing_requests": replicas.target_ongoing_requests,
        },
        graceful_shutdown_timeout_s=settings.max_seconds,
        health_check_timeout_s=30,
    )(ModelReplica)
    gateway = serve.deployment(
        name="gateway",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=ONGOING + replicas.max_queued_requests * 2,
        max_queued_requests=replicas.max_queued_requests,
        backpressure_config={"status_code": 429, "retry_after_s": 5},
    )(serve.ingress()(Gateway))
    return gateway.bind(models.bind(_folders(settings)), _folders(settings))


def _folders(settings: Settings) -> dict[str, str]:
    """Folders and files by their absolute paths; nothing that is secret."""
    store = settings.store if "://" in settings.store else str(Path(settings.store).absolute())
    return {
        "ablations": str(settings.ablations.absolute()),
        "store": store,
        "keys_file": str(settings.keys_file.absolute()),
    }
