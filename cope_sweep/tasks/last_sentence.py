"""Counting a word in the last sentence (Golovneva et al. 2024, section 3.2 and appendix A, where GPT-4 fails).

A context of two sentences and a word; the answer is how often the word occurs in the second sentence. Answers are
balanced: all numbers from 0 to `maximum` are equally likely for every word. With `maximum: 3`, where `.` ends a
sentence, `?` starts the query and `_` is padding:

    inputs    she saw the book . so alice put the cat by the fire . ? the _ _
    targets   .   .   .   .    . .  .     .   .   .   .  .   .    . . 2   . .

With `queries: 2`, every context is asked for two different words, and both answers are trained. Padding stands between
the queries, instead of the answers:

    inputs    she saw the book . so alice put the cat by the fire . ? the _ ? cat _
    targets   .   .   .   .    . .  .     .   .   .   .  .   .    . . 2   . . 1   .

The corpus `composed` generates its sentences: each has a random number of random words, and each queried word occurs in
each a random number of times at random places. It reads no text and is the same on every machine.

Any other corpus is a text, and contexts are its consecutive sentences. Words are separated by blanks and punctuation,
and converted to lower case. Sentences end at `.`, `!` or `?` before a blank, and at blank lines. A word is queried only
if the text has examples of every answer for it. For the answer 0, the word occurs in an earlier sentence of the
context, as in the paper's question. A tenth of the sentences, chosen by hash, are last sentences in the test sets only,
and another tenth in the validation set only. Any sentence can be an earlier one.

The token of a word is a hash of it. So the vocabulary does not depend on the text, and a model can be queried about any
other text (`prompt`); words with the same token count as the same word.

Test sets: `in_dist`; `absent`, in which the word occurs in an earlier sentence and not in the last, as in all the
paper's questions; `longer`, with contexts of four sentences.

Shapes: N sequences, K sentences, W places for words in a sentence, Q queries, T tokens.
"""

from __future__ import annotations

import re
import unicodedata
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
from cope_sweep.frozen import Positive
from cope_sweep.tasks.base import IGNORED, VALIDATION, Batch, GeneratedTask, NamedContent, Task, next_name
from cope_sweep.text import CorpusName, TextError, data_dir
from cope_sweep.text.reading import Files
from cope_sweep.text.sources import read_document

_SENTENCE_BOUNDARY = re.compile(r"(?<=[.!?])[\"'”’»)\]]*\s+|\n\s*\n")
COMPOSED = "composed"


