"""Model families: one file each, with its equations, its parameters and its blocks. Register a new one below."""

from typing import Annotated

from cope_sweep.families.base import (
    ConstantValue,
    Declarations,
    Family,
    Initialisation,
    ModelSizes,
    Normal,
    OutputGate,
    ParameterDeclaration,
    Uniform,
    attention_parameters,
)
from cope_sweep.families.gpt2 import GPT2
from cope_sweep.families.llama import Llama
from cope_sweep.families.post_norm import PostNorm
from cope_sweep.registry import Registry

# mypy refuses an abstract class where a type is asked for. A registry makes no instance of it.
FAMILIES = Registry(
    "model family",
    Family,  # type: ignore[type-abstract]
    (GPT2, Llama, PostNorm),
    entry_points="cope_sweep.families",
)

AnyFamily = Annotated[Family, FAMILIES]
"""Any registered family: its `kind` (`gpt2`), or a mapping with its options."""

__all__ = [
    "FAMILIES",
    "GPT2",
    "AnyFamily",
    "ConstantValue",
    "Declarations",
    "Family",
    "Initialisation",
    "Llama",
    "ModelSizes",
    "Normal",
    "OutputGate",
    "ParameterDeclaration",
    "PostNorm",
    "Uniform",
    "attention_parameters",
]
