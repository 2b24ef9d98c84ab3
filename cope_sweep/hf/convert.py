"""Position encodings in a causal language model of transformers, through its `AttentionInterface`.

Each attention layer gets a module `positions` with the parameters of its encodings, and `cope_sweep.nn` computes the
attention. Where the model rotates queries and keys (RoPE), its rotation moves into that attention: encodings such as
CoPE take queries and keys from before it, and the cache then holds keys from before it.

A converted model is saved as `cope_sweep_converted`, a config.json that transformers refuses, instead of loading the
model without its encodings: its Auto classes unless this package is imported, and the model's own class always.

Shapes: B batch, H heads, T queries, S keys, K head dim.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import torch
from pydantic import PrivateAttr
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import causal_mask_function
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.import_utils import is_tracing

from cope_sweep.errors import InvalidValue
from cope_sweep.hf.arguments import check_positions
from cope_sweep.kernels import LayerEncoding
from cope_sweep.nn import (
    UNKNOWN_CONTEXT,
    PositionalAttention,
    check_context,
    check_encodings,
    needs_hidden,
    positional_attention,
)
from cope_sweep.positions import ENCODINGS, Dims, Encoding, check_together
from cope_sweep.positions.base import AttentionEncoding, Tensors

IMPLEMENTATION = "cope_sweep"
"""The name of the attention function, as transformers' `attn_implementation`."""
SETTINGS = "cope_sweep"
"""The attribute of a converted model's config that holds the encodings."""


def convert(
    model: PreTrainedModel, encodings: Sequence[Encoding | str | dict[str, Any]], *, keep_rope: bool = True
) -> PreTrainedModel:
    """Give a causal language model of transformers these position encodings, in place, and return it.

    CoPE's table starts with zeros: the model computes what it computed, until it is trained.

    Args:
        model: such as LlamaForCausalLM or GPT2LMHeadModel.
        encodings: such as `[CoPE(p_max=64)]`; those with `layers` in these layers only.
        keep_rope: whether a model with RoPE still rotates queries and keys.

    Raises:
        InvalidValue: The model cannot be converted, an encoding needs what attention does not get in transformers
            (`hidden`), or `keep_rope=False` has no effect.

    """
    checked = [ENCODINGS.validate(encoding) for encoding in encodings]
    layers = _attention_layers(model)
    if hasattr(model.config, SETTINGS):
        raise InvalidValue(
            f"{type(model).__name__} was converted already; load the original again",
            code="already_converted",
            model=type(model).__name__,
        )
    _add(model, layers, checked, keep_rope=keep_rope)
    settings = {"position": [encoding.dump() for encoding in checked], "keep_rope": keep_rope}
    model.config.__class__ = _saving_config(cast(Any, type(model.config)))
    setattr(model.config, SETTINGS, settings)
    model.set_attn_implementation(IMPLEMENTATION)
    return model


# -- The attention ----------------------------------------------------------------------------------------------------


class ModelRotation(AttentionEncoding):
    """The rotation of a model of transformers, with its frequencies and its layout."""

    kind: Literal["model_rotation"] = "model_rotation"
    _rotary: HeldRotation = PrivateAttr()
    _apply: Callable[..., tuple[Tensor, Tensor]] = PrivateAttr()

    @classmethod
    def of(cls, rotary: HeldRotation, apply: Callable[..., tuple[Tensor, Tensor]]) -> ModelRotation:
        """The rotation by a module that computes cosines and sines, and a function that applies them."""
        rotation = cls()
        rotation._rotary, rotation._apply = rotary, apply
        return rotation

    def rotate(
        self,
        parameters: Tensors,
        x_BHTK: Tensor,
        start: int,
        features_BHSF: Tensor | None = None,
        *,
        keys: bool = False,
    ) -> Tensor:
        position_1T = torch.arange(start, start + x_BHTK.shape[2], device=x_BHTK.device)[None]
        cos, sin = self._rotary.original(x_BHTK, position_ids=position_1T)
        # With a partial rotation, some models apply it to the first components themselves.
        turned, kept = x_BHTK.split((cos.shape[-1], x_BHTK.shape[-1] - cos.shape[-1]), dim=-1)
        return torch.cat((self._apply(turned, turned, cos, sin)[0], kept), dim=-1)


