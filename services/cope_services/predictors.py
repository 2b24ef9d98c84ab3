"""Perplexity and probes of the checkpoints of finished runs. The first request imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING

from anyio import CapacityLimiter, to_thread
from cachetools import LRUCache, cached

from cope_services.checkpoints import Checkpoints
from cope_services.errors import DamagedCheckpointError, InvalidError, InvalidTokensError, TooLargeError
from cope_services.schemas import (
    PerplexityRequest,
    PerplexityResponse,
    PerplexityValues,
    ProbeRequest,
    ProbeResponse,
    SequencePerplexity,
)
from cope_sweep.store import RunFolder

if TYPE_CHECKING:
    import numpy as np

    from cope_sweep.inference import Perplexity, Predictor


class Predictors:
    """Answers requests with the models of checkpoints, in a limited number of threads.

    The `max_models` most recently used models stay in memory.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        *,
        device: str,
        max_models: int,
        max_inferences: int,
        max_tokens: int,
        max_probe_values: int,
    ) -> None:
        self.max_tokens = max_tokens
        self.max_probe_values = max_probe_values
        self._checkpoints = checkpoints
        self._device = device
        # With the condition, threads that need the same model wait until one of them has loaded it.
        self._load_cached: Callable[[Path, Hashable], Predictor] = cached(LRUCache(max_models), condition=Condition())(
            self._load
        )
        # A separate limiter: requests that wait for a model do not occupy the threads of other requests.
        self._limiter = CapacityLimiter(max_inferences)

    async def perplexity(self, folder: RunFolder, request: PerplexityRequest) -> PerplexityResponse:
        """Perplexity under the model of a finished run, computed when a thread is free.

        Raises TooLargeError, InvalidTokensError, DamagedCheckpointError, NotFoundError.
        """
        count = sum(map(len, request.tokens))
        if count > self.max_tokens:
            raise TooLargeError(f"{count} tokens; one request may have {self.max_tokens}, so send several requests")
        return await to_thread.run_sync(self._perplexity, folder, request, limiter=self._limiter)

    def _perplexity(self, folder: RunFolder, request: PerplexityRequest) -> PerplexityResponse:
        from cope_sweep.inference import Perplexity

        with _service_errors():
            scores = self._predictor(folder).log_probabilities(request.tokens)
        return PerplexityResponse(
            run_id=folder.run_id,
            total=PerplexityValues(**_values(Perplexity.of(scores))),
            sequences=[_sequence(each, Perplexity.of([each]), request.log_probabilities) for each in scores],
        )

    async def probe(self, folder: RunFolder, request: ProbeRequest) -> ProbeResponse:
        """Probe the model of a finished run, when a thread is free.

        Raises TooLargeError, InvalidTokensError, InvalidError, DamagedCheckpointError, NotFoundError.
        """
        if len(request.tokens) > self.max_tokens:
            raise TooLargeError(f"{len(request.tokens)} tokens; one request may have {self.max_tokens}")
        return await to_thread.run_sync(self._probe, folder, request, limiter=self._limiter)

    def _probe(self, folder: RunFolder, request: ProbeRequest) -> ProbeResponse:
        from cope_services.probing import probe_response

        with _service_errors():
            return probe_response(self._predictor(folder), request, self.max_probe_values)

    def _predictor(self, folder: RunFolder) -> Predictor:
        state = tuple((file.path.name, file.state) for file in self._checkpoints.files(folder))
        return self._load_cached(folder.fetch_checkpoint(), state)

    def _load(self, checkpoint: Path, state: Hashable) -> Predictor:
        """Load a model; `state` is part of the cache key, so changed files are loaded again."""
        from cope_sweep.inference import Predictor

        return Predictor.load(checkpoint, self._device)


@contextmanager
def _service_errors() -> Iterator[None]:
    """Raise errors of modules that import torch as ServiceErrors."""
    from cope_sweep.inference import TokensError
    from cope_sweep.model import CheckpointError
    from cope_sweep.probe import ProbeError

    try:
        yield
    except ProbeError as error:  # a subclass of TokensError
        raise InvalidError(str(error)) from error
    except TokensError as error:
        raise InvalidTokensError(str(error)) from error
    except CheckpointError as error:
        raise DamagedCheckpointError(str(error)) from error


def _sequence(scores: np.ndarray, perplexity: Perplexity, with_scores: bool) -> SequencePerplexity:
    if not with_scores:
        return SequencePerplexity(**_values(perplexity))
    finite = [score if math.isfinite(score) else None for score in scores.tolist()]
    return SequencePerplexity(**_values(perplexity), log_probabilities=finite)


def _values(perplexity: Perplexity) -> dict[str, float | int | None]:
    return {
        "nll_sum": perplexity.nll_sum,
        "tokens": perplexity.tokens,
        "perplexity": perplexity.perplexity if math.isfinite(perplexity.perplexity) else None,
        "bits_per_token": perplexity.bits_per_token,
    }
