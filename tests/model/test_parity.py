"""The same weights give the same numbers as other people's code: HF transformers, x-transformers."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from x_transformers.x_transformers import AlibiPositionalBias
from x_transformers.x_transformers import CoPE as TheirCoPE

from cope_sweep.model import Transformer
from cope_sweep.positions import ALiBi, CoPE
from tests.positions.test_cope import attention_of
from tests.tiny import tiny_run

SHAPE = {"task.vocabulary": 50, "model.layers": 3, "model.dim": 24, "model.heads": 4, "model.context": 40}
TOKENS = torch.randint(0, 50, (2, 17), generator=torch.Generator().manual_seed(0))


def ours(**overrides):
    model = Transformer(tiny_run(**SHAPE | overrides)).double().eval()
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=rng)
    return model


def test_gpt2_with_absolute_positions():
    mine = ours(**{"model.position": ["absolute"]})
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=50, n_positions=40, n_embd=24, n_layer=3, n_head=4, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
        )
    )
    state = {"transformer.wte.weight": mine.embedding.weight, "transformer.wpe.weight": mine.position[0].shared["e"]}
    state |= {"transformer.ln_f.weight": mine.norm.weight, "transformer.ln_f.bias": mine.norm.bias}
    for i, block in enumerate(mine.blocks):
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
    missing, unexpected = theirs.double().eval().load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}  # tied
    assert not unexpected
    torch.testing.assert_close(mine(TOKENS), theirs(TOKENS).logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("base", [10_000.0, 500.0])
def test_llama_with_rope(base):
    mine = ours(
        **{
            "model.family": "llama",
            "model.tied": False,
            "model.ffn_dim": 56,
            "model.position": [{"kind": "rope", "base": base}],
        }
    )
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=24,
            intermediate_size=56,
            num_hidden_layers=3,
            num_attention_heads=4,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": base},
            attn_implementation="eager",
        )
    )
    state = {"model.embed_tokens.weight": mine.embedding.weight, "lm_head.weight": mine.head.weight}
    state["model.norm.weight"] = mine.norm.weight
    for i, block in enumerate(mine.blocks):
        at = f"model.layers.{i}."
        q, k, v = block.attention.qkv.weight.chunk(3)
        state |= {f"{at}self_attn.{n}_proj.weight": w for n, w in (("q", q), ("k", k), ("v", v))}
        state[f"{at}self_attn.o_proj.weight"] = block.attention.out.weight
        for name in ("gate", "up", "down"):
            state[f"{at}mlp.{name}_proj.weight"] = getattr(block.feed_forward, name).weight
        state[f"{at}input_layernorm.weight"] = block.attention_norm.weight
        state[f"{at}post_attention_layernorm.weight"] = block.ffn_norm.weight
    theirs.double().eval().load_state_dict(state)
    # Their angles are float32, ours float64.
    torch.testing.assert_close(mine(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", [1, 4, 6, 12])
def test_alibi(heads):
    attention = attention_of(heads=heads, tokens=9, head_dim=3)
    theirs = AlibiPositionalBias(heads)(9, 9).double()
    mine = ALiBi().score({}, attention).view(heads, 9, 9)
    visible = attention.visible_QS
    torch.testing.assert_close(mine[:, visible], theirs[:, visible])


@pytest.mark.parametrize("p_max", [1, 4, 30])
def test_cope(p_max):
    attention = attention_of(heads=3, tokens=20, head_dim=5)
    theirs = TheirCoPE(dim=5, heads=3, max_pos=p_max).double()
    with torch.no_grad():
        theirs.pos_emb.normal_()
    logits = attention.logits_BHQS.masked_fill(~attention.visible_QS, -torch.finfo(torch.float64).max)
    mine = CoPE(p_max=p_max).score({"e": theirs.pos_emb}, attention)
    visible = attention.visible_QS
    torch.testing.assert_close(mine[..., visible], theirs(attention.q_BHQK, logits)[..., visible])