class HeldRotation(nn.Module):
    """In the place of a model's rotary embedding: the model itself does not rotate."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Cosines and sines of angles of 0."""
        cos, sin = self.original(*args, **kwargs)
        return torch.ones_like(cos), torch.zeros_like(sin)


class LayerPositions(PositionalAttention):
    """The encodings of one layer of a model of transformers."""

    rotation: ModelRotation | None = None

    def _check_together(self, encodings: Sequence[Encoding]) -> None:
        """Nothing: `convert` has checked them together with the model's rotation."""

    def layer_encodings(self) -> list[LayerEncoding]:
        """The model's rotation, and the encodings."""
        rotation = [] if self.rotation is None else [LayerEncoding(self.rotation)]
        return rotation + super().layer_encodings()

    def forward(  # type: ignore[override] # the model has its own dropout
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float
    ) -> Tensor:
        """Attention, (B, H, T, K)."""
        return positional_attention(q, k, v, self.layer_encodings(), mask=mask, dropout=dropout)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers: (B, T, H, K), and no weights."""
    positions = getattr(module, "positions", None)
    if positions is None:
        raise InvalidValue(
            f"{type(module).__name__} has no encodings; call cope_sweep.hf.convert on the model instead of choosing "
            f"attn_implementation={IMPLEMENTATION!r}",
            code="not_converted",
        )
    for name in ("softcap", "s_aux", "position_bias", "sliding_window"):
        if kwargs.get(name) is not None:
            raise _not_computed(f"{type(module).__name__} passes {name} to its attention", name)
    if attention_mask is not None and attention_mask.dim() != 2:
        raise _not_computed("the attention mask has a row for each query", "attention_mask")
    if scaling is not None and scaling != query.shape[-1] ** -0.5:
        # Attention divides by √K.
        query = query * (scaling * query.shape[-1] ** 0.5)
    attended_BHTK = positions(query, key, value, attention_mask, dropout)
    return attended_BHTK.transpose(1, 2).contiguous(), None


def _mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor | None:
    """The mask of padding, (B, S), from which transformers would make one with a row for each query."""
    if mask_function is not causal_mask_function:
        if attention_mask is None and (is_tracing() or not _is_packed(mask_function, batch_size, q_length, device)):
            # While tracing, transformers cannot look at position_ids, and takes every row for a packed one.
            raise _not_computed(
                "in torch.compile and torch.export, transformers cannot tell packed sequences from others without a "
                "mask; pass attention_mask=torch.ones_like(input_ids)",
                "attention_mask",
            )
        raise _not_computed("several sequences are packed into one row, or a window slides over them", "mask_function")
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise _not_computed("the cache has places for later tokens (a static cache)", "cache_implementation")
    if attention_mask is None or (not is_tracing(attention_mask) and bool(attention_mask.all())):
        return None
    return attention_mask


def _is_packed(mask_function: Callable[..., Any], batch: int, queries: int, device: torch.device | None) -> bool:
    """Whether some token does not attend to the one before it."""
    row_B1, query_1T = torch.arange(batch, device=device)[:, None], torch.arange(1, queries, device=device)[None]
    return not bool(mask_function(row_B1, 0, query_1T, query_1T - 1).all())


def _check_call(model: nn.Module, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
    """Raise InvalidValue before a call that would compute something else than was asked for.

    A hook of the model without its output layer, which PEFT and the model with that layer both call.
    """
    config = cast(PreTrainedConfig, model.config)
    if config._attn_implementation != IMPLEMENTATION:
        raise _not_computed(
            f"{config._attn_implementation!r} would leave out the encodings and the rotation of a converted model; "
            f"call set_attn_implementation({IMPLEMENTATION!r})",
            "attn_implementation",
        )
    # What follows reads values of tensors, which have none while a graph is traced.
    if torch.compiler.is_compiling() or is_tracing():
        return
    if args:
        names = inspect.signature(model.forward).parameters
        arguments = dict(zip(names, args, strict=False)) | arguments
    asked = arguments.get("output_attentions")
    if config.output_attentions if asked is None else asked:
        raise _no_weights()
    if any(isinstance(child, HeldRotation) for child in model.children()):
        _check_rotated(arguments)


def _check_rotated(arguments: dict[str, Any]) -> None:
    """Raise InvalidValue for `position_ids` other than those of `ModelRotation`, which count the tokens."""
    inputs, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    inputs = arguments.get("inputs_embeds") if inputs is None else inputs
    cache = arguments.get("cache")
    cache = arguments.get("past_key_values") if cache is None else cache
    if inputs is None or arguments.get("position_ids") is None:
        return
    (B, T), past = inputs.shape[:2], 0 if cache is None else int(cache.get_seq_length())
    if mask is None:
        is_token_BS = torch.ones((B, past + T), dtype=torch.bool, device=inputs.device)
    elif mask.shape == (B, past + T):
        is_token_BS = mask.bool()
    else:
        return  # the attention refuses such a mask
    check_positions(arguments["position_ids"], is_token_BS, T, is_relative=True)


def _no_weights() -> InvalidValue:
    return InvalidValue(
        "output_attentions: cope_sweep computes attention without keeping its weights; leave it out",
        code="not_computed",
        argument="output_attentions",
    )


def _not_computed(what: str, argument: str) -> InvalidValue:
    return InvalidValue(
        f"{argument}: {what}; cope_sweep computes causal attention over all earlier tokens of each row, with padding "
        "and a growing cache",
        code="not_computed",
        argument=argument,
    )


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, _mask)


# -- Adding encodings -------------------------------------------------------------------------------------------------


def _attention_layers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The attention modules of a model by the number of their layer. Raises InvalidValue."""
    name = type(model).__name__
    if model.config.is_encoder_decoder or not model.can_generate():
        raise InvalidValue(
            f"{name} is not a causal language model: convert the one that AutoModelForCausalLM gives",
            code="not_a_causal_model",
            model=name,
        )
    if getattr(model.config.get_text_config(), "add_cross_attention", False):
        raise InvalidValue(
            f"{name} has attention to the output of an encoder, which cope_sweep does not compute; load it with "
            "add_cross_attention=False",
            code="cross_attention",
            model=name,
        )
    layers = {
        cast(int, module.layer_idx): module
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int) and getattr(module, "is_causal", False)
    }
    if not (layers and model._can_set_attn_implementation()):
        raise InvalidValue(
            f"{name} has no hook for attention: it does not call transformers' AttentionInterface, so nothing can "
            "replace its attention",
            code="no_attention_hook",
            model=name,
        )
    config = model.config.get_text_config()
    if getattr(config, "sliding_window", None) is not None:
        raise InvalidValue(
            f"{name} has attention in sliding windows, which cope_sweep does not compute; if its sequences are shorter "
            "than the window, load it with sliding_window=None",
            code="sliding_window",
            model=name,
        )
    if any(hasattr(layer, "v_head_dim") for layer in layers.values()):
        raise InvalidValue(
            f"{name} has values of another width than its keys, which cope_sweep does not compute",
            code="not_computed",
            model=name,
        )
    return layers


