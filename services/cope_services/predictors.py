"""Models of finished runs in memory, and probes of them. The first request imports torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING

from cachetools import LRUCache, cached

from cope_services.batching import Batcher
from cope_services.checkpoints import Checkpoints
from cope_services.errors import (
    DamagedCheckpointError,
    InvalidError,
    InvalidTokensError,
    NotFiniteOutputError,
    TooLargeError,
)
from cope_services.schemas import ProbeRequest, ProbeResponse
from cope_services.settings import Settings
from cope_sweep.store import RunFolder

if TYPE_CHECKING:
    from cope_sweep.inference import Predictor

MODEL_SUFFIX = ".safetensors"


class Predictors:
    """Loads models, and answers probes. The most recently used models stay in memory, up to a number of bytes."""

    def __init__(self, checkpoints: Checkpoints, settings: Settings) -> None:
        self.settings = settings
        self.batcher = Batcher(settings.max_inferences, settings.max_queue_tokens, settings.max_cache_bytes)
        self._checkpoints = checkpoints
        # With the condition, threads that need the same model wait until one of them has loaded it.
        models: LRUCache[Hashable, Predictor] = LRUCache(settings.max_model_bytes, lambda model: model.size_bytes)
        self._load_cached: Callable[[Path, Hashable], Predictor] = cached(models, condition=Condition())(self._load)

    async def load(self, folder: RunFolder) -> Predictor:
        """The model of a finished run.

        Raises TooLargeError, DamagedCheckpointError, NotFoundError.
        """
        return await self.batcher.prepare(lambda: self._predictor(folder))

    async def probe(self, folder: RunFolder, request: ProbeRequest) -> ProbeResponse:
        """Probe the model of a finished run, when a thread is free.

        Raises TooLargeError, BusyError, InvalidTokensError, InvalidError, DamagedCheckpointError, NotFoundError.
        """
        if len(request.tokens) > self.settings.max_tokens:
            raise TooLargeError(f"{len(request.tokens)} tokens; one request may have {self.settings.max_tokens}")
        with self.batcher.admitted(len(request.tokens)):
            return await self.batcher.infer(lambda: self._probe(folder, request))

    def _probe(self, folder: RunFolder, request: ProbeRequest) -> ProbeResponse:
        from cope_services.probing import probe_response

        with service_errors():
            return probe_response(self._predictor(folder), request, self.settings.max_probe_values)

    def _predictor(self, folder: RunFolder) -> Predictor:
        files = self._checkpoints.files(folder)
        size_bytes = sum(file.stat.st_size for file in files if file.path.suffix == MODEL_SUFFIX)
        if size_bytes > self.settings.max_model_bytes:
            raise TooLargeError(
                f"the model of run {folder.run_id} has {size_bytes:,} bytes, and all models in memory may have "
                f"{self.settings.max_model_bytes:,}; raise COPE_SWEEP_MAX_MODEL_BYTES"
            )
        with service_errors():
            return self._load_cached(folder.fetch_checkpoint(), tuple((file.path.name, file.state) for file in files))

    def _load(self, checkpoint: Path, state: Hashable) -> Predictor:
        """Load a model; `state` is part of the cache key, so changed files are loaded again."""
        from cope_sweep.inference import Predictor

        return Predictor.load(checkpoint, self.settings.device)


@contextmanager
def service_errors() -> Iterator[None]:
    """Raise errors of modules that import torch as ServiceErrors."""
    from cope_sweep.inference import NotFiniteError, TokensError
    from cope_sweep.model import CheckpointError
    from cope_sweep.probe import ProbeError

    try:
        yield
    except ProbeError as error:  # a subclass of TokensError
        raise InvalidError(str(error)) from error
    except TokensError as error:
        raise InvalidTokensError(str(error)) from error
    except NotFiniteError as error:  # a subclass of CheckpointError
        raise NotFiniteOutputError(str(error)) from error
    except CheckpointError as error:
        raise DamagedCheckpointError(str(error)) from error
