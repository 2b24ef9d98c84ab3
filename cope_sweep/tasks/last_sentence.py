"""Counting a word in the last sentence (Golovneva et al. 2024, section 3.2 and appendix A: what GPT-4 got wrong).

A context of two sentences, and how often a word stands in the second. Answers are balanced: every number from 0 to
`maximum` is as likely, whatever the word. With `maximum: 3`, where `.` ends a sentence, `?` asks and `_` pads:

    inputs    she saw the book . so alice put the cat by the fire . ? the _ _
    targets   .   .   .   .    . .  .     .   .   .   .  .   .    . . 2   . .

The corpus `composed` makes its sentences: each of a random number of words, the asked one in each of them a random
number of times, at random places. There is nothing to read, and it is the same on every machine.

From a text come its own sentences, as they follow each other there: words are what is between blanks and marks, in
lower case; sentences end at `.`, `!` or `?` before a blank, and at blank lines. Asked are the words for which the text
has every answer. Where the answer is 0, the word stands in a sentence before: the paper's question. A tenth of the
sentences, by their hash, are asked about in the test sets only; any may come before the last.

A word's token is its hash, so the vocabulary is known before any text is, and a model can be asked about any other
text (`prompt`); words that share a token count as the same.

Test sets: `in_dist`; `absent`, where the word stands in a sentence before and not in the last, as in all the paper's
questions; `longer`, the last of four sentences.

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

from cope_sweep.tasks.base import IGNORED, Batch, Task
from cope_sweep.text import TextError, data_dir
from cope_sweep.text.reading import Files, read_document

_WORD = re.compile(r"\w+(?:['’]\w+)*")
_BETWEEN_SENTENCES = re.compile(r"(?<=[.!?])[\"'”’»)\]]*\s+|\n\s*\n")
COMPOSED = "composed"
TEST_SHARE = 10
"""One last sentence in so many is asked about in the test sets, and never in training."""

Positive = Annotated[int, Field(ge=1)]


class LastSentence(Task):
    """Count a word in the last of the context's sentences, whatever the others say."""

    TESTS: ClassVar[tuple[str, ...]] = ("in_dist", "absent", "longer")
    METRICS: ClassVar[tuple[str, ...]] = (*Task.METRICS, "majority_baseline_error")
    NON_IDENTITY_FIELDS: ClassVar[tuple[str, ...]] = ("folder",)

    kind: Literal["last_sentence"] = "last_sentence"
    corpus: str = Field(default=COMPOSED, description="composed: no text; another name: that of a text of your own.")
    folder: str | None = Field(
        default=None,
        description="Where the text is: a file, or a folder of `*.txt` files; null: $COPE_SWEEP_DATA/<corpus>. "
        "Not part of what a run is.",
    )
    maximum: Positive = Field(default=3, description="Largest answer.")
    sentences: Annotated[int, Field(ge=2)] = Field(default=2, description="In training and in-distribution.")
    longer_sentences: Annotated[int, Field(ge=2)] = Field(default=4, description="In the OOD test set.")
    fewest_words: Positive = Field(default=4, description="Of a sentence; no shorter one is used.")
    most_words: Positive = Field(default=24, description="Of a sentence; no longer one is used.")
    vocabulary: Positive = Field(
        default=1024, description="All tokens: answers, three marks, and words, by their hash."
    )

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.corpus == COMPOSED and self.folder is not None:
            raise ValueError(f"task.folder is of no use to {COMPOSED}: name your corpus, as task.corpus=alice")
        if not self.maximum <= self.fewest_words <= self.most_words:
            raise ValueError(
                f"maximum = {self.maximum}, fewest_words = {self.fewest_words} and most_words = {self.most_words} "
                "must not fall: a sentence has room for the word as often as it is asked for"
            )
        if self.vocabulary < self._words + 2:
            raise ValueError(f"vocabulary = {self.vocabulary} has no room for two words; it takes {self._words + 2}")
        return self

    @property
    def vocabulary_size(self) -> int:
        return self.vocabulary

    @property
    def end(self) -> int:
        """The token that ends a sentence; after it come that which asks, and that which pads."""
        return self.maximum + 1

    @property
    def _words(self) -> int:
        """The first word's token."""
        return self.maximum + 4

    def length(self, split: str) -> int:
        return self.context_sentences(split) * (self.most_words + 1) + 2

    def context_sentences(self, split: str) -> int:
        """Sentences in a context of this split."""
        return self.longer_sentences if split == "longer" else self.sentences

    def marks(self, tokens_NT: np.ndarray) -> dict[str, np.ndarray]:
        return {"end of sentence": tokens_NT == self.end, "word": tokens_NT >= self._words}

    def token(self, word: str) -> int:
        """A word's token id, whatever its case."""
        return self._words + zlib.crc32(word.lower().encode()) % (self.vocabulary - self._words)

    def prompt(self, text: str, word: str) -> list[int]:
        """The token ids that ask how often `word` stands in the last sentence of `text`; any text, any word."""
        sentences = [[*map(self.token, words), self.end] for words in _sentences_of(text)]
        return [*(token for sentence in sentences for token in sentence), self.end + 1, self.token(word)]

    def prepare(self) -> None:
        if self.corpus != COMPOSED:
            self._questions()

    def fingerprint(self) -> str | None:
        return None if self.corpus == COMPOSED else Files(_files(self), one_document=False).digest()

    def _questions(self) -> _Questions:
        return _questions(self, data_dir())

    def generate(self, split: str, rng: np.random.Generator, count: int) -> Batch:
        answers_N = np.zeros(count, np.int64) if split == "absent" else rng.integers(0, self.maximum + 1, count)
        if self.corpus == COMPOSED:
            words_N = rng.integers(self._words, self.vocabulary, count)
            tokens_NL, lengths_N = self._compose(split, words_N, answers_N, rng)
        else:
            words_N, tokens_NL, lengths_N = self._questions().draw(split, answers_N, rng)

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
        """Contexts of composed sentences, (N, T − 2), and their lengths."""
        shape_NK = (len(words_N), self.context_sentences(split))
        times_NK = rng.integers(0, self.maximum + 1, shape_NK)
        if split == "absent":
            times_NK[:, -2] = rng.integers(1, self.maximum + 1, len(words_N))
        times_NK[:, -1] = answers_N
        lengths_NK = rng.integers(self.fewest_words, self.most_words + 1, shape_NK)

        place_W = np.arange(self.most_words + 1)
        shape_NKW = (*shape_NK, self.most_words)
        others = self.vocabulary - self._words
        other_NKW = words_N[:, None, None] - self._words + rng.integers(1, others, shape_NKW)
        order_NKW = np.where(place_W[:-1] < lengths_NK[..., None], rng.random(shape_NKW), 2.0)
        chosen_NKW = order_NKW.argsort(axis=-1).argsort(axis=-1) < times_NK[..., None]

        tokens_NKW = np.full((*shape_NK, self.most_words + 1), self.end)
        tokens_NKW[..., :-1] = np.where(chosen_NKW, words_N[:, None, None], self._words + other_NKW % others)
        tokens_NKW[place_W == lengths_NK[..., None]] = self.end
        kept_NL = (place_W <= lengths_NK[..., None]).reshape(len(words_N), -1)
        # A stable sort by "left out" moves what is kept to the front, in its order.
        front_NL = np.argsort(~kept_NL, axis=1, kind="stable")
        return np.take_along_axis(tokens_NKW.reshape(len(words_N), -1), front_NL, axis=1), kept_NL.sum(1)


