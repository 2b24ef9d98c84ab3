"""CoPE attention on a CPU, forward and backward, beside the paper's listing and torch's attention without positions.

Shapes A–D are those of the project's notes: (batch, heads, tokens, head dim, p_max). Gates are about ½, so positions
saturate after about 2·p_max keys; at D, never. Before anything is timed, output and every gradient are compared on the
same inputs, in float64 for the answer: what fails has no speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from cope_benchmarks import peers
from cope_benchmarks.peers import Attend, Leaves
from cope_benchmarks.timing import extra_peak_mb, interleaved, machine
from cope_sweep.kernels import Implementation, Inputs, Position, attend
from cope_sweep.positions import CoPE, CoPEMLP, Dims, Relative
from cope_sweep.positions.base import Encoding

REPETITIONS = 9
DENSITIES = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98)
HIDDEN = 64
WORST, MEAN = 0.05, 1e-3
"""Of the largest entry: a position that rounding takes across an integer changes a gradient there, in any float32."""


@dataclass(frozen=True)
class Shape:
    """What is attended to."""

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

LISTING, SDPA, NATIVE, BLOCKED, MLP = (
    "the paper's listing", "SDPA, no positions", "native", "blocked", f"native, CoPE-MLP({HIDDEN})",
)  # fmt: skip


def measure(
    shapes: tuple[Shape, ...] = SHAPES, repetitions: int = REPETITIONS, *, compiled: bool = True, densities: bool = True
) -> dict[str, Any]:
    """Times, ratios and extra memory at each shape, and native beside SDPA at gates from rare to always open."""
    timed = [_shape(shape, repetitions, compiled) for shape in shapes]
    at_densities = [_density(density, repetitions) for density in DENSITIES] if densities else []
    # Last: it changes how memory is handed out.
    for _, add_memory in timed:
        add_memory()
    return {
        "machine": machine(),
        "repetitions": repetitions,
        "shapes": [shape for shape, _ in timed],
        "densities": at_densities,
    }


def table(measured: dict[str, Any]) -> Table:
    """The measurement for people: medians, and ratios of forward + backward."""
    result = Table(title="Attention, ms (median, and spread of the middle half)", title_justify="left")
    for head in ("shape", "attention", "forward", "forward + backward", "listing ÷ this", "this ÷ SDPA", "extra MB"):
        result.add_column(head, justify="left" if head in ("shape", "attention") else "right")
    for shape in measured["shapes"]:
        for row in shape["rows"]:
            if "failed" in row:
                result.add_row(shape["shape"], row["attention"], f"[red]{row['failed']}[/red]")
                continue
            forward, both = row["forward"], row["forward_backward"]
            result.add_row(
                shape["shape"],
                row["attention"],
                f"{forward['median_ms']:.1f} ± {forward['spread_ms']:.1f}",
                f"{both['median_ms']:.1f} ± {both['spread_ms']:.1f}",
                *(f"{row[key]:.2f}" if key in row else "–" for key in ("times_faster_than_listing", "of_sdpa")),
                f"{row['extra_mb']:.1f}",
            )
        result.add_section()
    for row in measured["densities"]:
        both = row["forward_backward"]["median_ms"]
        result.add_row(
            "A", f"native, gates {row['mean_gate']:.2f}", "", f"{both:.1f}", "–", f"{row['of_sdpa']:.2f}", ""
        )
    return result


def of_encoding(encoding: Encoding, implementation: Implementation) -> Attend:
    """Attention with one encoding, whose parameters are among the leaves."""
    return lambda x: attend(
        Inputs.plain(x["q"], x["k"], x["v"]), [Position(encoding, x)], implementation=implementation
    )


def _ways(shape: Shape, compiled: bool) -> dict[str, tuple[Attend, Attend]]:
    """By name: a way to attend, and one whose float64 answer it must give."""
    cope, mlp = CoPE(p_max=shape.p_max), CoPEMLP(hidden=HIDDEN)
    answer = of_encoding(cope, "blocked")
    ways = {
        NATIVE: (of_encoding(cope, "native"), answer),
        BLOCKED: (of_encoding(cope, "blocked"), peers.listing if shape.tokens <= 1024 else answer),
        LISTING: (peers.listing, answer),
    }
    if compiled:
        ways["the listing, torch.compile"] = (torch.compile(peers.listing, dynamic=False), answer)
    if peers.has_x_transformers():
        ways["x-transformers' CoPE"] = (peers.x_transformers, answer)
    relative = Relative(positions=shape.tokens)

    def by_blocked(x: Leaves) -> Tensor:
        return of_encoding(relative, "blocked")({**x, "e": x["e_relative"]})

    return {
        **ways,
        SDPA: (peers.sdpa, lambda x: attend(Inputs.plain(x["q"], x["k"], x["v"]), [], implementation="blocked")),
        "Shaw, skewed": (peers.shaw, by_blocked),
        MLP: (of_encoding(mlp, "native"), of_encoding(mlp, "blocked")),
    }


def _shape(shape: Shape, repetitions: int, compiled: bool) -> tuple[dict[str, Any], Callable[[], None]]:
    """Times and ratios at a shape, and what adds extra memory to them."""
    leaves, weight = _inputs(shape)
    ways = _ways(shape, compiled)
    failures = {name: _failure(way, answer, leaves, weight) for name, (way, answer) in ways.items()}
    sound = {name: way for name, (way, _) in ways.items() if failures[name] is None}
    times = interleaved({name: _phases(way, leaves, weight) for name, way in sound.items()}, repetitions)
    rows: list[dict[str, Any]] = []
    for name in ways:
        if name not in sound:
            rows.append({"attention": name, "failed": failures[name]})
            continue
        row: dict[str, Any] = {"attention": name, "forward": times[name][0], "forward_backward": times[name][1]}
        both = times[name][1]["median_ms"]
        if LISTING in sound:
            row["times_faster_than_listing"] = round(times[LISTING][1]["median_ms"] / both, 2)
        if SDPA in sound:
            row["of_sdpa"] = round(both / times[SDPA][1]["median_ms"], 3)
        rows.append(row)

    def add_memory() -> None:
        # Output and gradients, which all have, are not counted.
        results = 4 * sum(leaves[name].numel() for name in ("q", "k", "v", "v", "e"))
        for row in rows:
            if "failed" not in row:
                row["extra_mb"] = extra_peak_mb(_phases(sound[row["attention"]], leaves, weight)[1], results)

    return {**vars(shape), "shape": shape.name, "rows": rows}, add_memory


def _density(mean_gate: float, repetitions: int) -> dict[str, Any]:
    """Native beside SDPA at shape A, where every gate is about `mean_gate`."""
    shape = SHAPES[0]
    leaves, weight = _inputs_with_gates(shape, mean_gate)
    ways = {NATIVE: of_encoding(CoPE(p_max=shape.p_max), "native"), SDPA: peers.sdpa}
    times = interleaved({name: _phases(way, leaves, weight) for name, way in ways.items()}, repetitions)
    both = times[NATIVE][1]
    ratio = both["median_ms"] / times[SDPA][1]["median_ms"]
    return {"mean_gate": mean_gate, "forward_backward": both, "of_sdpa": round(ratio, 3)}


def _inputs_with_gates(shape: Shape, mean_gate: float) -> tuple[Leaves, Tensor]:
    """The same with every gate about `mean_gate`: one component says so, the others are small."""
    leaves, weight = _inputs(shape)
    with torch.no_grad():
        leaves["q"].mul_(0.3)[..., 0] = 1
        leaves["k"][..., 0] = torch.logit(torch.tensor(mean_gate)) * shape.head_dim**0.5
    return leaves, weight


def _inputs(shape: Shape) -> tuple[Leaves, Tensor]:
    """Leaves with gradients, and the gradient of the output, laid out as a model's are."""
    rng = torch.Generator().manual_seed(0)
    B, H, T, K = shape.batch, shape.heads, shape.tokens, shape.head_dim

    def heads() -> Tensor:
        return torch.randn(B, T, H, K, generator=rng).transpose(1, 2)

    leaves = {"q": heads(), "k": heads(), "v": heads()}
    leaves["e"] = torch.randn(shape.p_max, K, generator=rng) * 0.1
    leaves["e_relative"] = torch.randn(T, K, generator=rng) * 0.1
    for name, parameter in CoPEMLP(hidden=HIDDEN).parameters(Dims(H * K, H, 1, T)).items():
        leaves[name] = torch.randn(parameter.shape, generator=rng) * (parameter.std or 0.02)
    return {name: x.requires_grad_() for name, x in leaves.items()}, heads()


