"""Models of transformers with position encodings: what they compute, and that transformers' tools go on working."""

import copy
import json
import pickle
import subprocess
import sys

import peft
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from cope_sweep.errors import InvalidValue
from cope_sweep.hf import convert
from cope_sweep.model import Transformer
from cope_sweep.positions import CoPE, RoPE
from tests.helpers.errors import raises
from tests.helpers.processes import output_of
from tests.helpers.tiny import tiny_run
from tests.helpers.tiny_models import gpt2_state, llama_state, randomize

pytestmark = pytest.mark.slow  # importing transformers takes seconds

SIZES = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = torch.randint(1, 50, (2, 17), generator=torch.Generator().manual_seed(0))


def llama(seed=0, **fields):
    torch.manual_seed(seed)
    options = {"intermediate_size": 56, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "pad_token_id": 0}
    config = transformers.LlamaConfig(**SIZES | options | {"initializer_range": 0.3} | fields)
    return transformers.LlamaForCausalLM(config).double().eval()


def gpt2(seed=0, **fields):
    torch.manual_seed(seed)
    options = {"n_positions": 64, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0, "bos_token_id": 1}
    config = transformers.GPT2Config(**SIZES | options | {"initializer_range": 0.3, "eos_token_id": 1} | fields)
    return transformers.GPT2LMHeadModel(config).double().eval()


MODELS = {
    "llama": llama,
    "gpt2": gpt2,
    **{
        kind: lambda kind=kind, **fields: of_kind(kind, **fields)
        for kind in ("mistral", "qwen2", "qwen3", "gpt_neox", "phi", "olmo2", "cohere", "nanochat")
    },
}


def of_kind(kind, **fields):
    torch.manual_seed(0)
    options = {"intermediate_size": 56, "initializer_range": 0.3, "pad_token_id": 0, "max_position_embeddings": 64}
    options |= {"num_key_value_heads": 2} if kind not in ("gpt_neox", "bloom", "gptj", "gpt_neo") else {}
    options |= {"sliding_window": None} if kind == "mistral" else {}
    options |= {"head_dim": 8} if kind in ("mistral", "qwen3") else {}
    options |= {"hidden_size": 32} if kind in ("phi", "gpt_neox") else {}  # partial rotations of whole pairs
    options |= {"rotary_dim": 4} if kind == "gptj" else {}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | options | fields)).double().eval()


