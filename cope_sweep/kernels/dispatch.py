"""Attention by the path that fits the device, type and shape, or that the caller has chosen.

    auto        the fastest for the device, type and shape
    reference   directly from the equation: memory O(T²), every case
    blocked     PyTorch in blocks of queries: memory O(block × T)
    native      C++ on a CPU
    triton      Triton on a GPU

All compute the same result, with the same dropout mask. If the chosen implementation cannot compute a problem (hard
attention, for example), attention falls back to blocked or the reference, and logs the reason once. torch.compile
traces `attend` without a break.
"""

from __future__ import annotations

import functools
import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from cope_sweep.kernels import operator
from cope_sweep.kernels.choice import Implementation, chosen_implementation, constant_when_compiled, observe
from cope_sweep.kernels.dropout import draw_seeds
from cope_sweep.kernels.inputs import Inputs, Positions
from cope_sweep.kernels.path import choose
from cope_sweep.kernels.query_blocks import attend_in_blocks
from cope_sweep.kernels.reference import reference

log = logging.getLogger(__name__)


def attend(
    inputs: Inputs,
    positions: Positions,
    dropout: float = 0.0,
    seeds_B: Tensor | None = None,
    implementation: Implementation | None = None,
) -> Tensor:
    """Causal attention, softmax(q·k/√K + Σ scores)·v, (B, H, T, K). Query t is token S − T + t.

    `dropout` is the probability of dropping a weight, and `seeds_B`, int64, determine the mask of each sequence; None:
    they are drawn from torch's global generator. `implementation`: None means the one that `set_implementation` or
    `using` chose, or auto.
    """
    observe(inputs, positions)
    implementation = implementation or chosen_implementation()
    if dropout and seeds_B is None:
        seeds_B = draw_seeds(len(inputs.q_BHTK), inputs.q_BHTK.device)
    path = choose(inputs, positions, dropout, implementation, seeds_B)
    # float64 is for comparisons: that auto then uses PyTorch needs no warning.
    if path.reason is not None and (implementation != "auto" or inputs.q_BHTK.dtype != torch.float64):
        _log_once(f"attention: {path.reason}")
    if path.problem is not None:
        return operator.attention(path.problem, path.name)
    if path.name == "blocked":
        return attend_in_blocks(inputs, positions, dropout, seeds_B)
    if path.name == "sdpa":
        return _without_scores(inputs)
    return reference(inputs, positions, dropout, seeds_B)


def _without_scores(inputs: Inputs) -> Tensor:
    return F.scaled_dot_product_attention(
        inputs.rotated_q_BHTK,
        inputs.rotated_k_BHSK,
        inputs.v_BHSK,
        is_causal=inputs.q_BHTK.shape[2] > 1,
    )


@constant_when_compiled
def _log_once(message: str) -> None:
    _cached_log(message)


@functools.cache
def _cached_log(message: str) -> None:
    log.warning(message)
