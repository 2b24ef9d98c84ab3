"""Estimates of what a plan costs: parameters (exact), time and memory.

Parameters are counted from declared shapes, without building a model, so that planning does not import torch.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cope_sweep.config.expand import Plan
from cope_sweep.config.resources import Resources
from cope_sweep.config.run import RunSpec
from cope_sweep.optim.base import FLOAT32_BYTES
from cope_sweep.positions import Dims
from cope_sweep.positions.base import Encoding
from cope_sweep.positions.cope import ContextualEncoding
from cope_sweep.sizes import CHUNK_LOGITS, MIN_BLOCKED_KEYS, RECOMPUTED_ELEMENTS

DEFAULT_FLOPS_PER_S = 5e10
"""Floating-point operations per second and core without measurements, on small transformers. A run of the quick start
took 24 to 30 s of a shared AVX-512 core, which are 45 to 58 GFLOP/s, and about 20 s of a quiet one."""
DEFAULT_STEP_S = 2e-3
"""Seconds per training step without measurements, in addition to the floating-point operations. A batch of an
evaluation, without a backward pass, takes a third."""
RUN_S = 0.12
"""Seconds per run beside its steps: its model, files and records. `bench sweep`: 16 runs of one step a second, two at a
time."""
RAY_START_S, LOCAL_START_S = 20.0, 5.0
"""Seconds from the command to the first step, with Ray (`bench sweep`) and without: imports, Ray, worker processes."""
RULE_OF_THUMB = f"rule of thumb: {DEFAULT_FLOPS_PER_S / 1e9:.0f} GFLOP/s per core"
PROCESS_BYTES = 750 * 2**20
"""A worker process after a step of a model without a size: with torch and an optimiser loaded."""


class FamilyMemory(NamedTuple):
    """Numbers that a block takes for each token: for each unit of the model's width and of its feed-forward net."""

    saved_width: float
    saved_hidden: float
    """Kept for the backward pass."""
    backward_hidden: float
    """Needed for a while in the backward pass of a block."""


FAMILY_MEMORY = {
    "gpt2": FamilyMemory(9.3, 1, 5),
    "post_norm": FamilyMemory(12.9, 1, 2.4),
    "llama": FamilyMemory(13.6, 4, 6.4),
}
"""Measured with 1 and 4 layers (tests/benchmarks, memory). Other families count as `llama`."""
NOT_RECOMPUTED = 4
"""More for each unit of width in a block of `gpt2` whose activations are too small to be computed again
(`families.base.recomputed`)."""
GATE_MEMORY, QK_NORM_MEMORY = 3, 5
"""More for each unit of width with `output_gate: channel`, and with `qk_norm`; measured with `gpt2` and 127 tokens."""
ENCODING_MEMORY = {
    "rope": 6.2, "xpos": 5.1, "darope": 9.9, "selective_rope": 12.6, "path": 4.8, "short_convolution": 8.1,
    "cope": 1.3, "cope_mlp": 8.9, "cope_alibi": 0.0, "relative": 0.8, "alibi": 0.5, "t5": 1.8, "fire": 1.2,
    "kerple": 1.9, "dape": 2.8, "fox": 0.8, "stick_breaking": 2.8, "tra": 2.5, "grape_ap": 7.2, "absolute": 0.0,
    "sinusoidal": 0.0, "wall": 6.0, "inkling": 2.0, "window": 0.0, "temperature": 1.0,
}  # fmt: skip
"""Kind → what it adds to a block, for each token and unit of width: the mean over the families, 127 and 1,023 tokens.
By holes in the heap, one measurement is up to 4 above or below. Others count as `rope` if they rotate or mix, else as
`cope`."""
WEIGHTS_MATRICES = 2.2
"""Whole matrices of (T, T) for each head and sequence that a block takes where neither a fused kernel nor blocks of
queries compute attention: the weights, and their gradient."""
ENCODING_MATRICES = {
    "cope": 9.7, "cope_mlp": 6.1, "relative": 6.3, "stick_breaking": 7.2, "path": 7.3, "tra": 6.4, "dape": 20.5,
    "fox": 0.6, "fire": 0.6, "alibi": 0.6, "t5": 0.6, "kerple": 0.6, "cope_alibi": 3.0, "grape_ap": 4.9,
    "wall": 14.0,
}  # fmt: skip
"""Kind → how many more of them; measured with 127 tokens. Others that score or weigh count as `path`."""
WITHOUT_TRITON = ("fire", "grape_ap", "stick_breaking")
"""Kinds that native kernels compute, and those for GPUs do not."""
SAME_TERM = (
    {"cope", "cope_mlp"}, {"cope_alibi", "grape_ap"}, {"relative", "inkling"}, {"t5", "kerple"},
)  # fmt: skip
"""Pairs of kinds that no fused kernel computes in the same layer: it has room for only one of their terms."""
LARGE_BYTES = 32 * 2**20
"""glibc returns blocks of this size to the system as soon as they are free. Smaller ones leave holes among others."""
LARGE_SAVED, LARGE_BACKWARD = 0.83, 0.47
"""Shares of the numbers above without holes; measured with activations of 42 MB. On a GPU, torch leaves few."""
LOGITS_ARRAYS = 3
"""Arrays of the logits' size: their softmax, and the gradients of both."""
OUTPUT_ARRAYS = 3
"""Arrays of the output layer's size while a loss in chunks is computed: its gradient, which exists before the backward
pass, and copies that matrix products make of the weight."""


