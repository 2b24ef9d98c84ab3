"""A pseudo-random permutation of 0 … size − 1 that is a pure function of a key, evaluated at any indices, not stored.

A Feistel network permutes the numbers below a power of 4. It is applied again to results ≥ `size` until they are below
("cycle walking", Black & Rogaway 2002). The result is a permutation of 0 … size − 1.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def permuted(index_N: np.ndarray, size: int, *key: int) -> np.ndarray:
    """The images of indices under the permutation of 0 … size − 1 that `key` selects.

    Args:
        index_N: Indices in 0 … size − 1, shape (N,).
        size: Number of elements of the permutation.
        key: Any integers, for example seed and epoch.

    Returns:
        int64, shape (N,).
    """
    # Halves of equal width have at most 4 × size numbers, so an index is permuted again 3 times on average at most.
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    keys = _round_keys(key)
    result_N = _feistel(index_N.astype(np.uint64), half, keys)
    while (outside_N := result_N >= size).any():
        result_N[outside_N] = _feistel(result_N[outside_N], half, keys)
    return result_N.astype(np.int64)


def _feistel(x_N: np.ndarray, half: np.uint64, keys: list[np.uint64]) -> np.ndarray:
    low = (np.uint64(1) << half) - np.uint64(1)
    left_N, right_N = x_N >> half, x_N & low
    for key in keys:
        left_N, right_N = right_N, left_N ^ (_mix(right_N ^ key) & low)
    return (left_N << half) | right_N


def _mix(x_N: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele et al. 2014)."""
    x_N = (x_N ^ (x_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_N = (x_N ^ (x_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x_N ^= x_N >> np.uint64(31)
    return x_N


def _round_keys(key: tuple[int, ...]) -> list[np.uint64]:
    # An array: numpy warns of overflow in scalars, and here it is meant.
    state = np.zeros(1, dtype=np.uint64)
    for word in key:
        state = _mix(state ^ np.uint64((word + _GOLDEN) & _MASK))
    # Four rounds of pseudo-random functions make a pseudo-random permutation (Luby & Rackoff 1988).
    return [_mix(state + np.uint64(round_ * _GOLDEN & _MASK))[0] for round_ in range(1, 5)]
