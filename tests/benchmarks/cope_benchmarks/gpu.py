"""Benchmark of the fused kernels on a GPU, beside torch's SDPA and the paper's listing: the stage `bench` of `make gpu`.

Times include everything that CoPE adds, such as the product q·e and its gradient. Before an alternative is timed, its
output and gradients are compared with float64, on one sequence and two heads of the same kind (`exact.py`); a wrong one
is not timed. The configurations of the kernels are those of the table (`cope_sweep/kernels/tuning.json`) and are
recorded; nothing is tuned here. The listing rounds gates in half precision: its error is recorded, and not limited.

Cases are measured in the order of their importance and written as they come, until the time budget ends; the same
command then continues.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cope_benchmarks import peers
from cope_benchmarks.compiling import one_sequence
from cope_benchmarks.exact import Expected, computed_by
from cope_benchmarks.gpu_problems import DTYPES, Problem
from cope_benchmarks.gpu_timing import (
    device_ms,
    extra_mib,
    first_line,
    free_memory,
    graph_time,
    host_bound,
    phases,
    resumed,
    times,
)
from cope_benchmarks.peers import Attend, Leaves
from cope_benchmarks.report import MEMORY, OF_SDPA, goals_table, markdown
from cope_sweep.kernels import tuning

TOKENS = 65536
"""Tokens of a batch, which determine the number of sequences."""
BACKENDS = {
    "SDPA, flash": SDPBackend.FLASH_ATTENTION,
    "SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA, efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA, math": SDPBackend.MATH,
}
TRITON, BLOCKED, LISTING, COMPILED = "triton", "blocked", "the paper's listing", "the listing, torch.compile"
FUSED_SDPA = tuple(name for name in BACKENDS if name != "SDPA, math")
QUADRATIC = ("SDPA, math", LISTING, COMPILED)
PHASES = ("forward", "backward", "forward_backward")


@dataclass(frozen=True)
class Case:
    """A problem, and what it is measured beside. Its goals are in `report.GOALS`."""

    name: str
    problem: Problem
    beside: tuple[str, ...] = FUSED_SDPA


def _problem(tokens: int, **options: Any) -> Problem:
    return Problem(batch=max(1, TOKENS // tokens), tokens=tokens, **{"heads": 16, **options})


def _cases() -> tuple[Case, ...]:
    all_peers = (*FUSED_SDPA, "SDPA, math", BLOCKED, LISTING, COMPILED)
    gates = (0.02, 0.1, 0.25, 0.75, 0.9, 0.98)
    return (
        Case("T 4096", _problem(4096)),
        Case("T 1024", _problem(1024)),
        Case("T 16384", _problem(16384)),
        Case("T 4096, never saturating", _problem(4096, p_max="full")),
        Case("T 4096, one sequence", Problem(tokens=4096, heads=16, batch=1), all_peers),
        Case("T 1024, four sequences", Problem(tokens=1024, heads=16, batch=4), all_peers),
        Case("T 4096, views of a projection", _problem(4096, projection=True)),
        Case("T 4096, dropout", _problem(4096, dropout=0.1)),
        Case("T 512, Flip-Flop's batch", Problem(batch=16, heads=4, tokens=512, projection=True)),
        Case("T 4096, ALiBi", _problem(4096, p_max=None, alibi=True)),
        Case("T 4096, relative", _problem(4096, p_max=None, relative=256)),
        Case("T 1024, relative, all distances", _problem(1024, p_max=None, relative="full")),
        Case("T 1024, never saturating", _problem(1024, p_max="full")),
        Case("T 16384, never saturating", _problem(16384, p_max="full")),
        *(Case(f"T {t}, head dim 128", _problem(t, head_dim=128, heads=8)) for t in (4096, 1024, 16384)),
        *(Case(f"T {t}, head dim 32", _problem(t, head_dim=32, heads=32)) for t in (4096, 1024, 16384)),
        Case("T 4096, separate gate keys", _problem(4096, gate="separate")),
        *(Case(f"T 4096, mean gate {gate}", _problem(4096, mean_gate=gate)) for gate in gates),
        Case("T 4096, float16", _problem(4096, dtype="float16")),
        Case("T 1024, float32", _problem(1024, dtype="float32"), ("SDPA, efficient",)),
        Case("T 4096, no positions", _problem(4096, p_max=None)),
    )


CASES = _cases()
DRY_CASES = tuple(case for case in CASES if case.name in ("T 4096", "T 4096, one sequence", "T 4096, ALiBi"))
"""One of each kind: the cases of a dry run."""


def tiny(case: Case) -> Case:
    """The case at a size for Triton's interpreter."""
    # A CPU's fused one is "flash".
    beside = tuple(name for name in case.beside if name not in (COMPILED, *FUSED_SDPA[1:]))
    return Case(case.name, case.problem.tiny(), beside)


