"""Benchmark of CoPE attention on a CPU, forward and backward: our kernels, the paper's listing and torch's SDPA.

Gates are about ½, so positions saturate after about 2·p_max keys; at shape D, never. Outputs and gradients are checked
before anything is timed: they are compared with a float64 result (`exact.py`), for one sequence and two heads, and an
alternative that fails is not timed.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cope_benchmarks import peers
from cope_benchmarks.exact import Expected, computed_by
from cope_benchmarks.gpu_timing import first_line
from cope_benchmarks.peers import Attend, Leaves
from cope_benchmarks.report import interleaved, machine, markdown
from cope_sweep.kernels import Implementation, Inputs, Position, attend, make_problem
from cope_sweep.kernels.arguments import Arguments
from cope_sweep.positions import CoPE, CoPEMLP, Dims
from cope_sweep.positions.base import Encoding
from cope_sweep.train.facts import peak_bytes, reset_peak

DENSITIES = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98)
HIDDEN = 64


@dataclass(frozen=True)
class Shape:
    """A problem size."""

    name: str
    batch: int
    heads: int
    tokens: int
    head_dim: int
    p_max: int


SHAPES = (
    Shape("A", 16, 4, 512, 64, 64),
    Shape("B", 1, 12, 1024, 64, 64),
    Shape("C", 1, 2, 4096, 32, 64),
    Shape("D", 2, 2, 1024, 32, 1024),
)

LISTING, SDPA, NATIVE = "the paper's listing", "SDPA, no positions", "native"


def measure(
    repetitions: int, shapes: tuple[Shape, ...] = SHAPES, densities: tuple[float, ...] = DENSITIES
) -> dict[str, Any]:
    """Times, ratios and extra memory at each shape; native and SDPA with mean gates from near 0 to near 1."""
    timed = [_shape(shape, repetitions) for shape in shapes]
    at_densities = [_density(shapes[0], density, repetitions) for density in densities]
    # Last, because it changes how memory is allocated.
    for _, add_memory in timed:
        add_memory()
    return {
        "machine": machine(),
        "repetitions": repetitions,
        "shapes": [shape for shape, _ in timed],
        "densities": at_densities,
    }


def table(measured: dict[str, Any]) -> str:
    """The measurement in Markdown: medians and spreads in ms, and ratios of forward + backward."""
    rows = []
    for shape in measured["shapes"]:
        for row in shape["rows"]:
            if "failed" in row:
                rows.append([shape["shape"], row["attention"], row["failed"], *[""] * 4])
                continue
            rows.append([
                shape["shape"], row["attention"],
                *(f"{row[key]['median_ms']:.1f} ± {row[key]['spread_ms']:.1f}" for key in ("forward", "forward_backward")),
                *(f"{row[key]:.2f}" if key in row else "–" for key in ("times_faster_than_listing", "of_sdpa")),
                f"{row['extra_mb']:.1f}",
            ])  # fmt: skip
    for row in measured["densities"]:
        total = row["forward_backward"]["median_ms"]
        gates = f"native, gates {row['mean_gate']:.2f}"
        rows.append(["A", gates, "", f"{total:.1f}", "–", f"{row['of_sdpa']:.2f}", ""])
    heads = ("shape", "attention", "forward", "forward + backward", "listing ÷ this", "this ÷ SDPA", "extra MB")
    return markdown(heads, rows, left=2)


def of_encoding(encoding: Encoding, implementation: Implementation) -> Attend:
    """Attention with one encoding, whose parameters are in the dictionary of inputs."""
    return lambda x: attend(
        Inputs.plain(x["q"], x["k"], x["v"]), [Position(encoding, x)], implementation=implementation
    )


def _alternatives(shape: Shape) -> dict[str, tuple[Attend, tuple[Encoding, ...]]]:
    """By name: an alternative, and the encodings that it computes."""
    cope, mlp = CoPE(p_max=shape.p_max), CoPEMLP(hidden=HIDDEN)
    return {
        NATIVE: (of_encoding(cope, "native"), (cope,)),
        "blocked": (of_encoding(cope, "blocked"), (cope,)),
        LISTING: (peers.listing, (cope,)),
        "the listing, torch.compile": (torch.compile(peers.listing, dynamic=False), (cope,)),
        SDPA: (peers.sdpa, ()),
        f"native, CoPE-MLP({HIDDEN})": (of_encoding(mlp, "native"), (mlp,)),
    }


def _shape(shape: Shape, repetitions: int) -> tuple[dict[str, Any], Callable[[], None]]:
    """Times and ratios at a shape, and a function that adds the extra memory to them."""
    leaves, weight = _inputs(shape)
    alternatives, failures = _alternatives(shape), _failures(shape)
    correct = {name: alternative for name, (alternative, _) in alternatives.items() if name not in failures}
    times = interleaved(
        {name: _phases(alternative, leaves, weight) for name, alternative in correct.items()}, repetitions
    )
    rows: list[dict[str, Any]] = []
    for name in alternatives:
        if name not in correct:
            rows.append({"attention": name, "failed": failures[name]})
            continue
        row: dict[str, Any] = {"attention": name, "forward": times[name][0], "forward_backward": times[name][1]}
        total = times[name][1]["median_ms"]
        if LISTING in correct:
            row["times_faster_than_listing"] = round(times[LISTING][1]["median_ms"] / total, 2)
        if SDPA in correct:
            row["of_sdpa"] = round(total / times[SDPA][1]["median_ms"], 3)
        rows.append(row)

    def add_memory() -> None:
        # Output and gradients are not counted: all alternatives have them.
        results = 4 * sum(leaves[name].numel() for name in ("q", "k", "v", "v", "e"))
        for row in rows:
            if "failed" not in row:
                row["extra_mb"] = _extra_peak_mb(_phases(correct[row["attention"]], leaves, weight)[1], results)

    return {**vars(shape), "shape": shape.name, "rows": rows}, add_memory


def _density(shape: Shape, mean_gate: float, repetitions: int) -> dict[str, Any]:
    """Native and SDPA, with every gate about `mean_gate`."""
    leaves, weight = inputs_with_gates(shape, mean_gate)
    alternatives = {NATIVE: of_encoding(CoPE(p_max=shape.p_max), "native"), SDPA: peers.sdpa}
    times = interleaved(
        {name: _phases(alternative, leaves, weight) for name, alternative in alternatives.items()}, repetitions
    )
    total = times[NATIVE][1]
    ratio = total["median_ms"] / times[SDPA][1]["median_ms"]
    return {"mean_gate": mean_gate, "forward_backward": total, "of_sdpa": round(ratio, 3)}


def inputs_with_gates(shape: Shape, mean_gate: float) -> tuple[Leaves, Tensor]:
    """Inputs with every gate about `mean_gate`: one component of q and k determines it, the others are small."""
    leaves, weight = _inputs(shape)
    with torch.no_grad():
        leaves["q"].mul_(0.3)[..., 0] = 1
        leaves["k"][..., 0] = torch.logit(torch.tensor(mean_gate)) * shape.head_dim**0.5
    return leaves, weight


def _inputs(shape: Shape) -> tuple[Leaves, Tensor]:
    """Inputs with gradients, and the gradient of the output, in the memory layout of a model."""
    rng = torch.Generator().manual_seed(0)
    B, H, T, K = shape.batch, shape.heads, shape.tokens, shape.head_dim

    def heads() -> Tensor:
        return torch.randn(B, T, H, K, generator=rng).transpose(1, 2)

    leaves = {"q": heads(), "k": heads(), "v": heads()}
    leaves["e"] = torch.randn(shape.p_max, K, generator=rng) * 0.1
    for name, parameter in CoPEMLP(hidden=HIDDEN).parameters(Dims(H * K, H, 1, T)).items():
        leaves[name] = torch.randn(parameter.shape, generator=rng) * (parameter.std or 0.02)
    return {name: x.requires_grad_() for name, x in leaves.items()}, heads()


def _phases(alternative: Attend, leaves: Leaves, weight: Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Two functions: forward as in training, and forward + backward."""

    def total() -> None:
        out = alternative(leaves)
        used = [x for x in leaves.values() if x.requires_grad]
        torch.autograd.grad(out, used, weight, allow_unused=True)

    return lambda: alternative(leaves), total


