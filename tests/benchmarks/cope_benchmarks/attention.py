"""Benchmark of attention with CoPE, forward and backward: our kernels, the paper's listing and torch's SDPA.

On a CPU: `cope-sweep bench attention`. On a GPU: the stage `bench` of `make gpu`. Times include all that CoPE adds, such as
the product q·e.

Before an alternative is timed, its output and gradients are compared with float64, for one sequence and two heads of the
same kind (`exact.py`); a wrong one is not timed. The listing rounds gates to half precision there: its error is recorded only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cope_benchmarks import peers
from cope_benchmarks.exact import Expected, Leaves, computed_by
from cope_benchmarks.gpu_problems import Problem
from cope_benchmarks.report import MEMORY, OF_OURS, OF_SDPA, Measured, Row, Rows, add_ratios
from cope_benchmarks.timing import Run, extra_mb, one_line, resumed, times
from cope_sweep.kernels import Inputs, LayerEncoding, attend

KERNELS = ("native", "triton")
BLOCKED = "blocked"
LISTING, COMPILED, SDPA = "the paper's listing", "the listing, torch.compile", "SDPA, no positions"
BACKENDS = {
    SDPA: None,
    "SDPA, flash": SDPBackend.FLASH_ATTENTION,
    "SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA, efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""None: torch chooses."""
LISTINGS = (LISTING, COMPILED)
FORM = "near and far"
BOTH = "forward + backward, ms"
FUSED = ("triton", "SDPA, flash", "SDPA, cuDNN", "SDPA, efficient")
BY_FORM = (
    "triton",
    FORM,
    *(f"{FORM}: {sizes}" for sizes in ("forward 128 rows", "forward near 32 keys", "forward far 128 keys")),
    *(f"{FORM}: {sizes}" for sizes in ("rows far 64 keys", "keys far 32 queries", "keys near 3 stages")),
    "SDPA, flash",
    "SDPA, cuDNN",
)
"""The forms of the Triton kernels (`forms.FORMS`), and SDPA."""


@dataclass(frozen=True)
class Case:
    """A problem, and the names of what computes it, ours first."""

    name: str
    problem: Problem
    alternatives: tuple[str, ...] = FUSED

    def tiny(self) -> Case:
        """The case at a size for Triton's interpreter, without what is not on a CPU."""
        alternatives = without(self.alternatives, COMPILED, "SDPA, cuDNN", "SDPA, efficient")
        return replace(self, problem=self.problem.tiny(), alternatives=tuple(alternatives))


def without(names: Iterable[str], *others: str) -> list[str]:
    return [name for name in names if name not in others]


_FLOAT32: dict[str, Any] = {"dtype": "float32"}
_A = Problem(batch=16, heads=4, tokens=512, **_FLOAT32)
_ON_CPU = ("native", BLOCKED, LISTING, SDPA)
CPU_CASES = (
    Case("A", _A, _ON_CPU),
    Case("B", Problem(batch=1, heads=12, tokens=1024, **_FLOAT32), _ON_CPU),
    Case("C", Problem(batch=1, heads=2, tokens=4096, head_dim=32, **_FLOAT32), _ON_CPU),
    Case("D", Problem(batch=2, heads=2, tokens=1024, head_dim=32, p_max=1024, **_FLOAT32), _ON_CPU),
    *(
        Case(f"A, gates {gate:.2f}", replace(_A, mean_gate=gate), ("native", SDPA))
        for gate in (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98)
    ),
)
"""Gates are about ½, so that positions saturate after about 2·p_max keys; at shape D, never."""


