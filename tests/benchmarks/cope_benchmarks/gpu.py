"""Benchmark of CoPE's fused attention on a GPU, and of torch's flash attention without positions.

The times include everything that CoPE adds, such as the product z = q·e and its gradient. bfloat16, head dim 64,
p_max 64. Gates are one half in the mean, or near 0, so that positions never saturate. Both get the same queries, keys and
values. Outputs and gradients are checked before anything is timed, against the blocked path in float32.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

HEAD_DIM = 64
P_MAX = 64
HEADS = 16
TOKENS = 65536
"""Tokens of a batch, which determine the number of sequences."""
REPETITIONS = 21
WARM_UPS = 3
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Limit of the error, relative to the largest entry. In bfloat16, the terms of the gradient of e cancel."""


@dataclass(frozen=True)
class Shape:
    """A problem size, and the largest ratios to flash attention that we aim at."""

    tokens: int
    saturates: bool = True
    forward_at_most: float | None = None
    backward_at_most: float | None = None

    @property
    def batch(self) -> int:
        return max(1, TOKENS // self.tokens)


SHAPES = (
    Shape(1024, forward_at_most=1.8, backward_at_most=2.0),
    Shape(4096, forward_at_most=1.25, backward_at_most=1.3),
    Shape(16384, forward_at_most=1.1, backward_at_most=1.1),
    Shape(4096, saturates=False, forward_at_most=3.0, backward_at_most=3.0),
    Shape(65536),
)


def why_not() -> str | None:
    """Why there is nothing to measure here; None: there is a GPU."""
    if not torch.cuda.is_available():
        return "no CUDA device: GPU attention is not measured"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than compute capability 8.0: GPU attention is not measured"
    return None


def measure(shapes: tuple[Shape, ...] = SHAPES, repetitions: int = REPETITIONS) -> dict[str, Any]:
    """Times and extra memory of each shape, and the ratios aimed at; `{"skipped": reason}` without a GPU."""
    skipped = why_not()
    if skipped:
        return {"skipped": skipped}
    import triton  # type: ignore[import-untyped]

    return {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "repetitions": repetitions,
        "rows": [_row(shape, repetitions) for shape in shapes],
    }


def table(measured: dict[str, Any]) -> Table:
    """The measurement as a table, with the ratios aimed at."""
    result = Table(title=measured.get("skipped") or measured["device"], title_justify="left")
    for head in (
        "tokens",
        "gates",
        "forward ÷ flash's",
        "at most",
        "backward ÷ flash's",
        "at most",
        "extra MB, flash's",
    ):
        result.add_column(head, justify="left" if head == "gates" else "right")
    for row in measured.get("rows", ()):
        if "failed" in row:
            result.add_row(str(row["tokens"]), row["gates"], f"[red]{row['failed']}[/red]")
            continue
        cells = [
            cell
            for what in ("forward", "backward")
            for cell in (
                f"{row[what]['ratio']:.2f}",
                "–" if row[what]["at_most"] is None else str(row[what]["at_most"]),
            )
        ]
        extra = row["extra_mb"]
        result.add_row(str(row["tokens"]), row["gates"], *cells, f"{extra['cope']:.0f}, {extra['flash']:.0f}")
    return result


def _row(shape: Shape, repetitions: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "batch": shape.batch,
        "heads": HEADS,
        "tokens": shape.tokens,
        "gates": "one half" if shape.saturates else "near 0: never saturating",
    }
    off = {dtype: _worst_error(shape, dtype) for dtype in TOLERANCE}
    row["off_by"] = {str(dtype).removeprefix("torch."): round(error, 6) for dtype, error in off.items()}
    if not all(off[dtype] <= limit for dtype, limit in TOLERANCE.items()):
        return {**row, "failed": "differs from the blocked path: not timed"}
    x, do = _inputs(shape, shape.batch, HEADS)
    sides: dict[str, Callable[[], Tensor]] = {"cope": lambda: cope(x), "flash": lambda: flash(x)}
    for what, run in (("forward", _forward), ("backward", _backward)):
        row[what] = _interleaved({name: run(side, list(x.values()), do) for name, side in sides.items()}, repetitions)
    for what, limit in (("forward", shape.forward_at_most), ("backward", shape.backward_at_most)):
        row[what]["at_most"] = limit
        row[what]["reached"] = limit is None or row[what]["ratio"] <= limit
    row["extra_mb"] = {name: _extra_mb(side, list(x.values()), do) for name, side in sides.items()}
    return row


def cope(x: dict[str, Tensor]) -> Tensor:
    """CoPE with the Triton kernels, including the product q·e."""
    from cope_sweep.kernels.triton_attention import attention

    return attention(x["q"], x["k"], x["v"], z=x["q"] @ x["e"].T, scale=HEAD_DIM**-0.5)


def flash(x: dict[str, Tensor]) -> Tensor:
    """Attention without positions."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=True)


def _inputs(shape: Shape, batch: int, heads: int) -> tuple[dict[str, Tensor], Tensor]:
    rng = torch.Generator("cuda").manual_seed(0)
    size = (batch, heads, shape.tokens, HEAD_DIM)
    q, k, v, do = (torch.randn(size, generator=rng, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    if not shape.saturates:
        # Shift all logits by −8: positions are about 6 after 4096 keys. All components share the shift, to keep rounding small.
        q, k = q + 1, k - 1
    e = torch.randn(P_MAX, HEAD_DIM, generator=rng, device="cuda", dtype=torch.bfloat16) * HEAD_DIM**-0.5
    return {name: tensor.requires_grad_() for name, tensor in (("q", q), ("k", k), ("v", v), ("e", e))}, do


def _worst_error(shape: Shape, dtype: torch.dtype) -> float:
    """Error of output and gradients relative to the largest entry, for one head and at most 8192 tokens."""
    from cope_sweep.kernels import AttentionProblem
    from cope_sweep.kernels.blocked import blocked
    from cope_sweep.positions import CoPE

    x, do = _inputs(shape, 1, 1)
    first = min(shape.tokens, 8192)
    given = {name: (t if name == "e" else t[:, :, :first]).detach().to(dtype).requires_grad_() for name, t in x.items()}
    exact = {name: t.detach().float().requires_grad_() for name, t in given.items()}
    weight = do[:, :, :first]
    look_up = CoPE(p_max=P_MAX).term({"e": exact["e"]}, exact["q"])
    expected = blocked(AttentionProblem(exact["q"], exact["k"], exact["v"], HEAD_DIM**-0.5, look_up=look_up))
    ours = cope(given)
    wanted = [expected, *torch.autograd.grad(expected, list(exact.values()), weight.float())]
    got = [ours, *torch.autograd.grad(ours, list(given.values()), weight.to(dtype))]
    return max(float((g.float() - w).abs().max() / w.abs().max()) for g, w in zip(got, wanted, strict=True))


def _forward(side: Callable[[], Tensor], _inputs: list[Tensor], _do: Tensor) -> Callable[[], object]:
    return side


def _backward(side: Callable[[], Tensor], inputs: list[Tensor], do: Tensor) -> Callable[[], object]:
    out = side()
    return lambda: torch.autograd.grad(out, inputs, do, retain_graph=True, allow_unused=True)


def _interleaved(runs: dict[str, Callable[[], object]], repetitions: int) -> dict[str, Any]:
    """Median times, measured in turns so that changes of the clock affect both, and the ratio of first to second."""
    times_ms: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(-WARM_UPS, repetitions):
        for name, run in runs.items():
            begin, end = _event(), _event()
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            if repetition >= 0:
                times_ms[name].append(begin.elapsed_time(end))
    measured: dict[str, Any] = {}
    for name, values in times_ms.items():
        low, median, high = statistics.quantiles(values, n=4)
        measured[f"{name}_ms"] = round(median, 4)
        measured[f"{name}_quartiles_ms"] = [round(low, 4), round(high, 4)]
    first, second = (statistics.median(values) for values in times_ms.values())
    return {**measured, "ratio": round(first / second, 3)}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _extra_mb(side: Callable[[], Tensor], inputs: list[Tensor], do: Tensor) -> float:
    """Peak memory of forward and backward in MiB, beyond what was allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(side(), inputs, do, allow_unused=True)
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
