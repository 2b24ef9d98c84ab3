"""A checkpoint's model, with all that is asked of it. The package's description is in `__init__`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from cope_sweep.config import RunSpec
from cope_sweep.errors import NotFiniteError, TokensError
from cope_sweep.inference.scoring import (
    Perplexity,
    Scores,
    TextPerplexity,
    Window,
    score,
    windows,
)
from cope_sweep.inference.vocabulary import (
    LabelVocabulary,
    TextVocabulary,
    TokenIds,
    Vocabulary,
    validate_sequence,
)
from cope_sweep.model import CheckpointError, Transformer, check_reach, load_model
from cope_sweep.tasks import IGNORED, Task
from cope_sweep.text import TOKENIZER_FILE, TextError, TextTokenizer


class Predictor:
    """A trained model that scores token ids, and texts if it was trained on text. It is thread-safe."""

    def __init__(self, model: Transformer, run: RunSpec, tokenizer_json: Path | None = None) -> None:
        """`model` is the model of `run`, in evaluation mode; `tokenizer_json` is the file of its tokenizer."""
        self.model = model
        self.run = run
        self._tokenizer_json = tokenizer_json
        self._reach = 0
        """Tokens in a row that every encoding is known to have positions for."""

    @classmethod
    def load(cls, folder: Path | str, device: str = "auto") -> Predictor:
        """Load a checkpoint folder. Device `auto` is CUDA if available, else the CPU.

        Raises CheckpointError for a checkpoint that is damaged or does not fit this version of the code, and its
        subclass NotFiniteError for weights that are not numbers.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        model, run = load_model(Path(folder), device)
        for name, parameter in model.named_parameters():
            if not parameter.isfinite().all():
                raise NotFiniteError(
                    f"run {run.run_id}: the weights {name} contain NaN or infinite values; the training diverged, or "
                    "the file is damaged",
                    run_id=run.run_id,
                    weights=name,
                )
        return cls(model, run, tokenizer_json=Path(folder) / TOKENIZER_FILE)

    def untrained(self) -> Predictor:
        """The same model with the weights with which its training started."""
        model = Transformer(self.run).to(self.model.embedding.weight.device).eval()
        return Predictor(model, self.run, self._tokenizer_json)

    @property
    def vocabulary_size(self) -> int:
        """Token ids are 0 … vocabulary_size − 1."""
        return self.model.vocabulary_size

    @property
    def context(self) -> int:
        """Tokens in the longest sequence of the training task; a whole window has one more, which is only predicted."""
        return self.run.task.context

    def window(self, context: int | None, stride: int | None, *, is_text: bool) -> int | None:
        """Tokens of a window if somebody asks for `context` and `stride`; None: whole sequences.

        Without a context, texts are read in windows as in training, and so are token ids with a stride.
        """
        return context or (self.context if is_text or stride else None)

    @cached_property
    def longest_read(self) -> int:
        """Tokens that the model reads at most when it generates: one more than the context, if each encoding can."""
        try:
            check_reach(self.run, self.context + 1)
        except ValueError:
            return self.context
        return self.context + 1

    @property
    def size_bytes(self) -> int:
        """Size of the weights in memory; a tied weight counts once."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @cached_property
    def reads_text(self) -> bool:
        """The checkpoint has a tokenizer."""
        return self._tokenizer_json is not None and self._tokenizer_json.exists()

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the training data.

        Raises CheckpointError for a checkpoint without one, or with one that does not fit the model.
        """
        path = self._tokenizer_json
        if path is None or not self.reads_text:
            raise CheckpointError(
                f"run {self.run.run_id} has no {TOKENIZER_FILE} beside its model: the task {self.run.task.kind} "
                "does not use text; give token ids instead",
                code="no_tokenizer",
                run_id=self.run.run_id,
                task=self.run.task.kind,
            )
        try:
            tokenizer = TextTokenizer.load(path)
        except TextError as error:
            raise CheckpointError(str(error), code=error.code, **error.data) from error
        if tokenizer.ids > self.vocabulary_size:
            raise CheckpointError(
                f"{path}: the tokenizer has {tokenizer.ids:,} ids, but the vocabulary of run {self.run.run_id} has "
                f"{self.vocabulary_size:,}; it is the tokenizer of another model",
                code="vocabulary_too_small",
                file=str(path),
                ids=tokenizer.ids,
                vocabulary=self.vocabulary_size,
                run_id=self.run.run_id,
            )
        return tokenizer

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The text of token ids: the tokenizer's, or the labels of the task. Raises CheckpointError."""
        return TextVocabulary(self.tokenizer) if self.reads_text else LabelVocabulary(self.run)

    def reading(self, ids: list[int]) -> list[int]:
        """The model's input in the places of token ids: themselves, but for a task that trains on others."""
        if type(self.run.task).with_targets is Task.with_targets:
            return ids
        inputs: list[int] = self.trained(np.array(ids))[0].tolist()
        return inputs

    def text_tokens(self, text: str) -> np.ndarray:
        """The ids of a text with the end-of-text token before them, so that every token of the text is scored.

        Raises TokensError for an empty text; CheckpointError as `tokenizer`.
        """
        if not text:
            raise TokensError("the text is empty; give at least one character", code="empty_text")
        return np.concatenate(([self.tokenizer.end_of_text], TextVocabulary(self.tokenizer).encode(text)))

    def encode(self, text: str) -> np.ndarray:
        """As `text_tokens`; of a model without a tokenizer, the ids of labels of its task's tokens: `_ 3 _ 7 > 3 7`.

        Raises TokensError, also for what is no label; CheckpointError.
        """
        return self.text_tokens(text) if self.reads_text else self.vocabulary.encode(text)

    def text_units(self, tokens_T: np.ndarray) -> tuple[int, int]:
        """Words and bytes of the tokens of a text, without the first token, as `text_tokens` returns them."""
        units = self.tokenizer.units(tokens_T[None, :-1], tokens_T[None, 1:], np.ones((1, len(tokens_T) - 1), bool))
        return int(units["words"][0]), int(units["bytes"][0])

    def text_perplexity(self, text: str, *, context: int | None = None, stride: int | None = None) -> TextPerplexity:
        """Perplexity of a text of any length, in windows as in the task's test sets (`Task.windows`).

        Args:
            text: The text.
            context: Tokens of a window. None: as many as in training.
            stride: Tokens from the start of a window to the start of the next, 1 … `context`. None: `context`, which
                makes the windows disjoint.

        Raises TokensError for an empty text, for a stride out of range, and for a context longer than an encoding
        supports; CheckpointError as `tokenizer`.
        """
        tokens_T = self.text_tokens(text)
        return TextPerplexity.per_unit(
            self.perplexity([tokens_T], context=context or self.context, stride=stride), *self.text_units(tokens_T)
        )

    def perplexity(
        self, token_ids: Sequence[TokenIds], *, context: int | None = None, stride: int | None = None
    ) -> Perplexity:
        """Perplexity of what the task trains in all sequences together, which contain the answers.

        Each is read as a whole, or in windows as by `text_perplexity`.

        Args:
            token_ids: The sequences, each of shape (T,).
            context: Tokens of a window. None: the whole sequence, or with a `stride` as many as in training.
            stride: Tokens from the start of a window to the start of the next, 1 … `context`. None: `context`.

        Raises, like `log_probabilities`; TokensError for a stride out of range, and for a sequence without a token
        that the task trains.
        """
        sequences = []
        for index, ids in enumerate(token_ids):
            tokens_T = validate_sequence(ids, self.vocabulary_size, f"sequence {index}")
            inputs_T, trained_T = self.trained(tokens_T)
            self.check_trained(trained_T, f"sequence {index}")
            width = self.window(context, stride, is_text=False) or len(tokens_T) - 1
            sequences.append((trained_T, list(windows(tokens_T, width, stride or width, inputs_T))))
        scored = self.score_windows(window for _, parts in sequences for window in parts)
        entries = []
        for trained_T, parts in sequences:
            log_p_T = np.concatenate([[np.nan], *(next(scored).log_probabilities_N for _ in parts)])
            entries.append(np.where(trained_T, log_p_T, np.nan))
        return Perplexity.of(entries)

    def trained(self, tokens_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The model's input in the places of tokens, (T,), and whether the task trains each token, bool (T,)."""
        # A task makes one input less than it gets tokens. The 0 is only the target of the last one, which is dropped.
        batch = self.run.task.with_targets(np.append(tokens_T, 0)[None])
        return batch.inputs_NT[0], np.concatenate(([False], batch.targets_NT[0, :-1] != IGNORED))

    def check_trained(self, trained_T: np.ndarray, name: str) -> None:
        """Raise TokensError for a sequence without any token that the task trains."""
        if not trained_T.any():
            task = self.run.task
            raise TokensError(
                f"{name} has no token that is scored: the task {task.kind} trains only {task.TRAINED}; add the answer "
                "that the model should give",
                code="nothing_scored",
                sequence=name,
                task=task.kind,
            )

    def log_probabilities(self, token_ids: Sequence[TokenIds]) -> list[np.ndarray]:
        """The log-probabilities of each sequence in nats, float64 of shape (T,).

        Entry t is log p(token t | tokens < t); entry 0 is NaN. The model reads the tokens as they are, and all are
        scored, those too that the task does not train.

        Raises TokensError (a ValueError) for a sequence of fewer than two tokens, for an entry that is not a token id
        of this model, and for a sequence longer than an encoding supports; NotFiniteError where the model's outputs
        are not numbers.
        """
        sequences = [
            validate_sequence(ids, self.vocabulary_size, f"sequence {index}") for index, ids in enumerate(token_ids)
        ]
        if not sequences:
            raise TokensError("there is no sequence; give at least one", code="no_sequence")
        longest = max(range(len(sequences)), key=lambda index: len(sequences[index]))
        self.check_reach(len(sequences[longest]) - 1, f"sequence {longest} of {len(sequences[longest])} tokens")
        scored = score(self.model, self.run, [Window(sequence) for sequence in sequences])
        return [np.concatenate(([np.nan], scores.check(self.run).log_probabilities_N)) for scores in scored]

    def score_windows(self, all_windows: Iterable[Window]) -> Iterator[Scores]:
        """The scores of windows, computed some at a time. Raises TokensError and NotFiniteError."""
        iterator = iter(all_windows)
        # Enough for full batches of similar lengths, without all windows of a long text in memory.
        while some := list(islice(iterator, 64)):
            longest = max(window.reads for window in some)
            self.check_reach(longest, f"a window of {longest + 1} tokens")
            for scores in score(self.model, self.run, some):
                yield scores.check(self.run)

    def check_reach(self, reads: int, name: str) -> None:
        """Raise TokensError where an encoding has no position for so many tokens in a row."""
        if reads <= self._reach:
            return
        try:
            check_reach(self.run, reads)
        except ValueError as error:
            raise TokensError(
                f"{name} is too long (the model reads all but the last): {error}", code="too_long", sequence=name
            ) from error
        self._reach = max(reads, self._reach)
