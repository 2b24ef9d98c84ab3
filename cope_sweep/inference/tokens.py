"""Validation of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from cope_sweep.errors import UserError

TokenIds = Sequence[int] | np.ndarray


class TokensError(UserError, ValueError):
    """Token ids that a model cannot score. The message names them and the ids that the model accepts."""


def validate_sequence(ids: TokenIds, vocabulary_size: int, name: str) -> np.ndarray:
    """One sequence of at least two tokens as int64, shape (T,). Raises TokensError."""
    tokens_T = validate_token_ids(ids, vocabulary_size, name)
    if len(tokens_T) < 2:
        raise TokensError(f"{name} has {len(tokens_T)} tokens; give at least two, because the first is not scored")
    return tokens_T


def validate_token_ids(ids: TokenIds, vocabulary_size: int, name: str = "the sequence") -> np.ndarray:
    """One sequence as int64, shape (T,). Raises TokensError, which names the position of the first invalid entry."""
    try:
        items: list[Any] = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    except TypeError:
        raise TokensError(f"{name}: {_short(ids)} is not a list of token ids") from None
    if set(map(type, items)) <= {int}:
        with suppress(OverflowError):
            tokens_T = np.array(items, dtype=np.int64)
            if not len(tokens_T) or (tokens_T.min() >= 0 and tokens_T.max() < vocabulary_size):
                return tokens_T
    for position, item in enumerate(items):  # for the message, and for numpy's integers
        if isinstance(item, bool) or not isinstance(item, int | np.integer):
            raise TokensError(f"{name}, position {position}: {_short(item)} is not a token id")
        if not 0 <= item < vocabulary_size:
            raise TokensError(
                f"{name}, position {position}: token id {_short(item)} is out of range; "
                f"this model's vocabulary is 0 … {vocabulary_size - 1} ({vocabulary_size} ids)"
            )
    return np.array(items, dtype=np.int64)


def _short(item: Any) -> str:
    text = "of more than 60 digits" if isinstance(item, int) and abs(item) >= 10**60 else repr(item)
    return text if len(text) <= 60 else text[:59] + "…"
