"""A finished run as a model of transformers, with its own attention, cache and weights.

    folder/config.json          model_type cope_sweep, with the content of the checkpoint's config.json
    folder/model.safetensors    the run's weights
    folder/tokenizer.json …     the run's tokenizer, if it was trained on text

Shapes: B sequences, T new tokens, S all tokens (those of the cache first), D dim.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from cope_sweep.errors import InvalidValue
from cope_sweep.hf.arguments import check_positions
from cope_sweep.inference import Predictor
from cope_sweep.model import Cache, Transformer
from cope_sweep.model.attention import LayerCache
from cope_sweep.model.checkpoint import config_of, run_of
from cope_sweep.model.parameters import ParametersByName
from cope_sweep.model.transformer import Block
from cope_sweep.text import TOKENIZER_FILE

LAYOUT = "cope_sweep_layout"
"""The attribute of a cache that says what its keys consist of."""


class CopeSweepConfig(PreTrainedConfig):
    """The config.json of an exported run. transformers' names of sizes are there for scripts that read them."""

    model_type = "cope_sweep"
    checkpoint: dict[str, Any] | None = None
    """The content of the config.json of the run's checkpoint."""
    vocab_size: int = 0
    hidden_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    max_position_embeddings: int = 0
    """Tokens in the longest sequence of the training task."""
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None


