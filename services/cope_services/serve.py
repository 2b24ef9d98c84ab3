"""The routes that ask models, on autoscaled replicas of Ray Serve: `serve run cope_services.serve:app`.

    Gateway       one per cluster or more: keys, hosts, sizes; passes requests on to replicas
    ModelReplica  models in memory, their batches, and the routes, which are those of `cope-sweep serve`

Serve prefers a replica that has announced the run of a request (`@serve.multiplexed`). How many bytes of models a
replica has in memory is decided as in `cope-sweep serve`, by COPE_SWEEP_MAX_MODEL_BYTES.
"""
# Serve reads the annotation of `app` at run time, so annotations must not be texts here.

from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from cope_services.http.access import AllowedHosts, Authentication
from cope_services.http.app import ModelRoutes, create_model_app
from cope_services.http.body_limit import BodyLimit
from cope_services.http.compression import Compression
from cope_services.http.errors import PlainErrors, ServiceError
from cope_services.http.headers import SecurityHeaders
from cope_services.http.keys import KeysFile
from cope_services.http.settings import Settings, load_settings
from cope_services.relay import Messages, Relay, RelayedRequest, messages_of
from cope_sweep.errors import UserError

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
        return gateway_app(Relay(self.call, self.settings.max_seconds), self.settings)

    def call(self, request: RelayedRequest) -> Any:
        """Send a request to a replica."""
        return self.models.options(multiplexed_model_id=request.run_id).remote(request)


def gateway_app(app: ASGIApp, settings: Settings) -> ASGIApp:
    """The checks of the service around an application. It always asks for a key: Serve's proxies choose the address."""
    app = BodyLimit(app, settings.max_body_bytes)
    app = Authentication(app, KeysFile(settings.keys_file), always=True)
    app = PlainErrors(app)
    app = Compression(app)
    app = AllowedHosts(app, settings.host, settings.allowed_hosts)
    return SecurityHeaders(app)


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
