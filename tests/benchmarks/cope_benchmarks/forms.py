"""The forms of the Triton kernels that the stage `near_far` of `make gpu` times."""

from __future__ import annotations

from torch import Tensor

from cope_benchmarks.exact import Leaves
from cope_benchmarks.gpu_problems import Problem
from cope_sweep.kernels.triton_attention import launch, tile_sizes

ROWS_128 = {"BLOCK_T": 128, "num_warps": 8}
FORMS: dict[str, dict[str, tile_sizes.TileSizes] | None] = {
    "triton": None,
    "near and far": {},
    "near and far: forward 128 rows": {"forward_near": ROWS_128, "forward_far": ROWS_128},
    "near and far: forward near 32 keys": {"forward_near": {"BLOCK_S": 32}},
    "near and far: forward far 128 keys": {"forward_near": {"PLAIN_S": 128}, "forward_far": {"PLAIN_S": 128}},
    "near and far: rows far 64 keys": {"backward_rows_far": {"PLAIN_S": 64}},
    "near and far: keys far 32 queries": {
        "backward_keys_near": {"PLAIN_T": 32},
        "backward_keys_far": {"PLAIN_T": 32},
    },
    "near and far: keys near 3 stages": {"backward_keys_near": {"num_stages": 3}},
}
"""None: one kernel visits all tiles. Else what differs from the sizes of `tile_sizes.py` for 16 bits and a head dim of 64."""


def attend(problem: Problem, form: str, x: Leaves) -> Tensor:
    """Attention by one of `FORMS`. All backward passes have the form of the latest call, so this one's has to come next."""
    changed = FORMS[form]
    launch.NEAR_AND_FAR = changed is not None

    def sizes(kernel: str, *of: object) -> tile_sizes.TileSizes:
        return {**tile_sizes.tile_sizes(kernel, *of), **(changed or {}).get(kernel, {})}  # type: ignore[arg-type]

    setattr(launch, "tile_sizes", sizes)  # noqa: B010 - a function of the module, replaced
    return problem.attend(x)
