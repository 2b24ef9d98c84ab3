"""Perplexity of token ids and texts, computed in batches with other requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from cope_services.http.errors import TooLargeError
from cope_services.http.settings import Settings
from cope_services.models.predictors import Predictors
from cope_sweep.api.requests import (
    ModelPerplexity,
    PerplexityRequest,
    ScoredSequence,
    ScoredTotal,
    TextUnits,
)
from cope_sweep.read.tables.stats import finite

if TYPE_CHECKING:
    from cope_services.http.components import Components
    from cope_sweep.inference import Perplexity, Predictor, Scores, Window

T = TypeVar("T")

SMALL_TOKENS = 4096
"""Requests with at most this many token ids are processed in the event loop: it takes a few milliseconds."""


@dataclass(frozen=True)
class _Sequence:
    """One sequence of a request for one model."""

    tokens_L: np.ndarray
    inputs_L: np.ndarray
    """The token that the model reads at each position."""
    trained_L: np.ndarray
    """True for the tokens that the task trains; only these are scored."""
    windows: list[Window]
    units: tuple[int, int] | None
    """Words and bytes; None for token ids."""


async def compare(components: Components, request: PerplexityRequest) -> bytes:
    """The perplexity of each model of the request, in order: a PerplexityComparison as JSON.

    The models are measured one after another, so that they need not fit into memory together, and each of them once.

    Raises NotFoundError, NotFinishedError, TooLargeError, BusyError, TokensError, CheckpointError.
    """
    predictors, run_ids = components.predictors, list[str]()
    for model in request.models:
        if isinstance(model, str):
            run_ids.append(model)
        else:
            run_ids.append(await components.best_run_id(model.ablation, model.row, model.scale, model.set))
    max_values = predictors.settings.max_scored_values // len(run_ids)
    answers: dict[str, bytes] = {}
    for run_id in dict.fromkeys(run_ids):
        answers[run_id] = await measure(predictors, await components.predictor(run_id), request, max_values)
    # Joined as bytes, because each answer is JSON already.
    return b'{"results":[' + b",".join(answers[run_id] for run_id in run_ids) + b"]}"


async def measure(predictors: Predictors, predictor: Predictor, request: PerplexityRequest, max_values: int) -> bytes:
    """The perplexity of one model: a ModelPerplexity as JSON, with at most `max_values` values of single tokens.

    Raises the errors of `compare`.
    """
    batcher = predictors.batcher
    context = predictor.window(request.context, request.stride, is_text=request.text is not None)
    # For a few tokens, a thread would cost more than the work.
    is_small = request.text is None and sum(map(len, request.tokens or ())) <= SMALL_TOKENS
    prepare = _run_here if is_small else batcher.prepare
    sequences = await prepare(lambda: _sequences(predictor, request, context, predictors.settings))
    values = sum(len(sequence.tokens_L) for sequence in sequences) * request.values_per_token
    if values > max_values:
        raise TooLargeError(
            f"the answer would have {values:,} log-probabilities and labels for each model, but the limit is "
            f"{max_values:,}, for {len(request.models)} models; choose a smaller `top`, or send several requests",
            values=values,
            limit=max_values,
        )
    windows = [window for sequence in sequences for window in sequence.windows]
    with batcher.admitted(sum(window.reads for window in windows)):
        scored = await batcher.score(predictor, windows, top=request.top)
        return await prepare(lambda: _write_answer(predictor, request, sequences, scored, context))


async def _run_here(compute: Callable[[], T]) -> T:
    return compute()


def _sequences(
    predictor: Predictor, request: PerplexityRequest, context: int | None, settings: Settings
) -> list[_Sequence]:
    """The tokens and windows of each sequence. Raises TooLargeError, TokensError, CheckpointError."""
    from cope_sweep.inference import tokens_read, validate_sequence, windows

    sequences: list[_Sequence] = []
    reads = 0
    inputs: Sequence[str | list[int]] = request.texts if request.tokens is None else request.tokens
    for index, item in enumerate(inputs):
        ids = predictor.encode(item) if isinstance(item, str) else item
        tokens_L = validate_sequence(ids, predictor.vocabulary_size, f"sequence {index}")
        units = predictor.text_units(tokens_L) if isinstance(item, str) and predictor.reads_text else None
        inputs_L, trained_L = predictor.trained(tokens_L)
        predictor.check_trained(trained_L, f"sequence {index}")
        width = context or len(tokens_L) - 1
        stride = request.stride or width
        # Counted before any window is created: a small stride makes many windows.
        reads += tokens_read(len(tokens_L), width, stride)
        if min(width + 1, len(tokens_L)) > settings.max_tokens:
            raise TooLargeError(
                f"sequence {index} has {len(tokens_L)} tokens, but a sequence or window may have at most "
                f"{settings.max_tokens}; add a smaller `context`",
                sequence=index,
                tokens=len(tokens_L),
                limit=settings.max_tokens,
            )
        if reads > settings.max_request_tokens:
            raise TooLargeError(
                f"the model would read more than {settings.max_request_tokens} tokens, the limit per request; "
                "choose a larger `stride`, or send several requests",
                limit=settings.max_request_tokens,
            )
        parts = list(windows(tokens_L, width, stride, inputs_L))
        widest = max(window.reads for window in parts)
        predictor.check_reach(widest, f"sequence {index} of {widest + 1} tokens")
        sequences.append(_Sequence(tokens_L, inputs_L, trained_L, parts, units))
    return sequences


def _write_answer(
    predictor: Predictor,
    request: PerplexityRequest,
    sequences: list[_Sequence],
    scored: list[Scores],
    context: int | None,
) -> bytes:
    from cope_sweep.inference import Perplexity

    remaining = iter(scored)
    entries: list[np.ndarray] = []
    answers: list[ScoredSequence] = []
    for sequence in sequences:
        scores = [next(remaining).check(predictor.run) for _ in sequence.windows]
        trained = sequence.trained_L.tolist()
        log_p_L = np.concatenate([[np.nan], *(window.log_probabilities_N for window in scores)])
        entries.append(np.where(sequence.trained_L, log_p_L, np.nan))
        fields = _total(Perplexity.of(entries[-1:]), [sequence])
        if request.log_probabilities:
            fields["log_probabilities"] = _where(trained, log_p_L.tolist())
        if request.token_labels:
            fields["token_ids"] = sequence.tokens_L.tolist()
            fields["input_ids"] = sequence.inputs_L[:-1].tolist()
            fields["labels"] = [predictor.vocabulary.label(token) for token in fields["token_ids"]]
        if request.top:
            ids_LK = np.concatenate([window.top_ids_NK[:, : request.top] for window in scores])
            tops_LK = np.concatenate([window.top_log_probabilities_NK[:, : request.top] for window in scores])
            rows = zip(ids_LK.tolist(), tops_LK.tolist(), strict=True)
            fields["top"] = _where(trained, [None, *(list(zip(*row, strict=True)) for row in rows)])
        answers.append(ScoredSequence(**fields))
    answer = ModelPerplexity(
        run_id=predictor.run.run_id,
        context=context,
        stride=request.stride or context,
        scored=predictor.run.task.TRAINED,
        total=ScoredTotal(**_total(Perplexity.of(entries), sequences)),
        sequences=answers,
    )
    # What the request did not ask for is unset, and left out.
    return answer.model_dump_json(exclude_unset=True).encode()


def _total(perplexity: Perplexity, sequences: list[_Sequence]) -> dict[str, Any]:
    """The fields of a ScoredTotal. It has numbers per word and byte only if every sequence is a text."""
    from cope_sweep.inference import TextPerplexity

    fields: dict[str, Any] = {
        "nll_sum": perplexity.nll_sum,
        "tokens": perplexity.tokens,
        "positions": perplexity.positions,
        "perplexity": finite(perplexity.perplexity),
        "bits_per_token": perplexity.bits_per_token,
    }
    units = [sequence.units for sequence in sequences if sequence.units is not None]
    if len(units) == len(sequences):
        words, size_bytes = (sum(counts) for counts in zip(*units, strict=True))
        text = TextPerplexity.per_unit(perplexity, words, size_bytes)
        fields["text"] = TextUnits(
            words=words,
            size_bytes=size_bytes,
            word_perplexity=finite(text.word_perplexity),
            byte_perplexity=finite(text.byte_perplexity),
            bits_per_byte=text.bits_per_byte,
        )
    return fields


def _where(mask: list[bool], values: list[T]) -> list[T | None]:
    return [value if holds else None for value, holds in zip(values, mask, strict=True)]
