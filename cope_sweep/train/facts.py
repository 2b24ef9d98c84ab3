"""Facts of a finished run: its speed, the size of the model, memory, and where and with which versions it ran."""

from __future__ import annotations

import math
import platform
from typing import Any, Literal

import torch

from cope_sweep.config import Resources, RunSpec
from cope_sweep.model.paths import attention_paths
from cope_sweep.train.hardware import model_flops_per_token, peak_flops_per_s
from cope_sweep.train.memory import peak_bytes
from cope_sweep.train.runtime import Runtime
from cope_sweep.train.trainer import Trainer


def speed_facts(trainer: Trainer, tokens_per_s: float) -> dict[str, float]:
    """Facts of a result: tokens and floating-point operations per second, and the share of the devices' peak."""
    runtime = trainer.runtime
    sizes = {name: parameter.numel() for name, parameter in trainer.model.named_parameters()}
    speed = tokens_per_s * model_flops_per_token(trainer.spec, sizes)
    facts = {"tokens_per_s": tokens_per_s, "model_flops_per_s": speed}
    if peak := peak_flops_per_s(_device_name(runtime), runtime.precision):
        facts["mfu"] = round(speed / (peak * runtime.world_size), 4)
    return facts


def machine_facts(trainer: Trainer) -> dict[str, Any]:
    """Facts of a result: size of the model, peak memory of this worker, where and with which versions it ran."""
    runtime = trainer.runtime
    share = math.ceil(trainer.spec.train.batch / runtime.world_size)
    return {
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "peak_memory_bytes": peak_bytes(runtime.device),
        "device": _device_name(runtime),
        "precision": runtime.precision,
        "attention": _attention(trainer.spec, runtime),
        "threads": runtime.threads,
        "workers": runtime.world_size,
        "micro_batch": min(runtime.micro_batch or share, share),
        "checkpoint_activations": runtime.checkpoint_activations,
        "compile": runtime.compile,
        "worker_id": runtime.worker_id,
        "host": platform.node(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    } | ({"plugins": sources} if (sources := trainer.spec.plugin_sources) else {})


def _attention(spec: RunSpec, runtime: Runtime) -> str:
    """By which kernels a training step computes attention, and why not by faster ones: `native`, for example."""
    precision: Literal["bf16", "fp32"] = "bf16" if runtime.precision == "bf16" else "fp32"
    texts = []
    for path in attention_paths(spec, Resources(precision=precision, attention=runtime.attention), runtime.device):
        text = path.name + (f" ({path.reason})" if path.reason else "")
        texts.append(f"layers {path.layers[0]}–{path.layers[1]}: {text}")
    return ", ".join(texts) if len(texts) > 1 else text


def _device_name(runtime: Runtime) -> str:
    """The name of the worker's GPU, or `cpu`."""
    return torch.cuda.get_device_name() if runtime.device == "cuda" else "cpu"