def randomise(model):
    """Random tables: at their initial zeros CoPE changes nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".positions." in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def our_model(family, position, **model):
    shape = {"task.vocabulary": 50, "model.layers": 2, "model.dim": 24, "model.heads": 4, "model.context": 64}
    ours = Transformer(tiny_run(**shape, **{"model.family": family, "model.position": position}, **model))
    randomize(ours.parameters(), 0.3)
    return ours.double().eval()


def copy_tables(ours, model, number):
    layers = [module.positions for module in model.modules() if hasattr(module, "positions")]
    for layer, positions in enumerate(layers):
        for theirs, own in zip(positions.position, list(ours.position)[number:], strict=True):
            for name, table in own.of_layer(layer).items():
                theirs.of_layer(0)[name].data.copy_(table)


@pytest.mark.parametrize("keep_rope", [True, False])
@pytest.mark.parametrize("options", [{}, {"gate_after_rotation": True}, {"rotated_query": True}])
def test_llama_is_our_llama_of_the_same_weights(keep_rope, options):
    if options and not keep_rope:
        options = {"per_head": True}
    cope = {"kind": "cope", "p_max": 6, **options}
    position = [*(["rope"] if keep_rope else []), cope]
    ours = our_model("llama", position, **{"model.tied": False, "model.ffn_dim": 56})
    theirs = convert(llama(num_key_value_heads=4), [cope], keep_rope=keep_rope)
    missing, unexpected = theirs.load_state_dict(llama_state(ours), strict=False)
    assert not unexpected
    assert all(".positions." in name for name in missing)
    copy_tables(ours, theirs, len(position) - 1)
    # transformers computes angles and norms in float32
    torch.testing.assert_close(theirs(TOKENS).logits, ours(TOKENS), rtol=1e-4, atol=1e-4)


def test_gpt2_is_our_gpt2_of_the_same_weights():
    position = ["absolute", {"kind": "cope", "p_max": 6}, {"kind": "alibi"}]
    ours, theirs = our_model("gpt2", position), convert(gpt2(), position[1:])
    _, unexpected = theirs.load_state_dict(gpt2_state(ours), strict=False)
    assert not unexpected
    copy_tables(ours, theirs, 1)
    torch.testing.assert_close(theirs(TOKENS).logits, ours(TOKENS), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", MODELS)
def test_cope_starts_as_the_model_was(kind):
    model = MODELS[kind]()
    before = model(TOKENS).logits
    assert convert(model, [CoPE(p_max=8)]) is model
    torch.testing.assert_close(model(TOKENS).logits, before, rtol=1e-5, atol=1e-5)
    # and then does not stay it
    assert (randomise(model)(TOKENS).logits - before).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi", "qwen3"])
def test_generation_with_the_cache_equals_full_passes(kind):
    model = randomise(convert(MODELS[kind](), [CoPE(p_max=4)]))
    mask = torch.ones_like(TOKENS)
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cached = model.generate(TOKENS, **options, output_logits=True, return_dict_in_generate=True)
    whole = model.generate(TOKENS, **options, use_cache=False, output_logits=True, return_dict_in_generate=True)
    assert torch.equal(cached.sequences, whole.sequences)
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(whole.logits), rtol=1e-4, atol=1e-4)
    beams = model.generate(TOKENS, **options, num_beams=3)
    assert torch.equal(beams, model.generate(TOKENS, **options, num_beams=3, use_cache=False))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "cohere"])
def test_left_padding_changes_nothing(kind):
    model = randomise(convert(MODELS[kind](), [CoPE(p_max=4), "alibi"]))
    mask = torch.ones_like(TOKENS)
    mask[0, :6] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    both = model.generate(TOKENS, attention_mask=mask, **options)
    for row, first in ((0, 6), (1, 0)):
        tokens = TOKENS[row : row + 1, first:]
        alone = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        assert torch.equal(alone[0], both[row, first:])


@pytest.mark.parametrize(("kind", "keep_rope"), [("llama", True), ("llama", False), ("gpt2", True), ("qwen3", True)])
def test_save_and_load(kind, keep_rope, tmp_path):
    model = randomise(convert(MODELS[kind](), [CoPE(p_max=4), "kerple"], keep_rope=keep_rope))
    model.save_pretrained(tmp_path)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".json", ".safetensors"]
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype="auto")
    assert not any(info.values()), info
    assert type(loaded) is type(model)
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float64)
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    with raises("not_computed", argument="attn_implementation"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")


ALONE = """
import json, sys, traceback
import transformers

errors = []
for name, folder in json.loads(sys.argv[1]):
    try:
        getattr(transformers, name).from_pretrained(folder)
        errors.append("")
    except Exception:
        errors.append(traceback.format_exc())
assert "cope_sweep" not in sys.modules
print(json.dumps(errors))
"""


def test_without_this_package_no_class_loads_a_converted_model(tmp_path):
    """They would leave out its encodings: Auto classes do not know its type, and the original's class refuses it."""
    asked = []
    for kind in ("llama", "gpt2"):
        model, folder = convert(MODELS[kind](), [CoPE(p_max=4)]), str(tmp_path / kind)
        model.save_pretrained(folder)
        asked += [("AutoModelForCausalLM", folder), (type(model).__name__, folder)]
    errors = json.loads(output_of("-c", ALONE, json.dumps(asked)).splitlines()[-1])
    for by_type, by_class in zip(errors[::2], errors[1::2], strict=True):
        assert "cope_sweep_converted" in by_type
        assert "import cope_sweep.hf and load the model with AutoModelForCausalLM" in by_class


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_class_of_the_original_refuses_a_converted_model(kind, tmp_path):
    """Also where `cope_sweep.hf` is imported."""
    model = convert(MODELS[kind](), [CoPE(p_max=4)])
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"import cope_sweep\.hf and load the model with AutoModelForCausalLM"):
        type(model).from_pretrained(tmp_path)


