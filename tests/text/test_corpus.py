"""Tokenised corpora: content, keys, several processes, crashes, memory and errors."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cope_sweep.text import SplitFiles, open_corpus
from cope_sweep.text.reading import Files
from tests.helpers.errors import raises
from tests.helpers.texts import prose, write_corpus

pytestmark = pytest.mark.usefixtures("cache")

SCRIPT = """
import resource, sys
from pathlib import Path
from cope_sweep.text import SplitFiles, open_corpus
from cope_sweep.text.reading import Files
folder = Path(sys.argv[1])
splits = {split: Files((folder / f"wiki.{split}.tokens",)) for split in ("train", "valid", "test")}
sys.stdin.readline()  # wait until all processes have started
corpus = open_corpus(SplitFiles(splits), None, 300)
print(corpus.fingerprint, corpus.folder, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def start(folder, cache):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)],
        env=os.environ | {"COPE_SWEEP_CACHE": str(cache)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, _ = process.communicate("\n", timeout=240)
    assert process.returncode == 0
    return out.split()


def files(folder):
    return SplitFiles({split: Files((folder / f"wiki.{split}.tokens",)) for split in ("train", "valid", "test")})


def content(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COPE_SWEEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_ids_decode_to_the_text(tmp_path):
    folder = write_corpus(tmp_path)
    corpus = open_corpus(files(folder), None, 400)
    for split, read in corpus.splits.items():
        data = (folder / f"wiki.{split}.tokens").read_bytes()
        assert read.tokens_L[0] == corpus.tokenizer.end_of_text
        assert b"".join(corpus.tokenizer.pieces(read.tokens_L)) == data
        assert (read.size_bytes, read.lines) == (len(data), data.count(b"\n"))
        assert read.words == len(data.split()) + data.count(b"\n")
    assert isinstance(read.tokens_L, np.memmap)


def test_one_document_per_file(tmp_path):
    paths = []
    for index, text in enumerate(["one\n", "two", " three"]):
        paths.append(tmp_path / f"{index}.txt")
        paths[-1].write_text(text)
    split = open_corpus(SplitFiles({"train": Files(tuple(paths), one_document=False)}), None, 257)
    tokens, end = split.splits["train"].tokens_L, split.tokenizer.end_of_text
    assert (tokens == end).sum() == 3
    assert [b"".join(split.tokenizer.pieces(part)) for part in np.split(tokens, np.flatnonzero(tokens == end))] == [
        b"",
        b"one\n",
        b"two",
        b" three",
    ]
    joined = open_corpus(SplitFiles({"train": Files(tuple(paths))}), None, 257)
    assert (joined.splits["train"].tokens_L == end).sum() == 1
    assert (split.splits["train"].words, joined.splits["train"].words) == (4, 4)
    assert split.fingerprint != joined.fingerprint


def test_a_text_is_found_again_by_its_content(tmp_path, own_cache):
    folder, copy = write_corpus(tmp_path / "a"), write_corpus(tmp_path / "b")
    first = open_corpus(files(folder), None, 300)
    stamp = (first.folder / "train.bin").stat()
    again = open_corpus(files(copy), None, 300)  # the same text in another folder
    assert again.folder == first.folder
    assert (again.folder / "train.bin").stat() == stamp
    other = open_corpus(files(folder), None, 301)
    assert other.folder != first.folder
    assert other.fingerprint != first.fingerprint
    (copy / "wiki.test.tokens").write_text(prose(60, seed=9))
    changed = open_corpus(files(copy), None, 300)
    assert changed.folder != first.folder
    assert changed.fingerprint != first.fingerprint


@pytest.mark.slow
def test_processes_that_start_together_create_one_entry(tmp_path, own_cache, monkeypatch):
    folder = write_corpus(tmp_path, train=20_000)
    processes = [start(folder, own_cache) for _ in range(3)]
    for process in processes:  # let all of them continue
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [finish(process)[:2] for process in processes]
    assert outputs == [outputs[0]] * 3
    made = own_cache / "text"
    assert sorted(path.name for path in made.iterdir()) == sorted(
        [outputs[0][1].rsplit("/")[-1], f"{outputs[0][1].rsplit('/')[-1]}.lock"]
    )
    # Another process, this one, in another cache creates the same bytes, also those of a trained tokenizer.
    monkeypatch.setenv("COPE_SWEEP_CACHE", str(tmp_path / "other"))
    other = open_corpus(files(folder), None, 300)
    assert other.fingerprint == outputs[0][0]
    assert other.folder.is_relative_to(tmp_path / "other")
    assert content(other.folder) == content(Path(outputs[0][1]))


@pytest.mark.slow
def test_a_killed_process_leaves_no_incomplete_entry(tmp_path, own_cache):
    folder = write_corpus(tmp_path, train=60_000)
    process = start(folder, own_cache)
    process.stdin.write("\n")
    process.stdin.flush()
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in own_cache.glob("text/.*/train.bin")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = [path for path in own_cache.glob("text/*") if path.is_dir()]
    assert [path.name[0] for path in left] == ["."]  # hidden, so it is not an entry
    half = next(own_cache.glob("text/.*/train.bin")).stat().st_size

    corpus = open_corpus(files(folder), None, 300)
    assert half < (corpus.folder / "train.bin").stat().st_size
    data = (folder / "wiki.train.tokens").read_bytes()
    assert b"".join(corpus.tokenizer.pieces(corpus.splits["train"].tokens_L)) == data
    assert [path for path in own_cache.glob("text/*") if path.is_dir()] == [corpus.folder]


def test_an_error_leaves_no_entry(tmp_path, own_cache):
    folder = write_corpus(tmp_path)
    with (folder / "wiki.test.tokens").open("ab") as file:
        file.write(b"\xff")
    with raises("not_utf8", file=str(folder / "wiki.test.tokens")):
        open_corpus(files(folder), None, 300)
    assert [path for path in own_cache.glob("text/*") if path.is_dir()] == []


@pytest.mark.slow
@pytest.mark.thorough
def test_memory_does_not_grow_with_the_text(tmp_path):
    """16 MB more text may increase the peak by less than half of that, which leaves room for the allocator."""
    small, large = write_corpus(tmp_path / "a", train=75_000), write_corpus(tmp_path / "b")
    text = (small / "wiki.train.tokens").read_bytes()
    (large / "wiki.train.tokens").write_bytes(text * 9)
    assert 8 * len(text) > 16e6
    peak_mb = [int(finish(start(folder, tmp_path / "cache"))[2]) for folder in (small, large)]
    assert peak_mb[1] - peak_mb[0] < 8


def test_a_damaged_entry_is_an_error(tmp_path, own_cache):
    folder = write_corpus(tmp_path)
    corpus = open_corpus(files(folder), None, 300)
    with (corpus.folder / "test.bin").open("r+b") as file:
        file.truncate(10)
    with raises("damaged_cache", file=str(corpus.folder), reason="test.bin has 10 bytes"):
        open_corpus(files(folder), None, 300)


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COPE_SWEEP_CACHE", str(tmp_path / "file" / "cache"))
    with raises("unusable_cache"):
        open_corpus(files(write_corpus(tmp_path)), None, 300)
