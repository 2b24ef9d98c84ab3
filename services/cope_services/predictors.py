"""Perplexity and probes of the checkpoints of finished runs. torch is imported with the first question, not before."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from anyio import CapacityLimiter, to_thread

from cope_services.checkpoints import Checkpoints
from cope_services.errors import TooLargeError
from cope_services.kept import Kept
from cope_services.schemas import (
    Measured,
    MeasuredSequence,
    PerplexityRequest,
    PerplexityResponse,
    ProbeRequest,
    ProbeResponse,
)
from cope_sweep.record import RunFolder

if TYPE_CHECKING:
    import numpy as np

    from cope_sweep.inference import Perplexity, Predictor


class Predictors:
    """Models in memory, the most recently used `max_models` of them, and a few threads that compute with them."""

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
        self._models: Kept[Predictor] = Kept(max_models)
        # A limiter of its own: a queue of questions leaves the threads of tables and runs alone.
        self._limiter = CapacityLimiter(max_inferences)

    async def measure(self, folder: RunFolder, request: PerplexityRequest) -> PerplexityResponse:
        """Answer a question about a finished run, as soon as a thread is free.

        Raises TooLargeError, TokensError, CheckpointError, NotFoundError.
        """
        count = sum(map(len, request.tokens))
        if count > self.max_tokens:
            raise TooLargeError(f"{count} tokens came; one request may have {self.max_tokens}, so send several")
        return await to_thread.run_sync(self._measure, folder, request, limiter=self._limiter)

    def _measure(self, folder: RunFolder, request: PerplexityRequest) -> PerplexityResponse:
        from cope_sweep.inference import Perplexity

        scores = self._predictor(folder).log_probabilities(request.tokens)
        return PerplexityResponse(
            run_id=folder.run_id,
            total=Measured(**_numbers(Perplexity.of(scores))),
            sequences=[_sequence(each, Perplexity.of([each]), request.log_probabilities) for each in scores],
        )

    async def probe(self, folder: RunFolder, request: ProbeRequest) -> ProbeResponse:
        """Probe a finished run, as soon as a thread is free.

        Raises TooLargeError, TokensError, ProbeError, CheckpointError, NotFoundError.
        """
        if len(request.tokens) > self.max_tokens:
            raise TooLargeError(f"{len(request.tokens)} tokens came; one request may have {self.max_tokens}")
        return await to_thread.run_sync(self._probe, folder, request, limiter=self._limiter)

    def _probe(self, folder: RunFolder, request: ProbeRequest) -> ProbeResponse:
        from cope_services.probing import answer

        return answer(self._predictor(folder), request, self.max_probe_values)

    def _predictor(self, folder: RunFolder) -> Predictor:
        from cope_sweep.inference import Predictor

        state = tuple((file.path.name, file.state) for file in self._checkpoints.files(folder))
        return self._models.get(folder.run_id, state, lambda: Predictor.load(folder.checkpoint, self._device))


def _sequence(scores: np.ndarray, measured: Perplexity, with_scores: bool) -> MeasuredSequence:
    if not with_scores:
        return MeasuredSequence(**_numbers(measured))
    finite = [score if math.isfinite(score) else None for score in scores.tolist()]
    return MeasuredSequence(**_numbers(measured), log_probabilities=finite)


def _numbers(measured: Perplexity) -> dict[str, float | int | None]:
    return {
        "nll_sum": measured.nll_sum,
        "tokens": measured.tokens,
        "perplexity": measured.perplexity if math.isfinite(measured.perplexity) else None,
        "bits_per_token": measured.bits_per_token,
    }
