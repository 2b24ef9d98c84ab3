"""The routes that ask models, on autoscaled replicas of Ray Serve: `serve run cope_services.serve:app`.

A replica runs the application of these routes, with the same keys, hosts and limits as `cope-sweep serve`. Serve scales
the number of replicas with the number of requests. A client that sends the header `serve_multiplexed_model_id: RUN_ID`
gets a replica that has the model in memory, if there is one. COPE_SWEEP_MAX_MODEL_BYTES limits the models in memory.
"""
# Serve reads the annotation of `app` at run time, so annotations must not be texts here.

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from starlette.types import ASGIApp, Receive, Scope, Send

from cope_services.http.access import KeysFile
from cope_services.http.app import create_model_app
from cope_services.http.settings import Settings, load_settings
from cope_sweep.errors import UserError

ANNOUNCED = 64
"""Runs for which Serve prefers a replica."""
LOADING_S = 10.0
"""How long a request waits for the model that its header names before it is answered."""
ONGOING = 64
"""Requests that a replica answers at a time; it computes their windows in batches."""
QUEUED = 256
"""Maximum number of requests that wait in a proxy for a replica; more get 429."""


class Replicas(BaseModel):
    """Arguments of the application: `serve run cope_services.serve:app max_replicas=8 gpus=1`."""

    model_config = ConfigDict(extra="forbid")

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(4, ge=1)
    target_ongoing_requests: float = Field(8, gt=0)
    """Target number of requests per replica for autoscaling."""
    cpus: float = Field(1, ge=0)
    """CPUs of a replica."""
    gpus: float = Field(0, ge=0)
    """GPUs of a replica."""
    max_queued_requests: int = Field(QUEUED, ge=1)


class AnnouncedModel:
    """Loads the model that the header of a request names, before the request is answered.

    It is inside the application's checks of hosts and keys: a refused request loads nothing. Loading in advance only
    tells Serve which replica has the model: after `LOADING_S` the route goes on with it, within its own limit.
    """

    def __init__(self, app: ASGIApp, load: Callable[[str], Awaitable[str]]) -> None:
        self.app, self.load = app, load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run_id = serve.get_multiplexed_model_id()
        if run_id and "cope_key" in scope:  # paths that need no key have no model either
            with suppress(UserError, TimeoutError):  # the route says what is wrong with the run
                async with asyncio.timeout(LOADING_S):
                    await self.load(run_id)
        await self.app(scope, receive, send)


@serve.ingress()
class Models:
    """A replica: the application of the routes that ask models."""

    def __init__(self, folders: dict[str, str]) -> None:
        settings = load_settings(**folders)
        self.service = create_model_app(settings)
        self.service.add_middleware(AnnouncedModel, load=self.load)

    @serve.multiplexed(max_num_models_per_replica=ANNOUNCED)  # type: ignore[untyped-decorator]  # Ray has no types
    async def load(self, run_id: str) -> str:
        """Load a model. From now on, Serve prefers this replica for it. The application may drop it from memory."""
        await self.service.components.predictor(run_id)
        return run_id

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self.service


def app(replicas: Replicas) -> Application:
    """The application, with settings from the environment of each node. Raises UserError.

    Folders come from the caller's environment, as absolute paths.
    """
    settings = load_settings()
    if not KeysFile(settings.keys_file).protects:
        raise UserError(
            f"Ray Serve needs API keys, but {settings.keys_file.absolute()} has none; make one with `cope-sweep serve "
            "--new-key NAME`, or set COPE_SWEEP_KEYS_FILE"
        )
    models = serve.deployment(
        name="models",
        ray_actor_options={"num_cpus": replicas.cpus, "num_gpus": replicas.gpus},
        max_ongoing_requests=ONGOING,
        max_queued_requests=replicas.max_queued_requests,
        backpressure_config={"status_code": 429, "retry_after_s": 5},
        autoscaling_config={
            "min_replicas": replicas.min_replicas,
            "max_replicas": replicas.max_replicas,
            "initial_replicas": replicas.min_replicas,
            "target_ongoing_requests": replicas.target_ongoing_requests,
        },
        graceful_shutdown_timeout_s=settings.max_seconds,
        health_check_timeout_s=30,
    )(Models)
    return models.bind(_folders(settings))


def _folders(settings: Settings) -> dict[str, str]:
    """Absolute paths of folders and files; no secrets."""
    store = settings.store if "://" in settings.store else str(Path(settings.store).absolute())
    return {
        "ablations": str(settings.ablations.absolute()),
        "store": store,
        "keys_file": str(settings.keys_file.absolute()),
    }