RunShape = tuple[str, str, int, str]
"""Task, model, batch size and optimiser of a run; runs of equal shape take equal time per step."""


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of one run."""

    parameters: int
    """Exact; of runs that are not known yet, the most."""
    seconds: float
    """Training and evaluation on one worker group, while no other program uses the machine."""
    memory_bytes: int
    """Peak of one worker process; of runs that are not known yet, the most."""
    basis: str
    """Source of `seconds`."""


def parameter_count(run: RunSpec) -> int:
    """The number of learned parameters of a run's model, from the declared shapes; tied weights count once."""
    return sum(math.prod(shape) * count for _, shape, count in _declared_parameters(run))


def _declared_parameters(run: RunSpec) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, shape and count of the learned parameters of a run's model.

    Parameters that several layers have alike come once, under the name of one layer, with the number of layers.
    """
    family, sizes = run.model.family, run.sizes
    for name, declared in (family.input_parameters(sizes) | family.output_parameters(sizes)).items():
        yield name, declared.shape, 1
    for name, declared in (family.block_parameters(sizes) | run.attention_parameters).items():
        yield f"blocks.0.{name}", declared.shape, sizes.layers
    for encoding in run.model.position:
        layers = sum(encoding.serves(layer) for layer in range(sizes.layers))
        for name, parameter in encoding.parameters(run.dims).items():
            if parameter.learned:
                yield f"position.{name}", parameter.shape, layers if parameter.per_layer else 1


def _sequence_flops(run: RunSpec, tokens: int, parameters: int) -> float:
    """Floating-point operations of the forward pass of one sequence: 2 per parameter and token, plus attention."""
    per_token: float = 2 * parameters + 4 * run.model.layers * run.model.dim * tokens
    if any(encoding.scores for encoding in run.model.position):
        per_token *= 1.5  # gates and look-ups are elementwise: few operations, but bound by memory bandwidth
    return per_token * tokens


def step_flops(run: RunSpec, resources: Resources, parameters: int | None = None) -> float:
    """Floating-point operations of a training step. `parameters`: the number of the model's, where it is known.

    A backward pass costs as much as two forward passes, and three if activations are recomputed.
    """
    parameters = parameter_count(run) if parameters is None else parameters
    passes = 4 if resources.checkpoint_activations else 3
    return passes * run.train.batch * _sequence_flops(run, run.task.length("train"), parameters)


def model_flops_per_token(run: RunSpec) -> int:
    """Floating-point operations of a forward and backward pass for each token of a training sequence.

    6 for each parameter that is multiplied with the token's vectors, and 12·layers·dim·tokens for the products of
    attention (Chowdhery et al. 2022, PaLM, appendix B). Tables in which rows are looked up, and what encodings, dropout
    or recomputed activations add, do not count.
    """
    looked_up = ("position.",) if run.model.tied else ("position.", "embedding.")
    declared = (parameter for parameter in _declared_parameters(run) if not parameter[0].startswith(looked_up))
    multiplied = sum(math.prod(shape) * count for _, shape, count in declared)
    return 6 * multiplied + 12 * run.model.layers * run.model.dim * run.task.length("train")


def training_flops(run: RunSpec) -> int:
    """Floating-point operations of all training steps, counted by `model_flops_per_token`."""
    return run.training_tokens * model_flops_per_token(run)


def run_flops(run: RunSpec, resources: Resources, parameters: int | None = None) -> float:
    """Floating-point operations of a run with its evaluations. `parameters`: as for `step_flops`.

    This is an upper bound where a test set has fewer than `final_sequences` sequences.
    """
    parameters = parameter_count(run) if parameters is None else parameters
    evaluate, task = run.evaluate, run.task
    at_every = (run.train.steps - 1) // evaluate.every * evaluate.sequences + evaluate.final_sequences
    total = run.train.steps * step_flops(run, resources, parameters)
    at_every += len(evaluate.variants) * evaluate.final_sequences
    for split in run.test_sets:
        total += at_every * _sequence_flops(run, task.length(split), parameters)
        for context in evaluate.contexts:
            windows = task.covered(split, evaluate.final_sequences) / (evaluate.stride or context)
            total += (1 + len(evaluate.variants)) * windows * _sequence_flops(run, context, parameters)
        if (places := evaluate.positions) is not None:
            windows = task.covered(split, evaluate.final_sequences) / places
            total += (1 + len(evaluate.variants)) * windows * _sequence_flops(run, places, parameters)
    for times in evaluate.lengths:
        longer = _sequence_flops(run, task.longer(times).length(task.TESTS[0]), parameters)
        total += (1 + len(evaluate.variants)) * evaluate.final_sequences * longer
    return total


def evaluation_batches(run: RunSpec) -> int:
    """The number of batches in all evaluations on the test sets, with longer sequences and variants."""
    evaluate = run.evaluate
    often, last = (math.ceil(number / run.train.batch) for number in (evaluate.sequences, evaluate.final_sequences))
    at_every = (run.train.steps - 1) // evaluate.every * often + last
    variants = 1 + len(evaluate.variants)
    return len(run.test_sets) * (at_every + (variants - 1) * last) + variants * len(evaluate.lengths) * last


def memory_bytes(run: RunSpec, resources: Resources) -> int:
    """The peak memory of a worker process.

    It holds weights, gradients, the optimiser's state, what the backward pass needs, and the process itself. Evaluation
    keeps nothing for a backward pass, so only the logits of longer sequences can need more there.
    """
    model, task, train = run.model, run.task, run.train
    share = math.ceil(train.batch / resources.workers)
    sequences = min(resources.micro_batch or share, share)
    keeps_gradients = sequences < share or resources.workers > 1 or resources.checkpoint_activations
    tokens = sequences * task.length("train")
    saved, backward = _block_numbers(run, tokens, on_cuda=_on_cuda(resources))
    whole = resources.attention == "reference"
    short = task.length("train") < MIN_BLOCKED_KEYS
    matrices = 0.0
    places = range(len(model.position))
    served = Counter(tuple(n for n in places if model.position[n].serves(layer)) for layer in range(model.layers))
    for serving_places, layers in served.items():
        serving = [model.position[n] for n in serving_places]
        fused = not model.hard_attention and is_fused(serving, run.dims, on_cuda=_on_cuda(resources))
        # Only these paths keep whole (T, T) matrices: fused kernels and blocks of queries compute them again.
        if whole or (short and not fused):
            scoring = [encoding.kind for encoding in serving if encoding.scores or encoding.weighs]
            of_encodings = sum(ENCODING_MATRICES.get(kind, ENCODING_MATRICES["path"]) for kind in scoring)
            matrices += layers * (WEIGHTS_MATRICES + of_encodings)
    saved += matrices / model.layers * model.heads * tokens * task.length("train")
    activations = model.layers * saved
    if resources.checkpoint_activations:
        activations = model.layers * model.dim * tokens + saved
    longest = (task.longer(times).length(task.TESTS[0]) for times in run.evaluate.lengths)
    windows = [*run.evaluate.contexts, run.evaluate.positions or 0]
    evaluated = [*(sequences * task.length(split) for split in run.test_sets), *windows, *longest]
    chunk = CHUNK_LOGITS["cuda" if _on_cuda(resources) else "cpu"]
    logits = LOGITS_ARRAYS * min(max(tokens, *evaluated) * task.vocabulary_size, chunk)
    if tokens * task.vocabulary_size > chunk:
        logits += OUTPUT_ARRAYS * model.dim * task.vocabulary_size
    owners = resources.workers if resources.shard == "optimizer" else 1
    declared = [(name, shape, math.prod(shape) * count) for name, shape, count in _declared_parameters(run)]
    state = sum((FLOAT32_BYTES + train.optimizer.state_bytes(name, shape) / owners) * n for name, shape, n in declared)
    gradients = sum(n for *_, n in declared)
    at_start, at_end = activations + max(logits, backward), gradients + saved + backward
    # Gradients come as activations go, unless there are those of earlier parts of the batch, or buffers for workers.
    needed = gradients + at_start if keeps_gradients else max(at_start, at_end)
    return PROCESS_BYTES + int(state + FLOAT32_BYTES * needed)


def is_fused(encodings: Sequence[Encoding], dims: Dims, *, on_cuda: bool) -> bool:
    """Whether a fused kernel can compute a layer with these encodings: what `kernels.make_problem` finds from tensors.

    The kernel has room for one term of a class, one source of gates, and one kind of queries beside the attention's.
    """
    scoring = [encoding for encoding in encodings if encoding.scores or encoding.weighs]
    kinds = {encoding.kind for encoding in scoring}
    if not all(encoding.has_term(dims.head_dim) for encoding in scoring) or (on_cuda and kinds & set(WITHOUT_TRITON)):
        return False
    rotated = any(encoding.rotates for encoding in encodings)
    # What gates are computed from, and the encoding if it has gate keys or a bias of its own.
    gates: set[tuple[str, str]] = set()
    queries: set[str] = set()
    for encoding in scoring:
        if isinstance(encoding, ContextualEncoding):
            source = encoding.gate_source if rotated or encoding.gate != "keys" else "logits"
            gates.add((source, encoding.kind if encoding.gate_parameters(dims) else ""))
            queries |= set() if source == "logits" else {"unrotated"}
        if encoding.kind in ("cope", "relative"):
            queries.add("rotated" if encoding.uses_rotated_query else "unrotated")
        elif encoding.kind in ("inkling", "grape_ap"):
            queries.add(encoding.kind)
    biases_of_keys = [encoding for encoding in scoring if encoding.kind == "fox" or encoding.samples]
    contextual = len(gates) + ("grape_ap" in kinds)
    return (
        contextual <= 1
        and len(queries) <= 1
        and len(biases_of_keys) <= 1
        and not any(kinds >= pair for pair in SAME_TERM)
        and not ("stick_breaking" in kinds and (contextual or biases_of_keys))
    )


def _block_numbers(run: RunSpec, tokens: int, *, on_cuda: bool) -> tuple[float, float]:
    """How many numbers a block saves for the backward pass, and how many it needs for a while in it."""
    model = run.model
    family = FAMILY_MEMORY.get(model.family.kind, FAMILY_MEMORY["llama"])
    width, hidden = model.dim * tokens, model.feed_forward_dim * tokens
    saved, backward = family.saved_width * width + family.saved_hidden * hidden, family.backward_hidden * hidden
    if model.family.kind == "gpt2" and hidden < RECOMPUTED_ELEMENTS:
        saved += NOT_RECOMPUTED * width
    if model.output_gate is not None:
        saved += GATE_MEMORY * width
    if model.qk_norm:
        saved += QK_NORM_MEMORY * width
    for encoding in model.position:
        known_as = "rope" if encoding.rotates or encoding.mixes else "cope"
        added = ENCODING_MEMORY.get(encoding.kind, ENCODING_MEMORY[known_as])
        saved += added * width * _share_of_layers(encoding, run)
    if on_cuda or width * FLOAT32_BYTES >= LARGE_BYTES:
        return LARGE_SAVED * saved, LARGE_BACKWARD * backward
    return saved, backward


def _share_of_layers(encoding: Encoding, run: RunSpec) -> float:
    """The share of the model's layers that an encoding serves."""
    layers = run.model.layers
    return sum(encoding.serves(layer) for layer in range(layers)) / layers


