"""Training steps with less work on the host: CUDA graphs for small models, torch.compile for the others.

A GPU computes a small model's step faster than Python can start its kernels. So the forward and backward pass are
recorded once as CUDA graphs (`torch.cuda.make_graphed_callables`), and each step starts the two: the same kernels with
the same results to the bit. Recording takes less than a second, where torch.compile takes half a minute.

Measured on an H100, which ten other processes used, too: a step of each encoding of `encodings`, 2 layers of dim 64, 32
sequences of 63 tokens, takes 2.0 to 5.0 ms as graphs, and 4.7 to 13.4 ms without (CoPE 2.2 and 7.9).

A large model goes through torch.compile: attention is one operator, which stays as it is; what is around it is fused
into few kernels. The loss is not compiled: it works in chunks where it is large.
"""

from __future__ import annotations

import gc
import logging

import torch
from torch import Tensor, nn

from cope_sweep.model import Transformer
from cope_sweep.model.transformer import Hidden
from cope_sweep.train.batches import BatchPart, to_device
from cope_sweep.train.runtime import Runtime

log = logging.getLogger(__name__)

CUDA_GRAPH_PARAMETERS = 30_000_000
"""Models with fewer parameters run as CUDA graphs."""
BACKEND = "inductor"


def runs_as_graphs(model: Transformer, runtime: Runtime) -> bool:
    """Training steps of the model run as CUDA graphs.

    The graphs write every gradient into the same memory, so they fit where a step has one backward pass, and no other
    worker's gradients are added.
    """
    size = sum(parameter.numel() for parameter in model.parameters())
    whole = runtime.world_size == 1 and runtime.micro_batch is None
    return runtime.device == "cuda" and whole and size < CUDA_GRAPH_PARAMETERS


def record_graphs(loss: nn.Module, part: BatchPart, runtime: Runtime) -> None:
    """Record the forward and backward pass of `loss`, in training, as CUDA graphs; its next calls replay them.

    They are for arguments with the shapes of `part`: inputs and targets (N, T), seeds (N,); its values do not matter.
    Afterwards, the parameters have to keep their memory. If recording fails, the loss is computed as before, and the
    log says why. No other thread may use the GPU during this call.
    """
    # Graphs of an earlier run of this process: freeing them while others are recorded is an error of CUDA. And their
    # memory is wanted by other processes on the GPU.
    gc.collect()
    torch.cuda.empty_cache()
    device = torch.device(runtime.device)
    loss.train()
    try:
        with torch.autocast(runtime.device, torch.bfloat16, enabled=runtime.precision == "bf16", cache_enabled=False):
            arguments = tuple(to_device(tensor, device) for tensor in part)
            torch.cuda.make_graphed_callables(loss, arguments, allow_unused_input=True)
    except Exception as error:  # a run must not fail because recording does; an error of the model comes again
        log.warning("the model runs without CUDA graphs: %s", error)


def compiled_hidden(model: Transformer) -> Hidden:
    """`model.hidden`, compiled at its first call. If a call fails, the model runs uncompiled from then on."""
    log.info("torch.compile compiles the model")
    compiled = torch.compile(model.hidden, backend=BACKEND, dynamic=False)
    failed = False

    def hidden(tokens_NT: Tensor, seeds_N: Tensor | None = None) -> Tensor:
        nonlocal failed
        if failed:
            return model.hidden(tokens_NT, seeds_B=seeds_N)
        try:
            result: Tensor = compiled(tokens_NT, seeds_B=seeds_N)
        except Exception as error:  # a run must not fail because a compiler does; an error of the model comes again
            failed = True
            log.warning("torch.compile failed, so the model runs uncompiled: %s", error)
            result = model.hidden(tokens_NT, seeds_B=seeds_N)
        return result

    return hidden
