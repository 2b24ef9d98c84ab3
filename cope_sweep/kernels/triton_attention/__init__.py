"""Fused attention on a GPU, in Triton, without T × T or T × P memory.

The operator `cope_sweep::attention` calls `forward` and `backward`; PyTorch computes problems for which `why_not` has a
reason. With TRITON_INTERPRET=1 in the environment when Triton is imported, the same kernels run on a CPU, slowly; the
tests use that. Same inputs give the same bits. Gate keys and embeddings are converted to the type of the queries, and
slopes and biases to float32.

    kernel_forward.py          the output, and for each query the log-sum-exp and where its tables end
    kernel_backward_rows.py    gradients of queries and tables
    kernel_backward_keys.py    gradients of keys, values and gate keys
    kernels_far.py             the tiles beyond all tables, if they have kernels of their own (`launch.NEAR_AND_FAR`)
    scores.py                  what they share of a tile: logits, terms, gradients of scores
    tables.py                  tables in scratch memory
    table_gradients.py         their gradients
    tiles.py                   programs, products, fixed-point positions, dropout
    launch.py                  arguments, scratch memory, launches
    tile_sizes.py              the sizes of tiles, numbers of warps and stages
    workspace.py               the size of scratch memory, a formula

Memory beyond inputs and outputs: 20 bytes for each query of each head from the forward pass to the backward pass, 8
in the backward pass, and the scratch memory.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]

from cope_sweep.kernels.arguments import Arguments, constant_when_compiled
from cope_sweep.kernels.triton_attention.launch import PAIRS, backward, forward

__all__ = ["backward", "forward", "why_not"]

INTERPRETED = bool(triton.knobs.runtime.interpret)
MAX_HEAD_DIM = 256
DTYPES = tuple(PAIRS)


def why_not(arguments: Arguments, device: torch.device) -> str | None:
    """Why these kernels cannot compute this problem on a device, for a log message; None if they can."""
    q = arguments.q
    if device.type != "cuda" and not INTERPRETED:
        return f"it needs a GPU, and the tensors are on {device.type}"
    if device.type == "cuda" and _is_old(device.index):
        return "the GPU is older than compute capability 8.0"
    if q.dtype not in DTYPES:
        return f"it has no kernel for {q.dtype}"
    if any(x.dtype != q.dtype for x in (arguments.k, arguments.v)):
        return "queries, keys and values are not all of one type"
    if any(x is not None and x.shape[-1] != q.shape[-1] for x in (arguments.k, arguments.v, arguments.gate_k)):
        return "queries, keys, values and gate keys do not have one head dim"
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"head dim {q.shape[-1]} is more than {MAX_HEAD_DIM}"
    if q.shape[2] > arguments.k.shape[2] or 0 in q.shape:
        return f"there are {q.shape[2]} queries of {arguments.k.shape[2]} tokens"
    if arguments.knots is not None and arguments.e is not None:
        return "it does not compute CoPE and CoPE-MLP in one layer"
    if arguments.log_gates:
        return "it has no sums of log gates"
    if arguments.stick_breaking:
        return "it has no stick-breaking"
    if arguments.share_slope is not None:
        return "it has no bias by the share of the distance"
    return None


@constant_when_compiled
def _is_old(device: int | None) -> bool:
    """Without a GPU, as for the plan of another machine, it is not."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0)