def _on_cuda(resources: Resources) -> bool:
    """`auto` leaves the device to the machine, and counts as a CPU."""
    return resources.device == "cuda" or (resources.device == "auto" and resources.gpus not in ("auto", 0))


def estimates(plan: Plan, measured: Mapping[RunShape, float] | None = None) -> dict[str, Estimate]:
    """Run id → estimate, for every run of the plan and of its examples.

    `measured` maps the shapes (`shape_of`) of finished runs to seconds per floating-point operation. Runs of other
    shapes use the median of these rates. Without measurements, times follow a rule of thumb.
    """
    measured = measured or {}
    median_rate = statistics.median(measured.values()) if measured else None
    resources = plan.ablation.content.resources
    by_shape: dict[tuple[Any, ...], Estimate] = {}
    result = {}
    for row in (*plan.rows, *plan.examples):
        run = row.runs[0]
        # The seed and the learning rate do not change the cost.
        train = run.train
        parts = (run.task, run.model, run.evaluate, train.optimizer)
        key = train.steps, train.batch, *(part.model_dump_json() for part in parts)
        estimate = by_shape.get(key)
        if estimate is None:
            estimate = by_shape[key] = _estimate(run, resources, measured, median_rate)
        result.update(dict.fromkeys((run.run_id for run in row.runs), estimate))
    return result


