"""Tokenizers: lossless encoding, GPT-2's ids, counts of words and bytes, and errors."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers

from cope_sweep.text import END_OF_TEXT, TextTokenizer
from cope_sweep.text.tokenizer import byte_letters, find_gpt2
from tests.helpers.errors import raises
from tests.helpers.texts import prose

TRAINED = TextTokenizer.train([prose(200)], 400)
BYTES = TextTokenizer.train([], 257)

# Mostly blanks and words, in which tokenizers differ; and any other text.
TEXTS = st.text(st.sampled_from([*" \n\t\r\u00a0\u3000\x0b\x1c", *"the cat's 12é日", "🦞"])) | st.text()

GPT2_PIECES = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
"""The pattern of GPT-2's released encoder.py. It needs `regex`, because `re` has no \\p{L}."""


def reference_ids(text, vocabulary, merges):
    """Byte-pair encoding by its definition: in each piece, the merge of lowest rank first."""
    letter = {byte: letter for letter, byte in byte_letters().items()}
    rank = {tuple(pair): i for i, pair in enumerate(merges)}
    ids = []
    for piece in GPT2_PIECES.findall(text):
        parts = [letter[byte] for byte in piece.encode()]
        while True:
            pairs = [(rank.get(pair, math.inf), i) for i, pair in enumerate(itertools.pairwise(parts))]
            if not pairs or min(pairs)[0] == math.inf:
                break
            i = min(pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [vocabulary[part] for part in parts]
    return ids


@pytest.fixture(scope="module")
def gpt2_files(tmp_path_factory):
    """Files in GPT-2's format with 50,257 ids, most of them unused; with their ids and merges."""
    folder = tmp_path_factory.mktemp("gpt2")
    TRAINED.save(folder / "trained.json")
    model = json.loads((folder / "trained.json").read_text())["model"]
    tokens = sorted(set(model["vocab"]) - {END_OF_TEXT})
    vocabulary = {token: i for i, token in enumerate(tokens)}
    vocabulary |= {f"filler{i}": i for i in range(len(tokens), 50256)} | {END_OF_TEXT: 50256}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))
    return folder, vocabulary, model["merges"]


@pytest.fixture(scope="module")
def gpt2(gpt2_files):
    return TextTokenizer.gpt2(find_gpt2([gpt2_files[0]]))


@given(text=TEXTS)
@example(text=f"a{END_OF_TEXT}b")
@settings(max_examples=300, deadline=None)
def test_encoding_is_lossless(text):
    for tokenizer in (TRAINED, BYTES):
        [ids] = tokenizer.encode([text])
        assert b"".join(tokenizer.pieces(ids)) == text.encode()
        assert tokenizer.end_of_text not in ids
        assert ids.max(initial=0) < tokenizer.ids


@given(text=TEXTS)
@settings(max_examples=200, deadline=None)
def test_gpt2_files_give_the_ids_of_byte_pair_encoding(text, gpt2, gpt2_files):
    _, vocabulary, merges = gpt2_files
    assert gpt2.encode([text])[0].tolist() == reference_ids(text, vocabulary, merges)


def test_both_file_formats_of_gpt2_give_the_same_tokenizer(gpt2, gpt2_files, tmp_path):
    gpt2.save(tmp_path / "tokenizer.json")
    other = TextTokenizer.gpt2(find_gpt2([tmp_path / "nowhere", tmp_path]))
    assert other.digest == gpt2.digest
    assert (other.ids, other.end_of_text) == (50257, 50256)
    text = prose(30) + END_OF_TEXT
    assert np.array_equal(other.encode([text])[0], gpt2.encode([text])[0])


@given(text=TEXTS)
@settings(max_examples=300, deadline=None)
def test_words_and_bytes_equal_plain_counts(text):
    for tokenizer in (TRAINED, BYTES):
        [ids] = tokenizer.encode([text])
        stream = np.array([[tokenizer.end_of_text, *ids]], dtype=np.int64)
        units = tokenizer.units(stream[:, :-1], stream[:, 1:], np.ones((1, len(ids)), dtype=bool))
        data = text.encode()
        assert units["words"].tolist() == [len(data.split()) + data.count(b"\n")]
        assert units["bytes"].tolist() == [len(data)]
        # The sums of single tokens are the same.
        each = tokenizer.units(stream[0, :-1, None], stream[0, 1:, None], np.ones((len(ids), 1), dtype=bool))
        assert each["words"].sum() == units["words"][0]
        assert each["bytes"].tolist() == [len(piece) for piece in tokenizer.pieces(ids)]


