"""CoPE-ALiBi: a linear bias of the contextual position (Golovneva et al. 2024, appendix C).

    a_ij = softmax_j(q_i·k_j/√K + s·m_h·p_ij)                                             (eq. 10)

with p_ij as in CoPE, not clamped, m_h a slope for each head, and the sign s = −1, which favours near tokens, as ALiBi
does. The paper's equation has no sign; `slope_sign: 1` is the equation as printed. Learned slopes are initialised to 0,
one for each head and layer, and `slope_sign` does not apply to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from cope_sweep.positions.alibi import Slopes, check_slopes, standard_slopes
from cope_sweep.positions.base import Attention, Dims, Parameter, Tensors, constants
from cope_sweep.positions.cope import ContextualEncoding
from cope_sweep.terms import Slope

if TYPE_CHECKING:
    from torch import Tensor


class CoPEALiBi(ContextualEncoding):
    """Contextual positions times a slope."""

    SOURCE: ClassVar[str] = "arXiv 2405.18719"

    kind: Literal["cope_alibi"] = "cope_alibi"
    slopes: Slopes | Literal["standard", "learned"] = Field(
        default="standard",
        description="One slope for each head; standard: ALiBi's; learned: per head and layer, initialised to 0.",
    )
    slope_sign: Literal[-1, 1] = Field(default=-1, description="−1 favours near tokens; not used by learned slopes.")

    def check(self, dims: Dims) -> None:
        super().check(dims)
        if not isinstance(self.slopes, str):
            check_slopes(self.slopes, dims, self.kind)
        if self.slopes == "learned":
            self.refuse(("slope_sign",), "cope_alibi.slopes are learned")

    def parameters(self, dims: Dims) -> Mapping[str, Parameter]:
        learned = {"m": Parameter((dims.heads,), per_layer=True)} if self.slopes == "learned" else {}
        return {**learned, **self.gate_parameters(dims)}

    def score(self, parameters: Tensors, attention: Attention) -> Tensor:
        return self._slopes(parameters, attention.q_BHQK)[:, None, None] * self.positions(parameters, attention)

    def term(self, parameters: Tensors, q_BHQK: Tensor, keys: int, features_BHSF: Tensor | None) -> Slope:
        return Slope(self._slopes(parameters, q_BHQK), self.gate_source, self.gate_shift(parameters))

    def _slopes(self, parameters: Tensors, q_BHQK: Tensor) -> Tensor:
        if self.slopes == "learned":
            return parameters["m"]
        fixed = standard_slopes(q_BHQK.shape[1]) if self.slopes == "standard" else self.slopes
        return self.slope_sign * constants(fixed, q_BHQK)
