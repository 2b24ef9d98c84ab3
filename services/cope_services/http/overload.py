"""ASGI middleware that refuses inference while the queue is full, before the request's body is read."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from cope_services.http.errors import BusyError, error_response
from cope_services.models.batching import Batcher

INFERENCE_PATH = re.compile(
    r"/api/v1/perplexity|/api/v1/runs/[^/]+/probe|(/openai/[^/]+)?/(v1/completions|tokenize|detokenize)"
)


class OverloadGuard:
    """Answers 429 in a fraction of the time of a request that is read first. The routes ask the batcher again."""

    def __init__(self, app: ASGIApp, batcher: Batcher) -> None:
        self.app = app
        self.batcher = batcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and INFERENCE_PATH.fullmatch(scope["path"]):
            try:
                self.batcher.check_room()
            except BusyError as error:
                response = error_response(scope, error.status, error.code, str(error), error.headers)
                return await response(scope, receive, send)
        return await self.app(scope, receive, send)
