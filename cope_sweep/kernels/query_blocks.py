"""The path for plugins, and where there is neither a compiler nor a GPU: the reference in blocks of queries.

It serves every encoding, by its `score` and `weights`: they are defined for the last Q of some tokens (as in decoding),
so the queries a … b − 1 see a shorter sequence, which ends with token b − 1. The backward pass computes the
weights of each block again. Beyond inputs and outputs it needs the memory of one block, O(rows × S), and keys after a
block are never visited.

Shapes: B sequences, H heads, T queries (the last of the S tokens), K head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from cope_sweep.kernels.arguments import Inputs, LayerEncoding, LayerEncodings
from cope_sweep.kernels.dropout import draw_seeds
from cope_sweep.kernels.reference import dropped_weights, reference, with_float32, without_padding

ROWS = 64
"""Queries in a block; a 32nd of a sequence of more than 2,048 tokens, so that it has few blocks."""
BLOCK_ELEMENTS = 1 << 18
"""Approximate number of scores in a block: its arrays stay in a cache."""


@dataclass(frozen=True)
class QueryBlock:
    """Some sequences, and the queries `rows` of them; `end`: the token after the last."""

    batch: slice
    rows: slice
    end: int

    def of(self, x: Tensor, kind: TensorKind) -> Tensor:
        """The block's part of a tensor."""
        if kind == "queries":
            return x[self.batch, :, self.rows]
        return x[self.batch, :, : self.end] if kind == "keys" else x


TensorKind = Literal["queries", "keys", "parameter"]
"""The content of a tensor: (B, H, T, ·), (B, H, S, ·), or anything."""


def attend_in_blocks(inputs: Inputs, positions: LayerEncodings, dropout: float, seeds_B: Tensor | None) -> Tensor:
    """The result of `reference`, and its gradients."""
    problem = _Problem(*with_float32(inputs, positions), dropout, seeds_B)
    out_BHTK: Tensor = _Blocks.apply(problem, *problem.tensors)
    return out_BHTK.to(inputs.v_BHSK.dtype)


