"""Sequences to probe a checkpoint on, and their marked tokens.

Marked are tokens that end a line, a section title or a sentence, and tokens that a task names.

A head that counts lines, sections or sentences opens its gates on such tokens.

newline     a token that contains a line break (in WikiText, the end of a paragraph)
section     a token of a title: WikiText's ` = = Title = = `, or Markdown's `## Title`, on a line of its own
sentence    a token that contains the `.`, `!` or `?` at the end of a sentence. Closing quotation marks and brackets may
            follow it; then a space or the end of the text must follow. This is a heuristic: it splits "Mr. Smith".

The patterns match bytes, because a token may contain only a part of a character.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from cope_sweep.inference.probe.matrices import ProbeError
from cope_sweep.tasks import IGNORED, Task
from cope_sweep.text import TextTokenizer


def split_sequences(task: Task, split: str | None, index: int, count: int = 1) -> list[list[int]]:
    """`count` sequences of token ids from `index` on, without padding; without split, of the first test set.

    Raises ProbeError for a split that the task does not have, and an index beyond its end.
    """
    try:
        batch = task.sequences(split or task.TESTS[0], 0, index, count)  # 0: the seed of every run's test sets
    except ValueError as error:
        raise ProbeError(f"the split: {error}") from error
    if not len(batch):
        raise ProbeError(f"the split has no sequence {index}; choose a smaller index")
    ends_N = [(row_T != IGNORED).nonzero()[0][-1] + 1 for row_T in batch.targets_NT]
    return [row_T[:end].tolist() for row_T, end in zip(batch.inputs_NT, ends_N, strict=True)]


_PATTERNS = {
    "newline": re.compile(rb"(?P<unit>\n)"),
    "section": re.compile(rb"^[ \t]*(?P<unit>(?P<rank>=+(?: =+)*) .*\S (?P=rank)|#{1,6} .*\S)[ \t\r]*$", re.MULTILINE),
    "sentence": re.compile(rb"(?P<unit>[.!?]+)(?=[\"')\]\xe2\x80\x99\x9d]*(?:\s|\Z))"),
}


def token_marks(task: Task, tokens_T: np.ndarray, tokenizer: TextTokenizer | None = None) -> dict[str, np.ndarray]:
    """Mark name → which tokens are marked: bool, shape (T,).

    The marks are those of the task, and those of the text where there is a tokenizer.
    """
    marks = {} if tokenizer is None else text_marks(tokenizer.pieces(tokens_T.tolist()))
    return marks | task.marks(tokens_T)


def token_labels(task: Task, tokens_T: np.ndarray, tokenizer: TextTokenizer | None = None) -> list[str]:
    """The text of each token. The end-of-text token is `¶`; an incomplete character is `�`."""
    if tokenizer is None:
        return [task.token_label(token) for token in tokens_T.tolist()]
    return [piece.decode(errors="replace") or "¶" for piece in tokenizer.pieces(tokens_T.tolist())]


def text_marks(pieces: Sequence[bytes]) -> dict[str, np.ndarray]:
    """Mark name → which tokens of a text are marked: bool, shape (T,). `pieces` are the bytes of each token."""
    text = b"".join(pieces)
    ends_T = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    marks = {}
    for name, pattern in _PATTERNS.items():
        marked_T = np.zeros(len(pieces), dtype=bool)
        for match in pattern.finditer(text):
            first = np.searchsorted(ends_T, match.start("unit"), "right")  # the token with the first byte of the unit
            last = np.searchsorted(ends_T, match.end("unit") - 1, "right")
            marked_T[first : last + 1] = True
        marks[name] = marked_T
    return marks