def test_the_config_of_a_converted_model_saved_alone(tmp_path):
    convert(llama(), [CoPE(p_max=4)]).save_pretrained(tmp_path)
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "alone")
    assert AutoConfig.from_pretrained(tmp_path / "alone").original().hidden_size == 24
    with pytest.raises(ValueError, match=r"import cope_sweep\.hf"):
        transformers.LlamaConfig.from_pretrained(tmp_path / "alone")


def test_a_model_saved_with_its_type_inside_base(tmp_path):
    """As folders were written at first."""
    model = randomise(convert(llama(), [CoPE(p_max=4)]))
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    data = json.loads(path.read_text())
    del data["id2label"]
    data["base"]["model_type"] = data.pop("base_type")
    path.write_text(json.dumps(data))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_a_copy_is_independent():
    model = randomise(convert(llama(), [CoPE(p_max=4)]))
    other = copy.deepcopy(model)
    assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)
    with torch.no_grad():
        other.model.layers[0].self_attn.positions.position[0].of_layer(0)["e"].zero_()
    assert not torch.equal(other(TOKENS).logits, model(TOKENS).logits)


def test_layers_that_have_the_encoding():
    model = convert(llama(), [CoPE(p_max=4, layers=(1,))])
    counts = [len(layer.self_attn.positions.position) for layer in model.model.layers]
    assert counts == [0, 1]


def test_the_span_of_gates_is_that_of_the_models_context():
    model = convert(llama(), [CoPE(p_max=4, gate_bias={"span": 512})])
    (layer,) = model.model.layers[0].self_attn.positions.layer_encodings()[1:]
    assert layer.parameters["shift"].sigmoid().tolist() == pytest.approx(4 * [512 / 2048])


def test_rope_for_a_model_without():
    model = gpt2()
    before = model(TOKENS).logits
    assert not torch.equal(convert(model, [RoPE()])(TOKENS).logits, before)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_every_parameter_has_a_gradient(kind):
    model = randomise(convert(MODELS[kind](), [CoPE(p_max=4), "kerple"])).train()
    mask = torch.ones_like(TOKENS)
    mask[0, :6] = 0
    model(TOKENS, attention_mask=mask, labels=TOKENS.where(mask == 1, -100)).loss.backward()
    assert [name for name, x in model.named_parameters() if x.grad is None or not x.grad.isfinite().all()] == []


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_for_ten_steps(tmp_path, checkpointing):
    model = convert(llama().float(), [CoPE(p_max=4)])
    data = [{"input_ids": row, "labels": row} for row in torch.randint(1, 50, (40, 12))]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=10,
        per_device_train_batch_size=4,
        learning_rate=0.05,
        report_to=[],
        use_cpu=True,
        gradient_checkpointing=checkpointing,
        save_steps=10,
        disable_tqdm=True,
    )
    table = model.model.layers[0].self_attn.positions.position[0].of_layer(0)["e"]
    result = transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    assert result.global_step == 10
    assert table.abs().max() > 0
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-10")
    assert torch.equal(saved(TOKENS).logits, model.eval()(TOKENS).logits)


def test_an_adapter_of_peft(tmp_path):
    model = convert(llama().float(), [CoPE(p_max=4)])
    with torch.no_grad():
        model.model.layers[0].self_attn.positions.position[0].of_layer(0)["e"].normal_()
    before = model(TOKENS).logits
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["positions"], task_type="CAUSAL_LM")
    )
    torch.testing.assert_close(adapted(TOKENS).logits, before)
    trained = {name for name, x in adapted.named_parameters() if x.requires_grad}
    assert any("lora_A" in name for name in trained)
    assert any("positions" in name for name in trained)
    adapted(TOKENS, labels=TOKENS).loss.backward()
    assert [name for name, x in adapted.named_parameters() if x.requires_grad and x.grad is None] == []


def test_bfloat16():
    exact = randomise(convert(llama(initializer_range=0.05), [CoPE(p_max=4)]))
    with torch.no_grad():
        difference = (copy.deepcopy(exact).bfloat16()(TOKENS).logits.double() - exact(TOKENS).logits).abs().mean()
        assert difference < 0.03 * exact(TOKENS).logits.abs().mean()


