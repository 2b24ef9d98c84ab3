"""Counting words in the last sentence: answers, distributions, generated sentences and texts."""

import re
import unicodedata
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.tasks import IGNORED, LastSentence, last_sentence
from tests.helpers.errors import raises
from tests.tasks.chi_square import ALPHA, contingency, independent_p, uniform_p

SPLITS = ["train", "in_dist", "absent", "longer"]

ALICE = """Alice was beginning to get very tired of sitting by her sister on the bank, and of
having nothing to do: once or twice she had peeped into the book her sister was
reading, but it had no pictures or conversations in it, “and what is the use of
a book,” thought Alice “without pictures or conversations?”

So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and
stupid), whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the
daisies, when suddenly a White Rabbit with pink eyes ran close by her."""
"""Table 1 of the paper; the answer is 0 for Alice and for book."""


@st.composite
def composed(draw):
    queries = draw(st.integers(1, 3))
    maximum = draw(st.integers(1, 4 if queries == 1 else 2))
    fewest = draw(st.integers(queries * maximum, 6))
    return LastSentence(
        maximum=maximum,
        queries=queries,
        sentences=draw(st.integers(2, 4)),
        longer_sentences=draw(st.integers(2, 5)),
        fewest_words=fewest,
        most_words=draw(st.integers(fewest, 9)),
        vocabulary=draw(st.integers(maximum + 5 + queries, 60)),
    )


def read(task, inputs, targets):
    """The sentences of a sequence, the queried words, and their answers; checks everything else."""
    query, padding = task.end + 1, task.end + 2
    inputs = inputs.tolist()
    at = inputs.index(query)
    places = [at + 1 + 3 * index for index in range(task.queries)]
    words = [inputs[place] for place in places]
    asked = [token for word in words for token in (query, word, padding)]
    assert inputs[at:] == (asked + [padding] * len(inputs))[: len(inputs) - at]
    assert min(words) > padding
    assert len(set(words)) == task.queries
    assert (targets != IGNORED).nonzero()[0].tolist() == places
    sentences, sentence = [], []
    for token in inputs[:at]:
        if token == task.end:
            sentences.append(sentence)
            sentence = []
        else:
            assert token > padding
            sentence.append(token)
    assert not sentence  # the last one has an end, too
    return sentences, words, targets[places].tolist()


def questions(task, split, count, seed=0):
    """The sentences, word and answer of every query, in order."""
    batch = task.sequences(split, seed, 0, count)
    assert np.array_equal(batch.answers_NT, batch.targets_NT != IGNORED)
    return [
        (sentences, word, answer)
        for inputs, targets in zip(batch.inputs_NT, batch.targets_NT, strict=True)
        for sentences, words, answers in [read(task, inputs, targets)]
        for word, answer in zip(words, answers, strict=True)
    ]


def check(task, split, asked):
    for sentences, word, answer in asked:
        assert len(sentences) == (task.longer_sentences if split == "longer" else task.sentences)
        assert all(task.fewest_words <= len(sentence) <= task.most_words for sentence in sentences)
        assert answer == sentences[-1].count(word)
        if split == "absent":
            assert answer == 0
            assert any(word in sentence for sentence in sentences[:-1])


