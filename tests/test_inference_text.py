"""Predictor on text: agreement with the evaluation in training, windows, and invalid input."""

import math
import shutil

import pytest

from cope_sweep.inference import Predictor
from cope_sweep.train.evaluate import Evaluator
from tests.helpers.errors import raises
from tests.helpers.texts import prose, write_corpus
from tests.helpers.training import trained_on_text

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache):
    """A model trained for a few steps on a small text: the trainer, the folder of the text, and the checkpoint."""
    folder, checkpoint = write_corpus(tmp_path_factory.mktemp("corpus")), tmp_path_factory.mktemp("checkpoint")
    return trained_on_text(folder, checkpoint), folder, checkpoint


@pytest.mark.parametrize(("context", "stride"), [(None, None), (16, 5), (40, 40), (64, 10), (100_000, None)])
def test_perplexity_of_a_text_agrees_with_evaluation(trained, context, stride):
    trainer, folder, checkpoint = trained
    predictor, text = Predictor.load(checkpoint), (folder / "wiki.test.tokens").read_text()
    measured = predictor.text_perplexity(text, context=context, stride=stride)
    if context == 100_000:  # longer than the text: one window
        ids = [predictor.tokenizer.end_of_text, *(int(token) for token in predictor.tokenizer.encode([text])[0])]
        [whole] = predictor.log_probabilities([ids])
        assert measured.nll_sum == pytest.approx(-whole[1:].sum())
        return
    context = context or 16
    run = trainer.spec
    strided = run.model_copy(update={"evaluate": run.evaluate.model_copy(update={"stride": stride})})
    metrics = Evaluator(strided, trainer.runtime, trainer.model).evaluate_windows(context, 10**6)
    assert measured.perplexity == pytest.approx(metrics[f"test/perplexity@{context}"], rel=1e-5)
    assert measured.word_perplexity == pytest.approx(metrics[f"test/word_perplexity@{context}"], rel=1e-5)
    assert measured.bits_per_byte == pytest.approx(metrics[f"test/bits_per_byte@{context}"], rel=1e-5)
    assert measured.bits_per_token == pytest.approx(math.log2(measured.perplexity))
    if (context, stride) == (16, None):
        assert measured.perplexity == pytest.approx(trainer.evaluate(10**6)["test/perplexity"], rel=1e-5)


def test_token_ids_with_a_stride_are_read_in_windows_as_in_training(trained):
    predictor = Predictor.load(trained[2])
    tokens = predictor.text_tokens(prose(20))
    measured = predictor.perplexity([tokens], stride=5)
    assert measured == predictor.perplexity([tokens], context=16, stride=5)
    assert measured != predictor.perplexity([tokens])
    with raises("invalid_stride", stride=17, largest=16):
        predictor.perplexity([tokens], stride=17)


def test_a_text_of_one_character(trained):
    measured = Predictor.load(trained[2]).text_perplexity("a")
    assert (measured.tokens, measured.words, measured.size_bytes) == (1, 1, 1)
    assert Predictor.load(trained[2]).text_perplexity(" ").word_perplexity == math.inf


def test_invalid_requests(trained):
    predictor = Predictor.load(trained[2])
    with raises("empty_text"):
        predictor.text_perplexity("")
    with raises("invalid_stride", stride=17, largest=16):
        predictor.text_perplexity("a", stride=17)


def test_a_tokenizer_that_does_not_fit_is_reported(trained, tmp_path):
    from cope_sweep.text import TextTokenizer

    copy = shutil.copytree(trained[2], tmp_path / "copy")
    TextTokenizer.train([prose(400)], 310).save(copy / "tokenizer.json")
    file = str(copy / "tokenizer.json")
    with raises("vocabulary_too_small", file=file, ids=310, vocabulary=300):
        Predictor.load(copy).text_perplexity("a")
    (copy / "tokenizer.json").write_text("{}")
    with raises("not_a_tokenizer", file=file):
        Predictor.load(copy).text_perplexity("a")
    (copy / "tokenizer.json").unlink()
    with raises("no_tokenizer", run_id=Predictor.load(copy).run.run_id):
        Predictor.load(copy).text_perplexity("a")
    assert len(Predictor.load(copy).log_probabilities([[1, 2]])[0]) == 2  # token ids need no tokenizer