@dataclass(frozen=True)
class _Table:
    """The sentences that can come last, for each question: a word and an answer."""

    sentences: np.ndarray
    """Their indices, one question's after the other's; question = word · (maximum + 1) + answer."""
    first: np.ndarray
    """Where each question's begin, and after the last one's where they end."""

    def pick(self, question_N: np.ndarray, chance_N: np.ndarray) -> np.ndarray:
        """One of each question's sentences, each as likely."""
        many_N = self.first[question_N + 1] - self.first[question_N]
        picked_N: np.ndarray = self.sentences[self.first[question_N] + (chance_N * many_N).astype(np.int64)]
        return picked_N


@dataclass(frozen=True)
class _Questions:
    """A text's sentences, and what can be asked of them."""

    task: LastSentence
    tokens: np.ndarray
    """All sentences', each with its end."""
    first: np.ndarray
    """Where each sentence begins, and after the last one where it ends."""
    tables: dict[str, _Table]
    asked: np.ndarray
    """The words for which each table has every answer."""

    def draw(
        self, split: str, answers_N: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Words that have these answers, contexts (N, T − 2) that give them, and the contexts' lengths."""
        table = self.tables["in_dist" if split == "absent" else split]
        words_N = rng.choice(self.asked, len(answers_N))
        last_N = table.pick(words_N * (self.task.maximum + 1) + answers_N, rng.random(len(answers_N)))
        starts_N = self.first[last_N + 1 - self.task.context_sentences(split)]
        lengths_N = self.first[last_N + 1] - starts_N
        places_NL = starts_N[:, None] + np.arange(self.task.length(split) - 2)
        return words_N, self.tokens[np.minimum(places_NL, len(self.tokens) - 1)].astype(np.int64), lengths_N


@lru_cache(maxsize=2)
def _questions(task: LastSentence, data: Path) -> _Questions:
    """What a text can be asked, read once per process. Raises TextError where it cannot be, or has no question."""
    tokens = array("i")
    first = [0]
    usable: list[bool] = []
    tested: list[bool] = []
    token = lru_cache(maxsize=None)(task.token)
    for path in _files(task):
        # The sentence of no words after each file keeps contexts within it.
        for words in (*_sentences_of("".join(read_document([path]))), []):
            tokens.extend([*map(token, words), task.end])
            first.append(len(tokens))
            usable.append(task.fewest_words <= len(words) <= task.most_words)
            tested.append(zlib.crc32(" ".join(words).encode()) % TEST_SHARE == 0)
    tokens_A, first_A, usable_A, tested_A = np.array(tokens), np.array(first), np.array(usable), np.array(tested)
    tables = {
        split: _table(task, tokens_A, first_A, usable_A, tested_A == (split != "train"), task.context_sentences(split))
        for split in ("train", "in_dist", "longer")
    }
    complete = [np.diff(t.first).reshape(task.vocabulary, -1).all(axis=1) for t in tables.values()]
    asked = np.flatnonzero(np.logical_and.reduce(complete))
    if not len(asked):
        raise TextError(
            f"the corpus {task.corpus!r}: among its {len(usable):,} sentences, no word stands 0, 1, … and "
            f"{task.maximum} times in some that can come last of {task.sentences} or {task.longer_sentences}, in "
            "training and in test; give a longer text, lower task.maximum, or raise task.most_words"
        )
    return _Questions(task, tokens_A.astype(np.min_scalar_type(task.vocabulary)), first_A, tables, asked)


def _table(
    task: LastSentence, tokens: np.ndarray, first: np.ndarray, usable: np.ndarray, asks: np.ndarray, sentences: int
) -> _Table:
    """The questions to contexts of so many usable sentences, the last of them one that `asks` allows."""
    before = np.concatenate(([0], usable.cumsum()))
    is_last = np.zeros(len(usable), dtype=bool)
    is_last[sentences - 1 :] = before[sentences:] - before[:-sentences] == sentences
    is_last &= asks

    # A pair is a word in a sentence: sentence · vocabulary + token.
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
    """The files of a text. Raises TextError where there are none, or one has nothing in it."""
    place = data_dir() / task.corpus if task.folder is None else Path(task.folder).expanduser()
    if task.folder is None and not place.is_dir():
        raise TextError(
            f"the corpus {task.corpus!r} comes from a file or a folder: set task.folder, "
            f"or put it in $COPE_SWEEP_DATA/{task.corpus}"
        )
    found = tuple(sorted(place.rglob("*.txt"))) if place.is_dir() else (place,)
    if not found:
        raise TextError(f"{place}: no `*.txt` file in this folder; name a file, or a folder that has some")
    for path in found:
        if path.is_file() and not path.stat().st_size:
            raise TextError(f"{path}: empty; put text in it, or take it out of task.folder")
    return found


def _sentences_of(text: str) -> Iterator[list[str]]:
    """The words of each sentence, in lower case; sentences without any are left out."""
    for sentence in _BETWEEN_SENTENCES.split(text):
        words = _WORD.findall(sentence.lower())
        if words:
            yield words