@given(task=composed(), split=st.sampled_from(SPLITS), seed=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_every_answer_is_a_plain_count(task, split, seed):
    check(task, split, questions(task, split, 20, seed))


@pytest.mark.slow
def test_composed_sentences_have_the_declared_distribution():
    """χ² of answers, lengths, places and words; and the answer is independent of everything before the last sentence."""
    task = LastSentence(fewest_words=3, most_words=6, vocabulary=27)
    asked = questions(task, "train", 6000)
    answers = np.array([answer for _, _, answer in asked])
    words = np.array([word for _, word, _ in asked]) - 7
    before = np.array([sentences[0].count(word) for sentences, word, _ in asked])
    lengths = np.array([[len(sentence) for sentence in sentences] for sentences, _, _ in asked]) - 3
    for drawn, kinds in ((answers, 4), (before, 4), (words, 20), (lengths[:, 0], 4), (lengths[:, 1], 4)):
        assert uniform_p(np.bincount(drawn, minlength=kinds)) > ALPHA
    for other in (words, before, lengths[:, 0], lengths[:, 1]):
        assert independent_p(contingency(answers, other)) > ALPHA
    places = [s[1].index(w) for s, w, answer in asked if answer == 1 and len(s[1]) == 6]
    assert uniform_p(np.bincount(places, minlength=6)) > ALPHA
    pairs = [tuple(np.flatnonzero(np.array(s[1]) == w)) for s, w, answer in asked if answer == 2 and len(s[1]) == 5]
    assert uniform_p(np.unique(pairs, axis=0, return_counts=True)[1]) > ALPHA
    assert len(set(pairs)) == 10
    offsets = np.array([(token - word) % 20 for s, word, _ in asked for token in s[1] if token != word])
    assert uniform_p(np.bincount(offsets, minlength=20)[1:]) > ALPHA


@pytest.mark.slow
def test_answers_to_several_queries_are_balanced_and_independent():
    """χ² of the answers, words and places of two queries."""
    task = LastSentence(queries=2, maximum=2, fewest_words=4, most_words=6, vocabulary=18)
    asked = questions(task, "train", 6000)
    answers = np.array([answer for *_, answer in asked]).reshape(-1, 2).T
    words = np.array([word for _, word, _ in asked]).reshape(-1, 2).T - 6
    for answer, word in zip(answers, words, strict=True):
        assert uniform_p(np.bincount(answer, minlength=3)) > ALPHA
        assert uniform_p(np.bincount(word, minlength=12)) > ALPHA
        assert independent_p(contingency(answer, word)) > ALPHA
    assert independent_p(contingency(*answers)) > ALPHA
    assert uniform_p(np.bincount((words[1] - words[0]) % 12, minlength=12)[1:]) > ALPHA
    lengths = np.array([len(sentences[-1]) for sentences, *_ in asked[::2]])
    assert independent_p(contingency(answers[0], lengths)) > ALPHA
    for query in range(2):
        places = [s[-1].index(w) for s, w, answer in asked[query::2] if answer == 1 and len(s[-1]) == 6]
        assert uniform_p(np.bincount(places, minlength=6)) > ALPHA
    pairs = list(zip(asked[::2], asked[1::2], strict=True))
    offsets = np.array([(t - a[1]) % 12 for a, b in pairs for t in a[0][0] if t not in (a[1], b[1])])
    assert uniform_p(np.bincount(offsets, minlength=12)[1:]) > ALPHA


def test_the_docstring_s_samples():
    rows = [re.findall(rf"    {row} +(.*)", last_sentence.__doc__) for row in ("inputs", "targets")]
    samples = [(inputs.split(), targets.split()) for inputs, targets in zip(*rows, strict=True)]
    assert [inputs.count("?") for inputs, _ in samples] == [1, 2]
    for inputs, targets in samples:
        assert len(inputs) == len(targets)
        ends = [place for place, word in enumerate(inputs) if word == "."]
        last = inputs[ends[-2] + 1 : ends[-1]]
        words = [place + 1 for place, word in enumerate(inputs) if word == "?"]
        assert [targets[place] for place in words] == [str(last.count(inputs[place])) for place in words]
        assert {target for place, target in enumerate(targets) if place not in words} == {"."}


# -- texts


def story(seed, sentences):
    """A text with repeated words, punctuation and line breaks."""
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(sentences):
        words = rng.choice(["the", "The", "a", "cat", "dog", "sat", "on", "and", "mat"], rng.integers(3, 12))
        parts.append(
            " ".join(words) + str(rng.choice([".", "!", "?", ".”", "?)"])) + str(rng.choice([" ", "\n", "\n\n"]))
        )
    return "".join(parts)


def plain_sentences(text):
    """The sentences of a text, read character by character."""
    sentences, words, word, ended = [], [], "", False
    for character in text + "\n\n":
        if character.isalnum():
            word += character.lower()
            continue
        if word:
            words.append(word)
            word = ""
        if character in ".!?":
            ended = True
        elif character.isspace() and ended:
            if words:
                sentences.append(words)
            words, ended = [], False
    return sentences


def of_text(tmp_path, text, **sizes):
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    return LastSentence(corpus="story", folder=str(tmp_path / "text.txt"), **sizes)


@pytest.mark.parametrize("split", SPLITS)
def test_contexts_are_consecutive_sentences_of_the_text(tmp_path, split):
    text = story(0, 3000)
    task = of_text(tmp_path, text, maximum=2, fewest_words=4, most_words=10, vocabulary=500)
    asked = questions(task, split, 500)
    check(task, split, asked)
    tokens = [[task.token(word) for word in words] for words in plain_sentences(text)]
    count = task.context_sentences(split)
    contexts = {str(tokens[at : at + count]) for at in range(len(tokens))}
    for sentences, _, _ in asked:
        assert str(sentences) in contexts
    if split != "absent":
        answers = np.array([answer for *_, answer in asked])
        words = np.unique([word for _, word, _ in asked], return_inverse=True)[1]
        assert uniform_p(np.bincount(answers, minlength=3)) > ALPHA
        assert independent_p(contingency(answers, words)) > ALPHA
        assert words.max() > 3


def test_training_validation_and_test_sets_share_no_last_sentences(tmp_path):
    task = of_text(tmp_path, story(1, 3000), maximum=2, vocabulary=5000)
    last = {split: {tuple(sentences[-1]) for sentences, _, _ in questions(task, split, 2000)} for split in task.splits}
    assert min(map(len, last.values())) > 30
    for split in ("in_dist", "absent", "longer"):
        assert not last["train"] & last[split]
        assert not last["validation"] & last[split]
    assert not last["train"] & last["validation"]


def test_only_a_text_has_another_version(tmp_path):
    assert (LastSentence().version(), of_text(tmp_path, story(1, 9)).version()) == (1, 3)


def test_no_context_spans_two_files(tmp_path):
    halves = [story(seed, 600) for seed in (2, 3)]
    for name, half in zip("ab", halves, strict=True):
        (tmp_path / f"{name}.txt").write_text(half, encoding="utf-8")
    (tmp_path / "notes.md").write_text("not read", encoding="utf-8")
    task = LastSentence(corpus="two", folder=str(tmp_path), maximum=1, vocabulary=500, most_words=12)
    contexts = set()
    for half in halves:
        tokens = [[task.token(word) for word in words] for words in plain_sentences(half)]
        contexts |= {str(tokens[at : at + 2]) for at in range(len(tokens) - 1)}
    for sentences, _, _ in questions(task, "train", 3000):
        assert str(sentences) in contexts


@pytest.mark.parametrize(("word", "times"), [("Alice", (2, 0)), ("book", (2, 0)), ("her", (2, 3)), ("making", (0, 1))])
def test_the_prompt_of_the_paper(word, times):
    task = LastSentence(most_words=64, vocabulary=50000)
    tokens = np.array(task.prompt(ALICE, word))
    sentences, asked, _ = read(task, tokens, np.where(np.arange(len(tokens)) == len(tokens) - 1, 0, IGNORED))
    assert asked == [task.token(word)]
    assert [len(sentence) for sentence in sentences] == [57, 56]
    assert tuple(sentence.count(asked[0]) for sentence in sentences) == times


def test_tokens_do_not_depend_on_a_text():
    task = LastSentence(vocabulary=300, maximum=3)
    assert task.token("Book") == task.token("book") == 7 + zlib.crc32(b"book") % 293


@pytest.mark.parametrize("text", ["हिन्दी भाषा है", "cafe\u0301 au lait", "l’e\u0301te\u0301 d’A\u030angstro\u0308m"])
def test_combining_marks_are_parts_of_words_and_of_characters(text):
    task = LastSentence(vocabulary=50000)
    tokens = [task.token(word) for word in text.split()]
    for form in ("NFC", "NFD"):
        for word, token in zip(text.split(), tokens, strict=True):
            prompt = task.prompt(unicodedata.normalize(form, text), word)
            assert prompt == [*tokens, task.end, task.end + 1, token]


def test_the_fingerprint_depends_on_the_content_only(tmp_path):
    text = story(4, 500)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b.txt").write_text(text, encoding="utf-8")
    a = of_text(tmp_path, text)
    b = LastSentence(corpus="story", folder=str(tmp_path / "other"))
    assert a.fingerprint() == b.fingerprint()
    (tmp_path / "other" / "b.txt").write_text(text + "More.", encoding="utf-8")
    assert a.fingerprint() != b.fingerprint()
    assert LastSentence().fingerprint() is None


def test_a_text_that_has_changed_is_read_again_before_the_next_run(tmp_path):
    (tmp_path / "new").mkdir()
    task, new = of_text(tmp_path, story(1, 3000), maximum=2), of_text(tmp_path / "new", story(2, 3000), maximum=2)
    before, after = (each.sequences("in_dist", 0, 0, 20).inputs_NT for each in (task, new))
    of_text(tmp_path, story(2, 3000))
    assert np.array_equal(task.sequences("in_dist", 0, 0, 20).inputs_NT, before)  # a run keeps the text it began with
    task.prepare()
    assert task.fingerprint() == new.fingerprint()
    assert np.array_equal(task.sequences("in_dist", 0, 0, 20).inputs_NT, after)


# -- errors


def test_a_corpus_without_a_folder_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("COPE_SWEEP_DATA", str(tmp_path))
    task = LastSentence(corpus="tale", maximum=1)
    with raises("no_corpus", corpus="tale"):
        task.prepare()
    (tmp_path / "tale").mkdir()
    (tmp_path / "tale" / "a.txt").write_text(story(5, 500), encoding="utf-8")
    task.prepare()


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("notes.md", "One sentence.", "no_such_file"),
        ("a.txt", "", "empty_text"),
        ("a.txt", "One sentence is here now. Another one is here now.", "text_too_short"),
    ],
)
def test_a_folder_without_questions_is_an_error(tmp_path, name, text, code):
    (tmp_path / name).write_text(text)
    named = {"no_such_file": tmp_path, "empty_text": tmp_path / name}
    with raises(code, **({"file": str(named[code])} if code in named else {"corpus": "story", "sentences": 3})):
        LastSentence(corpus="story", folder=str(tmp_path)).prepare()


