"""Checks a fused kernel against the reference at its first use in a process.

A kernel may be wrong where nobody has tried it: `triton` on a GPU, with a driver and a version of Triton; `native` as
the compiler of this machine has built it. So before a process uses a kernel for a kind of problem, the output and all
gradients of a small problem are compared with the reference, which takes about 30 ms of a core for `native`. Where they
differ, attention falls back to PyTorch, with a warning that says by how much.

Not covered: sizes at which kernels use other tiles (more tokens, more positions), and results that change from call to
call. `tests/kernels` and `make gpu` compare many sizes.

Shapes: B batch, H heads, T tokens, K head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, get_type_hints

import torch
from torch import Tensor

from cope_sweep.kernels import operator
from cope_sweep.kernels.arguments import (
    Arguments,
    Inputs,
    LayerEncoding,
    LayerEncodings,
    constant_when_compiled,
    make_problem,
)
from cope_sweep.kernels.reference import reference

if TYPE_CHECKING:
    from cope_sweep.positions import Encoding

BATCH, HEADS, TOKENS, POSITIONS = 2, 2, 160, 12
"""Sizes of the problem. Tokens fill several tiles, and most positions are beyond the last embedding."""
TOLERANCES = {torch.float32: 5e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""The largest norm of a result's error, relative to the norm of the result. Correct kernels stayed below half
of it for all kinds of problem; in float32, without TF32, below 1e-5."""

HEAD_DIMS = (12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""A problem is checked at the smallest of these that is not below its own head dim. Every second one fills the Triton
kernels' blocks, and the others leave a part empty."""

_FLAGS = ("log_gates", "stick_breaking", "keep_remainder", "window")
_OPTIONAL = [name for name, kind in get_type_hints(Arguments).items() if kind == Tensor | None and name != "seeds"]

CheckResults = dict[str, Tensor]
"""By name: the output, and the gradient of each input and parameter."""


def why_not(kernel: str, arguments: Arguments, device: torch.device) -> str | None:
    """Why the results of `native` or `triton` for this kind of problem cannot be trusted here; None if they are right.

    A plan for a GPU that this machine does not have is not checked.
    """
    if kernel == "triton" and not (device.type == "cuda" and torch.cuda.is_available()):
        return None
    names = tuple(name for name in _OPTIONAL if getattr(arguments, name) is not None)
    names += tuple(name for name in ("dropout", *_FLAGS) if getattr(arguments, name))
    # By comparisons, which torch.compile can guard where sizes are symbols.
    head_dim = next((size for size in HEAD_DIMS if arguments.q.shape[-1] <= size), HEAD_DIMS[-1])
    return _why_not(kernel, device.type, device.index or 0, arguments.q.dtype, head_dim, names)


@constant_when_compiled
def _why_not(
    kernel: str, type_: str, index: int, dtype: torch.dtype, head_dim: int, names: tuple[str, ...]
) -> str | None:
    return _checked(kernel, type_, index, dtype, head_dim, names)


@functools.cache
def _checked(
    kernel: str, type_: str, index: int, dtype: torch.dtype, head_dim: int, names: tuple[str, ...]
) -> str | None:
    device = torch.device(type_, index)
    name = torch.cuda.get_device_name(device) if type_ == "cuda" else "processor"
    try:
        # A new thread has none of the caller's modes: inference, autocast, a default device, tracing.
        with ThreadPoolExecutor(1) as thread:
            errors = thread.submit(relative_errors, kernel, device, dtype, head_dim, names).result()
    # Whatever it is, attention has another path, and the message says why it is taken.
    except Exception as error:
        return f"its check on this {name} ended with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    # Not `error >`: an error that is NaN is wrong, too.
    wrong = [f"{name} by {error:.2g}" for name, error in errors.items() if not error <= TOLERANCES[dtype]]
    if wrong:
        return f"its results on this {name} are wrong (relative errors in a small problem: {', '.join(wrong)})"
    return None


def relative_errors(
    kernel: str, device: torch.device, dtype: torch.dtype, head_dim: int, names: tuple[str, ...]
) -> dict[str, float]:
    """By name of a result: the norm of its error, relative to the norm of the exact result.

    `names` are the fields of `Arguments` that a kernel is given beside q, k and v: tensors, `dropout` and flags.
    """
    tensors, encodings = _random_problem(dtype, head_dim, names)
    dropout = 0.1 if "dropout" in names else 0.0

    def results(to: torch.device, dtype: torch.dtype, attend: Callable[..., Tensor]) -> CheckResults:
        # Parameters stay in float32 where attention computes in half precision, as under autocast in training.
        of_parameters = torch.promote_types(dtype, torch.float32)
        leaves = {n: x.to(to, of_parameters if "." in n else dtype).requires_grad_() for n, x in tensors.items()}
        q, k, v, rotated_q = leaves["q"], leaves["k"], leaves["v"], leaves.get("rotated_q", leaves["q"])
        lengths_B = torch.tensor([TOKENS, TOKENS - 37], device=to) if "lengths" in names else None
        features = [leaves.get(f"features{index}") for index in range(len(encodings))]
        inputs = Inputs(q, k, v, rotated_q, k, features, lengths_B=lengths_B)
        positions = [
            LayerEncoding(
                encoding, {name.partition(".")[2]: x for name, x in leaves.items() if name.startswith(f"{index}.")}
            )
            for index, encoding in enumerate(encodings)
        ]
        out = attend(inputs, positions, dropout, torch.arange(BATCH, device=to))
        weight_BHTK = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).sin_().view_as(out).to(out)
        gradients = torch.autograd.grad((out * weight_BHTK).sum(), list(leaves.values()))
        return {"output": out.detach(), **{f"gradient of {n}": x for n, x in zip(leaves, gradients, strict=True)}}

    def by_kernel(inputs: Inputs, positions: LayerEncodings, dropout: float, seeds_B: Tensor) -> Tensor:
        problem = make_problem(inputs, positions, dropout, seeds_B)
        assert isinstance(problem, Arguments), problem  # noqa: S101 - tests make every kind of problem
        return operator.attention(problem, kernel)

    # Their gradients cancel. The kernels' gradients of CoPE-MLP's tables are in those of q and w₂, too. FIRE's c scales
    # both factors of a share, and its factor one: their gradients keep enough bits in float32 only.
    cancelling = (".w1", ".b1", ".b2", *(() if dtype == torch.float32 else (".c", ".factor")))
    exact = results(torch.device("cpu"), torch.float64, reference)
    computed = results(device, dtype, by_kernel)
    return {
        name: ((computed[name].cpu().double() - x).norm() / x.norm()).item()
        for name, x in exact.items()
        if not name.endswith(cancelling)
    }


