"""What a plan will cost, before anything starts: parameters (exact), time and memory (estimates, and on what basis).

Parameters are counted from the declared shapes, without building a model, so that planning needs no torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from cope_sweep.plan.expand import Plan
from cope_sweep.record import Ledger
from cope_sweep.spec import RunSpec

RULE_FLOPS_PER_S = 2e10
"""Where nothing was measured yet: what one CPU core achieves on small transformers, within a factor of about 3."""
RULE_STEP_S = 2e-3
"""…and what a step costs however small its tensors are."""
PROCESS_BYTES = 600 * 2**20
"""A worker process with torch loaded, before its first tensor."""


@dataclass(frozen=True)
class Estimate:
    """What one run takes."""

    parameters: int
    """Exact."""
    seconds: float
    """On one worker group, by itself."""
    memory_bytes: int
    """Of a worker process."""
    basis: str
    """Where `seconds` comes from."""


def parameter_count(run: RunSpec) -> int:
    """The number of parameters of a run's model, tied weights once."""
    model, vocabulary = run.model, run.task.vocabulary_size
    dim, hidden = model.dim, model.feed_forward_dim
    if model.family == "llama":
        norm, attention, feed_forward = dim, 4 * dim * dim, 3 * dim * hidden
    else:
        norm, attention, feed_forward = 2 * dim, 4 * dim * (dim + 1), 2 * dim * hidden + hidden + dim
    total = vocabulary * dim * (1 if model.tied else 2) + model.layers * (attention + feed_forward + 2 * norm)
    if model.family != "post_norm":
        total += norm
    for encoding in model.position:
        served = sum(encoding.serves(layer) for layer in range(model.layers))
        for parameter in encoding.parameters(run.dims).values():
            total += math.prod(parameter.shape) * (served if parameter.per_layer else 1)
    return total


def step_flops(run: RunSpec) -> float:
    """Floating-point operations of a training step: 6 for each parameter and token, and those of attention."""
    tokens = run.task.length("train")
    per_token: float = 6 * parameter_count(run) + 12 * run.model.layers * run.model.dim * tokens
    if any(encoding.scores for encoding in run.model.position):
        per_token *= 1.5  # gates, look-ups and their gradients: elementwise, memory-bound
    return float(per_token * run.train.batch * tokens)


def memory_bytes(run: RunSpec) -> int:
    """A worker's peak: weights, gradients and AdamW's two moments, what backward keeps, and the process itself."""
    model, tokens = run.model, run.task.length("train")
    matrices = 14 if any(encoding.scores for encoding in model.position) else 1
    attention = matrices * run.train.batch * model.heads * tokens * tokens
    rest = run.train.batch * tokens * (20 * model.dim)
    logits = 3 * run.train.batch * tokens * run.task.vocabulary_size
    return PROCESS_BYTES + 16 * parameter_count(run) + 4 * (model.layers * (attention + rest) + logits)


def estimates(plan: Plan, ledger: Ledger) -> dict[str, Estimate]:
    """Run id → estimate; time from this store's own finished runs where there are any, else by rule of thumb."""
    measured = _measured(plan, ledger)
    rate = statistics.median(measured.values()) if measured else None
    result = {}
    for run in plan.runs:
        key = _shape(run)
        steps = run.train.steps
        if key in measured:
            seconds, basis = steps * step_flops(run) * measured[key], "measured on this store, same shapes"
        elif rate is not None:
            seconds, basis = steps * step_flops(run) * rate, "scaled from this store's finished runs"
        else:
            seconds = steps * (RULE_STEP_S + step_flops(run) / RULE_FLOPS_PER_S)
            basis = f"rule of thumb, {RULE_FLOPS_PER_S / 1e9:.0f} GFLOP/s; within a factor of 3"
        result[run.run_id] = Estimate(parameter_count(run), seconds, memory_bytes(run), basis)
    return result


def total_seconds(runs: Iterable[Estimate], groups: int) -> float:
    """Wall time of runs, given in order to `groups` worker groups, each to the first that is free."""
    free_at = [0.0] * max(1, groups)
    for run in runs:
        first = min(range(len(free_at)), key=free_at.__getitem__)
        free_at[first] += run.seconds
    return max(free_at)


def _shape(run: RunSpec) -> tuple[object, ...]:
    """Runs of equal shape take equal time per step."""
    return (run.task.model_dump_json(), run.model.model_dump_json(), run.train.batch)


def _measured(plan: Plan, ledger: Ledger) -> dict[tuple[object, ...], float]:
    """Shape → seconds per floating-point operation, evaluation included, in this plan's finished runs."""
    seen: dict[tuple[object, ...], list[float]] = {}
    for run in plan.runs:
        result = ledger.run(run.run_id).result
        facts = result["facts"] if result else {}
        steps = facts.get("steps", 0) - facts.get("resumed_from_step", 0)
        if steps > 0:
            seen.setdefault(_shape(run), []).append(facts["wall_s"] / (steps * step_flops(run)))
    return {shape: statistics.median(values) for shape, values in seen.items()}
