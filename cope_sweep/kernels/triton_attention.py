"""Fused attention on a GPU, in Triton: no T × T memory, forward or backward; the kernels are in `triton_kernels.py`.

`why_not` and `attend` are what `dispatch` asks for; what is not covered goes to the blocked path. Under
TRITON_INTERPRET=1 (set before Triton is first imported) the same kernels run on a CPU, slowly: so they are tested.

Memory beyond inputs and outputs, per head: forward, 16 bytes for each query, and where z has 16 bits, twice z, packed;
backward, for at most `ROWS_PER_LAUNCH` queries at a time, 8·P bytes for each, and 12 for each of them and tile of keys,
which is linear in T. z = q·e itself is the caller's, of P entries for each query.

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
from cope_sweep.kernels.dropout import threshold
from cope_sweep.kernels.problem import Problem

INTERPRETED = bool(triton.knobs.runtime.interpret)

ROWS_PER_LAUNCH = 4096
"""Queries that one backward launch takes on, where there are gates: its workspace grows with them."""
LARGEST_HEAD_DIM = 128
MOST_HEADS = 65535
"""Of a batch: CUDA's limit of a grid's second dimension."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_not(problem: Problem) -> str | None:
    """Why these kernels cannot compute a problem here, in words for a log; None: they can."""
    q = problem.q_BHTK
    if not q.is_cuda and not INTERPRETED:
        return f"tensors are on {q.device.type}, and it needs a GPU"
    if q.is_cuda and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    if q.dtype not in DTYPES:
        return f"it has no kernel for {q.dtype}"
    if q.shape[0] * q.shape[1] > MOST_HEADS:
        return f"the batch has more than {MOST_HEADS} heads"
    others = [problem.k_BHSK, problem.v_BHSK, *(problem.gates or ())]
    if any(other.dtype != q.dtype for other in others):
        return "queries, keys, values and gates' keys are not all of one type"
    if any(other.shape[-1] != q.shape[-1] for other in others):
        return "queries, keys, values and gates' keys are not all of one head dim"
    if q.shape[-1] > LARGEST_HEAD_DIM:
        return f"head dim {q.shape[-1]} is more than {LARGEST_HEAD_DIM}"
    if q.shape[2] > problem.k_BHSK.shape[2] or 0 in q.shape:
        return f"there are {q.shape[2]} queries of {problem.k_BHSK.shape[2]} tokens"
    if problem.piecewise is not None:
        return "it has no kernel for CoPE-MLP"
    if problem.distance_bias is not None:
        return "it has no kernel for a bias by distance buckets (T5)"
    look_up, relative = problem.look_up, problem.relative
    tables = [*([look_up.z_BHQP] if look_up else []), *([relative.z_BHQR] if relative else [])]
    if any(table.dtype not in DTYPES for table in tables):
        return "a table of position logits is of a type that it has no kernel for"
    return None


def attend(problem: Problem) -> Tensor:
    """Attention of the problem, (B, H, T, K), with gradients of q, k, v, gates, z, slopes m and relative z."""
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
    """`attend` on tensors.

    `z` (B, H, T, P) and `relative` (B, H, T, R) are the products q·e of contextual and relative look-ups; `m` (H,)
    are the slopes of positions, `distance_slope` (H,), which get no gradient, those of distances; `seed` is dropout's.
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

Given = tuple[Any, ...]
"""The operators' inputs, in the order of `_INPUTS`."""


