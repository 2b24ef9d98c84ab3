"""Models of finished runs in memory, and probes of them. The first request imports torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary, ref

from cachetools import LRUCache, TTLCache, cached

from cope_services.http.errors import (
    DamagedCheckpointError,
    InvalidError,
    InvalidTokensError,
    NotFiniteOutputError,
    TooLargeError,
)
from cope_services.http.settings import Settings
from cope_services.models.batching import Batcher
from cope_services.models.checkpoints import Checkpoints
from cope_services.models.inference_stats import PredictorsStats
from cope_services.models.lookups import Lookups
from cope_sweep.api.requests import ProbeFormat, ProbeRequest
from cope_sweep.read.queries import Queries
from cope_sweep.store import RunFolder
from cope_sweep.store.errors import DamagedError

if TYPE_CHECKING:
    from cope_sweep.inference import Predictor

MODEL_SUFFIX = ".safetensors"
LOOKUPS = 8
"""Threads that look for runs and load models."""
MAX_KNOWN = 4096
"""Runs whose state is in memory."""
CHECK_S = 2.0
"""Time to find out whether the files of a model in memory have changed."""
FRESH_S = 0.25
"""Time for which a model in memory is used without asking again whether its run or its files have changed."""


class FinishedRuns:
    """Finds the folders of finished runs, and asks about a run again only if the index has changed.

    Whether the files of the run still exist is not asked here.
    """

    def __init__(self, queries: Queries) -> None:
        self._queries = queries
        self._known: dict[str, tuple[int, RunFolder]] = {}

    def find(self, run_id: str) -> RunFolder:
        """The folder of a finished run. Raises NotFoundError, NotFinishedError, StoreError."""
        revision = self._queries.store.index.revision()  # a tenth of the time of the other question
        known = self._known.get(run_id)
        if known is not None and known[0] == revision:
            return known[1]
        folder = self._queries.finished(run_id)
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[run_id] = revision, folder
        return folder


class Predictors:
    """Loads models, and answers probes. The most recently used models stay in memory, up to a number of bytes."""

    def __init__(self, checkpoints: Checkpoints, settings: Settings) -> None:
        self.settings = settings
        self.batcher = Batcher(settings.inferences(), settings.max_queue_tokens, settings.max_cache_bytes)
        self._checkpoints = checkpoints
        self.folders: Lookups[RunFolder] = Lookups(LOOKUPS)
        """Look-ups of the folders of runs."""
        self.best: Lookups[str] = Lookups(LOOKUPS)
        """Look-ups of the best runs of rows."""
        self._lookups: Lookups[Predictor] = Lookups(LOOKUPS)
        self._latest: WeakValueDictionary[Hashable, Predictor] = WeakValueDictionary()
        self._fresh: TTLCache[Hashable, ref[Predictor]] = TTLCache(MAX_KNOWN, FRESH_S)
        self._asked = self._loads = 0
        # With the condition, threads that need the same model wait until one of them has loaded it.
        self._models: LRUCache[Hashable, Predictor] = LRUCache(settings.max_model_bytes, lambda model: model.size_bytes)
        self._load_cached: Callable[[Path, Hashable], Predictor] = cached(self._models, condition=Condition())(
            self._load
        )

    async def get(self, key: Hashable, find: Callable[[], RunFolder]) -> Predictor:
        """The model of the finished run that `find` finds; `key` says what is looked for.

        Where the files do not answer within CHECK_S, and the model is in memory, it is used as it is.

        Raises TooLargeError, DamagedCheckpointError, NotFiniteOutputError, NotFoundError, and what `find` raises.
        """
        self._asked += 1
        fresh = self._fresh.get(key)
        known = self._latest.get(key) if fresh is None else fresh()
        if fresh is not None and known is not None:
            return known
        try:
            async with asyncio.timeout(None if known is None else CHECK_S) as limit:
                predictor = await self._lookups.get(key, lambda: self._find(find))
        except TimeoutError:
            if known is None or not limit.expired():
                raise
            return known
        self._latest[key] = predictor
        self._fresh[key] = ref(predictor)
        return predictor

    def stats(self) -> PredictorsStats:
        """Counters at this moment. It may be called in any thread, and takes no lock."""
        return PredictorsStats(
            models=len(self._models),
            model_bytes=int(self._models.currsize),
            max_model_bytes=self.settings.max_model_bytes,
            lookups=self._asked,
            loads=self._loads,
        )

    async def probe(self, predictor: Predictor, request: ProbeRequest, output_format: ProbeFormat) -> bytes:
        """Probe a model, when a thread is free: a ProbeResponse as JSON, or a picture.

        Raises TooLargeError, BusyError, InvalidTokensError, InvalidError, DamagedCheckpointError.
        """
        from cope_services.models.probing import probe_json, probe_picture, probe_sequence, probed_tokens

        settings = self.settings
        with service_errors():
            tokens_T = await self.batcher.prepare(lambda: probed_tokens(predictor, request))
            if len(tokens_T) > settings.max_tokens:
                raise TooLargeError(f"{len(tokens_T)} tokens; one request may have {settings.max_tokens}")
            with self.batcher.admitted(len(tokens_T)):
                probed = await self.batcher.infer(
                    lambda: probe_sequence(predictor, request, tokens_T, settings.max_probe_values, output_format)
                )
                if output_format == "json":
                    return await self.batcher.prepare(lambda: probe_json(probed, request))
                return await self.batcher.prepare(lambda: probe_picture(probed, request, output_format))

    def _find(self, find: Callable[[], RunFolder]) -> Predictor:
        try:
            return self._predictor(find())
        except DamagedError as error:  # links, pipes: the store refuses to open them
            raise DamagedCheckpointError(str(error)) from error

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
        from cope_sweep.model import CheckpointError

        self._loads += 1
        predictor = Predictor.load(checkpoint, self.settings.device)
        with suppress(CheckpointError):  # a request that needs the vocabulary says so
            predictor.vocabulary  # noqa: B018 - read here, so that no request reads a file in the event loop
        return predictor


@contextmanager
def service_errors() -> Iterator[None]:
    """Raise errors of modules that import torch as ServiceErrors."""
    from cope_sweep.inference import NotFiniteError, TokensError
    from cope_sweep.inference.probe import ProbeError
    from cope_sweep.model import CheckpointError

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
