"""Position encodings: one file each, with its equation, its spec and its hooks. Register a new one below."""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from cope_sweep.positions.absolute import Absolute
from cope_sweep.positions.alibi import ALiBi
from cope_sweep.positions.base import Attention, Dims, Encoding, Parameter
from cope_sweep.positions.cope import CoPE
from cope_sweep.positions.cope_alibi import CoPEALiBi
from cope_sweep.positions.cope_mlp import CoPEMLP
from cope_sweep.positions.relative import Relative
from cope_sweep.positions.rope import RoPE
from cope_sweep.positions.sinusoidal import Sinusoidal
from cope_sweep.positions.t5 import T5

OneOf = Absolute | Sinusoidal | Relative | RoPE | ALiBi | T5 | CoPE | CoPEMLP | CoPEALiBi

ENCODINGS: dict[str, type[Encoding]] = {cls.model_fields["kind"].default: cls for cls in OneOf.__args__}


def _named(value: Any) -> Any:
    """`cope` in a file means `{kind: cope}`."""
    return {"kind": value} if isinstance(value, str) else value


AnyEncoding = Annotated[
    Annotated[OneOf, Field(discriminator="kind")],
    BeforeValidator(_named, json_schema_input_type=str | dict[str, Any]),
]
"""Any registered encoding, by its `kind`."""


def check_together(encodings: Sequence[Encoding], dims: Dims) -> None:
    """Raise ValueError where an encoding cannot serve a model of these dims, or two cannot serve it together."""
    twice = [kind for kind, count in Counter(encoding.kind for encoding in encodings).items() if count > 1]
    for kind in twice:
        if kind in ("absolute", "sinusoidal", "rope"):
            raise ValueError(f"model.position has {kind} twice: the second adds nothing that one could not; remove it")
        shared = _common_layers([encoding for encoding in encodings if encoding.kind == kind], dims)
        if shared:
            raise ValueError(
                f"model.position has {kind} twice in layer {shared[0]}: two of a kind are one with summed parameters; "
                "remove one, or give them different `layers`"
            )
    kinds = {encoding.kind for encoding in encodings}
    if {"absolute", "sinusoidal"} <= kinds:
        raise ValueError("model.position has absolute and sinusoidal: a learned table can hold the sinusoids; keep one")
    for encoding in encodings:
        encoding.check(dims)


def _common_layers(encodings: Sequence[Encoding], dims: Dims) -> list[int]:
    return [layer for layer in range(dims.layers) if sum(encoding.serves(layer) for encoding in encodings) > 1]


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