class _Problem:
    """An attention as a list of tensors; each block takes its part of them."""

    def __init__(self, inputs: Inputs, positions: LayerEncodings, dropout: float, seeds_B: Tensor | None) -> None:
        self.inputs, self.positions, self.dropout = inputs, positions, dropout
        self.B, self.H, self.T, _ = inputs.q_BHTK.shape
        self.S = inputs.k_BHSK.shape[2]
        self.seeds_B = draw_seeds(self.B, inputs.q_BHTK.device) if dropout and seeds_B is None else seeds_B
        self.tensors: list[Tensor] = []
        self.kinds: list[TensorKind] = []
        # By identity, so that one tensor has one part: `Inputs.rotated` compares identities in a block, too.
        self._index: dict[tuple[int, TensorKind], int] = {}
        for name in ("q_BHTK", "rotated_q_BHTK"):
            self._add(getattr(inputs, name), "queries")
        for x in (inputs.k_BHSK, inputs.v_BHSK, inputs.rotated_k_BHSK, *inputs.features_BHSF):
            self._add(x, "keys")
        for position in positions:
            for x in position.parameters.values():
                self._add(x, "parameter")

    def _add(self, x: Tensor | None, kind: TensorKind) -> None:
        if x is not None and (id(x), kind) not in self._index:
            self._index[id(x), kind] = len(self.tensors)
            self.tensors.append(x)
            self.kinds.append(kind)

    def blocks(self) -> Iterator[QueryBlock]:
        rows = min(max(ROWS, self.S // 32), max(16, 4 * BLOCK_ELEMENTS // (self.H * self.S)))
        batch = max(1, BLOCK_ELEMENTS // (self.H * min(rows, self.T) * self.S))
        for first in range(0, self.B, batch):
            for row in range(0, self.T, rows):
                last = min(self.T, row + rows)
                yield QueryBlock(slice(first, first + batch), slice(row, last), self.S - self.T + last)

    def of_block(self, block: QueryBlock, tensors: Sequence[Tensor]) -> tuple[Inputs, LayerEncodings, Tensor | None]:
        """The inputs, encodings and seeds of a block, from its parts of the tensors."""

        def part(x: Tensor | None, kind: TensorKind) -> Any:
            return None if x is None else tensors[self._index[id(x), kind]]

        original = self.inputs
        inputs = replace(
            original,
            q_BHTK=part(original.q_BHTK, "queries"),
            rotated_q_BHTK=part(original.rotated_q_BHTK, "queries"),
            **{name: part(getattr(original, name), "keys") for name in ("k_BHSK", "v_BHSK", "rotated_k_BHSK")},
            features_BHSF=[part(x, "keys") for x in original.features_BHSF],
            lengths_B=None if original.lengths_B is None else original.lengths_B[block.batch],
        )
        positions = [
            LayerEncoding(position.encoding, {name: part(x, "parameter") for name, x in position.parameters.items()})
            for position in self.positions
        ]
        return inputs, positions, None if self.seeds_B is None else self.seeds_B[block.batch]


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, problem: _Problem, *tensors: Tensor) -> Tensor:
        ctx.problem = problem
        v_BHSK = problem.inputs.v_BHSK
        out_BHTK = v_BHSK.new_empty((problem.B, problem.H, problem.T, v_BHSK.shape[-1]))
        for block in problem.blocks():
            parts = [block.of(x, kind) for x, kind in zip(tensors, problem.kinds, strict=True)]
            inputs, positions, seeds_B = problem.of_block(block, parts)
            out_BHTK[block.batch, :, block.rows] = reference(inputs, positions, problem.dropout, seeds_B)
        return out_BHTK

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_BHTK: Tensor) -> tuple[Tensor | None, ...]:
        problem, wanted = ctx.problem, ctx.needs_input_grad[1:]
        sums: list[Tensor | None] = [None] * len(wanted)  # what no block uses has no gradient
        for block in problem.blocks():
            parts = [
                # Leaves of a graph for this block alone, which ends with it.
                block.of(x.detach(), kind).requires_grad_(needs)
                for x, kind, needs in zip(problem.tensors, problem.kinds, wanted, strict=True)
            ]
            leaves = [part for part in parts if part.requires_grad]
            gradients = iter(_gradients(problem, block, parts, leaves, dout_BHTK[block.batch, :, block.rows]))
            for index, (x, kind) in enumerate(zip(problem.tensors, problem.kinds, strict=True)):
                gradient, total = next(gradients) if wanted[index] else None, sums[index]
                if gradient is None:
                    continue
                if total is None:
                    total = sums[index] = torch.zeros_like(x)
                block.of(total, kind).add_(gradient)
        return (None, *sums)


def _gradients(
    problem: _Problem, block: QueryBlock, parts: Sequence[Tensor], leaves: Sequence[Tensor], dout_BHTK: Tensor
) -> Sequence[Tensor | None]:
    """The gradients of a block's leaves. The weights are computed again, and the output is not."""
    inputs, positions, seeds_B = problem.of_block(block, parts)
    with torch.autocast(dout_BHTK.device.type, enabled=False):
        with torch.enable_grad():
            weights_BHTS = dropped_weights(inputs, positions, problem.dropout, seeds_B)
        dout_BHTK = without_padding(dout_BHTK, inputs)
        v_BHSK = inputs.v_BHSK
        of_factors = (
            (weights_BHTS, dout_BHTK @ v_BHSK.detach().transpose(-1, -2)),
            (v_BHSK, weights_BHTS.detach().transpose(-1, -2) @ dout_BHTK),
        )
        factors, gradients = zip(*(of_factor for of_factor in of_factors if of_factor[0].requires_grad), strict=True)
        return torch.autograd.grad(factors, leaves, gradients, allow_unused=True)
