"""Reading of texts: chunks, UTF-8, Parquet and errors."""

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.cli.options import read_text_options as typed_text
from cope_sweep.config.source import read_source
from cope_sweep.text import TextTokenizer, reading
from cope_sweep.text.reading import chunks
from cope_sweep.text.sources import read_document
from tests.helpers.errors import raises
from tests.helpers.texts import prose

TOKENIZER = TextTokenizer.train([prose(200)], 400)


@given(
    pieces=st.lists(st.text(st.sampled_from([*" \n\t\r", *"the cat's 12é日,", "\u3000"]), max_size=60)),
    chunk=st.integers(2, 40),
)
@settings(max_examples=400, deadline=None)
def test_a_text_in_chunks_has_the_ids_of_the_whole_text(pieces, chunk):
    text = "".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "CHUNK", chunk)
        parts = list(chunks(pieces))
    assert "".join(parts) == text
    ids = list(itertools.chain.from_iterable(TOKENIZER.encode(parts)))
    assert np.array_equal(ids, TOKENIZER.encode([text])[0])


def test_long_texts_have_many_chunks():
    text = prose(20_000)
    parts = list(chunks([text]))
    assert "".join(parts) == text
    assert len(parts) >= len(text) // reading.CHUNK
    assert max(map(len, parts)) <= reading.CHUNK


def test_a_text_without_blanks_is_cut_at_the_largest_size():
    parts = list(chunks(["x" * 100_000] * 30))
    assert "".join(parts) == "x" * 3_000_000
    assert max(map(len, parts)) <= reading.MAX_CHUNK


@given(text=st.text(max_size=200), size=st.integers(1, 7))
@settings(max_examples=100, deadline=None)
def test_characters_across_two_reads_stay_whole(text, size, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "READ_BYTES", size)
        assert "".join(read_document([path])) == text


@pytest.mark.parametrize("size", [1, 1000])
def test_a_byte_order_mark_at_the_start_is_no_text(size, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "READ_BYTES", size)
    (tmp_path / "a.txt").write_text("a\ufeffb", encoding="utf-8-sig")
    assert "".join(read_document([tmp_path / "a.txt"])) == "a\ufeffb"
    assert typed_text(None, tmp_path / "a.txt") == typed_text("\ufeffa\ufeffb", None) == "a\ufeffb"
    (tmp_path / "a.yaml").write_text("title: T", encoding="utf-8-sig")
    assert read_source(tmp_path / "a.yaml").data == {"title": "T"}


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    ("data", "at"), [(b"abc\xff", 3), ("日本".encode()[:-1], 3), (b"\xe9t\xe9", 0), (b"ab\xf0\x9f\xa6x", 2)]
)
def test_errors_name_the_byte_that_is_not_utf8(data, at, size, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "READ_BYTES", size)
    (tmp_path / "a.txt").write_bytes(data)
    with raises("not_utf8", file=str(tmp_path / "a.txt"), byte=at):
        list(read_document([tmp_path / "a.txt"]))


def test_invalid_parquet_files_are_errors(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with raises("not_parquet", file=str(tmp_path / "a.parquet")):
        list(read_document([tmp_path / "a.parquet"]))
    pq.write_table(pa.table({"words": ["a"]}), tmp_path / "b.parquet")
    with raises("no_text_column", file=str(tmp_path / "b.parquet"), columns=["words"]):
        list(read_document([tmp_path / "b.parquet"]))


@pytest.mark.parametrize("name", ["none.txt", "none.parquet"])
def test_missing_files_are_errors(name, tmp_path):
    with raises("no_such_file", file=str(tmp_path / name)):
        list(read_document([tmp_path / name]))
