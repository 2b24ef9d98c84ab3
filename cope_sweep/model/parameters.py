"""Parameters that are built from the declarations of a family and of position encodings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from cope_sweep.families import ConstantValue, Initialisation, Normal, ParameterDeclaration, Uniform
from cope_sweep.positions import Dims, Encoding
from cope_sweep.positions.base import Parameter


def add_parameters(module: nn.Module, declared: Mapping[str, ParameterDeclaration]) -> None:
    """Register uninitialised parameters under their dotted names; submodules that do not exist are created."""
    for name, declaration in declared.items():
        path, _, last = name.rpartition(".")
        parent = module
        for part in path.split(".") if path else ():
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.register_parameter(last, nn.Parameter(torch.empty(declaration.shape)))


class ParametersByName(Mapping[str, Tensor]):
    """The current parameters of a module by their declared names.

    The parameters are looked up at each access, because `load_state_dict(assign=True)` replaces them.
    """

    def __init__(self, module: nn.Module, declared: Mapping[str, ParameterDeclaration]) -> None:
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        for name in declared:
            path, _, last = name.rpartition(".")
            self._owners[name] = module.get_submodule(path), last

    def __getitem__(self, name: str) -> Tensor:
        owner, attribute = self._owners[name]
        return cast(Tensor, getattr(owner, attribute))

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)


@torch.no_grad()
def initialise(module: nn.Module, declared: Mapping[str, ParameterDeclaration], generator: torch.Generator) -> None:
    """Set the declared parameters of a module to their initial values, in the declared order."""
    for name, declaration in declared.items():
        initialise_parameter(module.get_parameter(name), declaration.initialisation, generator)


def initialise_parameter(parameter: Tensor, initialisation: Initialisation, generator: torch.Generator) -> None:
    """Set a parameter to its initial values in place."""
    if isinstance(initialisation, ConstantValue):
        parameter.fill_(initialisation.value)
    elif isinstance(initialisation, Normal):
        parameter.normal_(0, initialisation.std, generator=generator)
    else:
        parameter.uniform_(-initialisation.bound, initialisation.bound, generator=generator)


class PositionParameters(nn.Module):
    """The parameters of one encoding: shared by all layers, or one set for each layer that it serves."""

    def __init__(self, encoding: Encoding, dims: Dims) -> None:
        super().__init__()
        self.encoding = encoding
        declared = encoding.parameters(dims)
        self.shared = nn.ParameterDict({name: _zeros(p) for name, p in declared.items() if not p.per_layer})
        per_layer = {name: p for name, p in declared.items() if p.per_layer}
        self.layers = nn.ModuleDict()
        for layer in range(dims.layers):
            if per_layer and encoding.serves(layer):
                self.layers[str(layer)] = nn.ParameterDict({name: _zeros(p) for name, p in per_layer.items()})

    def of_layer(self, layer: int) -> Mapping[str, Tensor]:
        """The parameters that layer `layer` uses, by name."""
        found = [self.shared, self.layers[str(layer)]] if str(layer) in self.layers else [self.shared]
        # By `items`: torch.compile of torch 2.11 cannot trace a dict that is made from a ParameterDict itself.
        return {name: x for owned in found for name, x in cast(Mapping[str, Tensor], owned).items()}

    @torch.no_grad()
    def initialise(self, dims: Dims, generator: torch.Generator) -> None:
        """Draw from the declared distributions."""
        declared = self.encoding.parameters(dims)
        for name, parameter in self.named_parameters():
            declaration = declared[name.split(".")[-1]]
            parameter.zero_()  # it may have been initialised before, or be memory that nothing has written
            if declaration.bound is not None:
                initialise_parameter(parameter, Uniform(declaration.bound), generator)
            elif declaration.std and declaration.cut is not None:
                end = declaration.cut * declaration.std
                nn.init.trunc_normal_(parameter, 0, declaration.std, -end, end, generator=generator)
            elif declaration.std:
                initialise_parameter(parameter, Normal(declaration.std), generator)
            if declaration.centre:
                parameter.add_(torch.tensor(declaration.centre, dtype=torch.float64).to(parameter))


def _zeros(declared: Parameter) -> nn.Parameter:
    """A parameter of zeros, without a gradient if it is not learned: it is in the state dict in either case."""
    return nn.Parameter(torch.zeros(declared.shape), requires_grad=declared.learned)
