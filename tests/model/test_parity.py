"""The same weights give the same numbers as independent implementations: HF transformers, x-transformers."""

import pytest
import torch

from cope_sweep.model import Transformer
from cope_sweep.positions import ALiBi, CoPE
from tests.helpers.tiny import tiny_run
from tests.helpers.tiny_models import gpt2_state, llama_state, randomize
from tests.positions import naive

pytestmark = pytest.mark.slow  # importing transformers takes seconds

SHAPE = {"task.vocabulary": 50, "model.layers": 3, "model.dim": 24, "model.heads": 4, "model.context": 40}
TOKENS = torch.randint(0, 50, (2, 17), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="transformers is not installed; the extra `test` has it")


@pytest.fixture(scope="module")
def x_transformers():
    reason = "x-transformers is not installed; the extra `test` has it"
    return pytest.importorskip("x_transformers.x_transformers", reason=reason)


def random_model(**overrides):
    model = Transformer(tiny_run(**SHAPE | overrides)).double().eval()
    randomize(model.parameters(), 0.3)
    return model


def test_gpt2_with_absolute_positions(transformers):
    model = random_model(**{"model.position": ["absolute"]})
    reference = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=50, n_positions=40, n_embd=24, n_layer=3, n_head=4, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
        )
    )
    missing, unexpected = reference.double().eval().load_state_dict(gpt2_state(model), strict=False)
    assert set(missing) <= {"lm_head.weight"}  # tied
    assert not unexpected
    torch.testing.assert_close(model(TOKENS), reference(TOKENS).logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("base", [10_000.0, 500.0])
def test_llama_with_rope(transformers, base):
    model = random_model(
        **{
            "model.family": "llama",
            "model.tied": False,
            "model.ffn_dim": 56,
            "model.position": [{"kind": "rope", "base": base}],
        }
    )
    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
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
    reference.double().eval().load_state_dict(llama_state(model))
    # transformers computes the angles in float32, this package in float64.
    torch.testing.assert_close(model(TOKENS), reference(TOKENS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", [1, 4, 6, 12])
def test_alibi(x_transformers, heads):
    attention = naive.attention(heads=heads, tokens=9, head_dim=3)
    reference = x_transformers.AlibiPositionalBias(heads)(9, 9).double()
    model = ALiBi().score({}, attention).view(heads, 9, 9)
    visible = attention.visible_QS
    torch.testing.assert_close(model[:, visible], reference[:, visible])


@pytest.mark.parametrize("p_max", [1, 4, 30])
def test_cope(x_transformers, p_max):
    attention = naive.attention(heads=3, tokens=20, head_dim=5)
    reference = x_transformers.CoPE(dim=5, heads=3, max_pos=p_max).double()
    with torch.no_grad():
        reference.pos_emb.normal_()
    logits = attention.logits_BHQS.masked_fill(~attention.visible_QS, -torch.finfo(torch.float64).max)
    model = CoPE(p_max=p_max).score({"e": reference.pos_emb}, attention)
    visible = attention.visible_QS
    torch.testing.assert_close(model[..., visible], reference(attention.q_BHQK, logits)[..., visible])