def _random_problem(
    dtype: torch.dtype, head_dim: int, names: tuple[str, ...]
) -> tuple[dict[str, Tensor], list[Encoding]]:
    """Inputs and parameters by name, in float64 but exact in `dtype`; "0.e" is parameter e of encoding 0."""
    from cope_sweep.positions import T5, ALiBi, CoPE, CoPEALiBi, CoPEMLP, Dims, Relative
    from cope_sweep.positions.fire import FIRE
    from cope_sweep.positions.fox import FoX
    from cope_sweep.positions.grape_ap import GrapeAP
    from cope_sweep.positions.stick_breaking import StickBreaking
    from cope_sweep.positions.window import Window

    # Gates whose keys are not the keys of the attention: from the values.
    gates: dict[str, Any] = {"gate": "values"} if "gate_k" in names else {"gate_after_rotation": "base_q" in names}
    gates["gate_bias_learned"] = "gate_bias" in names
    of_field: dict[str, Encoding] = {
        "e": CoPE(p_max=POSITIONS, **gates),
        "segment_slope": CoPEMLP(hidden=9, **gates),
        "m": GrapeAP() if "log_gates" in names else CoPEALiBi(slopes="learned", **gates),
        "relative": Relative(positions=3 * POSITIONS),
        "distance_bias": T5(buckets=8, max_distance=3 * POSITIONS),
        "window": Window(size=6 * POSITIONS),
        "distance_slope": ALiBi(),
        "share_slope": FIRE(hidden=9, threshold=TOKENS / 2),
        "key_bias": FoX(),
        "stick_breaking": StickBreaking(remainder="self" if "keep_remainder" in names else "drop"),
    }
    encodings = [encoding for name, encoding in of_field.items() if name in names]
    rng = torch.Generator().manual_seed(0)

    def normal(shape: tuple[int, ...], std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64) * std

    # Log gates have separate queries; otherwise, tables and gates use the queries before a rotation.
    rotated = "base_q" in names and "log_gates" not in names
    inputs = ["q", "k", "v", *(["rotated_q"] if rotated else [])]
    tensors = {name: normal((BATCH, HEADS, TOKENS, head_dim)) for name in inputs}
    stds = {"e": head_dim**-0.5, "w1": 0.2, "b1": 1.0, "w2": head_dim**-0.5, "m": 0.1, "c": 0.02, "factor": 0.1}
    features = {"fox": 1, "grape_ap": head_dim}
    for index, encoding in enumerate(encodings):
        if encoding.kind in features:  # they are given, instead of the parameters that make them
            tensors[f"features{index}"] = 3 + normal((BATCH, HEADS, TOKENS, features[encoding.kind]))
            continue
        # The input of FIRE's units is a share from 0 to 1. Where they hardly change, the gradient of w₂ cancels.
        of_encoding = stds | ({"w1": 3.0, "b1": 0.7} if encoding.kind == "fire" else {})
        for name, parameter in encoding.parameters(Dims(HEADS * head_dim, HEADS, 1, TOKENS)).items():
            centre = torch.tensor(parameter.centre, dtype=torch.float64)
            tensors[f"{index}.{name}"] = centre + normal(parameter.shape, of_encoding.get(name, 0.5))
    return {name: x.to(dtype).double() for name, x in tensors.items()}, encodings
