"""Position encodings: one file each, with its equation, its spec and its hooks. `ENCODINGS` registers them.

The names are imported on use: kernels import `positions.terms`, also on machines that have torch but not pydantic.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cope_sweep.positions.absolute import Absolute
    from cope_sweep.positions.alibi import ALiBi
    from cope_sweep.positions.base import Attention, Dims, Encoding, Parameter
    from cope_sweep.positions.cope import CoPE
    from cope_sweep.positions.cope_alibi import CoPEALiBi
    from cope_sweep.positions.cope_mlp import CoPEMLP
    from cope_sweep.positions.registered import ENCODINGS, AnyEncoding, check_together
    from cope_sweep.positions.relative import Relative
    from cope_sweep.positions.rope import RoPE
    from cope_sweep.positions.sinusoidal import Sinusoidal
    from cope_sweep.positions.t5 import T5

__all__ = [
    "ENCODINGS",
    "T5",
    "ALiBi",
    "Absolute",
    "AnyEncoding",
    "Attention",
    "CoPE",
    "CoPEALiBi",
    "CoPEMLP",
    "Dims",
    "Encoding",
    "Parameter",
    "Relative",
    "RoPE",
    "Sinusoidal",
    "check_together",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    registered = importlib.import_module("cope_sweep.positions.registered")
    return globals().setdefault(name, getattr(registered, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