class CopeSweepForCausalLM(PreTrainedModel, GenerationMixin):
    """The model of a run, as a causal language model of transformers."""

    config_class = CopeSweepConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = False
    _no_split_modules = ["Block"]
    _tied_weights_keys = {"transformer.head.weight": "transformer.embedding.weight"}

    def __init__(self, config: CopeSweepConfig) -> None:
        """Make the model with the run's initial weights. Raises CheckpointError where this code computes another."""
        super().__init__(config)
        self.run = run_of(config.checkpoint, Path(config.name_or_path or "config.json"))
        self.transformer = Transformer(self.run)
        for block in cast(list[Block], list(self.transformer.blocks)):
            block.parameters_by_name = _LinearLayers(block)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: the run's weights are drawn when the model is made, or are in the file."""

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.transformer.head

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: TransformersCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        past_key_values: TransformersCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of the next token, and with `labels` the mean loss, as all causal models of transformers.

        Args:
            input_ids: token ids, (B, T).
            attention_mask: 1 at tokens and 0 at padding, (B, S). Padding has no position.
            cache: a DynamicCache with the earlier tokens.
            labels: token ids, −100 where there is no loss; each is predicted by the token before it.
            use_cache: whether to return a cache. None: as the config says, but not in training.
            logits_to_keep: compute the logits of this many last tokens, or of these; 0: of all.
            return_dict: False: a tuple.
            past_key_values: the older name of `cache`.
            kwargs: `position_ids` have to count the tokens, from 0 in each row and those of the cache included;
                `num_items_in_batch` divides the loss.

        Raises:
            InvalidValue: An argument asks for what the model does not compute.

        """
        if input_ids is None or kwargs.get("inputs_embeds") is not None:
            raise InvalidValue("pass input_ids: the model has no way to start from embeddings", argument="input_ids")
        cache = past_key_values if cache is None else cache
        wants_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        if cache is None and wants_cache and not any(encoding.samples for encoding in self.run.model.position):
            cache = DynamicCache(config=self.config)
        hidden_BTD = self._hidden(input_ids, attention_mask, cache, kwargs.pop("position_ids", None))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
        logits = self.transformer.logits(hidden_BTD if isinstance(kept, int) else hidden_BTD[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, cache=cache)
        is_tuple = return_dict is False or (return_dict is None and not self.config.return_dict)
        return output.to_tuple() if is_tuple else output

    def _hidden(
        self,
        tokens_BT: Tensor,
        mask_BS: Tensor | None,
        cache: TransformersCache | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        """The input of the output layer, (B, T, D)."""
        T = tokens_BT.shape[1]
        past = _Past.of(cache, len(self.transformer.blocks))
        S = T + (0 if past is None else past.length)
        if mask_BS is not None and mask_BS.dim() != 2:
            raise InvalidValue(
                "attention_mask has to be (batch, tokens)", code="not_computed", argument="attention_mask"
            )
        if mask_BS is None or bool(mask_BS.all()):
            check_positions(position_ids, tokens_BT.new_ones((len(tokens_BT), S)).bool(), T, is_relative=False)
            layers = None if past is None else past.layers
            hidden_BTD = self.transformer.hidden(tokens_BT, layers)
        else:
            is_token_BS = mask_BS.bool()
            if is_token_BS.shape != (len(tokens_BT), S):
                raise InvalidValue(
                    "attention_mask has to have a column for each token, those of the cache included",
                    code="invalid_shape",
                    argument="attention_mask",
                )
            check_positions(position_ids, is_token_BS, T, is_relative=False)
            if past is None and not (is_token_BS.long().diff(dim=1) > 0).any():
                # Padding behind the tokens: no token sees it.
                hidden_BTD = self.transformer.hidden(tokens_BT, lengths_B=is_token_BS.sum(dim=1))
            else:
                hidden_BTD = self._without_padding(tokens_BT, is_token_BS, past)
        if cache is not None and past is not None:
            past.write(cache, T)
        return hidden_BTD

    def _without_padding(self, tokens_BT: Tensor, is_token_BS: Tensor, past: _Past | None) -> Tensor:
        """Sequences with the same padding together, without it: positions are then those of the tokens."""
        (B, T), S = tokens_BT.shape, is_token_BS.shape[1]
        hidden_BTD = tokens_BT.new_zeros((B, T, self.config.hidden_size), dtype=self.dtype)
        merged: list[LayerCache] = [{} for _ in self.transformer.blocks]
        patterns, pattern_B = is_token_BS.unique(dim=0, return_inverse=True)
        for number, is_token_S in enumerate(patterns):
            rows = (pattern_B == number).nonzero().squeeze(1)
            tokens, before = is_token_S.nonzero().squeeze(1), is_token_S[: S - T].nonzero().squeeze(1)
            new = tokens[len(before) :] - (S - T)
            layers: Cache | None = None
            if past is not None:
                layers = [{name: x[rows][:, :, before] for name, x in layer.items()} for layer in past.layers]
                # An encoding may take an empty part for the start of the sequence only where nothing is cached.
                layers = [layer if len(before) else {} for layer in layers]
            if len(new):
                hidden_BTD[rows[:, None], new] = self.transformer.hidden(tokens_BT[rows][:, new], layers)
            for layer, whole in zip(layers or [], merged, strict=False):
                for name, x in layer.items():
                    whole.setdefault(name, x.new_zeros((B, x.shape[1], S, x.shape[3])))
                    whole[name][rows[:, None], :, tokens] = x.transpose(1, 2)
        if past is not None:
            past.layers = merged
        return hidden_BTD


class _LinearLayers(ParametersByName):
    """The parameters of a block, whose linear layers become `nn.Linear`, and may be replaced by others (PEFT)."""

    def __init__(self, block: Block) -> None:
        for name, declaration in block.declared.items():
            path, _, last = name.rpartition(".")
            if last != "weight" or len(declaration.shape) != 2:
                continue
            outputs, inputs = declaration.shape
            holder = block.get_submodule(path)
            layer = nn.Linear(inputs, outputs, bias=f"{path}.bias" in block.declared, device="meta")
            for own, parameter in holder.named_parameters(recurse=False):
                layer.register_parameter(own, parameter)
            block.set_submodule(path, layer)
        super().__init__(block, block.declared)
        self._block = block

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self._block.get_submodule(name)(x)


class _Past:
    """The cached tensors of a model's layers, and their form in a cache of transformers.

    That has keys and values. All tensors but the values are joined along their last dimension, as its keys: so
    reordering, repeating and cutting it work.
    """

    def __init__(self, layers: Cache) -> None:
        self.layers = layers
        self.length = layers[0]["v"].shape[2] if layers and layers[0] else 0

    @staticmethod
    def of(cache: TransformersCache | None, layers: int) -> _Past | None:
        """What is in a cache. Raises InvalidValue for a kind of cache that the model cannot use."""
        if cache is None:
            return None
        if not isinstance(cache, DynamicCache) or cache.is_compileable:
            raise InvalidValue(
                f"the model needs a cache that grows (DynamicCache), and got {type(cache).__name__}",
                code="not_computed",
                argument="cache",
            )
        if cache.get_seq_length() == 0:
            return _Past([{} for _ in range(layers)])
        layout: list[dict[str, int]] = getattr(cache, LAYOUT)
        past: Cache = []
        for widths, stored in zip(layout, cast(list[Any], cache.layers), strict=True):
            parts = stored.keys.split(list(widths.values()), dim=-1)
            past.append(dict(zip(widths, parts, strict=True)) | {"v": stored.values})
        return _Past(past)

    def write(self, cache: TransformersCache, tokens: int) -> None:
        """Append the last tokens to a cache."""
        layout = []
        for number, layer in enumerate(self.layers):
            parts = {name: x for name, x in layer.items() if name != "v"}
            layout.append({name: x.shape[-1] for name, x in parts.items()})
            keys = torch.cat([x[:, :, -tokens:].to(layer["v"].dtype) for x in parts.values()], dim=-1)
            cache.update(keys, layer["v"][:, :, -tokens:], number)
        setattr(cache, LAYOUT, layout)


def export(checkpoint: Path | str, folder: Path | str) -> None:
    """Write a run's checkpoint into `folder` as a model of transformers, with the run's tokenizer if it has one.

    Raises CheckpointError for a checkpoint that is damaged or does not fit this version of the code.
    """
    predictor = Predictor.load(checkpoint, device="cpu")
    run = predictor.run
    end_of_text: int | None = predictor.tokenizer.end_of_text if predictor.reads_text else None
    config = CopeSweepConfig(
        checkpoint=config_of(run),
        vocab_size=predictor.vocabulary_size,
        hidden_size=run.model.dim,
        num_hidden_layers=run.model.layers,
        num_attention_heads=run.model.heads,
        max_position_embeddings=predictor.context,
        tie_word_embeddings=run.model.tied,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
    )
    model = CopeSweepForCausalLM(config)
    model.transformer.load_state_dict(predictor.model.state_dict())
    model.save_pretrained(folder)
    if end_of_text is not None:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(checkpoint) / TOKENIZER_FILE))
        end = cast(str, tokenizer.convert_ids_to_tokens(end_of_text))
        tokenizer.add_special_tokens({"bos_token": end, "eos_token": end, "pad_token": end})
        tokenizer.model_max_length = predictor.context
        tokenizer.save_pretrained(folder)


AutoConfig.register(CopeSweepConfig.model_type, CopeSweepConfig)
AutoModelForCausalLM.register(CopeSweepConfig, CopeSweepForCausalLM)
