"""Counting a word in the last sentence (Golovneva et al. 2024, section 3.2 and appendix A, where GPT-4 fails).

A context of two sentences and a word; the answer is how often the word occurs in the second sentence. Answers are
balanced: all numbers from 0 to `maximum` are equally likely for every word. With `maximum: 3`, where `.` ends a
sentence, `?` starts the query and `_` is padding:

    inputs    she saw the book . so alice put the cat by the fire . ? the _ _
    targets   .   .   .   .    . .  .     .   .   .   .  .   .    . . 2   . .

The corpus `composed` generates its sentences: each has a random number of random words, and the queried word occurs in
each a random number of times at random places. It reads no text and is the same on every machine.

Any other corpus is a text, and contexts are its consecutive sentences. Words are separated by blanks and punctuation,
and converted to lower case. Sentences end at `.`, `!` or `?` before a blank, and at blank lines. A word is queried only
if the text has examples of every answer for it. For the answer 0, the word occurs in an earlier sentence of the
context, as in the paper's question. A tenth of the sentences, chosen by hash, are last sentences in the test sets only.
Any sentence can be an earlier one.

The token of a word is a hash of it. So the vocabulary does not depend on the text, and a model can be queried about any
other text (`prompt`); words with the same token count as the same word.

Test sets: `in_dist`; `absent`, in which the word occurs in an earlier sentence and not in the last, as in all the
paper's questions; `longer`, with contexts of four sentences.

Shapes: N sequences, K sentences, W places for words in a sentence, T tokens.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from cope_sweep.errors import InvalidValue
from cope_sweep.tasks.base import IGNORED, Batch, GeneratedTask, Task
from cope_sweep.text import CorpusName, TextError, data_dir
from cope_sweep.text.reading import Files, read_document

_WORD = re.compile(r"\w+(?:['’]\w+)*")
_SENTENCE_BOUNDARY = re.compile(r"(?<=[.!?])[\"'”’»)\]]*\s+|\n\s*\n")
COMPOSED = "composed"
TEST_SHARE = 10
"""One in this many sentences can be a last sentence of the test sets; it is never one in training."""

Positive = Annotated[int, Field(ge=1, le=10**9)]


class LastSentence(GeneratedTask):
    """Count a word in the last sentence of a context, and ignore the other sentences."""

    TESTS: ClassVar[tuple[str, ...]] = ("in_dist", "absent", "longer")
    METRICS: ClassVar[tuple[str, ...]] = (*Task.METRICS, "majority_baseline_error")
    TRAINED: ClassVar[str] = "the number after the query, which is a separator and a word"
    NON_IDENTITY_FIELDS: ClassVar[tuple[str, ...]] = ("folder",)

    kind: Literal["last_sentence"] = "last_sentence"
    corpus: CorpusName = Field(
        default=COMPOSED, description="composed: generated sentences; any other name: your own text."
    )
    folder: str | None = Field(
        default=None,
        description="The text: a file, or a folder of `*.txt` files; null: $COPE_SWEEP_DATA/<corpus>. "
        "Not part of a run's identity.",
    )
    maximum: Positive = Field(default=3, description="Largest answer.")
    sentences: Annotated[int, Field(ge=2, le=10**9)] = Field(
        default=2, description="Sentences of a context, in training and in_dist."
    )
    longer_sentences: Annotated[int, Field(ge=2, le=10**9)] = Field(
        default=4, description="Sentences of a context in the OOD test set `longer`."
    )
    fewest_words: Positive = Field(
        default=4, description="Smallest number of words in a sentence; shorter ones are not used."
    )
    most_words: Positive = Field(
        default=24, description="Largest number of words in a sentence; longer ones are not used."
    )
    vocabulary: Positive = Field(
        default=1024, description="Number of token ids: answers, three separators, and words by hash."
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.corpus == COMPOSED and self.folder is not None:
            raise InvalidValue(
                f"task.folder is set, and the corpus {COMPOSED} reads no text; give your corpus a name, for example "
                "task.corpus=alice",
                key="task.corpus",
                value=COMPOSED,
            )
        if not self.maximum <= self.fewest_words <= self.most_words:
            raise InvalidValue(
                f"maximum = {self.maximum}, fewest_words = {self.fewest_words} and most_words = {self.most_words} "
                "must not decrease: a sentence must have room for `maximum` occurrences of the word",
                key="maximum",
                value=self.maximum,
                fewest_words=self.fewest_words,
                most_words=self.most_words,
            )
        if self.vocabulary < self._words + 2:
            raise InvalidValue(
                f"vocabulary = {self.vocabulary} has no room for two words; increase it to {self._words + 2} or more",
                key="vocabulary",
                value=self.vocabulary,
                smallest=self._words + 2,
            )
        return self

    @property
    def vocabulary_size(self) -> int:
        return self.vocabulary

    @property
    def end(self) -> int:
        """The token that ends a sentence. The next id starts the query, and the one after it is padding."""
        return self.maximum + 1

    @property
    def _words(self) -> int:
        """The first token id of words."""
        return self.maximum + 4

    def length(self, split: str) -> int:
        return self.context_sentences(split) * (self.most_words + 1) + 2

    def context_sentences(self, split: str) -> int:
        """Number of sentences in a context of this split."""
        return self.longer_sentences if split == "longer" else self.sentences

    def with_targets(self, tokens_NL: np.ndarray) -> Batch:
        inputs, following = tokens_NL[:, :-1], tokens_NL[:, 1:]
        answers = following <= self.maximum
        answers[:, :1] = False
        answers[:, 1:] &= inputs[:, :-1] == self.end + 1
        return Batch(inputs, np.where(answers, following, IGNORED), answers)

    def marks(self, tokens_NT: np.ndarray) -> dict[str, np.ndarray]:
        return {"end of sentence": tokens_NT == self.end, "word": tokens_NT >= self._words}

    def shortcuts(self, inputs_NT: np.ndarray) -> dict[str, np.ndarray]:
        query_N1 = (inputs_NT == self.end + 1).argmax(1)[:, None]
        word_N1 = np.take_along_axis(inputs_NT, query_N1 + 1, axis=1)
        is_word_NT = (inputs_NT == word_N1) & (np.arange(inputs_NT.shape[1]) < query_N1)
        return {"all sentences": np.minimum(is_word_NT.sum(1), self.maximum)}

    def token(self, word: str) -> int:
        """The token id of a word; case does not matter."""
        return self._words + zlib.crc32(word.lower().encode()) % (self.vocabulary - self._words)

    def prompt(self, text: str, word: str) -> list[int]:
        """The token ids of the query how often `word` occurs in the last sentence of `text`, for any text and word."""
        sentences = [[*map(self.token, words), self.end] for words in _sentences_of(text)]
        return [*(token for sentence in sentences for token in sentence), self.end + 1, self.token(word)]

    def prepare(self) -> None:
        if self.corpus != COMPOSED:
            self._read_questions()

    def fingerprint(self) -> str | None:
        return None if self.corpus == COMPOSED else Files(_files(self), one_document=False).digest()

    def _read_questions(self) -> _Questions:
        return _read_questions(self, data_dir())

    def generate(self, split: str, rng: np.random.Generator, count: int) -> Batch:
        answers_N = np.zeros(count, np.int64) if split == "absent" else rng.integers(0, self.maximum + 1, count)
        if self.corpus == COMPOSED:
            words_N = rng.integers(self._words, self.vocabulary, count)
            tokens_NL, lengths_N = self._compose(split, words_N, answers_N, rng)
        else:
            words_N, tokens_NL, lengths_N = self._read_questions().draw(split, answers_N, rng)

        every_N = np.arange(count)
        length = self.length(split)
        inputs_NT = np.full((count, length), self.end + 2, dtype=np.int64)
        inputs_NT[:, : length - 2] = np.where(np.arange(length - 2) < lengths_N[:, None], tokens_NL, self.end + 2)
        inputs_NT[every_N, lengths_N] = self.end + 1
        inputs_NT[every_N, lengths_N + 1] = words_N
        targets_NT = np.full_like(inputs_NT, IGNORED)
        targets_NT[every_N, lengths_N + 1] = answers_N
        return Batch(inputs_NT, targets_NT, targets_NT != IGNORED)

    def _compose(
        self, split: str, words_N: np.ndarray, answers_N: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Contexts of generated sentences, (N, T − 2), padded, and their lengths, (N,)."""
        shape_NK = (len(words_N), self.context_sentences(split))
        times_NK = rng.integers(0, self.maximum + 1, shape_NK)
        if split == "absent":
            times_NK[:, -2] = rng.integers(1, self.maximum + 1, len(words_N))
        times_NK[:, -1] = answers_N
        lengths_NK = rng.integers(self.fewest_words, self.most_words + 1, shape_NK)

        word_W = np.arange(self.most_words + 1)
        shape_NKW = (*shape_NK, self.most_words)
        others = self.vocabulary - self._words
        other_NKW = words_N[:, None, None] - self._words + rng.integers(1, others, shape_NKW)
        order_NKW = np.where(word_W[:-1] < lengths_NK[..., None], rng.random(shape_NKW), 2.0)
        chosen_NKW = order_NKW.argsort(axis=-1).argsort(axis=-1) < times_NK[..., None]

        tokens_NKW = np.full((*shape_NK, self.most_words + 1), self.end)
        tokens_NKW[..., :-1] = np.where(chosen_NKW, words_N[:, None, None], self._words + other_NKW % others)
        tokens_NKW[word_W == lengths_NK[..., None]] = self.end
        kept_NL = (word_W <= lengths_NK[..., None]).reshape(len(words_N), -1)
        # A stable sort by "not kept" moves the kept tokens to the front without changing their order.
        front_NL = np.argsort(~kept_NL, axis=1, kind="stable")
        return np.take_along_axis(tokens_NKW.reshape(len(words_N), -1), front_NL, axis=1), kept_NL.sum(1)