def measure(folder: Path, device: str, budget_s: float, cases: tuple[Case, ...] = CASES) -> dict[str, Any]:
    """Measure the cases that `folder` does not have yet, and write `gpu.jsonl`, `gpu.json` and `gpu.md`."""
    todo = {case.name: case if device == "cuda" else tiny(case) for case in cases}
    return resumed(
        folder / "gpu.jsonl", device, budget_s, todo, lambda case: _row(case, device), table,
        work=lambda case: [(case.problem, None)],
    )  # fmt: skip


def table(measured: dict[str, Any]) -> str:
    """The measurement in Markdown: goals, times, the ratio of ours to the fastest SDPA, of others to ours, and memory."""
    rows = []
    numbers: dict[str, float] = {}
    for row in measured["rows"]:
        for name, ratio in row["ratios"].items():
            what = name if name in (OF_SDPA, MEMORY) else f"time of {name} ÷ ours"
            numbers[f"{row['key']}: {what}"] = ratio
        for name, found in row["alternatives"].items():
            if "failed" in found:
                rows.append([row["key"], name, f"failed: {found['failed']}", *[""] * 6])
                continue
            cells = [f"{found[phase]['median_ms']:.3f}" for phase in PHASES]
            if "median_ms" in found.get("graph", {}):
                cells[-1] += f" (graph: {found['graph']['median_ms']:.3f})"
            of_sdpa = row["ratios"].get(OF_SDPA) if name == TRITON else None
            slower = row["ratios"].get(name)
            rows.append([
                row["key"], name + (" (host-bound)" if measured.get("capability") and host_bound(found) else ""), *cells,
                "–" if of_sdpa is None else f"{of_sdpa:.2f}",
                "–" if slower is None else f"{slower:.2f}",
                "–" if found["extra_mib"] is None else f"{found['extra_mib']:.0f}",
                f"{found['error']:.1e}" if "error" in found else "–",
            ])  # fmt: skip
    heads = (
        "case", "attention", "forward, ms", "backward, ms", "forward + backward, ms", "this ÷ fastest SDPA",
        "this ÷ triton", "extra MiB", "error",
    )  # fmt: skip
    # A dry run has other sizes.
    goals = goals_table("gpu", numbers) if measured.get("capability") else ""
    return f"{goals}\n{markdown(heads, rows, left=2)}"


def _row(case: Case, device: str) -> dict[str, Any]:
    problem = case.problem
    found: dict[str, dict[str, Any]] = {}
    expected: dict[Problem, Expected] = {}
    for name in (TRITON, *case.beside):
        try:
            found[name] = _checked(case, name, device, expected)
        except Exception as error:  # a peer may raise anything, and is then not timed
            found[name] = {"failed": first_line(error)}
    timed = {name: _alternative(problem, name, device) for name, row in found.items() if "failed" not in row}
    _add_times(found, timed, problem, device)
    return {
        "problem": asdict(problem),
        "alternatives": found,
        "ratios": _ratios(found),
        "configurations": configurations(problem, device),
    }