def _add(model: PreTrainedModel, layers: dict[int, nn.Module], encodings: list[Encoding], *, keep_rope: bool) -> None:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    context = getattr(config, "max_position_embeddings", None)
    dims = Dims(heads * head_dim, heads, max(layers) + 1, context or UNKNOWN_CONTEXT, hidden_dim=config.hidden_size)
    check_encodings(encodings)
    rotary = [
        (parent, child)
        for parent in model.modules()
        for child in parent.named_children()
        if "RotaryEmbedding" in type(child[1]).__name__
    ]
    _check_rotation(model, layers, [module for _, (_, module) in rotary], keep_rope=keep_rope)
    check_together([*encodings, *([ModelRotation()] if rotary and keep_rope else [])], dims)
    check_context(encodings, dims)
    for encoding in encodings:
        if encoding.mixes or needs_hidden(encoding, heads, head_dim):
            raise InvalidValue(
                f"{encoding.kind} needs {'earlier queries' if encoding.mixes else 'hidden, the input of a layer'}, "
                "which transformers gives to no attention function and keeps in no cache; use "
                "cope_sweep.nn.PositionalAttention in a model of your own",
                code="missing_argument",
                argument="q" if encoding.mixes else "hidden",
                kind=encoding.kind,
            )
        if any(not parameter.per_layer for parameter in encoding.parameters(dims).values()):
            raise InvalidValue(
                f"{encoding.kind} has one table for all layers, and a converted model keeps one in each; set "
                f"{encoding.kind}.share_layers: false",
                code="shared_by_layers",
                key=f"{encoding.kind}.share_layers",
                kind=encoding.kind,
            )
    # All checks are before the first change.
    rotation = None
    for parent, (child_name, original) in rotary:
        held = HeldRotation(original)
        parent.add_module(child_name, held)
        if keep_rope:
            apply = sys.modules[type(next(iter(layers.values()))).__module__].__dict__["apply_rotary_pos_emb"]
            rotation = ModelRotation.of(held, apply)
    model.base_model.register_forward_pre_hook(_check_call, with_kwargs=True)
    like = next(model.parameters())
    for index, layer in layers.items():
        serving = [encoding for encoding in encodings if encoding.serves(index)]
        everywhere = [
            encoding.model_copy(update={"layers": None}) if hasattr(encoding, "layers") else encoding
            for encoding in serving
        ]
        positions = LayerPositions(everywhere, heads=heads, head_dim=head_dim, context=context)
        # Layers without RoPE in a model that has it elsewhere say so.
        positions.rotation = rotation if getattr(layer, "use_rope", True) else None
        layer.add_module("positions", positions.to(device=like.device, dtype=like.dtype))