def _large(tokens: int, **options: Any) -> Problem:
    """A problem of 65,536 tokens."""
    return Problem(batch=65536 // tokens, tokens=tokens, **{"heads": 16, **options})


GPU_CASES = (
    Case("T 4096", _large(4096)),
    Case("T 1024", _large(1024)),
    Case("T 16384", _large(16384)),
    Case("T 4096, never saturating", _large(4096, p_max="full")),
    Case("T 4096, one sequence", Problem(tokens=4096, heads=16), (*FUSED, *LISTINGS)),
    Case("T 4096, dropout", _large(4096, dropout=0.1)),
    Case("T 4096, ALiBi", _large(4096, p_max=None, alibi=True)),
    Case("T 4096, relative", _large(4096, p_max=None, relative=256)),
    Case("T 4096, head dim 128", _large(4096, head_dim=128, heads=8)),
    Case("T 4096, head dim 32", _large(4096, head_dim=32, heads=32)),
    Case("T 4096, separate gate keys", _large(4096, gate="separate")),
    *(Case(f"T 4096, mean gate {gate}", _large(4096, mean_gate=gate)) for gate in (0.02, 0.98)),
    Case("T 4096, float16", _large(4096, dtype="float16")),
    Case("T 1024, float32", _large(1024, dtype="float32"), ("triton", "SDPA, efficient")),
    Case("T 4096, no positions", _large(4096, p_max=None)),
)
"""The most important first; those of the goals are the first five."""
DRY_CASES = tuple(case.tiny() for case in GPU_CASES if case.name in ("T 4096", "T 4096, one sequence", "T 4096, ALiBi"))


def measure(repetitions: int, cases: tuple[Case, ...] = CPU_CASES) -> Measured:
    """Times, ratios and extra memory on this CPU."""
    rows = Rows("attention")
    for case in cases:
        rows.add_rows(case.name, measure_case(case, "cpu", repetitions))
    return rows.measured(repetitions=repetitions)


def measure_gpu(folder: Path, device: str, budget_s: float) -> Measured:
    """The same on a GPU, into `gpu.json` and `gpu.md`; with device `cpu`, a dry run."""
    todo = {case.name: case for case in (GPU_CASES if device == "cuda" else DRY_CASES)}
    measure_one = partial(measure_case, device=device, memory=device == "cuda")
    return resumed(folder / "gpu.json", device, budget_s, todo, measure_one)


def measure_case(case: Case, device: str, repetitions: int = 9, memory: bool = True) -> dict[str, Row]:
    """By alternative: times, ratios of forward + backward, memory, and the largest relative error; or why it is not timed."""
    found = _checked(case, device)
    leaves, do = case.problem.leaves(device)
    if device == "cpu":
        leaves, do = {name: _as_in_a_model(x) for name, x in leaves.items()}, _as_in_a_model(do)
    given = {name: x.requires_grad_() for name, x in leaves.items()}
    # Those whose memory is O(T²) are measured alone, so that there is room for them.
    groups = [without(case.alternatives, *LISTINGS), *([name] for name in case.alternatives if name in LISTINGS)]
    for group in [case.alternatives] if device == "cpu" else groups:
        runs = {
            name: _phases(alternative(case.problem, name, device), given, do)
            for name in group
            if "failed" not in found[name]
        }
        try:
            for n, phase in enumerate(("forward, ms", BOTH)):
                taken = times({name: run[n] for name, run in runs.items()}, repetitions, device, turn_ms=20.0)
                for name, each in taken.items():
                    found[name][phase] = each
            for name, (_, both) in runs.items() if memory else ():
                # On a CPU without output and gradients, which all alternatives have.
                results = sum(x.nbytes for x in (*leaves.values(), do)) / 1e6 if device == "cpu" else 0
                found[name]["extra MB"] = round(max(0, extra_mb(both, device) - results), 1)
        except Exception as error:  # out of memory, for example
            found |= {name: {"failed": one_line(error)} for name in runs}
    ours = case.alternatives[0]
    add_all_ratios(found, ours)
    found[ours]["problem"] = asdict(case.problem)
    return found


def add_all_ratios(found: dict[str, Row], ours: str) -> None:
    """Add the ratios of times, and on a GPU of memory, to those of the fastest SDPA, and of times to `ours`."""
    total_ms = {name: found[name][BOTH]["median_ms"] for name in BACKENDS if BOTH in found.get(name, {})}
    sdpa = min(total_ms, key=total_ms.__getitem__, default="")
    add_ratios(found, BOTH, sdpa, OF_SDPA)
    if ours == "triton":
        add_ratios(found, "extra MB", sdpa, MEMORY)
    add_ratios(found, BOTH, ours, OF_OURS)


def alternative(problem: Problem, name: str, device: str) -> Callable[[Leaves], Tensor]:
    """A function of the problem's leaves that computes attention."""
    if name in BACKENDS:
        return partial(_sdpa, problem, BACKENDS[name])
    if name == "triton" or name.startswith(FORM):
        from cope_benchmarks import forms  # Triton may be missing

        return partial(forms.attend, problem, name)
    if name in KERNELS:
        return partial(problem.attend, kernel=name)
    if name == BLOCKED:
        return _in_blocks

    def listing(x: Leaves) -> Tensor:
        """Under autocast if the type is not float32: then sums of gates are float32, as in its users' code."""
        dtype = x["q"].dtype
        with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            return peers.listing(x).to(dtype)

    return torch.compile(listing, dynamic=False) if name == COMPILED else listing


def _in_blocks(x: Leaves) -> Tensor:
    """CoPE by PyTorch in blocks of queries."""
    from cope_sweep.positions import CoPE  # needs packages that a machine with a GPU may not have

    positions = [LayerEncoding(CoPE(p_max=len(x["e"])), {"e": x["e"]})]
    return attend(Inputs.plain(x["q"], x["k"], x["v"]), positions, implementation="blocked")


def _sdpa(problem: Problem, backend: SDPBackend | None, x: Leaves) -> Tensor:
    """Attention without positions, on the same queries, keys and values."""
    with sdpa_kernel(backend) if backend else nullcontext():
        return F.scaled_dot_product_attention(x["q"], x["k"], x["v"], dropout_p=problem.dropout, is_causal=True)


def _checked(case: Case, device: str) -> dict[str, Row]:
    """The largest relative error of each alternative, or why it is not timed."""
    found: dict[str, Row] = {}
    expected: dict[Problem, Expected] = {}
    for name in case.alternatives:
        problem = case.problem.one_sequence()
        if name in BACKENDS:
            problem = replace(problem, p_max=None, relative=None, alibi=False, gate="logits", dropout=0.0)
        leaves, weight = problem.leaves(device)
        try:
            if name == "triton" and (reason := _why_not_fused(problem, leaves)):
                raise ValueError(f"not fused: {reason}")
            computed = computed_by(alternative(problem, name, device), leaves, weight)
            if problem not in expected:
                expected[problem] = problem.expected(leaves, weight)
            wrong = expected[problem].wrong(computed)
            half = name in LISTINGS and problem.dtype != "float32"
            errors = {"error": max(expected[problem].relative_errors(computed).values())}
            found[name] = errors if half or not wrong else {"failed": wrong}
        except Exception as error:  # an alternative may raise anything, and is then not timed
            found[name] = {"failed": one_line(error)}
    return found


def _why_not_fused(problem: Problem, leaves: Leaves) -> str | None:
    from cope_sweep.kernels import triton_attention

    return triton_attention.why_not(problem.build(leaves), leaves["v" if "v" in leaves else "qkv"].device)


def _phases(attend: Callable[[Leaves], Tensor], given: Leaves, do: Tensor) -> tuple[Run, Run]:
    """Two functions: forward as in training, and forward + backward."""
    return (
        lambda: attend(given),
        lambda: torch.autograd.grad(attend(given), list(given.values()), do, allow_unused=True),
    )


def _as_in_a_model(x: Tensor) -> Tensor:
    """Queries, keys and values in the memory layout of a model, (B, T, H, K)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x