@pytest.mark.parametrize(
    ("make", "encodings", "options", "code", "data"),
    [
        (lambda: of_kind("bloom"), ["cope"], {}, "no_attention_hook", {"model": "BloomForCausalLM"}),
        (lambda: of_kind("gpt_neo", num_layers=2, attention_types=[[["global"], 2]]), ["cope"], {}, "no_attention_hook", {"model": "GPTNeoForCausalLM"}),
        (lambda: of_kind("mistral", sliding_window=8), ["cope"], {}, "sliding_window", {"model": "MistralForCausalLM"}),
        (lambda: of_kind("gptj"), ["cope"], {}, "not_computed", {"model": "GPTJForCausalLM"}),
        (lambda: of_kind("hunyuan_v1_dense", head_dim=8), ["cope"], {}, "not_computed", {"model": "HunYuanDenseV1ForCausalLM"}),
        (lambda: llama().model, ["cope"], {}, "not_a_causal_model", {"model": "LlamaModel"}),
        (llama, ["fox"], {}, "missing_argument", {"argument": "hidden", "kind": "fox"}),
        (llama, ["path"], {}, "missing_argument", {"argument": "hidden", "kind": "path"}),
        (llama, ["darope"], {}, "missing_argument", {"argument": "hidden", "kind": "darope"}),
        (llama, ["pope"], {}, "invalid_value", {"key": "model.position", "layer": 0}),
        (llama, ["short_convolution"], {}, "missing_argument", {"argument": "q", "kind": "short_convolution"}),
        (llama, ["absolute"], {}, "not_in_attention", {"kind": "absolute"}),
        (llama, ["t5"], {}, "shared_by_layers", {"key": "t5.share_layers"}),
        (llama, [CoPE(gate_bias={"span": 4096})], {}, "invalid_value", {"key": "cope.gate_bias", "below": 2048}),
        (lambda: gpt2(add_cross_attention=True), ["cope"], {}, "cross_attention", {"model": "GPT2LMHeadModel"}),
        (gpt2, ["cope"], {"keep_rope": False}, "no_rope", {"model": "GPT2LMHeadModel"}),
        (llama, [CoPE(rotated_query=True)], {"keep_rope": False}, "no_effect", {"key": "cope.rotated_query"}),
        (lambda: convert(llama(), ["cope"]), ["cope"], {}, "already_converted", {"model": "LlamaForCausalLM"}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_what_cannot_be_converted(make, encodings, options, code, data):
    model = make()
    with raises(code, **data):
        convert(model, encodings, **options)


def test_a_refused_model_is_as_it_was():
    model = llama()
    before = model(TOKENS).logits
    with raises("no_effect", key="cope.rotated_query"):
        convert(model, [CoPE(rotated_query=True)], keep_rope=False)
    with raises("invalid_value", key="cope.layers"):
        convert(model, [CoPE(layers=(7,))])
    assert torch.equal(model(TOKENS).logits, before)
    assert not [module for module in model.modules() if hasattr(module, "positions")]


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"position_ids": torch.arange(17)[None].expand(2, -1) % 9}, "position_ids"),
        ({"output_attentions": True}, "output_attentions"),
        ({"attention_mask": torch.ones(2, 1, 17, 17, dtype=torch.bool)}, "attention_mask"),
    ],
)
def test_attention_that_is_not_computed_is_refused(arguments, argument):
    model = convert(llama(), [CoPE(p_max=4)])
    with raises("not_computed", argument=argument):
        model(TOKENS, use_cache=False, **arguments)


PACKED = torch.tensor([[*range(9), *range(8)]])
PADDED = torch.tensor([[0] * 6 + [1] * 11, [1] * 17])
MIDDLE = torch.tensor([[1] * 6 + [0] * 3 + [1] * 8, [1] * 17])