class LastSentence(GeneratedTask):
    """Count a word in the last sentence of a context, and ignore the other sentences."""

    TESTS: ClassVar[tuple[str, ...]] = ("in_dist", "absent", "longer")
    METRICS: ClassVar[tuple[str, ...]] = (*Task.METRICS, "majority_baseline_error")
    TRAINED: ClassVar[str] = "the number after a query, which is a separator and a word"
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
    queries: Positive = Field(
        default=1,
        description="Queries of each context, for different words. More than one needs the corpus composed, and "
        "sentences with room for `maximum` occurrences of each word.",
    )
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
        if self.corpus != COMPOSED and self.queries > 1:
            raise InvalidValue(
                f"queries = {self.queries}, and a text has no sentences for all answers of several words; set "
                f"task.corpus={COMPOSED} or task.queries=1",
                key="queries",
                value=self.queries,
                corpus=self.corpus,
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
        occurrences = self.queries * self.maximum
        if occurrences > self.fewest_words:
            raise InvalidValue(
                f"a sentence of fewest_words = {self.fewest_words} has no room for maximum = {self.maximum} "
                f"occurrences of {self.queries} words; increase fewest_words to {occurrences}, or decrease queries",
                key="queries",
                value=self.queries,
                fewest_words=self.fewest_words,
                smallest=occurrences,
            )
        smallest = self._words + self.queries + 1
        if self.vocabulary < smallest:
            raise InvalidValue(
                f"vocabulary = {self.vocabulary} has no room for {self.queries + 1} words; increase it to {smallest} "
                "or more",
                key="vocabulary",
                value=self.vocabulary,
                smallest=smallest,
            )
        return self

    def version(self) -> int:
        """3 for a text: in version 1 the last sentences of the validation set were those of the test sets, and until
        version 2 combining marks ended words.
        """
        return self.VERSION if self.corpus == COMPOSED else 3

    @property
    def vocabulary_size(self) -> int:
        return self.vocabulary

    @property
    def end(self) -> int:
        """The token that ends a sentence. The next id starts the query, and the one after it is padding."""
        return self.maximum + 1

    @property
    def _words(self) -> int:
        return self.maximum + 4

    def length(self, split: str) -> int:
        return self.context_tokens(split) + 3 * self.queries - 1

    def context_tokens(self, split: str) -> int:
        """Number of tokens in the longest context of this split."""
        return self.context_sentences(split) * (self.most_words + 1)

    def context_sentences(self, split: str) -> int:
        """Number of sentences in a context of this split."""
        return self.longer_sentences if split == "longer" else self.sentences

    def with_targets(self, tokens_NL: np.ndarray) -> Batch:
        inputs, following = tokens_NL[:, :-1], tokens_NL[:, 1:]
        answers = following <= self.maximum
        answers[:, :1] = False
        answers[:, 1:] &= inputs[:, :-1] == self.end + 1
        inputs = inputs.copy()
        inputs[:, 1:][answers[:, :-1]] = self.end + 2
        return Batch(inputs, np.where(answers, following, IGNORED), answers)

    def marks(self, tokens_NT: np.ndarray) -> dict[str, np.ndarray]:
        return {"end of sentence": tokens_NT == self.end, "word": tokens_NT >= self._words}

    def shortcuts(self, inputs_NT: np.ndarray) -> dict[str, np.ndarray]:
        is_query_NT = inputs_NT == self.end + 1
        is_context_NT = np.arange(inputs_NT.shape[1]) < is_query_NT.argmax(1)[:, None]
        sequence_X, place_X = is_query_NT.nonzero()  # X queries
        word_X = inputs_NT[sequence_X, place_X + 1]
        times_X = ((inputs_NT[sequence_X] == word_X[:, None]) & is_context_NT[sequence_X]).sum(1)
        answers_NT = np.zeros_like(inputs_NT)
        answers_NT[sequence_X, place_X + 1] = np.minimum(times_X, self.maximum)
        return {"all sentences": answers_NT}

    def token(self, word: str) -> int:
        """The token id of a word; case does not matter."""
        return self._words + zlib.crc32(_normalized(word).encode()) % (self.vocabulary - self._words)

    def prompt(self, text: str, word: str) -> list[int]:
        """The token ids of the query how often `word` occurs in the last sentence of `text`, for any text and word."""
        sentences = [[*map(self.token, words), self.end] for words in _sentences_of(text)]
        return [*(token for sentence in sentences for token in sentence), self.end + 1, self.token(word)]

    def prepare(self) -> None:
        if self.corpus != COMPOSED and self._read_questions().fingerprint != self.fingerprint():
            _read_questions.cache_clear()  # the text has changed since this process read it
            self._read_questions()

    def fingerprint(self) -> str | None:
        return None if self.corpus == COMPOSED else Files(_files(self), one_document=False).digest()

    def named_content(self) -> dict[str, NamedContent]:
        if self.corpus == COMPOSED:
            return {}
        path = str(_place(self))
        renamed = {"corpus": next_name(self.corpus)} | ({} if self.folder else {"folder": path})
        return {"data": NamedContent(path, renamed)}

    def _read_questions(self) -> _Questions:
        return _read_questions(self, data_dir())

    def generate(self, split: str, rng: np.random.Generator, count: int) -> Batch:
        shape_NQ = (count, self.queries)
        answers_NQ = np.zeros(shape_NQ, np.int64) if split == "absent" else rng.integers(0, self.maximum + 1, shape_NQ)
        if self.corpus == COMPOSED:
            words_NQ, tokens_NL, lengths_N = self._compose(split, answers_NQ, rng)
        else:
            words_N, tokens_NL, lengths_N = self._read_questions().draw(split, answers_NQ[:, 0], rng)
            words_NQ = words_N[:, None]

        every_N1, length, context = np.arange(count)[:, None], self.length(split), self.context_tokens(split)
        inputs_NT = np.full((count, length), self.end + 2, dtype=np.int64)
        inputs_NT[:, :context] = np.where(np.arange(context) < lengths_N[:, None], tokens_NL, self.end + 2)
        query_NQ = lengths_N[:, None] + 3 * np.arange(self.queries)
        inputs_NT[every_N1, query_NQ] = self.end + 1
        inputs_NT[every_N1, query_NQ + 1] = words_NQ
        targets_NT = np.full_like(inputs_NT, IGNORED)
        targets_NT[every_N1, query_NQ + 1] = answers_NQ
        return Batch(inputs_NT, targets_NT, targets_NT != IGNORED)

    def _compose(
        self, split: str, answers_NQ: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queried words, (N, Q), contexts of generated sentences, padded, (N, L), and their lengths, (N,)."""
        count, queries = answers_NQ.shape
        kinds = self.vocabulary - self._words
        # The other words are numbered from the first queried one, around.
        first_N1 = rng.integers(0, kinds, (count, 1))
        queried_NQ = np.zeros((count, queries), np.int64)
        for query in range(1, queries):
            drawn_N1 = rng.integers(0, kinds - query, (count, 1))
            queried_NQ[:, query] = _without(queried_NQ[:, :query], drawn_N1)[:, 0]

        shape_NK = (count, self.context_sentences(split))
        times_NKQ = rng.integers(0, self.maximum + 1, (*shape_NK, queries))
        if split == "absent":
            times_NKQ[:, -2] = rng.integers(1, self.maximum + 1, (count, queries))
        times_NKQ[:, -1] = answers_NQ
        lengths_NK = rng.integers(self.fewest_words, self.most_words + 1, shape_NK)

        word_W = np.arange(self.most_words + 1)
        shape_NKW = (*shape_NK, self.most_words)
        drawn_NKW = rng.integers(queries, kinds, shape_NKW) - queries
        words_NX = _without(queried_NQ, drawn_NKW.reshape(count, -1))
        # Other numbers are below 1, so places behind the end of a sentence come last.
        order_NKW = np.where(word_W[:-1] < lengths_NK[..., None], rng.random(shape_NKW), 2.0)
        rank_NKW = order_NKW.argsort(axis=-1).argsort(axis=-1)
        # The words with the first ranks become the first queried one, the next ones the second.
        ends_NKQ = times_NKQ.cumsum(-1)
        which_NX = (rank_NKW[..., None] >= ends_NKQ[:, :, None, :]).sum(-1).reshape(count, -1)
        chosen_NX = np.take_along_axis(queried_NQ, np.minimum(which_NX, queries - 1), axis=1)
        words_NX = np.where(which_NX < queries, chosen_NX, words_NX)

        def token(words: np.ndarray) -> np.ndarray:
            tokens: np.ndarray = self._words + (first_N1 + words) % kinds
            return tokens

        tokens_NKW = np.full((*shape_NK, self.most_words + 1), self.end)
        tokens_NKW[..., :-1] = token(words_NX).reshape(shape_NKW)
        tokens_NKW[word_W == lengths_NK[..., None]] = self.end
        kept_NL = (word_W <= lengths_NK[..., None]).reshape(count, -1)
        # A stable sort by "not kept" moves the kept tokens to the front without changing their order.
        front_NL = np.argsort(~kept_NL, axis=1, kind="stable")
        return token(queried_NQ), np.take_along_axis(tokens_NKW.reshape(count, -1), front_NL, axis=1), kept_NL.sum(1)


def _without(taken_NQ: np.ndarray, drawn_NX: np.ndarray) -> np.ndarray:
    """The x-th number that is not taken, for each drawn x, (N, X): 0 → the smallest, 1 → the next."""
    number_NX = drawn_NX.copy()
    for taken_N in np.sort(taken_NQ, axis=1).T:
        number_NX += number_NX >= taken_N[:, None]
    return number_NX


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
    fingerprint: str | None
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
        """Words, (N,), contexts with these answers, (N, L), and the lengths of the contexts, (N,)."""
        table = self.tables["in_dist" if split == "absent" else split]
        words_N = rng.choice(self.queried, len(answers_N))
        last_N = table.pick(words_N * (self.task.maximum + 1) + answers_N, rng.random(len(answers_N)))
        starts_N = self.first[last_N + 1 - self.task.context_sentences(split)]
        lengths_N = self.first[last_N + 1] - starts_N
        index_NL = starts_N[:, None] + np.arange(self.task.context_tokens(split))
        # What is behind the end of a context, or of the text, is padding to the caller.
        return words_N, self.tokens[np.minimum(index_NL, len(self.tokens) - 1)].astype(np.int64), lengths_N


@lru_cache(maxsize=2)
def _read_questions(task: LastSentence, data: Path) -> _Questions:
    """The questions of a text, read once per process. Raises TextError if it is unreadable or has no question."""
    fingerprint = task.fingerprint()
    tokens = array("i")
    first = [0]
    usable: list[bool] = []
    parts: list[int] = []
    # A text repeats its words: each is hashed once.
    token = lru_cache(maxsize=None)(task.token)
    for path in _files(task):
        # The empty sentence after each file prevents contexts that span two files.
        for words in (*_sentences_of("".join(read_document([path]))), []):
            tokens.extend([*map(token, words), task.end])
            first.append(len(tokens))
            usable.append(task.fewest_words <= len(words) <= task.most_words)
            # Of ten parts, part 0 can be last in test sets only, and part 1 in the validation set only. By hash, so
            # copies of a sentence are alike.
            parts.append(zlib.crc32(" ".join(words).encode()) % 10)
    tokens_A, first_A, usable_A, parts_A = np.array(tokens), np.array(first), np.array(usable), np.array(parts)
    may_be_last = {"train": parts_A > 1, VALIDATION: parts_A == 1, "in_dist": parts_A == 0, "longer": parts_A == 0}
    tables = {
        split: _table(task, tokens_A, first_A, usable_A, of_split_A, task.context_sentences(split))
        for split, of_split_A in may_be_last.items()
    }
    complete = [np.diff(t.first).reshape(task.vocabulary, -1).all(axis=1) for t in tables.values()]
    queried = np.flatnonzero(np.logical_and.reduce(complete))
    if not len(queried):
        raise TextError(
            f"the corpus {task.corpus!r} has {len(usable):,} sentences, and no word occurs 0, 1, … and {task.maximum} "
            f"times in sentences that can be the last of {task.sentences} and of {task.longer_sentences}, in training, "
            "in validation and in test; use a longer text, decrease task.maximum, or increase task.most_words",
            code="text_too_short",
            corpus=task.corpus,
            sentences=len(usable),
        )
    tokens_A = tokens_A.astype(np.min_scalar_type(task.vocabulary))
    return _Questions(task, fingerprint, tokens_A, first_A, tables, queried)


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
    usable_words = is_last[last]
    question = (word * (task.maximum + 1) + answers)[usable_words]
    counts = np.bincount(question, minlength=task.vocabulary * (task.maximum + 1))
    return _Table(last[usable_words][np.argsort(question, kind="stable")], np.concatenate(([0], counts.cumsum())))


def _place(task: LastSentence) -> Path:
    return data_dir() / task.corpus if task.folder is None else Path(task.folder).expanduser()


def _files(task: LastSentence) -> tuple[Path, ...]:
    """The files of a text. Raises TextError if there are none, or if one is empty."""
    path = _place(task)
    if task.folder is None and not path.is_dir():
        raise TextError(
            f"the corpus {task.corpus!r} has no file or folder; set task.folder, or put its files in "
            f"$COPE_SWEEP_DATA/{task.corpus}",
            code="no_corpus",
            corpus=task.corpus,
        )
    text_files = tuple(sorted(path.rglob("*.txt"))) if path.is_dir() else (path,)
    if not text_files:
        raise TextError(
            f"{path}: no `*.txt` file in this folder; set task.folder to a text file, or to a folder with "
            "`*.txt` files",
            code="no_such_file",
            file=str(path),
        )
    for file in text_files:
        if file.is_file() and not file.stat().st_size:
            raise TextError(
                f"{file}: empty; add text to it, or remove it from task.folder", code="empty_text", file=str(file)
            )
    return text_files


def _sentences_of(text: str) -> Iterator[list[str]]:
    """The words of each sentence, in lower case, without sentences that have no words."""
    text = _normalized(text)
    # `\w` has no combining marks, such as the vowel signs of Hindi.
    marks = "".join(sorted(character for character in set(text) if unicodedata.category(character).startswith("M")))
    word = re.compile(rf"\w[\w{marks}]*(?:['’][\w{marks}]+)*")
    for sentence in _SENTENCE_BOUNDARY.split(text):
        words = word.findall(sentence)
        if words:
            yield words


def _normalized(text: str) -> str:
    """Lower case, with each character in its composed form (NFC)."""
    return unicodedata.normalize("NFC", text.lower())