@dataclass(frozen=True)
class _Table:
    """The possible last sentences of each question. A question is a pair of a word and an answer."""

    sentences: np.ndarray
    """Indices of sentences, grouped by question; question = word · (maximum + 1) + answer."""
    first: np.ndarray
    """The start of each question's group, and the end of the last group."""

    def pick(self, question_N: np.ndarray, chance_N: np.ndarray) -> np.ndarray:
        """A sentence for each question, (N,): chosen by `chance_N` in [0, 1) from the question's group."""
        many_N = self.first[question_N + 1] - self.first[question_N]
        picked_N: np.ndarray = self.sentences[self.first[question_N] + (chance_N * many_N).astype(np.int64)]
        return picked_N


@dataclass(frozen=True)
class _Questions:
    """The sentences of a text, and the questions that they can answer."""

    task: LastSentence
    tokens: np.ndarray
    """The tokens of all sentences, each with its end."""
    first: np.ndarray
    """The start of each sentence in `tokens`, and the end of the last one."""
    tables: dict[str, _Table]
    queried: np.ndarray
    """The words that have examples of every answer in every table."""

    def draw(
        self, split: str, answers_N: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Words, (N,), contexts with these answers, (N, T − 2), and the lengths of the contexts, (N,)."""
        table = self.tables[split if split in self.tables else "in_dist"]  # absent, validation
        words_N = rng.choice(self.queried, len(answers_N))
        last_N = table.pick(words_N * (self.task.maximum + 1) + answers_N, rng.random(len(answers_N)))
        starts_N = self.first[last_N + 1 - self.task.context_sentences(split)]
        lengths_N = self.first[last_N + 1] - starts_N
        index_NL = starts_N[:, None] + np.arange(self.task.length(split) - 2)
        return words_N, self.tokens[np.minimum(index_NL, len(self.tokens) - 1)].astype(np.int64), lengths_N


@lru_cache(maxsize=2)
def _read_questions(task: LastSentence, data: Path) -> _Questions:
    """The questions of a text, read once per process. Raises TextError if it is unreadable or has no question."""
    tokens = array("i")
    first = [0]
    usable: list[bool] = []
    in_tests: list[bool] = []
    token = lru_cache(maxsize=None)(task.token)
    for path in _files(task):
        # The empty sentence after each file prevents contexts that span two files.
        for words in (*_sentences_of("".join(read_document([path]))), []):
            tokens.extend([*map(token, words), task.end])
            first.append(len(tokens))
            usable.append(task.fewest_words <= len(words) <= task.most_words)
            in_tests.append(zlib.crc32(" ".join(words).encode()) % TEST_SHARE == 0)
    tokens_A, first_A, usable_A, in_tests_A = np.array(tokens), np.array(first), np.array(usable), np.array(in_tests)
    tables = {
        split: _table(
            task, tokens_A, first_A, usable_A, in_tests_A == (split != "train"), task.context_sentences(split)
        )
        for split in ("train", "in_dist", "longer")
    }
    complete = [np.diff(t.first).reshape(task.vocabulary, -1).all(axis=1) for t in tables.values()]
    queried = np.flatnonzero(np.logical_and.reduce(complete))
    if not len(queried):
        raise TextError(
            f"the corpus {task.corpus!r} has {len(usable):,} sentences, and no word occurs 0, 1, … and {task.maximum} "
            f"times in sentences that can be the last of {task.sentences} and of {task.longer_sentences}, in training "
            "and in test; use a longer text, decrease task.maximum, or increase task.most_words",
            code="text_too_short",
            corpus=task.corpus,
            sentences=len(usable),
        )
    return _Questions(task, tokens_A.astype(np.min_scalar_type(task.vocabulary)), first_A, tables, queried)


def _table(
    task: LastSentence,
    tokens: np.ndarray,
    first: np.ndarray,
    usable: np.ndarray,
    may_be_last: np.ndarray,
    sentences: int,
) -> _Table:
    """The questions for contexts of `sentences` usable sentences whose last sentence is allowed by `may_be_last`."""
    before = np.concatenate(([0], usable.cumsum()))
    is_last = np.zeros(len(usable), dtype=bool)
    is_last[sentences - 1 :] = before[sentences:] - before[:-sentences] == sentences
    is_last &= may_be_last

    # A pair of a sentence and a word is numbered sentence · vocabulary + token.
    sentence_of = np.repeat(np.arange(len(usable)), np.diff(first))
    is_word = tokens != task.end
    pairs, times = np.unique(sentence_of[is_word] * task.vocabulary + tokens[is_word], return_counts=True)
    later = np.unique(np.concatenate([pairs + back * task.vocabulary for back in range(1, sentences)]))
    absent = np.setdiff1d(later[later < len(usable) * task.vocabulary], pairs, assume_unique=True)

    pairs = np.concatenate((absent, pairs[times <= task.maximum]))
    answers = np.concatenate((np.zeros_like(absent), times[times <= task.maximum]))
    last, word = np.divmod(pairs, task.vocabulary)
    kept = is_last[last]
    question = (word * (task.maximum + 1) + answers)[kept]
    counts = np.bincount(question, minlength=task.vocabulary * (task.maximum + 1))
    return _Table(last[kept][np.argsort(question, kind="stable")], np.concatenate(([0], counts.cumsum())))


def _files(task: LastSentence) -> tuple[Path, ...]:
    """The files of a text. Raises TextError if there are none, or if one is empty."""
    path = data_dir() / task.corpus if task.folder is None else Path(task.folder).expanduser()
    if task.folder is None and not path.is_dir():
        raise TextError(
            f"the corpus {task.corpus!r} has no file or folder; set task.folder, or put its files in "
            f"$COPE_SWEEP_DATA/{task.corpus}",
            code="no_corpus",
            corpus=task.corpus,
        )
    found = tuple(sorted(path.rglob("*.txt"))) if path.is_dir() else (path,)
    if not found:
        raise TextError(
            f"{path}: no `*.txt` file in this folder; set task.folder to a text file, or to a folder with "
            "`*.txt` files",
            code="no_such_file",
            file=str(path),
        )
    for file in found:
        if file.is_file() and not file.stat().st_size:
            raise TextError(
                f"{file}: empty; add text to it, or remove it from task.folder", code="empty_text", file=str(file)
            )
    return found


def _sentences_of(text: str) -> Iterator[list[str]]:
    """The words of each sentence, in lower case, without sentences that have no words."""
    for sentence in _SENTENCE_BOUNDARY.split(text):
        words = _WORD.findall(sentence.lower())
        if words:
            yield words