def _phases(way: Attend, leaves: Leaves, weight: Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward as in training, and forward + backward."""

    def both() -> None:
        out = way(leaves)
        used = [x for x in leaves.values() if x.requires_grad]
        torch.autograd.grad(out, used, weight, allow_unused=True)

    return lambda: way(leaves), both


def _failure(way: Attend, answer: Attend, leaves: Leaves, weight: Tensor) -> str | None:
    """What is wrong with a way; None: nothing."""
    exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    try:
        got = _output_and_gradients(way, leaves, weight)
    except Exception as error:  # a peer may break in any way: it is then not timed
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    for name, wanted in _output_and_gradients(answer, exact, weight.double()).items():
        if got[name] is None and wanted is None:
            continue
        if got[name] is None or wanted is None:
            return f"no gradient of {name}"
        off = (got[name].double() - wanted).abs() / wanted.abs().max().clamp(min=1.0)
        if not (off.max() <= WORST and off.mean() <= MEAN):
            return f"{name} is off by {off.max():.1e} of its largest, {off.mean():.1e} in the mean"
    return None


def _output_and_gradients(way: Attend, leaves: Leaves, weight: Tensor) -> dict[str, Any]:
    out = way(leaves)
    gradients = torch.autograd.grad(out, list(leaves.values()), weight, allow_unused=True)
    return {"output": out.detach(), **dict(zip(leaves, gradients, strict=True))}
