"""Completions in the OpenAI protocol: prompts are scored and continued in batches with other requests."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from cope_services.http.errors import TooLargeError
from cope_services.http.settings import Settings
from cope_services.models.openai_schemas import Choice, Completion, CompletionRequest, Logprobs, Usage
from cope_services.models.predictors import Predictors, service_errors

if TYPE_CHECKING:
    import numpy as np

    from cope_sweep.inference import Generation, Predictor, Scores, Vocabulary

DEFAULT_MAX_TOKENS = 16

Entry = tuple[int, float | None, list[tuple[int, float]]]
"""A token, its log-probability, and the most probable tokens with theirs."""


@dataclass
class _Choice:
    """One completion, and how much of it the client has."""

    index: int
    prompt: list[int]
    trained: list[bool]
    """Which tokens of the prompt the task trains; only these have log-probabilities."""
    generation: Generation | None
    """None if no token is asked for."""
    scores: Scores | None = None
    """Log-probabilities of the prompt; None if they are not asked for, or if the prompt has one token."""
    begun: bool = False
    ended: bool = False
    sent_tokens: int = 0
    """Generated tokens."""
    sent_characters: int = 0
    """Characters of the generated text."""
    offset: int = 0
    """Characters of the tokens that were sent, the prompt's included."""
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def next_part(self, request: CompletionRequest, vocabulary: Vocabulary) -> Choice | None:
        """Text that was added since the last call; None for nothing."""
        if self.ended:
            return None
        text, entries = "", []
        if request.echo and not self.begun:
            text = b"".join(map(vocabulary.piece, self.prompt)).decode(errors="replace")
            entries = _prompt_entries(self.prompt, self.trained, self.scores, request.logprobs or 0)
        self.begun = True
        reason: Literal["stop", "length"] | None = "length"
        if self.generation is not None:
            # Read first: a generation that has a reason has its whole text.
            reason = self.generation.finish_reason
            text += self.generation.text[self.sent_characters :]
            self.sent_characters = len(self.generation.text)
            new = self.generation.tokens[self.sent_tokens :]
            self.sent_tokens += len(new)
            entries += [(token.id, token.log_probability, token.top) for token in new]
        self.ended = reason is not None
        if not (text or entries or self.ended):
            return None
        logprobs = None if request.logprobs is None else self._logprobs(entries, vocabulary)
        return Choice(index=self.index, text=text, logprobs=logprobs, finish_reason=reason)

    def _logprobs(self, entries: list[Entry], vocabulary: Vocabulary) -> Logprobs:
        logprobs = Logprobs()
        for token, log_p, top in entries:
            label = vocabulary.label(token)
            logprobs.tokens.append(label)
            logprobs.token_logprobs.append(log_p)
            # With the chosen token, whose float is the same one: clients compare them with `==`.
            labelled = None if log_p is None else {vocabulary.label(other): p for other, p in top} | {label: log_p}
            logprobs.top_logprobs.append(labelled)
            logprobs.text_offset.append(self.offset)
            self.offset += len(self.decoder.decode(vocabulary.piece(token)))
        return logprobs


def _prompt_entries(prompt: list[int], trained: list[bool], scores: Scores | None, top: int) -> list[Entry]:
    """The entries of a prompt's tokens. Only those after the first that the task trains have log-probabilities."""
    entries: list[Entry] = [(prompt[0], None, [])]
    if scores is not None:
        ids_NK, tops_NK = scores.top_ids_NK[:, :top].tolist(), scores.top_log_probabilities_NK[:, :top].tolist()
        log_p_N = scores.log_probabilities_N.tolist()
        for token, scored, log_p, ids, tops in zip(prompt[1:], trained[1:], log_p_N, ids_NK, tops_NK, strict=True):
            entries.append((token, log_p, list(zip(ids, tops, strict=True))) if scored else (token, None, []))
    return entries


async def complete(predictors: Predictors, predictor: Predictor, request: CompletionRequest) -> Completion:
    """All completions of a request. Raises as `parts`."""
    whole: dict[int, Choice] = {}
    async with aclosing(parts(predictors, predictor, request)) as all_parts:
        async for part in all_parts:
            last = part
            for choice in part.choices:
                known = whole.setdefault(choice.index, choice)
                if known is not choice:
                    _extend(known, choice)
    return last.model_copy(update={"choices": [whole[index] for index in sorted(whole)]})


def _extend(known: Choice, part: Choice) -> None:
    known.text += part.text
    known.finish_reason = part.finish_reason
    if known.logprobs is not None and part.logprobs is not None:
        for name, values in part.logprobs:
            getattr(known.logprobs, name).extend(values)


