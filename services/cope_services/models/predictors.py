"""Models of finished runs in memory, their probes, and their checkpoint files. The first request imports torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from anyio import CapacityLimiter, to_thread
from cachetools import LRUCache, TTLCache, cached

from cope_services.http.caching import SharedTasks
from cope_services.http.errors import TooLargeError
from cope_services.http.settings import Settings
from cope_services.http.work import WorkQueue
from cope_services.models.batching import Batcher
from cope_sweep.api.requests import ProbeFormat, ProbeRequest
from cope_sweep.api.runs import Checkpoint, CheckpointFile
from cope_sweep.errors import CheckpointError, NotFoundError
from cope_sweep.signals import user_code
from cope_sweep.store import RunFolder
from cope_sweep.store.files import sha256

if TYPE_CHECKING:
    from cope_sweep.inference import Predictor

T = TypeVar("T")

# -- checkpoint files --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredFile:
    """A file, with its status from when the folder was listed."""

    path: Path
    stat: os.stat_result

    @property
    def state(self) -> tuple[int, int, int]:
        """Modification time, size and inode, which change with the content."""
        return self.stat.st_mtime_ns, self.stat.st_size, self.stat.st_ino


def checkpoint_files(folder: RunFolder) -> list[StoredFile]:
    """The regular, visible files of a checkpoint on this machine, sorted by name, without links.

    Raises NotFoundError if there are none.
    """
    try:
        with os.scandir(folder.checkpoint) as entries:
            regular = [e for e in entries if e.is_file(follow_symlinks=False) and not e.name.startswith(".")]
            files = [StoredFile(folder.checkpoint / e.name, e.stat(follow_symlinks=False)) for e in regular]
    except (FileNotFoundError, NotADirectoryError):
        files = []
    if not files:
        raise NotFoundError(
            f"the checkpoint of run {folder.run_id} was deleted: its folder has no files; train the run again",
            code="deleted_checkpoint",
            run_id=folder.run_id,
        )
    return sorted(files, key=lambda file: file.path.name)


def checkpoint_file(folder: RunFolder, name: str) -> StoredFile:
    """The file with this name, which is only compared: it never becomes part of a path. Raises NotFoundError."""
    files = checkpoint_files(folder)
    for file in files:
        if file.path.name == name:
            return file
    names = ", ".join(file.path.name for file in files)
    raise NotFoundError(
        f"the checkpoint of run {folder.run_id} has no file {name[:80]!r}; choose one of {names}",
        run_id=folder.run_id,
        file=name[:80],
    )


def checkpoint_listing(folder: RunFolder) -> Checkpoint:
    """The files with their sizes and digests. Raises NotFoundError."""
    return Checkpoint(
        run_id=folder.run_id,
        files=[
            CheckpointFile(
                name=file.path.name,
                size_bytes=file.stat.st_size,
                sha256=_sha256(file.path, file.state),
                url=f"/api/v1/runs/{folder.run_id}/checkpoint/{quote(file.path.name)}",
            )
            for file in checkpoint_files(folder)
        ],
    )


# With the condition, one thread reads a file, and others that need its digest wait for it.
@cached(LRUCache(1024), condition=Condition())
def _sha256(path: Path, state: Hashable) -> str:
    """The digest in hexadecimal. `state` is part of the cache key, so a changed file is read again."""
    return sha256(path)


# -- models ------------------------------------------------------------------------------------------------------------

LOOKUPS = 16
"""Threads that look up runs and load models."""
FRESH_S = 0.25
"""Time for which a model in memory is used without checking whether its run or its files have changed."""


class Predictors:
    """Loads and probes models. The most recently used models stay in memory, up to a number of bytes."""

    def __init__(self, settings: Settings, drawings: WorkQueue) -> None:
        """`drawings` has the slots of images."""
        self.settings, self._drawings = settings, drawings
        self.batcher = Batcher(settings.inferences(), settings.max_queue_tokens)
        self._limiter = CapacityLimiter(LOOKUPS)
        self._looking: SharedTasks[Hashable, Any] = SharedTasks()
        self.requested = self.loads = 0
        """How often a model was requested, and how often one was read from files."""
        self._fresh: TTLCache[Hashable, Predictor] = TTLCache(4096, FRESH_S)
        # With the condition, threads that need the same model wait until one of them has loaded it.
        self.models: LRUCache[Hashable, Predictor] = LRUCache(settings.max_model_bytes, lambda model: model.size_bytes)
        self._load_cached: Callable[[Path, Hashable], Predictor] = cached(self.models, condition=Condition())(
            self._load
        )

    async def look_up(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The result of `compute`, or its error, from a thread. Requests with the same key share one look-up.

        A cancelled request stops waiting, but the look-up continues. So a store that does not answer occupies one
        thread per key, and at most `LOOKUPS` threads in all.
        """
        result: T = await self._looking.get(
            key, lambda: to_thread.run_sync(user_code()(compute), limiter=self._limiter)
        )
        return result

    async def get(self, key: Hashable, find: Callable[[], RunFolder]) -> Predictor:
        """The model of the finished run that `find` returns. Calls with the same `key` share its result.

        Raises TooLargeError, CheckpointError, NotFoundError, and the errors of `find`, among them DamagedError.
        """
        self.requested += 1
        predictor = self._fresh.get(key)
        if predictor is None:
            predictor = self._fresh[key] = await self.look_up(key, lambda: self._predictor(find()))
        return predictor

    async def probe(self, predictor: Predictor, request: ProbeRequest, output_format: ProbeFormat) -> bytes:
        """Probe a model, once a thread is free: a ProbeResponse as JSON, or an image.

        Raises TooLargeError, BusyError, TokensError, CheckpointError.
        """
        from cope_services.models.probing import probe_image, probe_json, probe_sequence, probed_tokens

        tokens_T = await self.batcher.prepare(lambda: probed_tokens(predictor, request))
        if len(tokens_T) > self.settings.max_tokens:
            limit = self.settings.max_tokens
            raise TooLargeError(
                f"the sequence has {len(tokens_T)} tokens; send at most {limit}", tokens=len(tokens_T), limit=limit
            )
        with self.batcher.admitted(len(tokens_T)):
            probed = await self.batcher.infer(
                lambda: probe_sequence(predictor, request, tokens_T, self.settings.max_probe_values, output_format)
            )
            if output_format == "json":
                return await self.batcher.prepare(lambda: probe_json(probed, request))
            # No other thread waits for matplotlib: those of `prepare` also read texts and write answers.
            async with self._drawings.slot():
                return await self.batcher.prepare(lambda: probe_image(probed, request, output_format))

    def _predictor(self, folder: RunFolder) -> Predictor:
        files = checkpoint_files(folder)
        size_bytes = sum(file.stat.st_size for file in files if file.path.suffix == ".safetensors")
        if size_bytes > self.settings.max_model_bytes:
            raise TooLargeError(
                f"the model of run {folder.run_id} has {size_bytes:,} bytes, but models in memory may have at most "
                f"{self.settings.max_model_bytes:,}; raise COPE_SWEEP_MAX_MODEL_BYTES"
            )
        return self._load_cached(folder.checkpoint, tuple((file.path.name, file.state) for file in files))

    def _load(self, checkpoint: Path, state: Hashable) -> Predictor:
        """Load a model. `state` is part of the cache key, so changed files are loaded again."""
        from cope_sweep.inference import Predictor

        self.loads += 1
        predictor = Predictor.load(checkpoint, self.settings.device)
        with suppress(CheckpointError):  # a request that needs the vocabulary raises it again
            predictor.vocabulary  # noqa: B018 - read now, so that no request reads a file in the event loop
        return predictor
