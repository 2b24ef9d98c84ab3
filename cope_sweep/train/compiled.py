"""The model's forward and backward pass through torch.compile.

Attention is one operator, which stays as it is; what is around it is fused into few kernels. A model that is so small
that starting kernels takes most of its time also runs as CUDA graphs (`mode="reduce-overhead"`). The loss is not
compiled: it works in chunks where it is large.

It is tested for equal losses on a CPU. On an H200 it has trained a small model as CUDA graphs, hardly faster than
uncompiled.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from cope_sweep.model import Transformer
from cope_sweep.model.transformer import Hidden

log = logging.getLogger(__name__)

CUDA_GRAPH_PARAMETERS = 30_000_000
"""Models with fewer parameters run as CUDA graphs."""
BACKEND = "inductor"


def compiled_hidden(model: Transformer) -> Hidden:
    """`model.hidden`, compiled at its first call. If a call fails, the model runs uncompiled from then on."""
    on_cuda, mode = _on_cuda(model), mode_of(model)
    log.info("torch.compile compiles the model, mode %s", mode)
    compiled = torch.compile(model.hidden, backend=BACKEND, dynamic=False, mode=mode)
    failed = False

    def hidden(tokens_NT: Tensor, seeds_N: Tensor | None = None) -> Tensor:
        nonlocal failed
        if failed:
            return model.hidden(tokens_NT, seeds_B=seeds_N)
        if on_cuda:
            # What the last graph returned is not used any more: its backward pass has ended.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        try:
            result: Tensor = compiled(tokens_NT, seeds_B=seeds_N)
        except Exception as error:  # a run must not fail because a compiler does; an error of the model comes again
            failed = True
            log.warning("torch.compile failed, so the model runs uncompiled: %s", error)
            result = model.hidden(tokens_NT, seeds_B=seeds_N)
        return result

    return hidden


def mode_of(model: Transformer) -> str:
    """The mode of torch.compile: `reduce-overhead`, CUDA graphs, for small models on a GPU."""
    size = sum(parameter.numel() for parameter in model.parameters())
    return "reduce-overhead" if _on_cuda(model) and size < CUDA_GRAPH_PARAMETERS else "default"


def _on_cuda(model: Transformer) -> bool:
    return next(model.parameters()).is_cuda
