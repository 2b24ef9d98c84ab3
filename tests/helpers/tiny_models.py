"""Tiny models with random weights, large enough that gates differ from ½ and attention is not uniform."""

import torch

from cope_sweep.inference import Predictor
from cope_sweep.model import Transformer
from tests.helpers.tiny import tiny_run

V = 6


def set_logits(model, logits_V):
    """Make a model whose output layer is its own give the same logits at every token."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.norm.bias[0] = 1
        model.head.weight[:, 0] = logits_V


def tiny_predictor(position, *, layers=2, heads=2, dim=8, seed=1, **model):
    """A model in float64, for comparisons with tight tolerances."""
    run = tiny_run(
        **{
            "model.position": position,
            "model.layers": layers,
            "model.heads": heads,
            "model.dim": dim,
            "task.blanks": 20,
        }
        | {f"model.{key}": value for key, value in model.items()}
    )
    return random_predictor(run, 0.6, seed)


def random_predictor(run, std, seed=1, dtype=torch.float64):
    """A model whose weights have this standard deviation."""
    net = Transformer(run).to(dtype).eval().requires_grad_(False)
    randomize(net.parameters(), std, seed)
    return Predictor(net, run)


def randomize(parameters, std, seed=1):
    """Draw each parameter from a normal distribution of this standard deviation."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(0, std, generator=rng)


def gpt2_state(model):
    """The weights of a `gpt2` model with absolute positions first, as transformers' GPT2LMHeadModel calls them."""
    state = {"transformer.wte.weight": model.embedding.weight, "transformer.wpe.weight": model.position[0].shared["e"]}
    state |= {"transformer.ln_f.weight": model.norm.weight, "transformer.ln_f.bias": model.norm.bias}
    for i, block in enumerate(model.blocks):
        at = f"transformer.h.{i}."
        for name, module in (("ln_1", block.attention_norm), ("ln_2", block.ffn_norm)):
            state |= {f"{at}{name}.weight": module.weight, f"{at}{name}.bias": module.bias}
        for name, linear in (
            ("attn.c_attn", block.attention.qkv),
            ("attn.c_proj", block.attention.out),
            ("mlp.c_fc", block.feed_forward.up),
            ("mlp.c_proj", block.feed_forward.down),
        ):
            state |= {f"{at}{name}.weight": linear.weight.T, f"{at}{name}.bias": linear.bias}
    return state


def llama_state(model):
    """The weights of a `llama` model, as transformers' LlamaForCausalLM calls them."""
    state = {"model.embed_tokens.weight": model.embedding.weight, "lm_head.weight": model.head.weight}
    state["model.norm.weight"] = model.norm.weight
    for i, block in enumerate(model.blocks):
        at = f"model.layers.{i}."
        q, k, v = block.attention.qkv.weight.chunk(3)
        state |= {f"{at}self_attn.{n}_proj.weight": w for n, w in (("q", q), ("k", k), ("v", v))}
        state[f"{at}self_attn.o_proj.weight"] = block.attention.out.weight
        for name in ("gate", "up", "down"):
            state[f"{at}mlp.{name}_proj.weight"] = getattr(block.feed_forward, name).weight
        state[f"{at}input_layernorm.weight"] = block.attention_norm.weight
        state[f"{at}post_attention_layernorm.weight"] = block.ffn_norm.weight
    return state