@pytest.mark.parametrize("keep_rope", [True, False])
@pytest.mark.parametrize(
    ("position_ids", "mask"),
    [
        (PACKED, None),
        (PACKED, torch.ones_like(TOKENS)),
        (torch.arange(17)[None] * 3, None),
        (torch.arange(17)[None] + 1, None),
        (torch.stack((torch.arange(17), PACKED[0])), PADDED),
        (torch.arange(16)[None], None),
        # Padding has no position.
        (torch.arange(17)[None], MIDDLE),
    ],
)
def test_positions_that_are_not_computed_are_refused(position_ids, mask, keep_rope):
    model = convert(llama(), [CoPE(p_max=4)], keep_rope=keep_rope)
    for call in (model, model.model):
        with raises("not_computed", argument="position_ids"):
            call(TOKENS, position_ids=position_ids, attention_mask=mask)
    with raises("not_computed", argument="position_ids"):
        model.model(TOKENS, mask, position_ids)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in ("gpt2", "llama")])
def test_packed_sequences_are_refused_in_every_model_with_rope(kind):
    """Those of llama are above."""
    model = convert(MODELS[kind](), [CoPE(p_max=4)])
    with raises("not_computed", argument="position_ids"):
        model(TOKENS, position_ids=PACKED)


def test_positions_after_a_cache_that_do_not_go_on_are_refused():
    model = convert(llama(), [CoPE(p_max=4)])
    cache = model(TOKENS, use_cache=True).cache
    for start in (0, 16, 100):
        with raises("not_computed", argument="position_ids"):
            model(TOKENS[:, :3], cache=cache, position_ids=torch.arange(start, start + 3)[None])
    assert cache.get_seq_length() == 17
    model(TOKENS[:, :3], cache=cache, position_ids=torch.arange(17, 20)[None])


