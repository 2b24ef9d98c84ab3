"""What a plan will cost, before anything starts: parameters (exact), time and memory (estimates, and on what basis).

Parameters are counted from the declared shapes, without building a model, so that planning needs no torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from cope_sweep.optim.base import FLOAT32_BYTES
from cope_sweep.plan.expand import Plan
from cope_sweep.spec import Resources, RunSpec

RULE_FLOPS_PER_S = 2e10
"""Where nothing was measured yet: what a slow CPU core achieves on small transformers; a fast one has five times it."""
RULE_STEP_S = 2e-3
"""…and what a step costs however small its tensors are."""
PROCESS_BYTES = 600 * 2**20
"""A worker process with torch loaded, before its first tensor."""
SAVED_PER_TOKEN_AND_UNIT = 17
"""Numbers that a block saves for the backward pass, for each token and unit of the model's width."""
LOGITS_ARRAYS = 4
"""Arrays of the logits' size: the logits, their softmax, and the gradients of both."""


Shape = tuple[str, str, int]
"""Task, model and batch of a run."""


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
    """The number of parameters of a run's model, from the declared shapes; tied weights count once."""
    return sum(math.prod(shape) * count for _, shape, count in _declared_parameters(run))


def _declared_parameters(run: RunSpec) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, shape and count of the parameters of a run's model.

    Parameters that several layers have alike come once, under the name of one layer, with the number of layers.
    """
    family, sizes = run.model.family, run.sizes
    for name, declared in (family.input_parameters(sizes) | family.output_parameters(sizes)).items():
        yield name, declared.shape, 1
    for name, declared in family.block_parameters(sizes).items():
        yield f"blocks.0.{name}", declared.shape, sizes.layers
    for encoding in run.model.position:
        layers = sum(encoding.serves(layer) for layer in range(sizes.layers))
        for name, parameter in encoding.parameters(run.dims).items():
            yield f"position.{name}", parameter.shape, layers if parameter.per_layer else 1


def sequence_flops(run: RunSpec, tokens: int) -> float:
    """Floating-point operations of a forward pass: 2 for each parameter and token, and those of attention."""
    per_token: float = 2 * parameter_count(run) + 4 * run.model.layers * run.model.dim * tokens
    if any(encoding.scores for encoding in run.model.position):
        per_token *= 1.5  # gates, look-ups and their gradients: elementwise, memory-bound
    return per_token * tokens


def step_flops(run: RunSpec, resources: Resources) -> float:
    """Of a training step: a backward pass takes two forward passes, and one more where activations are made again."""
    passes = 4 if resources.checkpoint_activations else 3
    return passes * run.train.batch * sequence_flops(run, run.task.length("train"))


def run_flops(run: RunSpec, resources: Resources) -> float:
    """Of a whole run, evaluations included; test sets that end sooner than `final_sequences` take less."""
    evaluate, task = run.evaluate, run.task
    at_every = (run.train.steps - 1) // evaluate.every * evaluate.sequences + evaluate.final_sequences
    total = run.train.steps * step_flops(run, resources)
    for split in task.TESTS:
        total += at_every * sequence_flops(run, task.length(split))
        for context in evaluate.contexts:
            windows = evaluate.final_sequences * task.length(split) / (evaluate.stride or context)
            total += windows * sequence_flops(run, context)
    return total


def memory_bytes(run: RunSpec, resources: Resources) -> int:
    """The peak memory of a worker process.

    It holds weights, gradients, the optimiser's state, what the backward pass needs, and the process itself. Evaluation
    keeps nothing for a backward pass, so only the logits of longer sequences can need more there.
    """
    model, task = run.model, run.task
    sequences = min(resources.micro_batch or run.train.batch, math.ceil(run.train.batch / resources.workers))
    tokens = sequences * task.length("train")
    block = SAVED_PER_TOKEN_AND_UNIT * model.dim * tokens
    if resources.attention == "reference" or model.hard_attention:
        scored = any(encoding.scores for encoding in model.position)
        block += (14 if scored else 3) * model.heads * tokens * task.length("train")
    activations = model.layers * block
    if resources.checkpoint_activations:
        activations = model.layers * model.dim * tokens + block
    evaluated = [*(sequences * task.length(split) for split in task.TESTS), *run.evaluate.contexts]
    logits = LOGITS_ARRAYS * max(tokens, *evaluated) * task.vocabulary_size
    state = sum(
        (2 * FLOAT32_BYTES + run.train.optimizer.state_bytes(name, shape)) * math.prod(shape) * count
        for name, shape, count in _declared_parameters(run)
    )
    return PROCESS_BYTES + state + FLOAT32_BYTES * (activations + logits)


def estimates(plan: Plan, measured: Mapping[Shape, float] | None = None) -> dict[str, Estimate]:
    """Run id → estimate.

    `measured`: seconds per floating-point operation of runs of a shape that were trained before, as `shape_of` names
    it; times of other shapes are scaled from them. Without any, times follow a rule of thumb.
    """
    resources = plan.ablation.content.resources
    measured = measured or {}
    rate = statistics.median(measured.values()) if measured else None
    result = {}
    for run in plan.runs:
        key = shape_of(run)
        flops = run_flops(run, resources)
        if key in measured:
            seconds, basis = flops * measured[key], "measured on this store, same shapes"
        elif rate is not None:
            seconds, basis = flops * rate, "scaled from this store's finished runs"
        else:
            workers = min(resources.workers, run.train.batch)
            seconds = run.train.steps * RULE_STEP_S + flops / (workers * resources.cpus * RULE_FLOPS_PER_S)
            basis = f"rule of thumb, {RULE_FLOPS_PER_S / 1e9:.0f} GFLOP/s a core; a fast one takes a fifth"
        result[run.run_id] = Estimate(parameter_count(run), seconds, memory_bytes(run, resources), basis)
    return result


def total_seconds(runs: Iterable[Estimate], groups: int) -> float:
    """Wall time of runs, given in order to `groups` worker groups, each to the first that is free."""
    free_at = [0.0] * max(1, groups)
    for run in runs:
        first = min(range(len(free_at)), key=free_at.__getitem__)
        free_at[first] += run.seconds
    return max(free_at)


def shape_of(run: RunSpec) -> Shape:
    """Runs of equal shape take equal time per step."""
    return (run.task.model_dump_json(), run.model.model_dump_json(), run.train.batch)
