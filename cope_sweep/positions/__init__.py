"""Position encodings: one file each, with its equation, its spec and its hooks. `ENCODINGS` registers them."""

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
    "ENCODINGS", "T5", "ALiBi", "Absolute", "AnyEncoding", "Attention", "CoPE", "CoPEALiBi", "CoPEMLP", "Dims",
    "Encoding", "Parameter", "Relative", "RoPE", "Sinusoidal", "check_together",
]  # fmt: skip
