"""Sizes at which a computation changes its form, for the code that computes and for estimates of its memory."""

RECOMPUTED_ELEMENTS = 2**20
"""Activations of this size and more are computed again in the backward pass. For smaller ones, that would take a larger
part of the time than it saves of the memory."""

CHUNK_LOGITS = {"cpu": 10 * 2**20, "cuda": 2**27}
"""More logits than these are computed in chunks of that size, by device: 40 MB in float32 on a CPU, 512 MB on a GPU,
which needs larger products.

On a CPU more than 32 MB: glibc returns such blocks to the system at once, and keeps smaller ones among others."""

MIN_BLOCKED_KEYS = 256
"""From this number of keys on, attention without a fused kernel is computed in blocks of queries."""