@pytest.mark.parametrize(
    ("fields", "code", "data"),
    [
        ({"maximum": 5}, "invalid_value", {"key": "maximum", "value": 5}),
        ({"fewest_words": 30}, "invalid_value", {"key": "maximum", "fewest_words": 30}),
        ({"vocabulary": 8}, "invalid_value", {"key": "vocabulary", "value": 8, "smallest": 9}),
        ({"folder": "books"}, "invalid_value", {"key": "task.corpus", "value": "composed"}),
        ({"sentences": 1}, "greater_than_equal", {"key": "sentences", "ge": 2}),
        ({"queries": 2, "corpus": "alice", "maximum": 1}, "invalid_value", {"key": "queries", "corpus": "alice"}),
        ({"queries": 2}, "invalid_value", {"key": "queries", "fewest_words": 4, "smallest": 6}),
        ({"queries": 4, "maximum": 1, "vocabulary": 9}, "invalid_value", {"key": "vocabulary", "smallest": 10}),
    ],
)
def test_impossible_specs_are_errors(fields, code, data):
    with raises(code, **data):
        LastSentence(**fields)


def test_the_shortcut_counts_in_all_sentences():
    task = LastSentence(maximum=3, vocabulary=20, fewest_words=3, most_words=5)
    end, query, pad, word = task.end, task.end + 1, task.end + 2, 9
    tokens = np.array([[word, 8, word, end, 8, word, 10, end, query, word, pad]])
    assert task.shortcuts(tokens)["all sentences"][0, 9] == 3
    two = np.array([[word, 8, word, end, 8, 10, 10, end, query, word, pad, query, 8, pad, query, 11]])
    assert task.shortcuts(two)["all sentences"][0, [9, 12, 15]].tolist() == [2, 2, 0]
    for queries in (1, 3):
        task = LastSentence(queries=queries, maximum=1, vocabulary=20, fewest_words=3, most_words=5)
        errors = [task.shortcut_errors(split, 500)["all sentences"] for split in ("in_dist", "absent")]
        assert 0 < errors[0] < errors[1] == 100