def _forward(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, and what a backward pass needs: log-sum-exp, where plain tiles end, and the position there."""
    call = _Call(given)
    outputs = _forward_fake(*given)
    with call.device():
        launch_forward(call, outputs)
    return outputs


def _forward_fake(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q = given[0]
    rows = q.shape[:3]
    integers = [q.new_empty(rows, dtype=torch.int32) for _ in range(3)]
    return q.new_empty(q.shape), q.new_empty(rows, dtype=torch.float32), integers[0], integers[1], integers[2]


def _backward(*arguments: Any) -> list[Tensor]:
    """Gradients of the first `_N_DIFFERENTIABLE` inputs; an empty tensor for an input that there is not."""
    (do, *saved), given = arguments[:6], arguments[6:]
    call = _Call(given)
    with call.device():
        return launch_backward(call, _unit_stride(do), saved)


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
    schema=f"(Tensor do, Tensor o, Tensor lse, Tensor plain_end, Tensor whole, Tensor part, {_INPUTS}) -> Tensor[]",
)
_forward_op.register_fake(_forward_fake)
_backward_op.register_fake(_backward_fake)


def _save(ctx: Any, inputs: Given, output: tuple[Tensor, ...]) -> None:
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


class _Call:
    """One attention as kernels take it."""

    def __init__(self, given: Given) -> None:
        q, k, v, gate_q, gate_k, z, m, relative, distance_slope, lengths, seed, scale, dropout, far_last = given
        q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
        gate_q = None if gate_q is None else _unit_stride(gate_q)
        gate_k = None if gate_k is None else _unit_stride(gate_k)
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
        """The context that launches belong in."""
        return torch.cuda.device_of(self.q)  # type: ignore[no-untyped-call]


_PAIRS = {torch.float32: "", torch.bfloat16: "bf16", torch.float16: "fp16"}


def pairs(z: Tensor) -> Tensor:
    """Each entry of a 16-bit table beside the next (the last beside itself), as int32: interpolation reads both."""
    if z.dtype == torch.float32:
        return z.contiguous()
    packed = z.new_empty(*z.shape, 2)
    packed[..., 0] = z
    packed[..., :-1, 1] = z[..., 1:]
    packed[..., -1, 1] = z[..., -1]
    return packed.view(torch.int32).squeeze(-1)


def precision(dtype: torch.dtype) -> str:
    """How tl.dot multiplies; float32 as exactly as torch does it, unless torch may use TF32."""
    if dtype != torch.float32:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(name: str, x: Tensor) -> dict[str, int]:
    return {f"{name}_b": x.stride(0), f"{name}_h": x.stride(1), f"{name}_t": x.stride(2)}


def launch(kernel: str, grid: Callable[[Mapping[str, Any]], tuple[int, int]], arguments: Any) -> None:
    """Run a kernel by name, with the best of its `choices`."""
    if INTERPRETED:
        getattr(kernels, kernel)[grid](**arguments, **getattr(SMALL, kernel))
    else:
        _tuned(kernel, arguments["q"].dtype)[grid](**arguments)


def launch_forward(call: _Call, outputs: Sequence[Tensor]) -> None:
    names = ("o", "lse", "plain_end", "whole_there", "part_there")
    arguments = {**call.shared, **dict(zip(names, outputs, strict=True))}

    def grid(meta: Mapping[str, Any]) -> tuple[int, int]:
        return triton.cdiv(call.T, meta["BLOCK_T"]), call.B * call.H

    launch("forward", grid, arguments)


def launch_backward(call: _Call, do: Tensor, saved: Sequence[Tensor]) -> list[Tensor]:
    """The gradients that `_backward` says, by one launch of both kernels, or several where rows are many."""
    o, lse, plain_end, whole, part = saved
    edge = SMALL.edge if INTERPRETED else EDGE
    rows = min(ROWS_PER_LAUNCH if call.contextual else call.T, call.T)
    several = rows < call.T
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
        **{name: work[name] for name in ("edge_whole", "edge_part", "edge_dp")},
    }
    of_rows = {
        "o": o,
        "whole_there": whole,
        "part_there": part,
        "dq": dq,
        "dgate_q": dgate_q,
        "dz": dz,
        "dm_rows": dm_rows,
        "drelative": drelative,
        "fallen": work["fallen"],
        "BLOCK_P": 16,
        "BLOCK_S": edge,
    }
    with_keys = (call.k, call.v, call.gate_k)
    sums = [None if x is None or not several else x.new_zeros(x.shape, dtype=torch.float32) for x in with_keys]
    for first_row in range(0, call.T, rows):
        here = min(rows, call.T - first_row)
        keys = call.S - call.T + first_row + here if several else call.S

        def row_grid(meta: Mapping[str, Any], here: int = here) -> tuple[int, int]:
            return triton.cdiv(here, meta["BLOCK_T"]), call.B * call.H

        def key_grid(meta: Mapping[str, Any], keys: int = keys) -> tuple[int, int]:
            return triton.cdiv(keys, meta["BLOCK_S"]), call.B * call.H

        dtype = torch.float32 if several else call.k.dtype
        parts = [None if x is None else x.new_empty(x.shape, dtype=dtype) for x in with_keys]
        of_keys = {"dk": parts[0], "dv": parts[1], "dgate_k": parts[2], "EDGE": edge}
        of_keys["TILES"] = max(2, triton.next_power_of_2(triton.cdiv(rows, LEAST_T)))
        launch("backward_rows", row_grid, {**shared, **of_rows, "first_row": first_row})
        launch("backward_keys", key_grid, {**shared, **of_keys, "first_row": first_row})
        if several:
            for total, part_sum in zip(sums, parts, strict=True):
                if total is not None and part_sum is not None:
                    total[:, :, :keys] += part_sum[:, :, :keys]
        else:
            sums = parts
    dk, dv, dgate_k = (None if x is None else x.to(call.k.dtype) for x in sums)
    dm = None if dm_rows is None or call.m is None else dm_rows.sum((0, 2)).to(call.m.dtype)
    gradients = (dq, dk, dv, dgate_q, dgate_k, dz, dm, drelative)
    return [dq.new_empty(0) if gradient is None else gradient for gradient in gradients]


def _rows_like(wanted: Tensor | None, lse: Tensor) -> Tensor | None:
    return None if wanted is None else torch.empty_like(lse)


def _workspace(call: _Call, rows: int, edge: int) -> dict[str, Tensor | None]:
    """What one backward launch's row kernel keeps, for itself (`fallen`) and for the column kernel."""
    if not call.contextual:
        return dict.fromkeys(("fallen", "edge_whole", "edge_part", "edge_dp"))
    q, heads = call.q, call.B * call.H
    edges = (heads, triton.cdiv(call.S, edge), rows)
    return {
        "fallen": None if call.z is None else q.new_empty((heads, rows, call.z.shape[-1], 2), dtype=torch.float32),
        "edge_whole": q.new_empty(edges, dtype=torch.int32),
        "edge_part": q.new_empty(edges, dtype=torch.int32),
        "edge_dp": q.new_empty(edges, dtype=torch.float32),
    }


# Tuning ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    """Sizes of tiles, in the kernels' words, where nothing is tuned.

    Where plain tiles end is known by the forward kernel's tiles. So its BLOCK_T and PLAIN_S are multiples of the row
    kernel's; BLOCK_S of both, and of the column kernel, are multiples of `edge`.
    """

    edge: int
    """Keys in a general tile of the backward row kernel; positions are kept at its edges."""
    forward: Mapping[str, int]
    backward_rows: Mapping[str, int]
    backward_keys: Mapping[str, int]


SMALL = Tiles(
    edge=16,
    forward={"BLOCK_T": 16, "BLOCK_S": 16, "PLAIN_S": 16},
    backward_rows={"BLOCK_T": 16, "PLAIN_S": 16},
    backward_keys={"BLOCK_T": 16, "BLOCK_S": 16, "PLAIN_T": 16},
)
"""For the interpreter, whose inputs are small."""


EDGE = 32
"""`Tiles.edge` on a GPU: in tiles of 64 × 32, few registers spill."""
LEAST_T = 16
"""No BLOCK_T of the column kernel is less."""


Choice = tuple[dict[str, int], int, int]
"""Sizes of tiles, warps, and stages of the pipeline."""

# Every forward BLOCK_T and PLAIN_S of a table is a multiple of every row kernel's in it (see `Tiles`).
_HALF: dict[str, list[Choice]] = {
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
# Of float32, as much would neither fit registers nor, at head dim 128, shared memory.
_SINGLE: dict[str, list[Choice]] = {
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
    """What the tuner tries; those that need more shared memory than the GPU has, it passes over."""
    table = _SINGLE if dtype == torch.float32 else _HALF
    return [triton.Config(sizes, num_warps=warps, num_stages=stages) for sizes, warps, stages in table[kernel]]


@cache
def _tuned(kernel: str, dtype: torch.dtype) -> Any:
    """The kernel with its tuner, which measures once for each head dim, power of 2 of T, table sizes and types."""
    tuner: Callable[..., Any] = triton.autotune(choices(kernel, dtype), key=["HEAD_DIM", "BUCKET", "P", "R"])
    return tuner(getattr(kernels, kernel))
