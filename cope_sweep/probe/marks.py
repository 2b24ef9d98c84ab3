"""Where a text's units end: the tokens that a head would open its gates on to count lines, sections or sentences.

newline     a token with a line's end in it (in WikiText, a paragraph's end)
section     a token of a title: WikiText's ` = = Title = = `, or Markdown's `## Title`, on a line of its own
sentence    a token with the `.`, `!` or `?` that ends a sentence: what closes a quotation or bracket may follow it,
            and then a space, or the text's end. A rule of thumb: it takes "Mr. Smith" for two sentences.

Patterns are of bytes, so that tokens may cut a letter in two.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from cope_sweep.tasks import Task
from cope_sweep.text import TextTokenizer

_MARKS = {
    "newline": re.compile(rb"(?P<unit>\n)"),
    "section": re.compile(rb"^[ \t]*(?P<unit>(?P<rank>=+(?: =+)*) .*\S (?P=rank)|#{1,6} .*\S)[ \t\r]*$", re.MULTILINE),
    "sentence": re.compile(rb"(?P<unit>[.!?]+)(?=[\"')\]\xe2\x80\x99\x9d]*(?:\s|\Z))"),
}


def marks_of(task: Task, tokens_T: np.ndarray, tokenizer: TextTokenizer | None = None) -> dict[str, np.ndarray]:
    """By name, which tokens are marked, bool, (T,): a text's marks where there is a tokenizer, and the task's own."""
    marks = {} if tokenizer is None else text_marks(tokenizer.pieces(tokens_T.tolist()))
    return marks | task.marks(tokens_T)


def labels_of(task: Task, tokens_T: np.ndarray, tokenizer: TextTokenizer | None = None) -> list[str]:
    """Each token as people read it; a part of a letter is �."""
    if tokenizer is None:
        return [task.token_label(token) for token in tokens_T.tolist()]
    return [piece.decode(errors="replace") or "¶" for piece in tokenizer.pieces(tokens_T.tolist())]


def text_marks(pieces: Sequence[bytes]) -> dict[str, np.ndarray]:
    """By name, which tokens of a text are marked, bool, (T,). `pieces` are the tokens' bytes: joined, they are it."""
    text = b"".join(pieces)
    ends_T = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    marks = {}
    for name, pattern in _MARKS.items():
        marked_T = np.zeros(len(pieces), dtype=bool)
        for match in pattern.finditer(text):
            first = np.searchsorted(ends_T, match.start("unit"), "right")  # the token that holds the unit's first byte
            last = np.searchsorted(ends_T, match.end("unit") - 1, "right")
            marked_T[first : last + 1] = True
        marks[name] = marked_T
    return marks