def _check_rotation(
    model: PreTrainedModel, layers: dict[int, nn.Module], rotary: Sequence[nn.Module], *, keep_rope: bool
) -> None:
    name, module = type(model).__name__, sys.modules[type(next(iter(layers.values()))).__module__]
    if not rotary and not keep_rope:
        raise InvalidValue(
            f"{name} has no RoPE, so keep_rope=False has no effect; leave it out", code="no_rope", model=name
        )
    apply = getattr(module, "apply_rotary_pos_emb", None)
    arguments = [] if apply is None else list(inspect.signature(apply).parameters)[:4]
    if len(rotary) > 1 or (rotary and arguments != ["q", "k", "cos", "sin"]):
        raise InvalidValue(
            f"{name} rotates queries and keys in a way of its own, which cope_sweep does not know",
            code="not_computed",
            model=name,
        )
    # HunYuan's names. A norm without gains commutes with the rotation (nanochat), and others are before it.
    if rotary and keep_rope and any(hasattr(layer, "query_layernorm") for layer in layers.values()):
        raise InvalidValue(
            f"{name} normalises queries and keys after their rotation, with gains, which cope_sweep does not compute",
            code="not_computed",
            model=name,
        )


# -- Files ------------------------------------------------------------------------------------------------------------


_REFUSED = {
    "converted by cope_sweep: this class would leave out the position encodings; import cope_sweep.hf and load the "
    "model with AutoModelForCausalLM": 0
}
"""The `id2label` in the config.json of a converted model.

With a model_type of another class, transformers only warns, and makes a config with the default sizes of that class.
The keys of `id2label` are what every class reads as numbers: it stops there, and its error has this text.
"""


