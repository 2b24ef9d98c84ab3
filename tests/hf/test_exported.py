"""Finished runs as models of transformers: the same numbers as ours."""

import json
import math

import peft
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from cope_sweep.cli.application import app as cli
from cope_sweep.hf import CopeSweepForCausalLM, export
from cope_sweep.inference import Predictor
from cope_sweep.model import Transformer, save_model
from cope_sweep.positions import ENCODINGS
from cope_sweep.registry import BUILT_IN
from tests.helpers.errors import raises
from tests.helpers.texts import write_corpus
from tests.helpers.tiny import tiny_run
from tests.helpers.tiny_models import randomize
from tests.helpers.training import trained_on_text

pytestmark = pytest.mark.slow  # importing transformers takes seconds

TOKENS = torch.randint(1, 6, (2, 11), generator=torch.Generator().manual_seed(0))
KINDS = [kind for kind, cls in ENCODINGS.items() if cls.__module__.startswith(BUILT_IN)]


def exported(folder, position, **fields):
    """A model with random weights, as ours and as transformers'."""
    run = tiny_run(**{"model.position": position, "model.layers": 2, "task.blanks": 20} | fields)
    model = Transformer(run).eval()
    randomize(model.parameters(), 0.5)
    (folder / "checkpoint").mkdir()
    save_model(folder / "checkpoint", model, run)
    export(folder / "checkpoint", folder / "exported")
    return model, AutoModelForCausalLM.from_pretrained(folder / "exported").eval()


@pytest.mark.parametrize(
    "fields",
    [
        *({"model.tied": True}, {"model.tied": False}, {"model.family": "llama"}, {"model.family": "post_norm"}),
        *({"model.output_gate": "channel"}, {"model.output_gate": "head", "model.qk_norm": True}),
    ],
    ids=str,
)
def test_logits_are_ours(tmp_path, fields):
    ours, theirs = exported(tmp_path, ["rope", "cope"], **fields)
    assert isinstance(theirs, CopeSweepForCausalLM)
    assert torch.equal(theirs(TOKENS).logits, ours(TOKENS))
    assert torch.equal(theirs(TOKENS, logits_to_keep=2).logits, ours(TOKENS)[:, -2:])
    assert not [path for path in (tmp_path / "exported").iterdir() if path.suffix not in (".json", ".safetensors")]


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_the_cache_with_every_encoding(tmp_path, kind):
    ours, theirs = exported(tmp_path, [kind])
    mask = torch.ones_like(TOKENS)
    mask[0, :4] = 0
    with torch.no_grad():
        cache, parts = None, []
        for part in (slice(0, 3), slice(3, 9), slice(9, 10), slice(10, 11)):  # the first has padding alone in a row
            out = theirs(TOKENS[:, part], attention_mask=mask[:, : part.stop], cache=cache, use_cache=True)
            cache, parts = out.cache, [*parts, out.logits]
        logits = torch.cat(parts, dim=1)
        torch.testing.assert_close(logits[0, 4:], ours(TOKENS[:1, 4:])[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits[1], ours(TOKENS[1:])[0], rtol=1e-4, atol=1e-4)
        whole = theirs(TOKENS, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(whole[0, 4:], logits[0, 4:], rtol=1e-4, atol=1e-4)
        right = theirs(TOKENS, attention_mask=mask.flip(1), use_cache=False).logits
        torch.testing.assert_close(right[0, :7], ours(TOKENS[:1, :7])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("position", [["rope", "cope"], ["fox"]])
def test_generation(tmp_path, position):
    _, theirs = exported(tmp_path, position)
    mask = torch.ones_like(TOKENS)
    mask[0, :4] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    both = theirs.generate(TOKENS, attention_mask=mask, **options)
    for row, first in ((0, 4), (1, 0)):
        tokens = TOKENS[row : row + 1, first:]
        alone = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **options)
        assert torch.equal(alone[0], both[row, first:])
    beams = theirs.generate(TOKENS, attention_mask=mask, num_beams=3, **options)
    assert torch.equal(beams, theirs.generate(TOKENS, attention_mask=mask, num_beams=3, use_cache=False, **options))


def test_sampled_positions_are_evaluated_without_a_cache(tmp_path):
    ours, theirs = exported(tmp_path, [{"kind": "rope", "sampled": 32}])
    mask = torch.ones_like(TOKENS)
    mask[0, 7:] = 0
    logits = theirs(TOKENS, attention_mask=mask).logits
    torch.testing.assert_close(logits[0, :7], ours(TOKENS[:1, :7])[0], rtol=1e-4, atol=1e-4)
    with raises("invalid_value", key="rope.sampled"):
        theirs.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=2, pad_token_id=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache):
    """A checkpoint of a model that was trained on a small text."""
    folder, checkpoint = write_corpus(tmp_path_factory.mktemp("corpus")), tmp_path_factory.mktemp("checkpoint")
    trained_on_text(folder, checkpoint)
    return checkpoint, (folder / "wiki.test.tokens").read_text()


def test_tokens_and_perplexity_of_a_text_are_ours(trained, tmp_path):
    checkpoint, text = trained
    done = CliRunner().invoke(cli, ["export", str(checkpoint), "--format", "hf", "--output", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(
        json.loads(done.stdout)["files"]
    )
    predictor, model = Predictor.load(checkpoint), AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = text[:2000] + " naïve <|endoftext|> 你"
    ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]]
    assert ids == predictor.text_tokens(text).tolist()
    assert tokenizer.decode(ids[1:]) == text
    tokens = torch.tensor([ids])
    measured = predictor.text_perplexity(text, context=len(ids))
    assert math.exp(model(tokens, labels=tokens).loss) == pytest.approx(measured.perplexity, rel=1e-5)


def test_fine_tuning_and_loading_again(trained, tmp_path):
    export(trained[0], tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    before = model.eval()(TOKENS).logits
    data = [{"input_ids": row, "labels": row} for row in torch.randint(1, 250, (40, 12))]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=10, per_device_train_batch_size=4, learning_rate=0.01, report_to=[],
        use_cpu=True, save_steps=10, disable_tqdm=True,
    )  # fmt: skip
    transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-10").eval()
    assert torch.equal(loaded(TOKENS).logits, model.eval()(TOKENS).logits)
    assert not torch.equal(loaded(TOKENS).logits, before)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_adapter_of_peft(tmp_path, family):
    _, model = exported(tmp_path, ["cope"], **{"model.family": family})
    before = model(TOKENS).logits
    config = peft.LoraConfig(target_modules=["attention.qkv", "feed_forward.down"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    torch.testing.assert_close(adapted(TOKENS).logits, before)
    optimizer = torch.optim.SGD([x for x in adapted.parameters() if x.requires_grad], lr=0.5)
    for _ in range(2):  # the first step leaves one factor at 0
        adapted(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    assert [name for name, x in adapted.named_parameters() if x.requires_grad and not x.grad.any()] == []
    trained = adapted.eval()(TOKENS).logits
    assert not torch.allclose(trained, before)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(TOKENS).logits, trained, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(TOKENS).logits, merged(TOKENS).logits)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda data: data["checkpoint"]["versions"].update(cope=99), "another_version"),
        (lambda data: data["checkpoint"].update(run_id="0" * 16), "another_run"),
        (lambda data: data.pop("checkpoint"), "invalid_json"),
    ],
)
def test_a_config_that_does_not_fit(tmp_path, change, code):
    exported(tmp_path, ["cope"])
    path = tmp_path / "exported" / "config.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with raises(code):
        AutoModelForCausalLM.from_pretrained(tmp_path / "exported")


