"""Benchmark of the fused kernels on a GPU, beside torch's SDPA, flex_attention and the paper's listing.

Times include everything that CoPE adds, such as the product q·e and its gradient. Before an alternative is timed, its
output and gradients are compared with float64, on one sequence and two heads of the same kind (`exact.py`); a wrong one
is not timed. The configurations of the kernels are those of the table (`cope_sweep/kernels/tuning.json`) and are
recorded; nothing is tuned here. The listing rounds gates in half precision: its error is recorded, and not limited.

Cases are measured in the order of their importance and written as they come, until the time budget ends; the same
command then continues.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cope_benchmarks import gpu_peers as peers
from cope_benchmarks.exact import Expected, computed_by
from cope_benchmarks.gpu_compile import Compiling, one_sequence
from cope_benchmarks.gpu_peers import BACKENDS, Attend
from cope_benchmarks.gpu_problems import DTYPES, Problem
from cope_benchmarks.gpu_timing import (
    Deadline,
    Effort,
    Journal,
    device_ms,
    extra_mib,
    facts,
    graph_time,
    host_bound,
    markdown,
    phases,
    times,
)
from cope_sweep.kernels import operator, tuning

BUDGET_S = 540.0
TOKENS = 65536
"""Tokens of a batch, which determine the number of sequences."""
TRITON, BLOCKED, LISTING, COMPILED = "triton", "blocked", "the paper's listing", "the listing, torch.compile"
FLEX = "flex_attention"
FUSED_SDPA = tuple(name for name in BACKENDS if name != "SDPA, math")
QUADRATIC = ("SDPA, math", LISTING, COMPILED)
PHASES = ("forward", "backward", "forward_backward")
CPU_EFFORT = Effort(turns=1, turn_ms=0.0)


OF_SDPA, MEMORY = "time ÷ fastest SDPA", "memory ÷ fastest SDPA"


@dataclass(frozen=True)
class Case:
    """A problem, what it is measured beside, and what we aim at."""

    name: str
    problem: Problem
    beside: tuple[str, ...] = FUSED_SDPA
    at_most: Mapping[str, float] = field(default_factory=dict)
    """The largest `OF_SDPA` and `MEMORY`."""
    at_least: Mapping[str, float] = field(default_factory=dict)
    """How many times as long others take, by name."""


def _problem(tokens: int, **options: Any) -> Problem:
    return Problem(batch=max(1, TOKENS // tokens), tokens=tokens, **{"heads": 16, **options})


def _cases() -> tuple[Case, ...]:
    single: dict[str, Any] = {"batch": 1, "heads": 16}
    all_peers = (*FUSED_SDPA, "SDPA, math", BLOCKED, LISTING, COMPILED)
    gates = (0.02, 0.1, 0.25, 0.75, 0.9, 0.98)
    return (
        Case("T 4096", _problem(4096), at_most={OF_SDPA: 1.25, MEMORY: 1.2}),
        Case("T 1024", _problem(1024), at_most={OF_SDPA: 2.0, MEMORY: 1.2}),
        Case("T 16384", _problem(16384), at_most={OF_SDPA: 1.1, MEMORY: 1.2}),
        Case("T 4096, never saturating", _problem(4096, p_max="full"), at_most={OF_SDPA: 3.0}),
        Case("T 4096, one sequence", Problem(tokens=4096, **single), all_peers, at_least={LISTING: 10, COMPILED: 4}),
        Case("T 1024, four sequences", Problem(tokens=1024, heads=16, batch=4), all_peers),
        Case("T 4096, views of a projection", _problem(4096, projection=True)),
        Case("T 4096, dropout", _problem(4096, dropout=0.1)),
        Case("T 512, Flip-Flop's batch", Problem(batch=16, heads=4, tokens=512, projection=True)),
        Case("T 4096, ALiBi", _problem(4096, p_max=None, alibi=True), (*FUSED_SDPA, FLEX)),
        Case("T 4096, relative", _problem(4096, p_max=None, relative=256), FUSED_SDPA),
        Case("T 1024, relative, all distances", _problem(1024, p_max=None, relative="full"), (*FUSED_SDPA, FLEX)),
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
    """The case at a size for Triton's interpreter, without goals."""
    problem = case.problem
    p_max = min(problem.p_max, 6) if isinstance(problem.p_max, int) else problem.p_max
    relative = min(problem.relative, 7) if isinstance(problem.relative, int) else problem.relative
    small = replace(problem, batch=1, heads=1, tokens=20, head_dim=16, p_max=p_max, relative=relative)
    beside = tuple(name for name in case.beside if name not in (COMPILED, *FUSED_SDPA[1:]))
    return Case(case.name, small, beside)


def why_not(device: str) -> str | None:
    """Why there is nothing to measure here; None: there is a GPU, or Triton interprets."""
    if device == "cpu":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if interpreted else "a dry run on a CPU needs TRITON_INTERPRET=1 in the environment"
    if not torch.cuda.is_available():
        return "no CUDA device: GPU attention is not measured"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than compute capability 8.0: GPU attention is not measured"
    return None


