"""Whether Triton's interpreter works here, which a dry run needs. Imported where TRITON_INTERPRET=1 is set only."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import numpy
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def _count(out, n):
    for _ in range(n):
        tl.store(out, tl.load(out) + 1)


def why_not() -> str | None:
    """Why it does not work, and the way out; None: it works."""
    out = torch.zeros(1, dtype=torch.int32)
    try:
        _count[(1,)](out, 3)
    except Exception as error:
        return (
            f"the interpreter of Triton {triton.__version__} does not work with NumPy {numpy.__version__} ({error}); for a "
            "dry run: pip install --target older 'numpy<2.4', then PYTHONPATH=older make gpu DEVICE=cpu"
        )
    return (
        None if out.item() == 3 else f"the interpreter of Triton {triton.__version__} counts to {out.item()}, not to 3"
    )
