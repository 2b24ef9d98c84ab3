"""The register of position encodings, and which of them a model may have together."""

from collections.abc import Sequence
from typing import Annotated

from cope_sweep.errors import InvalidValue
from cope_sweep.positions.absolute import Absolute
from cope_sweep.positions.alibi import ALiBi
from cope_sweep.positions.base import Dims, Encoding
from cope_sweep.positions.carope import CARoPE
from cope_sweep.positions.cope import ContextualEncoding, CoPE
from cope_sweep.positions.cope_alibi import CoPEALiBi
from cope_sweep.positions.cope_mlp import CoPEMLP
from cope_sweep.positions.dape import DAPE
from cope_sweep.positions.darope import DaRoPE
from cope_sweep.positions.fire import FIRE
from cope_sweep.positions.fox import FoX
from cope_sweep.positions.grape_ap import GrapeAP
from cope_sweep.positions.inkling import Inkling
from cope_sweep.positions.kerple import Kerple
from cope_sweep.positions.mapformer_em import MapFormerEM
from cope_sweep.positions.mapformer_wm import MapFormerWM
from cope_sweep.positions.path import PaTH
from cope_sweep.positions.pope import PoPE
from cope_sweep.positions.relative import Relative
from cope_sweep.positions.repo import RePo
from cope_sweep.positions.rope import RoPE
from cope_sweep.positions.selective_rope import SelectiveRoPE
from cope_sweep.positions.short_convolution import ShortConvolution
from cope_sweep.positions.sinusoidal import Sinusoidal
from cope_sweep.positions.stick_breaking import StickBreaking
from cope_sweep.positions.t5 import T5
from cope_sweep.positions.temperature import Temperature
from cope_sweep.positions.tra import TRA
from cope_sweep.positions.wall import Wall
from cope_sweep.positions.window import Window
from cope_sweep.positions.xpos import XPos
from cope_sweep.registry import Registry

ENCODINGS = Registry(
    "encoding",
    Encoding,
    (
        *(Absolute, Sinusoidal, Relative, RoPE, ALiBi, T5, CoPE, CoPEMLP, CoPEALiBi),
        *(FoX, PaTH, StickBreaking, TRA, GrapeAP, DaRoPE, SelectiveRoPE, FIRE, Kerple, DAPE, XPos),
        *(Wall, Inkling, ShortConvolution, PoPE, MapFormerWM, MapFormerEM, CARoPE, RePo, Window, Temperature),
    ),
    entry_points="cope_sweep.positions",
)

AnyEncoding = Annotated[Encoding, ENCODINGS]
"""Any registered encoding, as a spec, its `kind` (`cope`), or a mapping (`{kind: cope, p_max: 16}`)."""


def check_together(encodings: Sequence[Encoding], dims: Dims) -> None:
    """Raise ValueError if an encoding does not fit a model of these sizes, or if two encodings exclude each other."""
    kinds = [encoding.kind for encoding in encodings]
    for kind in dict.fromkeys(kind for kind in kinds if kinds.count(kind) > 1):
        if kind in ("absolute", "sinusoidal"):
            raise InvalidValue(
                f"model.position has {kind} twice, and one {kind} can represent both; remove one",
                key="model.position",
                kinds=[kind, kind],
            )
        shared = _common_layers([encoding for encoding in encodings if encoding.kind == kind], dims)
        if shared:
            raise InvalidValue(
                f"model.position has {kind} twice in layer {shared[0]}, and a layer has each kind once; remove one, or "
                "give them different `layers`",
                key="model.position",
                kinds=[kind, kind],
                layer=shared[0],
            )
    if {"absolute", "sinusoidal"} <= set(kinds):
        raise InvalidValue(
            "model.position has absolute and sinusoidal, and a learned table can represent the sinusoids; remove one",
            key="model.position",
            kinds=["absolute", "sinusoidal"],
        )
    for encoding in encodings:
        encoding.check(dims)
        if isinstance(encoding, ContextualEncoding) and not any(
            other.rotates and _common_layers([encoding, other], dims) for other in encodings
        ):
            encoding.refuse(("gate_after_rotation", "rotated_query"), "no encoding rotates queries in its layers")
    for encoding in encodings:
        layers = [layer for layer in range(dims.layers) if encoding.serves(layer)]
        if (encoding.rotates or encoding.mixes) and not any(is_read(encoding, encodings, layer) for layer in layers):
            raise InvalidValue(
                f"model.position: {encoding.kind} changes queries and keys, and has no effect, because nothing in its "
                "layers depends on that (mapformer_em with product: s replaces q·k; tra divides queries by their "
                "length); remove it",
                code="no_effect",
                key="model.position",
                kind=encoding.kind,
            )
    _check_widening(encodings, dims)
    _check_readings(encodings)
    _check_single([encoding for encoding in encodings if encoding.weighs], "the softmax", dims)
    _check_single([encoding for encoding in encodings if encoding.replaces], "q·k/√K", dims)


def is_read(changed: Encoding | None, encodings: Sequence[Encoding], layer: int) -> bool:
    """Attention in a layer may depend on what an encoding (None: the model's `qk_norm`) makes of queries and keys.

    It cannot where the layer's only scores are MapFormer-EM's product s, which replaces q·k, or TRA's, which divide
    queries by their length, all that Temperature changes.
    """
    scoring = [each for each in encodings if each.serves(layer) and (each.scores or each.weighs)]
    if len(scoring) != 1:
        return True
    (only,) = scoring
    is_replaced = isinstance(only, MapFormerEM) and only.product == "s"
    return not is_replaced and not (isinstance(only, TRA) and isinstance(changed, Temperature))


def _check_single(replacing: Sequence[Encoding], replaced: str, dims: Dims) -> None:
    """Raise ValueError if a layer has two of these encodings."""
    if shared := _common_layers(replacing, dims):
        kinds = [encoding.kind for encoding in replacing if encoding.serves(shared[0])]
        raise InvalidValue(
            f"model.position has {' and '.join(kinds)} in layer {shared[0]}, and each replaces {replaced}; keep one",
            key="model.position",
            kinds=kinds,
            layer=shared[0],
        )


def _check_widening(encodings: Sequence[Encoding], dims: Dims) -> None:
    for encoding in encodings:
        for other in encodings:
            if other is encoding or not encoding.widens or not (other.rotates or other.uses_rotated_query):
                continue
            if shared := _common_layers([encoding, other], dims):
                raise InvalidValue(
                    f"model.position has {encoding.kind} and {other.kind} in layer {shared[0]}, and {encoding.kind} "
                    f"makes queries and keys wider, so {other.kind} cannot rotate or read them; remove one, or "
                    "give them different `layers`",
                    key="model.position",
                    kinds=[encoding.kind, other.kind],
                    layer=shared[0],
                )


def _check_readings(encodings: Sequence[Encoding]) -> None:
    """Readings of DaRoPE differ by their version, and a model has one version of each kind."""
    readings = {each.reading for each in encodings if isinstance(each, DaRoPE) and each.slow != "none"}
    if len(readings) > 1:
        raise InvalidValue(
            "model.position has darope with two readings; give both the same darope.reading",
            key="darope.reading",
            kind="darope",
        )


def _common_layers(encodings: Sequence[Encoding], dims: Dims) -> list[int]:
    """The layers that more than one of the encodings serves."""
    return [layer for layer in range(dims.layers) if sum(encoding.serves(layer) for encoding in encodings) > 1]