def test_words_of_a_short_text():
    """`a  new⏎line`: a, new, the end of the line, line."""
    [ids] = BYTES.encode(["a  new\nline"])
    stream = np.array([[BYTES.end_of_text, *ids]], dtype=np.int64)
    units = BYTES.units(stream[0, :-1, None], stream[0, 1:, None], np.ones((len(ids), 1), dtype=bool))
    assert units["words"].tolist() == [1, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0]


def test_the_vocabulary_is_an_upper_bound():
    assert TRAINED.ids <= 400
    assert BYTES.ids == 257
    assert TextTokenizer.train(["ab ab"], 400).ids == 258  # one pair occurs twice; ` ` starts another piece
    assert TextTokenizer.train([prose(300)], 300).ids == 300


def test_training_is_deterministic():
    texts = [prose(50, seed) for seed in range(6)]
    assert TextTokenizer.train(texts, 500).digest == TextTokenizer.train(iter(texts), 500).digest
    assert TextTokenizer.train(texts, 300).digest != TextTokenizer.train(texts, 299).digest


def sentencepiece(prefix):
    """A tokenizer of Llama's kind: blanks as ▁, rare bytes as <0x0A>, and a blank before each text."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary |= {token: 259 + index for index, token in enumerate(["▁", "a", "c", "t", "h", "e", "at", "▁c", "▁cat"])}
    merges = [["a", "t"], ["▁", "c"], ["▁c", "at"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, list(map(tuple, merges)), unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@pytest.mark.parametrize("prefix", [[], [normalizers.Prepend("▁")]])
def test_a_tokenizer_of_sentencepiece_s_kind_is_lossless_and_adds_no_blank(prefix, tmp_path):
    tokenizer = sentencepiece(prefix)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = TextTokenizer.load(tmp_path / "tokenizer.json")
    [ids, blanks] = loaded.encode(["the cat\nat é▁", "  a"])
    assert b"".join(loaded.pieces(ids)) == "the cat\nat é ".encode()  # it cannot write the sign of its blanks
    assert loaded.pieces(ids)[:4] == [b"t", b"h", b"e", b" cat"]
    assert b"".join(loaded.pieces(blanks)) == b"  a"
    assert loaded.end_of_text == 2


def test_a_full_disk_is_an_error_of_the_system():
    with pytest.raises(OSError, match="No space left"):
        TRAINED.save(Path("/dev/full"))


def test_nfc_and_tokens_that_were_added_are_allowed(tmp_path):
    TRAINED.save(tmp_path / "a.json")
    tokenizer = Tokenizer.from_file(str(tmp_path / "a.json"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens(["    "])
    tokenizer.save(str(tmp_path / "b.json"))
    loaded = TextTokenizer.load(tmp_path / "b.json")
    [ids] = loaded.encode(["e\u0301    cat"])
    assert b"".join(loaded.pieces(ids)) == "é    cat".encode()
    assert b"    " in loaded.pieces(ids)
    assert loaded.digest != TRAINED.digest


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        (lambda text: text[: len(text) // 2], "not_a_tokenizer", None),
        (lambda text: text.replace(END_OF_TEXT, "<end>"), "unusable_tokenizer", "no token <|endoftext|>"),
        (
            lambda text: text.replace('"normalizer":null', '"normalizer":{"type":"Lowercase"}'),
            "unusable_tokenizer",
            "normalizer",
        ),
        (
            lambda text: text.replace('"add_prefix_space":false', '"add_prefix_space":true'),
            "unusable_tokenizer",
            "loses bytes",
        ),
    ],
    ids=["cut", "no end of text", "normalises", "adds blanks"],
)
def test_unusable_tokenizers_are_errors(change, code, reason, tmp_path):
    path = tmp_path / "tokenizer.json"
    TRAINED.save(path)
    path.write_text(change(path.read_text()))
    with raises(code, file=str(path)) as error:
        TextTokenizer.load(path).encode(["cat"])
    assert error.value.data.get("reason") == reason


def test_a_tokenizer_of_another_size_is_not_gpt2(tmp_path):
    TRAINED.save(tmp_path / "tokenizer.json")
    with raises("not_gpt2", file=str(tmp_path / "tokenizer.json"), ids=TRAINED.ids):
        TextTokenizer.gpt2(find_gpt2([tmp_path]))
    with raises("no_such_file", file=str(tmp_path / "none.json")):
        TextTokenizer.load(tmp_path / "none.json")


def test_a_vocabulary_of_words_is_an_error(tmp_path):
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"日本": 0, END_OF_TEXT: 1}))
    words.save(str(tmp_path / "tokenizer.json"))
    with raises("unusable_tokenizer", file=str(tmp_path / "tokenizer.json"), token="日本"):
        TextTokenizer.load(tmp_path / "tokenizer.json")