@pytest.mark.parametrize(
    ("position_ids", "mask"),
    [
        (torch.arange(17)[None], None),
        (torch.arange(17)[None], PADDED),
        (MIDDLE.cumsum(1) - 1, MIDDLE),
        (PADDED.cumsum(1) - 1, PADDED),
        ((PADDED.cumsum(1) - 1).masked_fill(PADDED == 0, 1), PADDED),
        ((PADDED.cumsum(1) - 1).masked_fill(PADDED == 0, 0), PADDED),
        (PADDED.flip(1).cumsum(1) - 1, PADDED.flip(1)),
        ((PADDED.flip(1).cumsum(1) - 1).masked_fill(PADDED.flip(1) == 0, 1), PADDED.flip(1)),
    ],
)
def test_positions_of_padded_rows_are_those_of_the_original(position_ids, mask):
    original = llama()
    model = convert(copy.deepcopy(original), [CoPE(p_max=4)])
    logits, expected = (m(TOKENS, attention_mask=mask, position_ids=position_ids).logits for m in (model, original))
    is_token = torch.ones_like(TOKENS) if mask is None else mask
    torch.testing.assert_close(logits[is_token == 1], expected[is_token == 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"prefill_chunk_size": 4},
        {"do_sample": True, "top_k": 1},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": True},
        {"cache_implementation": "dynamic"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_ways_of_generation_with_padding(kind, options):
    model = randomise(convert(MODELS[kind](), [CoPE(p_max=4)]))
    alone = not {"assistant_model", "prompt_lookup_num_tokens"}.isdisjoint(options)  # these take one row
    tokens, mask = (TOKENS[:1, 6:], PADDED[:1, 6:]) if alone else (TOKENS, PADDED)
    same = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if "assistant_model" in options:
        options = {"assistant_model": MODELS[kind](seed=1)}
    generated = model.generate(tokens, attention_mask=mask, **same | options)
    beams = {name: x for name, x in options.items() if "num_" in name and "prompt" not in name}
    assert torch.equal(generated, model.generate(tokens, attention_mask=mask, use_cache=False, **same | beams))


@pytest.mark.parametrize(("kind", "name"), [("llama", "sdpa"), ("gpt2", "eager")])
def test_another_attention_function_is_refused_at_the_call(kind, name, tmp_path):
    """It would leave out the encodings, and the rotation with them."""
    model = convert(MODELS[kind](), [CoPE(p_max=4)])
    before = model(TOKENS).logits
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        each.set_attn_implementation(name)
        for call in (each, each.base_model):
            with raises("not_computed", argument="attn_implementation"):
                call(TOKENS)
        with raises("not_computed", argument="attn_implementation"):
            each.generate(TOKENS, max_new_tokens=2)
        for copied in (copy.deepcopy(each), pickle.loads(pickle.dumps(each))):
            with raises("not_computed", argument="attn_implementation"):
                copied(TOKENS)
    model.set_attn_implementation("cope_sweep")
    assert torch.equal(model(TOKENS).logits, before)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_pickling(kind, tmp_path):
    model = randomise(convert(MODELS[kind](), [CoPE(p_max=4)]))
    model.save_pretrained(tmp_path / "loaded")
    torch.save(model, tmp_path / "whole")
    whole = torch.load(tmp_path / "whole", weights_only=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "loaded", dtype="auto")
    for number, other in enumerate((whole, pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(loaded)))):
        assert type(other) is type(model)
        assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)
        other.save_pretrained(tmp_path / str(number))
        again = AutoModelForCausalLM.from_pretrained(tmp_path / str(number), dtype="auto")
        torch.testing.assert_close(again(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)
    config = pickle.loads(pickle.dumps(model.config))
    assert config == model.config == copy.deepcopy(model.config)
    assert type(config) is type(model.config)


def test_options_of_loading_are_those_of_the_original(tmp_path):
    convert(llama(output_hidden_states=True), [CoPE(p_max=4)]).save_pretrained(tmp_path)

    def load(**options):
        return AutoModelForCausalLM.from_pretrained(tmp_path, **options)

    assert load()(TOKENS).hidden_states is not None
    assert load(output_hidden_states=False)(TOKENS).hidden_states is None
    assert load(use_cache=False)(TOKENS).cache is None
    assert load(return_dict=False).config.return_dict is False
    assert load(attention_dropout=0.25).model.layers[0].self_attn.attention_dropout == 0.25
    loaded, info = load(use_cache=False, output_loading_info=True, dtype=torch.bfloat16)
    assert (loaded.config.use_cache, loaded.dtype, any(info.values())) == (False, torch.bfloat16, False)
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["base"]["use_cache"] is False
    with pytest.raises(TypeError, match="no_option"):
        load(no_option=1)
    with raises("not_computed", argument="output_attentions"):
        load(output_attentions=True)


def test_attributes_that_are_set_on_a_config_are_those_of_the_original(tmp_path):
    convert(llama(), [CoPE(p_max=4)]).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.use_cache, config.output_hidden_states = False, True
    for model in (
        AutoModelForCausalLM.from_config(config),
        AutoModelForCausalLM.from_pretrained(tmp_path, config=config),
    ):
        assert model(TOKENS).cache is None
        assert model(TOKENS).hidden_states is not None
    config.output_attentions = True
    with raises("not_computed", argument="output_attentions"):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=config)


def test_compiling_without_a_cache_needs_a_mask():
    compiled = torch.compile(convert(llama(), [CoPE(p_max=4)]), backend="eager")
    with pytest.raises(Exception, match=r"attention_mask=torch\.ones_like\(input_ids\)"):
        compiled(TOKENS, use_cache=False)


def test_a_static_cache_is_refused():
    model = convert(llama(), [CoPE(p_max=4)])
    with pytest.raises(InvalidValue):
        model.generate(TOKENS, max_new_tokens=2, cache_implementation="static", disable_compile=True)


def test_a_model_that_was_not_converted_is_named():
    model = llama()
    model.set_attn_implementation("cope_sweep")
    with raises("not_converted"):
        model(TOKENS)


def test_nothing_else_imports_transformers():
    code = (
        "import sys, cope_sweep, cope_sweep.nn, cope_sweep.inference, cope_sweep.cli.application\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('transformers', 'accelerate', 'peft')])"
    )
    assert json.loads(subprocess.check_output([sys.executable, "-c", code], text=True)) == []


def test_a_missing_package_is_named():
    code = "import sys; sys.modules['transformers'] = None; import cope_sweep.hf"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode
    assert ".[hf]" in done.stderr
