"""Windows over a sequence of any length: every token but the first is scored in exactly one of them.

With context 4, stride 2 and the tokens a … h, of which capitals are scored:

    a B C D E       the model reads `context` tokens and predicts as many
    c d e F G
    e f g H         the last window may be shorter

Shapes: T tokens of a window, L tokens of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cope_sweep.inference.tokens import TokensError


@dataclass(frozen=True)
class Window:
    """Tokens that the model reads in one piece, and the first of them that is scored."""

    tokens_T: np.ndarray
    """int64 token ids."""
    inputs_T: np.ndarray | None = None
    """What the model reads in their places; None: the tokens."""
    first: int = 1
    """Tokens `first` … T − 1 are scored."""
    read_last: bool = False
    """Whether the model reads the last token, too, which predicts the token after the window."""

    @property
    def reads(self) -> int:
        """Number of tokens that the model reads."""
        return len(self.tokens_T) - (not self.read_last)


def windows(tokens_L: np.ndarray, context: int, stride: int, inputs_L: np.ndarray | None = None) -> Iterator[Window]:
    """The windows over a sequence of at least two tokens, as views. The model reads `inputs_L` in their places."""
    inputs_L = tokens_L if inputs_L is None else inputs_L
    for begin in window_begins(len(tokens_L), context, stride):
        part = slice(begin, begin + context + 1)
        yield Window(tokens_L[part], inputs_L[part], 1 + (context - stride if begin else 0))


def window_begins(length: int, context: int, stride: int) -> range:
    """The first token of each window. Raises TokensError for a stride that would leave out tokens."""
    if not 1 <= stride <= context:
        raise TokensError(
            f"the stride is {stride}, but windows have {context} tokens; choose a stride of 1 … {context}"
        )
    return range(0, max(1, length - 1 - context + stride), stride)


def tokens_read(length: int, context: int, stride: int) -> int:
    """Number of tokens that the model reads in all windows together. Raises as `window_begins`."""
    begins = window_begins(length, context, stride)
    last = min(context, length - 1 - begins[-1])
    return (len(begins) - 1) * context + last