def _failures(shape: Shape) -> dict[str, str]:
    """The alternatives whose outputs or gradients are wrong, for one sequence and at most two heads."""
    leaves, weight = _inputs(replace(shape, batch=1, heads=min(2, shape.heads)))
    expected: dict[tuple[Encoding, ...], Expected] = {}
    found = {}
    for name, (alternative, encodings) in _alternatives(shape).items():
        if encodings not in expected:
            expected[encodings] = Expected(partial(_problem, encodings), leaves, weight, torch.float32)
        try:
            wrong = expected[encodings].compare(computed_by(alternative, leaves, weight)).wrong
        except Exception as error:  # an alternative may raise anything; it is then not timed
            wrong = first_line(error)
        if wrong:
            found[name] = wrong
    return found


def _problem(encodings: tuple[Encoding, ...], x: Leaves) -> Arguments:
    positions = [Position(encoding, x) for encoding in encodings]
    problem = make_problem(Inputs.plain(x["q"], x["k"], x["v"]), positions, 0.0, None)
    assert isinstance(problem, Arguments), problem
    return problem


def _extra_peak_mb(step: Callable[[], Any], result_bytes: int) -> float:
    """Peak memory of a step in MB, beyond what was allocated before and the bytes of its results."""
    _release_free_memory()
    step()  # allocates the buffers that libraries keep
    _release_free_memory()
    reset_peak("cpu")
    before = peak_bytes("cpu")
    step()
    return round(max(0, peak_bytes("cpu") - before - result_bytes) / 1e6, 1)


def _release_free_memory() -> None:
    """Return free memory to the system (with glibc), so that a later step's allocations raise the peak."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: from now on, large blocks are returned when they are freed
        libc.malloc_trim(0)
