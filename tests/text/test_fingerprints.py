"""Fingerprints and counts of texts in every format, as values: a change of a reader must not change a text."""

import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cope_sweep.tasks import Code, Text, WikiText
from cope_sweep.text import sources
from tests.helpers.texts import prose, write_corpus

pytestmark = pytest.mark.usefixtures("cache")

DOCUMENTS = [prose(5, seed) + f"document {seed} of 120\r\n\u2028" for seed in range(120)]
ROWS = [{"text": text, "id": index, "when": "2024-01-01", "tags": [str(index)]} for index, text in enumerate(DOCUMENTS)]
LINES = "".join(json.dumps(row) + "\n" for row in [*ROWS, {"text": None}, {"text": " \n", "late": 1.5}]).encode()

SIZES = {"tokens": 16, "vocabulary": 300}


def parquet(rows, group=100_000):
    file = io.BytesIO()
    pq.write_table(pa.table({"id": range(len(rows)), "text": rows}), file, row_group_size=group)
    return file.getvalue()


def latin_1(folder):
    for name in ("b", "a"):
        (folder / f"{name}.txt").write_bytes(
            (f"{name}: é\r\n" + prose(900, seed=ord(name))).encode("latin-1", "replace")
        )
    (folder / "short.txt").write_text("a short file\n")
    return Text(path=str(folder), encoding="latin-1", corpus="c", **SIZES)


def several(folder):
    for part in range(3):
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[part::3]))
    return Text(path=str(folder), corpus="c", **SIZES)


def one_file(name, data, **fields):
    def write(folder):
        (folder / name).write_bytes(data)
        return Text(path=str(folder / name), corpus="c", **SIZES, **fields)

    return write


def code(folder):
    for index, text in enumerate(DOCUMENTS):
        (folder / f"{index}.py").write_bytes(text.encode())
    return Code(corpus="c", folder=str(folder), validation_share=0.1, test_share=0.1, **SIZES)


def wikitext(folder):
    return wikitext_of(write_corpus(folder))


def wikitext_of(folder):
    return WikiText(corpus="c", folder=str(folder), **SIZES)


def wikitext_in_parquet(folder):
    """As the hub stores it: one line per row, blank lines as empty strings, several files; it is the same text."""
    for path in write_corpus(folder).glob("*.tokens"):
        lines = [line if line.strip() else "" for line in path.read_text().splitlines(keepends=True)]
        for part in range(2):
            name = f"{path.name.split('.')[1]}-{part:05}-of-00002.parquet"
            (folder / name).write_bytes(parquet(lines[:40] if part == 0 else lines[40:]))
        path.unlink()
    return wikitext_of(folder)


@pytest.mark.parametrize(
    ("make", "fingerprint", "tokenizer", "counts"),
    [
        (code, "94a942a7024c", "e63dfc1fc223", [(8850, 4253, 630, 17769), (733, 329, 48, 1456), (591, 279, 42, 1181)]),
        (latin_1, "bfcd5cbeed35", "e9fa6ebd6684", [(16575, 10629, 1610, 42665), (923, 602, 105, 2370), (965, 611, 88, 2365)]),
        (wikitext_in_parquet, "55dfc411ae1a", "1a67be03e329", [(3373, 1929, 300, 8175), (693, 366, 60, 1482), (721, 391, 60, 1703)]),
        (wikitext, "55dfc411ae1a", "1a67be03e329", [(3373, 1929, 300, 8175), (693, 366, 60, 1482), (721, 391, 60, 1703)]),
        (one_file("a.jsonl", LINES), "c769dbaf076a", "8a57e5a84599", [(9434, 4532, 672, 18950), (417, 188, 24, 846), (319, 141, 24, 610)]),
        (one_file("a.jsonl.gz", gzip.compress(LINES)), "c769dbaf076a", "8a57e5a84599", [(9434, 4532, 672, 18950), (417, 188, 24, 846), (319, 141, 24, 610)]),
        (one_file("a.jsonl.zst", pa.compress(LINES, "zstd", asbytes=True)), "c769dbaf076a", "8a57e5a84599", [(9434, 4532, 672, 18950), (417, 188, 24, 846), (319, 141, 24, 610)]),
        (several, "19b5e03e71f4", "8a57e5a84599", [(9434, 4532, 672, 18950), (417, 188, 24, 846), (319, 141, 24, 610)]),
        (one_file("a.parquet", parquet([*DOCUMENTS, None])), "c769dbaf076a", "8a57e5a84599", [(9434, 4532, 672, 18950), (417, 188, 24, 846), (319, 141, 24, 610)]),
        (one_file("a.parquet", parquet(DOCUMENTS, group=10)), "61dee17322eb", "8a57e5a84599", [(9434, 4532, 672, 18950), (417, 188, 24, 846), (319, 141, 24, 610)]),
        (one_file("a.jsonl", LINES, limit_tokens=2000), "b06bed3800ae", "07063024d0cc", [(2078, 1015, 150, 4235), (409, 188, 24, 846), (323, 141, 24, 610)]),
        (one_file("a.parquet", parquet(DOCUMENTS, group=10), limit_bytes=2000), "142cb97f4ba8", "dfe4a5cef8c4", [(1017, 500, 72, 2089), (399, 188, 24, 846), (315, 141, 24, 610)]),
        (one_file("a.parquet", parquet(DOCUMENTS, group=10), limit_bytes=2000, validation_share=0.4, test_share=0.3), "2ba4e1ad4e7b", "9922b4fe98bd", [(1009, 511, 78, 2075), (1091, 481, 72, 2039), (987, 475, 72, 2010)]),
    ],
)  # fmt: skip
def test_texts_stay_the_same(make, fingerprint, tokenizer, counts, tmp_path, monkeypatch):
    """`counts`: tokens, words, lines and bytes of the training, validation and test splits."""
    monkeypatch.setattr(sources, "GROUP_BYTES", 8_000)  # so that a small Parquet file has several groups of rows
    corpus = make(tmp_path).open_corpus()
    found = [(len(read.tokens_L), read.words, read.lines, read.size_bytes) for read in corpus.splits.values()]
    assert (corpus.fingerprint[:12], corpus.tokenizer.digest[:12], found) == (fingerprint, tokenizer, counts)
