"""One kernel for all tiles, or one near the diagonal and one far from it: the stage `near_far` of `make gpu`.

Times both forms of the Triton kernels beside each other, the second with several sizes of tiles, and SDPA without positions. It
changes no default: `launch.NEAR_AND_FAR` and `tile_sizes.py` are changed by hand, by what it has measured.

Each alternative is compared with float64 before it is timed, as in the stage `bench`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from cope_benchmarks.attention import BY_FORM, GPU_CASES, Case, measure_case
from cope_benchmarks.report import Measured
from cope_benchmarks.timing import resumed

_OF_BENCH = {case.name: case.problem for case in GPU_CASES}
CASES = (
    *(Case(name, _OF_BENCH[name], BY_FORM) for name in ("T 4096", "T 1024", "T 16384")),
    *(Case(name, _OF_BENCH[name], BY_FORM) for name in ("T 4096, mean gate 0.98", "T 4096, mean gate 0.02")),
    Case("T 4096, one sequence", _OF_BENCH["T 4096, one sequence"], BY_FORM),
    Case("T 4096, never saturating", _OF_BENCH["T 4096, never saturating"], BY_FORM),
    Case("T 4096, head dim 128", _OF_BENCH["T 4096, head dim 128"], ("triton", "near and far", "SDPA, cuDNN")),
)
"""The most important first."""
DRY_CASES = (Case("T 4096", _OF_BENCH["T 4096"], ("triton", "near and far")).tiny(),)


def measure_gpu(folder: Path, device: str, budget_s: float) -> Measured:
    """Times, ratios and memory on a GPU, into `near_far.json` and `near_far.md`; with device `cpu`, a dry run."""
    todo = {case.name: case for case in (CASES if device == "cuda" else DRY_CASES)}
    measure_one = partial(measure_case, device=device, memory=device == "cuda")
    return resumed(folder / "near_far.json", device, budget_s, todo, measure_one)
