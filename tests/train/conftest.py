import random

import pytest

from cope_sweep.store import Store

WORDS = [
    "the",
    "a",
    "lobster",
    "river",
    "counts",
    "past",
    "two",
    "three",
    "seven",
    "grey",
    "and",
    "of",
    "with",
    "under",
    "=",
    "\n",
]


def write_text(folder):
    """Write three short splits of running text; returns the keys of a task that reads them."""
    folder.mkdir()
    for split, words in (("train", 3000), ("valid", 400), ("test", 300)):
        rng = random.Random(split)
        (folder / f"wiki.{split}.tokens").write_text(" ".join(rng.choice(WORDS) for _ in range(words)) + "\n")
    return {
        "kind": "wikitext",
        "corpus": "a-text",
        "folder": str(folder),
        "tokens": 16,
        "vocabulary": 280,
        "tokenizer": "bpe",
    }


@pytest.fixture
def text(tmp_path, monkeypatch):
    """The keys of a task that reads a short text, with an empty cache."""
    monkeypatch.setenv("COPE_SWEEP_CACHE", str(tmp_path / "cache"))
    return write_text(tmp_path / "text")


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store", create=True)
