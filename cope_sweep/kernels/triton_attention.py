"""Fused attention on a GPU, in Triton, without T × T memory; the kernels are in `triton_kernels.py`.

`dispatch` calls `why_not` and `attend`; the blocked path computes other problems. With TRITON_INTERPRET=1 in the
environment when Triton is imported, the same kernels run on a CPU, slowly; the tests use that.

Memory beyond inputs and outputs, per head. Forward: 16 bytes per query, and for a 16-bit z a packed copy of twice its
size. Backward, for at most `ROWS_PER_LAUNCH` queries at a time: 8·P bytes per query, and 12 bytes per query and tile of
keys. The caller holds z = q·e, P entries per query.

Shapes: B batch, H heads, T queries (the last of the S tokens), S keys, K head dim, P positions, R distances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from cope_sweep.kernels import triton_kernels as kernels
from cope_sweep.kernels.arguments import unit_stride
from cope_sweep.kernels.dropout import threshold
from cope_sweep.kernels.problem import AttentionProblem

INTERPRETED = bool(triton.knobs.runtime.interpret)

ROWS_PER_LAUNCH = 4096
"""Largest number of queries of a backward launch with gates: its workspace grows with it."""
MAX_HEAD_DIM = 128
MAX_HEADS = 65535
"""B·H of a batch: CUDA's limit for the second dimension of a grid."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_not(problem: AttentionProblem) -> str | None:
    """Why these kernels cannot compute this problem here, for a log message; None: they can."""
    q = problem.q_BHTK
    if not q.is_cuda and not INTERPRETED:
        return f"it needs a GPU, and the tensors are on {q.device.type}"
    if q.is_cuda and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    if q.dtype not in DTYPES:
        return f"it has no kernel for {q.dtype}"
    if q.shape[0] * q.shape[1] > MAX_HEADS:
        return f"the batch has more than {MAX_HEADS} heads"
    others = [problem.k_BHSK, problem.v_BHSK, *(problem.gates or ())]
    if any(other.dtype != q.dtype for other in others):
        return "queries, keys, values and gate keys are not all of one type"
    if any(other.shape[-1] != q.shape[-1] for other in others):
        return "queries, keys, values and gate keys do not have one head dim"
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"head dim {q.shape[-1]} is more than {MAX_HEAD_DIM}"
    if q.shape[2] > problem.k_BHSK.shape[2] or 0 in q.shape:
        return f"there are {q.shape[2]} queries of {problem.k_BHSK.shape[2]} tokens"
    if problem.piecewise is not None:
        return "it has no kernel for CoPE-MLP"
    if problem.distance_bias is not None:
        return "it has no kernel for a bias by distance buckets (T5)"
    look_up, relative = problem.look_up, problem.relative
    tables = [*([look_up.z_BHQP] if look_up else []), *([relative.z_BHQR] if relative else [])]
    if any(table.dtype not in DTYPES for table in tables):
        return "the type of a table of position logits is not one of bfloat16, float16 and float32"
    return None


def attend(problem: AttentionProblem) -> Tensor:
    """Return attention for the problem, (B, H, T, K), differentiable in q, k, v, gates, z, slopes m and relative z."""
    gate_q, gate_k = problem.gates or (None, None)
    relative = problem.relative
    return attention(
        problem.q_BHTK,
        problem.k_BHSK,
        problem.v_BHSK,
        gate_q,
        gate_k,
        problem.look_up.z_BHQP if problem.look_up else None,
        problem.slope.m_H if problem.slope else None,
        relative.z_BHQR if relative else None,
        problem.distance_slope.m_H if problem.distance_slope else None,
        problem.lengths_B,
        problem.seed if problem.dropout else None,
        problem.scale,
        problem.dropout,
        bool(relative and relative.far == "last"),
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_q: Tensor | None = None,
    gate_k: Tensor | None = None,
    z: Tensor | None = None,
    m: Tensor | None = None,
    relative: Tensor | None = None,
    distance_slope: Tensor | None = None,
    lengths: Tensor | None = None,
    seed: Tensor | None = None,
    scale: float = 1.0,
    dropout: float = 0.0,
    far_last: bool = False,
) -> Tensor:
    """`attend` with tensors as arguments.

    `z` (B, H, T, P) and `relative` (B, H, T, R) are the products q·e of contextual and relative tables. `m` (H,) are
    slopes of positions; `distance_slope` (H,) are slopes of distances, without gradient. `seed` is the seed of dropout.
    """
    given = (q, k, v, gate_q, gate_k, z, m, relative, distance_slope, lengths, seed)
    out: Tensor = _forward_op(*given, scale, dropout, far_last)[0]
    return out