class ConvertedConfig(PreTrainedConfig):
    """The config.json of a converted model: that of the original model, and what `convert` got."""

    model_type = "cope_sweep_converted"
    # Not in `base`: a config class takes an inner dictionary with its own model_type for its config.json.
    base_type: str | None = None
    base: dict[str, Any] | None = None
    position: list[Any] | None = None
    keep_rope: bool = True

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The config of the content of a config.json. Options that the original's config has are set in `base`."""
        data = {key: x for key, x in config_dict.items() if key != "id2label"}
        if kwargs.get("output_attentions"):
            raise _no_weights()
        if data.get("base"):
            original = cls(**data).original()
            set_here = ("attn_implementation", "dtype", "torch_dtype", "name_or_path")
            names = [name for name in kwargs if name not in set_here and hasattr(original, name)]
            data["base"] = data["base"] | {name: kwargs.pop(name) for name in names}
        return super().from_dict(data, **kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """What is written."""
        return super().to_diff_dict() | {"id2label": _REFUSED}

    def original(self) -> PreTrainedConfig:
        """The config of the model that was converted, which remembers the encodings."""
        data = dict(self.base or {})
        inner = data.pop("model_type", None)  # folders saved before `base_type` was there
        config = AutoConfig.for_model(self.base_type or inner, **data)
        if self.output_attentions:
            raise _no_weights()
        for name, value in _changed(self).items():
            setattr(config, name, value)
        config.__class__ = _saving_config(cast(Any, type(config)))
        setattr(config, SETTINGS, {"position": self.position, "keep_rope": self.keep_rope})
        return config


def _changed(config: ConvertedConfig) -> dict[str, Any]:
    """The attributes that were set on a config after it was read, and are the original's."""
    own = ("base_type", "base", "position", "keep_rope", "architectures", "dtype", "transformers_version")
    default = vars(ConvertedConfig())
    return {
        name: value
        for name, value in vars(config).items()
        if not name.startswith("_") and name not in own and (name not in default or value != default[name])
    }


class ConvertedForCausalLM:
    """Loads converted models; they are objects of the original's class."""

    config_class = ConvertedConfig

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, config: ConvertedConfig, **options: Any) -> PreTrainedModel:
        """The converted model of a folder. Options are those of `from_pretrained` of transformers."""
        original = config.original()
        model_class = _loading_class(_model_class(original))
        _check_implementation(options.pop("attn_implementation", None) or config._attn_implementation)
        loaded = model_class.from_pretrained(
            path, *args, config=original, attn_implementation=IMPLEMENTATION, **options
        )
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with `output_loading_info`
        model.__class__ = _model_class(original)
        return loaded

    @classmethod
    def _from_config(cls, config: ConvertedConfig, **options: Any) -> PreTrainedModel:
        original = config.original()
        _check_implementation(options.pop("attn_implementation", None) or config._attn_implementation)
        model = _loading_class(_model_class(original))._from_config(
            original, attn_implementation=IMPLEMENTATION, **options
        )
        model.__class__ = _model_class(original)
        return cast(PreTrainedModel, model)


def _check_implementation(name: str | None) -> None:
    if name not in (None, IMPLEMENTATION):
        raise InvalidValue(
            f"attn_implementation={name!r} would leave out the position encodings of a converted model; leave it out",
            code="not_computed",
            argument="attn_implementation",
        )


def _model_class(config: PreTrainedConfig) -> Any:
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config).__mro__[1]]


@cache
def _loading_class(base: Any) -> Any:
    """The class `base`, whose objects have encodings as soon as they are made: before weights are read."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        base.__init__(self, config, *args, **kwargs)
        settings = getattr(config, SETTINGS)
        encodings = [ENCODINGS.validate(encoding) for encoding in settings["position"]]
        _add(self, _attention_layers(self), encodings, keep_rope=settings["keep_rope"])

    return type(base.__name__, (base,), {"__init__": __init__, "__module__": base.__module__})


@cache
def _saving_config(base: Any) -> Any:
    """The class `base`, whose objects are saved as a ConvertedConfig."""

    def save_pretrained(self: Any, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        if push_to_hub:
            raise _not_computed("a config of a converted model is pushed together with the model", "push_to_hub")
        base.save_pretrained(self, save_directory, **kwargs)
        path = Path(save_directory) / "config.json"
        data = json.loads(path.read_text(encoding="utf-8"))
        settings = data.pop(SETTINGS)
        shown = {name: data[name] for name in ("architectures", "dtype", "transformers_version") if name in data}
        own = {"model_type": ConvertedConfig.model_type, "id2label": _REFUSED, "base_type": data.pop("model_type")}
        whole = shown | own | {"base": data} | settings
        path.write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def __reduce_ex__(self: Any, _: Any) -> tuple[Any, ...]:  # noqa: N807
        return _empty_config, (base,), self.__getstate__()

    own = {"save_pretrained": save_pretrained, "__reduce_ex__": __reduce_ex__, "__module__": base.__module__}
    return type(base.__name__, (base,), own)


def _empty_config(base: Any) -> Any:
    """What pickling makes the config of a converted model of: its class has no name to be found by."""
    of_class = _saving_config(base)
    return of_class.__new__(of_class)


AutoConfig.register(ConvertedConfig.model_type, ConvertedConfig)
AutoModelForCausalLM.register(ConvertedConfig, ConvertedForCausalLM)