def _estimate(
    run: RunSpec, resources: Resources, measured: Mapping[RunShape, float], median_rate: float | None
) -> Estimate:
    parameters, memory = parameter_count(run), memory_bytes(run, resources)
    flops = run_flops(run, resources, parameters)
    # A shape costs two dumps to JSON.
    rate = measured.get(shape_of(run)) if measured else None
    if rate is not None:
        seconds, basis = flops * rate, "measured on this store, same shapes"
    elif median_rate is not None:
        seconds, basis = flops * median_rate, "scaled from this store's finished runs"
    else:
        # A worker without a sequence computes nothing.
        workers = min(resources.workers, run.train.batch)
        steps = run.train.steps + evaluation_batches(run) / 3
        seconds = RUN_S + steps * DEFAULT_STEP_S + flops / (workers * resources.cpus * DEFAULT_FLOPS_PER_S)
        basis = RULE_OF_THUMB
    return Estimate(parameters, seconds, memory, basis)


def suggested_estimates(plan: Plan, estimated: Mapping[str, Estimate]) -> list[Estimate]:
    """An estimate for each run that the plan's search has still to suggest: the mean of the plan's examples."""
    if not plan.open_samples:
        return []
    examples = [estimated[row.runs[0].run_id] for row in plan.examples]
    mean = Estimate(
        max(example.parameters for example in examples),
        statistics.fmean(example.seconds for example in examples),
        max(example.memory_bytes for example in examples),
        examples[0].basis,
    )
    return [mean] * (plan.open_samples * len(plan.ablation.content.row_seeds))


def total_seconds(runs: Iterable[Estimate], parallel: int) -> float:
    """Wall time of `runs` in seconds, if `parallel` of them train side by side, each in order as soon as one ends."""
    ends: list[float] = []
    """The times at which runs in training end."""
    latest_s = 0.0
    for estimate in runs:
        # All workers are busy: this run starts when the first of them ends.
        start_s = heapq.heappop(ends) if len(ends) >= max(1, parallel) else 0.0
        heapq.heappush(ends, start_s + estimate.seconds)
        latest_s = max(latest_s, start_s + estimate.seconds)
    return latest_s


def shape_of(run: RunSpec) -> RunShape:
    """The shape of a run: its task, model, batch size and optimiser."""
    train = run.train
    return run.task.model_dump_json(), run.model.model_dump_json(), train.batch, train.optimizer.model_dump_json()