# Operators ------------------------------------------------------------------------------------------------------------

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? gate_q, Tensor? gate_k, Tensor? z, Tensor? m, Tensor? relative, "
    "Tensor? distance_slope, Tensor? lengths, Tensor? seed, float scale, float dropout, bool far_last"
)
_N_TENSORS = 11
_N_DIFFERENTIABLE = 8

Arguments = tuple[Any, ...]
"""The inputs of the operators, in the order of `_INPUTS`."""


def _forward(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, and what the backward pass needs: log-sum-exp, where plain tiles end, and the position there."""
    call = KernelCall(given)
    outputs = empty_outputs(*given)
    with call.device():
        launch_forward(call, outputs)
    return outputs


def empty_outputs(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q = given[0]
    rows = q.shape[:3]
    integers = [q.new_empty(rows, dtype=torch.int32) for _ in range(3)]
    return q.new_empty(q.shape), q.new_empty(rows, dtype=torch.float32), integers[0], integers[1], integers[2]


def _backward(*arguments: Any) -> list[Tensor]:
    """Gradients of the first `_N_DIFFERENTIABLE` inputs; an empty tensor for an input that is None."""
    (do, *saved), given = arguments[:6], arguments[6:]
    call = KernelCall(given)
    with call.device():
        return launch_backward(call, unit_stride(do), saved)


def _backward_fake(*arguments: Any) -> list[Tensor]:
    given = arguments[6 : 6 + _N_DIFFERENTIABLE]
    return [arguments[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in given]


_forward_op: Any = torch.library.custom_op(
    "cope_sweep::triton_attention",
    _forward,
    mutates_args=(),
    schema=f"({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_backward_op: Any = torch.library.custom_op(
    "cope_sweep::triton_attention_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor do, Tensor o, Tensor lse, Tensor plain_end, Tensor pos_int, Tensor pos_frac, "
    f"{_INPUTS}) -> Tensor[]",
)
_forward_op.register_fake(empty_outputs)
_backward_op.register_fake(_backward_fake)


def _save(ctx: Any, inputs: Arguments, output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output, *inputs[:_N_TENSORS])
    ctx.options = inputs[_N_TENSORS:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing = [None] * (_N_TENSORS - _N_DIFFERENTIABLE + len(ctx.options))
    if do is None:
        return (*[None] * _N_DIFFERENTIABLE, *nothing)
    given = ctx.saved_tensors[5:]
    gradients = _backward_op(do, *ctx.saved_tensors, *ctx.options)
    return (*(None if x is None else g for x, g in zip(given, gradients, strict=False)), *nothing)


_forward_op.register_autograd(_differentiate, setup_context=_save)


# Launches -------------------------------------------------------------------------------------------------------------


class KernelCall:
    """The arguments of the kernels for one attention."""

    def __init__(self, given: Arguments) -> None:
        q, k, v, gate_q, gate_k, z, m, relative, distance_slope, lengths, seed, scale, dropout, far_last = given
        q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
        gate_q = None if gate_q is None else unit_stride(gate_q)
        gate_k = None if gate_k is None else unit_stride(gate_k)
        self.q, self.k, self.v, self.gate_q, self.gate_k, self.z = q, k, v, gate_q, gate_k, z
        self.B, self.H, self.T, self.K = q.shape
        self.S = k.shape[2]
        self.m, self.relative = m, None if relative is None else relative.contiguous()
        self.contextual = z is not None or m is not None
        self.shared: dict[str, Any] = {
            "q": q,
            "k": k,
            "v": v,
            "gate_q": gate_q,
            "gate_k": gate_k,
            "z": None if z is None else pairs(z),
            "m": None if m is None else m.float().contiguous(),
            "relative": self.relative,
            "far_slope": None if distance_slope is None else distance_slope.float().contiguous(),
            "lengths": lengths,
            **_strides("q", q),
            **_strides("k", k),
            **_strides("v", v),
            **_strides("gq", q if gate_q is None else gate_q),
            **_strides("gk", k if gate_k is None else gate_k),
            "H": self.H,
            "T": self.T,
            "S": self.S,
            "P": 0 if z is None else z.shape[-1],
            "R": 0 if relative is None else relative.shape[-1],
            "scale": scale,
            "seed": 0 if seed is None or not dropout else int(seed),
            "threshold": threshold(dropout) - 2**31,
            "survival": 1.0 - dropout,
            "HEAD_DIM": self.K,
            "BLOCK_K": max(16, triton.next_power_of_2(self.K)),
            "FAR_LAST": far_last,
            "DROPOUT": dropout > 0,
            "PAIRS": "" if z is None else _PAIRS[z.dtype],
            "PRECISION": precision(q.dtype),
            "BUCKET": max(128, triton.next_power_of_2(self.T)),
        }

    def device(self) -> Any:
        """A context in which kernels are launched on the device of the inputs."""
        return torch.cuda.device_of(self.q)  # type: ignore[no-untyped-call]


_PAIRS = {torch.float32: "", torch.bfloat16: "bf16", torch.float16: "fp16"}


def pairs(z: Tensor) -> Tensor:
    """Pack each entry of a 16-bit table with the next (the last with itself) in an int32: interpolation reads both."""
    if z.dtype == torch.float32:
        return z.contiguous()
    packed = z.new_empty(*z.shape, 2)
    packed[..., 0] = z
    packed[..., :-1, 1] = z[..., 1:]
    packed[..., -1, 1] = z[..., -1]
    return packed.view(torch.int32).squeeze(-1)


def precision(dtype: torch.dtype) -> str:
    """The input precision of tl.dot: for float32 as exact as torch, which uses TF32 only if that is allowed."""
    if dtype != torch.float32:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def _strides(name: str, x: Tensor) -> dict[str, int]:
    return {f"{name}_b": x.stride(0), f"{name}_h": x.stride(1), f"{name}_t": x.stride(2)}


def launch(kernel: str, grid: Callable[[Mapping[str, Any]], tuple[int, int]], arguments: Any) -> None:
    """Run a kernel by name, with the fastest of its `choices`."""
    if INTERPRETED:
        getattr(kernels, kernel)[grid](**arguments, **getattr(INTERPRETER_TILES, kernel))
    else:
        _tuned(kernel, arguments["q"].dtype)[grid](**arguments)


def launch_forward(call: KernelCall, outputs: Sequence[Tensor]) -> None:
    names = ("o", "lse", "plain_end", "end_pos_int", "end_pos_frac")
    arguments = {**call.shared, **dict(zip(names, outputs, strict=True))}

    def grid(meta: Mapping[str, Any]) -> tuple[int, int]:
        return triton.cdiv(call.T, meta["BLOCK_T"]), call.B * call.H

    launch("forward", grid, arguments)


def launch_backward(call: KernelCall, do: Tensor, saved: Sequence[Tensor]) -> list[Tensor]:
    """The gradients that `_backward` returns, by one launch of both kernels, or several for many queries."""
    o, lse, plain_end, pos_int, pos_frac = saved
    edge = INTERPRETER_TILES.edge if INTERPRETED else EDGE
    rows = min(ROWS_PER_LAUNCH if call.contextual else call.T, call.T)
    is_split = rows < call.T
    dq, dm_rows = call.q.new_empty(call.q.shape), _rows_like(call.m, lse)
    dgate_q = None if call.gate_q is None else call.q.new_empty(call.gate_q.shape)
    dz = None if call.z is None else call.z.new_empty(call.z.shape)
    drelative = None if call.relative is None else torch.zeros_like(call.relative)
    work = _workspace(call, rows, edge)
    shared = {
        **call.shared,
        **_strides("do", do),
        "do": do,
        "lse": lse,
        "plain_end": plain_end,
        "delta": torch.empty_like(lse),
        "launch_rows": rows,
        "PARTS": 3 if call.q.dtype == torch.float32 else 2,
        **{name: work[name] for name in ("edge_pos_int", "edge_pos_frac", "edge_dp")},
    }
    of_rows = {
        "o": o,
        "end_pos_int": pos_int,
        "end_pos_frac": pos_frac,
        "dq": dq,
        "dgate_q": dgate_q,
        "dz": dz,
        "dm_rows": dm_rows,
        "drelative": drelative,
        "prefix_sums": work["prefix_sums"],
        "BLOCK_P": 16,
        "BLOCK_S": edge,
    }
    of_key_shape = (call.k, call.v, call.gate_k)
    sums = [None if x is None or not is_split else x.new_zeros(x.shape, dtype=torch.float32) for x in of_key_shape]
    for first_row in range(0, call.T, rows):
        here = min(rows, call.T - first_row)
        keys = call.S - call.T + first_row + here if is_split else call.S

        def row_grid(meta: Mapping[str, Any], here: int = here) -> tuple[int, int]:
            return triton.cdiv(here, meta["BLOCK_T"]), call.B * call.H

        def key_grid(meta: Mapping[str, Any], keys: int = keys) -> tuple[int, int]:
            return triton.cdiv(keys, meta["BLOCK_S"]), call.B * call.H

        dtype = torch.float32 if is_split else call.k.dtype
        launch_sums = [None if x is None else x.new_empty(x.shape, dtype=dtype) for x in of_key_shape]
        of_keys = {"dk": launch_sums[0], "dv": launch_sums[1], "dgate_k": launch_sums[2], "EDGE": edge}
        of_keys["TILES"] = max(2, triton.next_power_of_2(triton.cdiv(rows, MIN_BLOCK_T)))
        launch("backward_rows", row_grid, {**shared, **of_rows, "first_row": first_row})
        launch("backward_keys", key_grid, {**shared, **of_keys, "first_row": first_row})
        if is_split:
            for total, launch_sum in zip(sums, launch_sums, strict=True):
                if total is not None and launch_sum is not None:
                    total[:, :, :keys] += launch_sum[:, :, :keys]
        else:
            sums = launch_sums
    dk, dv, dgate_k = (None if x is None else x.to(call.k.dtype) for x in sums)
    dm = None if dm_rows is None or call.m is None else dm_rows.sum((0, 2)).to(call.m.dtype)
    gradients = (dq, dk, dv, dgate_q, dgate_k, dz, dm, drelative)
    return [dq.new_empty(0) if gradient is None else gradient for gradient in gradients]


def _rows_like(wanted: Tensor | None, lse: Tensor) -> Tensor | None:
    return None if wanted is None else torch.empty_like(lse)


def _workspace(call: KernelCall, rows: int, edge: int) -> dict[str, Tensor | None]:
    """Workspace of a backward launch: `prefix_sums` of the row kernel, and what it passes to the column kernel."""
    if not call.contextual:
        return dict.fromkeys(("prefix_sums", "edge_pos_int", "edge_pos_frac", "edge_dp"))
    q, heads = call.q, call.B * call.H
    edges = (heads, triton.cdiv(call.S, edge), rows)
    return {
        "prefix_sums": None if call.z is None else q.new_empty((heads, rows, call.z.shape[-1], 2), dtype=torch.float32),
        "edge_pos_int": q.new_empty(edges, dtype=torch.int32),
        "edge_pos_frac": q.new_empty(edges, dtype=torch.int32),
        "edge_dp": q.new_empty(edges, dtype=torch.float32),
    }


# Tuning ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    """Tile sizes without tuning, by the names of the kernels' parameters.

    The forward kernel determines where plain tiles end. So its BLOCK_T and PLAIN_S are multiples of the row kernel's,
    and BLOCK_S of both and of the column kernel are multiples of `edge`.
    """

    edge: int
    """Keys in a general tile of the backward row kernel, which stores positions at the edges of these tiles."""
    forward: Mapping[str, int]
    backward_rows: Mapping[str, int]
    backward_keys: Mapping[str, int]


INTERPRETER_TILES = Tiles(
    edge=16,
    forward={"BLOCK_T": 16, "BLOCK_S": 16, "PLAIN_S": 16},
    backward_rows={"BLOCK_T": 16, "PLAIN_S": 16},
    backward_keys={"BLOCK_T": 16, "BLOCK_S": 16, "PLAIN_T": 16},
)
"""Tile sizes in the interpreter, where inputs are small."""


EDGE = 32
"""`Tiles.edge` on a GPU: with tiles of 64 × 32, few registers spill."""
MIN_BLOCK_T = 16
"""The smallest BLOCK_T of the column kernel."""


Choice = tuple[dict[str, int], int, int]
"""Tile sizes, number of warps, number of pipeline stages."""

# In each table, BLOCK_T and PLAIN_S of forward are multiples of those of backward_rows (see `Tiles`).
_HALF_CHOICES: dict[str, list[Choice]] = {
    "forward": [
        ({"BLOCK_T": 64, "BLOCK_S": 32, "PLAIN_S": 64}, 4, 2),
        ({"BLOCK_T": 64, "BLOCK_S": 32, "PLAIN_S": 64}, 4, 3),
        ({"BLOCK_T": 128, "BLOCK_S": 32, "PLAIN_S": 64}, 8, 2),
        ({"BLOCK_T": 128, "BLOCK_S": 32, "PLAIN_S": 64}, 8, 3),
        ({"BLOCK_T": 128, "BLOCK_S": 32, "PLAIN_S": 128}, 8, 2),
        ({"BLOCK_T": 128, "BLOCK_S": 64, "PLAIN_S": 64}, 8, 2),
    ],
    "backward_rows": [
        ({"BLOCK_T": 64, "PLAIN_S": 64}, 4, 2),
        ({"BLOCK_T": 64, "PLAIN_S": 32}, 4, 3),
        ({"BLOCK_T": 64, "PLAIN_S": 64}, 8, 2),
        ({"BLOCK_T": 32, "PLAIN_S": 64}, 4, 2),
    ],
    "backward_keys": [
        ({"BLOCK_T": 32, "BLOCK_S": 64, "PLAIN_T": 64}, 4, 2),
        ({"BLOCK_T": 32, "BLOCK_S": 64, "PLAIN_T": 32}, 4, 3),
        ({"BLOCK_T": 32, "BLOCK_S": 128, "PLAIN_T": 64}, 8, 2),
        ({"BLOCK_T": 64, "BLOCK_S": 64, "PLAIN_T": 64}, 8, 2),
        ({"BLOCK_T": 32, "BLOCK_S": 32, "PLAIN_T": 64}, 4, 2),
    ],
}
# Smaller tiles for float32: larger ones exceed the registers and, with head dim 128, the shared memory.
_FLOAT32_CHOICES: dict[str, list[Choice]] = {
    "forward": [
        ({"BLOCK_T": 32, "BLOCK_S": 32, "PLAIN_S": 32}, 4, 1),
        ({"BLOCK_T": 64, "BLOCK_S": 32, "PLAIN_S": 32}, 4, 1),
        ({"BLOCK_T": 64, "BLOCK_S": 32, "PLAIN_S": 32}, 8, 2),
    ],
    "backward_rows": [
        ({"BLOCK_T": 16, "PLAIN_S": 32}, 4, 1),
        ({"BLOCK_T": 32, "PLAIN_S": 32}, 4, 1),
        ({"BLOCK_T": 32, "PLAIN_S": 32}, 8, 1),
    ],
    "backward_keys": [
        ({"BLOCK_T": 16, "BLOCK_S": 32, "PLAIN_T": 16}, 4, 1),
        ({"BLOCK_T": 32, "BLOCK_S": 32, "PLAIN_T": 32}, 4, 1),
        ({"BLOCK_T": 32, "BLOCK_S": 32, "PLAIN_T": 32}, 8, 1),
    ],
}


def choices(kernel: str, dtype: torch.dtype) -> list[triton.Config]:
    """The configurations that the tuner tries. It skips those that need more shared memory than the GPU has."""
    table = _FLOAT32_CHOICES if dtype == torch.float32 else _HALF_CHOICES
    return [triton.Config(sizes, num_warps=warps, num_stages=stages) for sizes, warps, stages in table[kernel]]


@cache
def _tuned(kernel: str, dtype: torch.dtype) -> Any:
    """The kernel with its tuner, which measures once for each head dim, next power of 2 of T, table sizes and types."""
    tuner: Callable[..., Any] = triton.autotune(choices(kernel, dtype), key=["HEAD_DIM", "BUCKET", "P", "R"])
    return tuner(getattr(kernels, kernel))