async def parts(
    predictors: Predictors, predictor: Predictor, request: CompletionRequest
) -> AsyncGenerator[Completion, None]:
    """The completions in parts, as they grow. The last part has the usage and no choices.

    Raises TooLargeError, InvalidTokensError, BusyError, TimeLimitError, NotFiniteOutputError, DamagedCheckpointError.
    """
    batcher, settings = predictors.batcher, predictors.settings
    with service_errors():
        choices = await batcher.prepare(lambda: _choices(predictor, request, settings))
    generations = [choice.generation for choice in choices if choice.generation is not None]
    header = Completion(id=f"cmpl-{uuid.uuid4().hex}", created=int(time.time()), model=predictor.run.run_id, choices=[])
    with batcher.admitted(_cost(request, choices)), service_errors():
        await _score_prompts(predictors, predictor, request, choices)
        async with aclosing(batcher.generate(generations, settings.max_seconds)) as progress:
            async for _ in progress:
                for generation in generations:
                    if generation.error is not None:
                        raise generation.error
                found = [choice.next_part(request, predictor.vocabulary) for choice in choices]
                if new := [part for part in found if part is not None]:
                    yield header.model_copy(update={"choices": new})
    prompted = sum(len(choice.prompt) for choice in choices) // request.n
    completed = sum(len(generation.tokens) for generation in generations)
    usage = Usage(prompt_tokens=prompted, completion_tokens=completed, total_tokens=prompted + completed)
    yield header.model_copy(update={"usage": usage})


def _choices(predictor: Predictor, request: CompletionRequest, settings: Settings) -> list[_Choice]:
    """The completions to make. Raises TokensError and TooLargeError."""
    from cope_sweep.inference import Generation, Sampling

    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    sampling = Sampling(
        max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=max(0, request.top_k),
        stop=tuple(stop),
        top=request.logprobs or 0,
    )
    choices: list[_Choice] = []
    for number, prompt in enumerate(request.prompts):
        tokens_T = _prompt_tokens(predictor, prompt, f"prompt {number}")
        if len(tokens_T) > settings.max_tokens:
            raise TooLargeError(f"prompt {number} has {len(tokens_T)} tokens; the limit is {settings.max_tokens}")
        if _scores_prompt(request):
            predictor.check_reach(len(tokens_T) - 1, f"prompt {number} of {len(tokens_T)} tokens")
        trained = predictor.trained(tokens_T)[1].tolist()
        for copy in range(request.n):
            # Each completion has its own random numbers, which do not depend on what else is asked for.
            seed = None if request.seed is None else (request.seed % (1 << 64), number, copy)
            generation = Generation(predictor, tokens_T, sampling, seed) if sampling.max_tokens else None
            choices.append(_Choice(len(choices), tokens_T.tolist(), trained, generation))
    cost = _cost(request, choices)
    if cost > settings.max_request_tokens:
        raise TooLargeError(
            f"{cost} tokens to read and generate; one request may have {settings.max_request_tokens}, so send several"
        )
    return choices


def _prompt_tokens(predictor: Predictor, prompt: str | list[int], name: str) -> np.ndarray:
    from cope_sweep.inference import TokensError, validate_token_ids

    if not isinstance(prompt, str):
        return validate_token_ids(prompt, predictor.vocabulary_size, name)
    tokens_T = predictor.vocabulary.encode(prompt)
    end_of_text = predictor.vocabulary.end_of_text
    if not len(tokens_T):
        if end_of_text is None:
            raise TokensError(f"{name} is empty; give at least one token")
        return validate_token_ids([end_of_text], predictor.vocabulary_size, name)
    return tokens_T


def _scores_prompt(request: CompletionRequest) -> bool:
    return request.echo and request.logprobs is not None


def _cost(request: CompletionRequest, choices: list[_Choice]) -> int:
    """Tokens to read and to generate."""
    scored = sum(len(choice.prompt) for choice in choices) // request.n if _scores_prompt(request) else 0
    return scored + sum(choice.generation.limit for choice in choices if choice.generation is not None)


async def _score_prompts(
    predictors: Predictors, predictor: Predictor, request: CompletionRequest, choices: list[_Choice]
) -> None:
    """Score the prompts, if the client asks for it, once for all their completions.

    The same pass gives the first generated token: a client that only scores prompts asks for one.
    """
    import numpy as np

    from cope_sweep.inference import Window

    if not _scores_prompt(request):
        return
    groups = [choices[first : first + request.n] for first in range(0, len(choices), request.n)]
    windows: dict[int, Window] = {}
    for number, group in enumerate(groups):
        first, prompt = group[0].generation, group[0].prompt
        # A generation that shortened its prompt starts from other tokens.
        read_last = first is not None and len(first.ids) == len(prompt)
        if read_last or len(prompt) > 1:
            windows[number] = Window(np.array(prompt), np.array(predictor.reading(prompt)), read_last=read_last)
    scored = await predictors.batcher.score(predictor, list(windows.values()), top=request.logprobs or 0)
    for number, scores in zip(windows, scored, strict=True):
        scores.check(predictor.run)
        for choice in groups[number]:
            choice.scores = scores if len(choice.prompt) > 1 else None
            if choice.generation is not None and scores.next_logits_V is not None:
                choice.generation.choose(scores.next_logits_V)