def measure(
    folder: Path | None = None, device: str = "cuda", budget_s: float = BUDGET_S, cases: tuple[Case, ...] = CASES
) -> dict[str, Any]:
    """Measure the cases that `folder` does not have yet; `{"skipped": reason}` where there is nothing to measure.

    Results are written to `gpu.jsonl`, `gpu.json` and `gpu.md` in `folder`. Raises ValueError if it has results of
    another machine.
    """
    skipped = why_not(device)
    if skipped:
        return {"skipped": skipped, "rows": []}
    if device == "cpu":
        cases = tuple(tiny(case) for case in cases)
    journal = Journal(folder / "gpu.jsonl" if folder else None, facts(device))
    deadline = Deadline(budget_s)
    todo = [case for case in cases if case.name not in journal.rows]
    with Compiling({case.name: [(case.problem, None)] for case in todo}, device) as compiling:
        for case in todo:
            if not deadline.allows_another():
                break
            compiling.wait(case.name)
            journal.add({"key": case.name, **_row(case, device)})
    left = [case.name for case in cases if case.name not in journal.rows]
    measured = {**journal.header, "rows": list(journal.rows.values()), "left": left}
    if folder:
        (folder / "gpu.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
        (folder / "gpu.md").write_text(table(measured), encoding="utf-8")
    return measured


def table(measured: dict[str, Any]) -> str:
    """The measurement in Markdown: times, the ratio of ours to the fastest SDPA, of others to ours, and memory."""
    if "skipped" in measured:
        return measured["skipped"] + "\n"  # type: ignore[no-any-return]
    rows = []
    goals = []
    for row in measured["rows"]:
        goals += [
            [row["key"], goal["what"], goal["goal"], f"{goal['measured']:.2f}", "yes" if goal["reached"] else "no"]
            for goal in row["goals"]
        ]
        for name, found in row["alternatives"].items():
            if "failed" in found:
                rows.append([row["key"], name, f"failed: {found['failed']}", *[""] * 6])
                continue
            cells = [f"{found[phase]['median_ms']:.3f}" for phase in PHASES]
            if "median_ms" in found.get("graph", {}):
                cells[-1] += f" (graph: {found['graph']['median_ms']:.3f})"
            ratio = row["ratios"].get(OF_SDPA) if name == TRITON else None
            slower = row["ratios"].get(name)
            rows.append([
                row["key"], name + (" (host-bound)" if measured.get("capability") and host_bound(found) else ""), *cells,
                "–" if ratio is None else f"{ratio:.2f}",
                "–" if slower is None else f"{slower:.2f}",
                "–" if found["extra_mib"] is None else f"{found['extra_mib']:.0f}",
                f"{found['error']:.1e}" if "error" in found else "–",
            ])  # fmt: skip
    heads = (
        "case", "attention", "forward, ms", "backward, ms", "forward + backward, ms", "this ÷ fastest SDPA",
        "this ÷ triton", "extra MiB", "error",
    )  # fmt: skip
    left = f"\nNot measured yet: {', '.join(measured['left'])}.\n" if measured["left"] else ""
    title = f"{measured['device']}, torch {measured['torch']}, Triton {measured['triton']}"
    reached = markdown(("case", "what", "goal", "measured", "reached"), goals) + "\n" if goals else ""
    return f"{title}\n\n{reached}{markdown(heads, rows)}{left}"


def _row(case: Case, device: str) -> dict[str, Any]:
    problem = case.problem
    found: dict[str, dict[str, Any]] = {}
    expected: dict[Problem, Expected] = {}
    for name in (TRITON, *case.beside):
        try:
            found[name] = _checked(case, name, device, expected)
        except Exception as error:  # a peer may raise anything, and is then not timed
            found[name] = {"failed": _first_line(error)}
    timed = {name: _alternative(problem, name, device) for name, row in found.items() if "failed" not in row}
    _add_times(found, timed, problem, device)
    ratios = _ratios(found)
    return {
        "problem": asdict(problem),
        "alternatives": found,
        "ratios": ratios,
        "goals": _goals(case, ratios),
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


def _goals(case: Case, ratios: Mapping[str, float]) -> list[dict[str, Any]]:
    """What we aim at, as far as it was measured."""
    found = []
    for what, limit in case.at_most.items():
        if what in ratios:
            reached = ratios[what] <= limit
            found.append({"what": what, "goal": f"≤ {limit:g}", "measured": ratios[what], "reached": reached})
    for name, limit in case.at_least.items():
        if name in ratios:
            what, reached = f"time of {name} ÷ ours", ratios[name] >= limit
            found.append({"what": what, "goal": f"≥ {limit:g}", "measured": ratios[name], "reached": reached})
    return found


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
        return peers.sdpa(problem, name)
    if name == TRITON:
        from cope_sweep.kernels import triton_attention

        return lambda x: triton_attention.attend(problem.build(x))
    if name == BLOCKED:
        return lambda x: operator.attention(problem.build(x), "blocked")
    return {LISTING: peers.listing, COMPILED: peers.listing_compiled, FLEX: peers.flex}[name](problem, device)


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
    computed = computed_by(attend, dict, leaves, weight)
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
    effort = Effort() if device == "cuda" else CPU_EFFORT
    # Those whose memory is O(T²) are measured alone, so that the others' graphs leave room for theirs.
    groups = [[name for name in timed if name not in QUADRATIC], *([name] for name in timed if name in QUADRATIC)]
    for group in groups:
        try:
            runs = {name: phases(partial(timed[name], given), list(given.values()), do) for name in group}
            rows: dict[str, dict[str, Any]] = {name: {} for name in group}
            for name, run in runs.items():
                rows[name]["extra_mib"] = extra_mib(run["forward_backward"], device)
            for phase in PHASES:
                for name, taken in times({name: run[phase] for name, run in runs.items()}, device, effort).items():
                    rows[name][phase] = taken
            if any(host_bound(row) for row in rows.values()) and device == "cuda":
                for name, run in runs.items():
                    rows[name]["graph"] = graph_time(run["forward_backward"], effort)
            for name, row in rows.items():
                found[name].update(row)
        except Exception as error:  # out of memory, for example
            found.update({name: {"failed": _first_line(error)} for name in group})
        runs = {}
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
