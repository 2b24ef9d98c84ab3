"""Facts of a finished run: time, speed, size of the model, peak memory, where and with which versions it ran."""

from __future__ import annotations

import contextlib
import platform
import re
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from cope_sweep.config import Resources, RunSpec
from cope_sweep.config.estimate import model_flops_per_token
from cope_sweep.model.paths import attention_paths
from cope_sweep.train.runtime import Runtime
from cope_sweep.train.trainer import Trainer

PEAK_BF16_FLOPS_PER_S = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
}
"""Dense bfloat16 matrix products, from NVIDIA's data sheets, by a part of the device's name. The first match counts."""


def peak_flops_per_s(device_name: str, precision: str) -> float | None:
    """The peak of a device in matrix products of this precision; None where it is not known."""
    if precision != "bf16":
        return None
    return next((peak for part, peak in PEAK_BF16_FLOPS_PER_S.items() if part in device_name), None)


def reset_peak(device: str) -> None:
    """Reset the peak, where the system can: always on CUDA, under Linux on a CPU."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc_pid_clear_refs(5): resets VmHWM


def peak_bytes(device: str) -> int:
    """The largest number of bytes since `reset_peak`: of tensors on CUDA, of the whole process on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(OSError):
        if match := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            return int(match[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Clock:
    """Measures a run's attempt from the clock's creation; `start` marks the first training step.

    A device computes asynchronously, so every reading waits for it.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._created_s = self._started_s = now_s()
        self._paused_s = self._warm_up_s = 0.0
        self._warm_up_tokens = 0
        self._earlier: Mapping[str, float] = {}

    def start(self, trainer: Trainer, earlier: Mapping[str, float]) -> None:
        """Training starts now; `earlier` are the `durations` that were stored with the trainer's state."""
        self._trainer, self._earlier = trainer, earlier
        self._started_s = self._now_s()

    def end_warm_up(self) -> None:
        """Exclude the steps so far from the speed: the first step may build kernels."""
        self._warm_up_s, self._warm_up_tokens = self._training_s(), self._trainer.tokens

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time within the block from the training time."""
        training_s = self._training_s()
        try:
            yield
        finally:
            self._paused_s += self._training_s() - training_s

    def durations(self) -> dict[str, float]:
        """Seconds over all attempts: `train_s` in training steps, `wall_s` in total."""
        seconds = {"train_s": self._training_s(), "wall_s": self._now_s() - self._created_s}
        return {name: round(self._earlier.get(name, 0.0) + value, 3) for name, value in seconds.items()}

    def tokens_per_s(self) -> float:
        """Tokens per second of training steps, without the warm-up unless there were no other steps."""
        tokens, seconds = self._trainer.tokens, self._training_s()
        if tokens > self._warm_up_tokens:
            tokens, seconds = tokens - self._warm_up_tokens, seconds - self._warm_up_s
        return round(tokens / seconds, 1) if tokens else 0.0

    def _training_s(self) -> float:
        self._trainer.wait()  # a GPU computes asynchronously
        return self._now_s() - self._started_s - self._paused_s


def speed_facts(trainer: Trainer, tokens_per_s: float) -> dict[str, float]:
    """Facts of a result: tokens and floating-point operations per second, and the share of the devices' peak."""
    runtime = trainer.runtime
    speed = tokens_per_s * model_flops_per_token(trainer.spec)
    facts = {"tokens_per_s": tokens_per_s, "model_flops_per_s": speed}
    if peak := peak_flops_per_s(_device_name(runtime), runtime.precision):
        facts["mfu"] = round(speed / (peak * runtime.world_size), 4)
    return facts


def machine_facts(trainer: Trainer) -> dict[str, Any]:
    """Facts of a result: size of the model, peak memory of this worker, where and with which versions it ran."""
    runtime = trainer.runtime
    return {
        "parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "peak_memory_bytes": peak_bytes(runtime.device),
        "device": _device_name(runtime),
        "attention": _attention(trainer.spec, runtime),
        "threads": runtime.threads,
        "workers": runtime.world_size,
        "micro_batch": runtime.at_once(trainer.spec.train.batch),
        "checkpoint_activations": runtime.checkpoint_activations,
        "compile": runtime.compile,
        "worker_id": runtime.worker_id,
        "host": platform.node(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    } | ({"plugins": sources} if (sources := trainer.spec.plugin_sources) else {})


def _attention(spec: RunSpec, runtime: Runtime) -> str:
    """The kernels by which a training step computes attention, and why not by faster ones: `native`, for example."""
    precision: Literal["bf16", "fp32"] = "bf16" if runtime.precision == "bf16" else "fp32"
    texts = []
    for path in attention_paths(spec, Resources(precision=precision, attention=runtime.attention), runtime.device):
        text = path.name + (f" ({path.reason})" if path.reason else "")
        texts.append(f"layers {path.layers[0]}–{path.layers[1]}: {text}")
    return ", ".join(texts) if len(texts) > 1 else text


def _device_name(runtime: Runtime) -> str:
    return torch.cuda.get_device_name() if runtime.device == "cuda" else "cpu"