def _ratios(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The time of each other ÷ ours, and ours ÷ that of the fastest SDPA; memory ÷ that of the fastest SDPA."""
    totals = {name: device_ms(row) for name, row in found.items() if "forward_backward" in row}
    ours = totals.pop(TRITON, None)
    if ours is None:
        return {}
    ratios = {name: round(total / ours, 3) for name, total in totals.items()}
    fastest = min((name for name in totals if name in BACKENDS), key=totals.__getitem__, default=None)
    if fastest is not None:
        ratios[OF_SDPA] = round(ours / totals[fastest], 3)
        memory, of_sdpa = found[TRITON]["extra_mib"], found[fastest]["extra_mib"]
        if memory and of_sdpa:
            ratios[MEMORY] = round(memory / of_sdpa, 3)
    return ratios


def configurations(problem: Problem, device: str) -> dict[str, dict[str, int]]:
    """The configuration of each kernel for a problem."""
    architecture = tuning.architecture_of(torch.device(device))
    return {
        kernel: tuning.configuration(
            kernel, architecture=architecture, dtype=DTYPES[problem.dtype], head_dim=problem.head_dim,
            p_max=problem.entries, contextual=problem.contextual, tokens=problem.keys,
        )
        for kernel in tuning.KERNELS
    }  # fmt: skip


def _alternative(problem: Problem, name: str, device: str) -> Attend:
    if name in BACKENDS:
        return lambda x: _sdpa(problem, x, BACKENDS[name])
    if name in (TRITON, BLOCKED):
        return lambda x: problem.attend(x, name)

    def listing(x: Leaves) -> Tensor:
        """The paper's listing, under autocast if the type is not float32: then sums of gates are float32, as in its users' code."""
        dtype = x["q"].dtype
        with torch.autocast(device, dtype=dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
            return peers.listing(x).to(dtype)

    return torch.compile(listing, dynamic=False) if name == COMPILED else listing


def _sdpa(problem: Problem, x: Leaves, backend: SDPBackend) -> Tensor:
    """Attention without positions by one backend, on the same queries, keys and values."""
    q, k, v = x["qkv"].permute(2, 0, 3, 1, 4) if problem.projection else (x["q"], x["k"], x["v"])
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=problem.dropout, is_causal=True)


def _checked(case: Case, name: str, device: str, expected: dict[Problem, Expected]) -> dict[str, Any]:
    """The error of an alternative on one sequence, or why it is not timed. `expected` keeps what alternatives share."""
    problem = one_sequence(case.problem)
    if name in BACKENDS:
        problem = replace(problem, p_max=None, relative=None, alibi=False, gate="logits", dropout=0.0)
    elif name == TRITON:
        from cope_sweep.kernels import triton_attention

        reason = triton_attention.why_not(problem.build(problem.leaves(device)[0]))
        if reason:
            return {"failed": f"not fused: {reason}"}
    leaves, weight = problem.leaves(device)
    attend = _alternative(problem, name, device)
    computed = computed_by(attend, leaves, weight)
    if problem not in expected:
        expected[problem] = Expected(problem.build, leaves, weight, DTYPES[problem.dtype])
    result = expected[problem].compare(computed)
    worst = max(result.relative.values())
    if result.wrong and name not in (LISTING, COMPILED):
        return {"failed": result.wrong}
    return {"error": worst}


def _add_times(found: dict[str, Any], timed: dict[str, Attend], problem: Problem, device: str) -> None:
    """Add times and memory of the alternatives to their rows."""
    leaves, do = problem.leaves(device)
    given = {name: x.requires_grad_() for name, x in leaves.items()}
    # Those whose memory is O(T²) are measured alone, so that the others' graphs leave room for theirs.
    groups = [[name for name in timed if name not in QUADRATIC], *([name] for name in timed if name in QUADRATIC)]
    for group in groups:
        try:
            runs = {name: phases(partial(timed[name], given), list(given.values()), do) for name in group}
            rows: dict[str, dict[str, Any]] = {name: {} for name in group}
            for name, run in runs.items():
                rows[name]["extra_mib"] = extra_mib(run["forward_backward"], device)
            for phase in PHASES:
                for name, taken in times({name: run[phase] for name, run in runs.items()}, device).items():
                    rows[name][phase] = taken
            if any(host_bound(row) for row in rows.values()) and device == "cuda":
                for name, run in runs.items():
                    rows[name]["graph"] = graph_time(run["forward_backward"])
            for name, row in rows.items():
                found[name].update(row)
        except Exception as error:  # out of memory, for example
            found.update({name: {"failed": first_line(error)} for name in group})
        runs = {}
        free_memory(device)