LEFT = torch.tensor([[0] * 4 + [1] * 7, [1] * 11])
GAP = torch.tensor([[1] * 5 + [0] * 2 + [1] * 4, [1] * 11])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An exported model, for tests that only call it."""
    return exported(tmp_path_factory.mktemp("rope"), ["rope"])[1]


@pytest.mark.parametrize("mask", [None, torch.ones_like(TOKENS), LEFT, LEFT.flip(1), GAP])
def test_positions_that_count_the_tokens(model, mask):
    position_ids = torch.ones_like(TOKENS).cumsum(1) - 1 if mask is None else mask.cumsum(1) - 1
    expected = model(TOKENS, attention_mask=mask).logits
    assert torch.equal(model(TOKENS, attention_mask=mask, position_ids=position_ids).logits, expected)
    cache = model(TOKENS[:, :6], attention_mask=None if mask is None else mask[:, :6]).cache
    with raises("not_computed", argument="position_ids"):
        model(TOKENS[:, 6:], attention_mask=mask, cache=cache, position_ids=position_ids[:, :5])
    model(TOKENS[:, 6:], attention_mask=mask, cache=cache, position_ids=position_ids[:, 6:])


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"inputs_embeds": torch.zeros(2, 3, 8)}, "input_ids"),
        ({"position_ids": torch.arange(11)[None] % 5}, "position_ids"),
        ({"position_ids": torch.arange(11)[None] * 3}, "position_ids"),
        ({"position_ids": torch.arange(11)[None] + 1}, "position_ids"),
        ({"position_ids": torch.arange(11)[None], "attention_mask": GAP}, "position_ids"),
        ({"position_ids": torch.arange(11)[None], "attention_mask": LEFT}, "position_ids"),
        ({"attention_mask": torch.ones(2, 1, 11, 11)}, "attention_mask"),
        ({"attention_mask": torch.zeros(2, 12)}, "attention_mask"),
    ],
)
def test_what_is_not_computed(model, arguments, argument):
    with raises_argument(argument):
        model(**{"input_ids": None if argument == "input_ids" else TOKENS} | arguments)


def raises_argument(argument):
    from cope_sweep.errors import InvalidValue

    return pytest.raises(InvalidValue, match=argument)


def test_the_folder_has_to_be_empty(tmp_path):
    exported(tmp_path, ["cope"])
    done = CliRunner().invoke(
        cli, ["export", str(tmp_path / "checkpoint"), "--output", str(tmp_path / "exported"), "--json"]
    )
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"]["code"] == "output_exists"


def test_a_missing_package_is_an_error_of_the_user(tmp_path, monkeypatch):
    import sys

    exported(tmp_path, ["cope"])
    for name in ("cope_sweep.hf", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    done = CliRunner().invoke(
        cli, ["export", str(tmp_path / "checkpoint"), "--output", str(tmp_path / "other"), "--json"]
    )
    assert json.loads(done.stdout)["error"]["code"] == "missing_package"
