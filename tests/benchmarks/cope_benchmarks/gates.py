"""Errors of contextual positions, which are sums of gates, by the number format in which they are summed.

Logits are random, N(0, 1) plus a bias, and rounded to bfloat16, as a model in bfloat16 has them. The exact positions are those of
these logits in float64. Compared are

    bfloat16        gates and their sums in bfloat16, as the paper's listing has them in a model of this type
    float32         gates and sums in float32: what our reference, native and blocked kernels do
    fixed point     gates rounded to multiples of 2⁻¹⁸ and summed exactly: what our Triton kernels do, emulated here
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cope_benchmarks.report import Measured, Row, Rows

ROWS = 256
UNITS = 2.0**18
BIASES = {"gates near ½": 0.0, "gates near 0.02": -4.0}


def _in_bfloat16(logits_RS: torch.Tensor) -> torch.Tensor:
    return logits_RS.sigmoid().flip(-1).cumsum(-1).flip(-1)


def _in_float32(logits_RS: torch.Tensor) -> torch.Tensor:
    return logits_RS.float().sigmoid().flip(-1).cumsum(-1).flip(-1)


def _fixed_point(logits_RS: torch.Tensor) -> torch.Tensor:
    units_RS = (logits_RS.float().sigmoid() * UNITS).round().long()
    return units_RS.flip(-1).cumsum(-1).flip(-1).double() / UNITS


FORMATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bfloat16": _in_bfloat16,
    "float32": _in_float32,
    "fixed point, 2⁻¹⁸": _fixed_point,
}


def measure(tokens: Sequence[int]) -> Measured:
    """The largest and the mean error of the positions of `ROWS` rows, and the share that is off by ½ or more.

    `tokens` are the lengths of the rows.
    """
    rows = Rows("gates")
    for length in tokens:
        for gates, bias in BIASES.items():
            random = torch.Generator().manual_seed(0)
            logits_RS = (torch.randn(ROWS, length, generator=random) + bias).bfloat16()
            exact_RS = logits_RS.double().sigmoid().flip(-1).cumsum(-1).flip(-1)
            found: dict[str, Row] = {}
            for name, positions in FORMATS.items():
                error_RS = (positions(logits_RS).double() - exact_RS).abs()
                found[name] = {
                    "largest error": error_RS.max().item(),
                    "mean error": error_RS.mean().item(),
                    "off by ½ or more (%)": 100 * (error_RS >= 0.5).double().mean().item(),
                }
            rows.add_rows(f"{length:,} tokens, {gates}", found)
    return rows.measured(rows_of_each=ROWS)
