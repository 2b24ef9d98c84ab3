import random

import pytest

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
    """Three little splits of running text. Returns the keys of a task that reads them."""
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
    """The keys of a task that reads a little text, and a cache of the test's own."""
    monkeypatch.setenv("COPE_SWEEP_CACHE", str(tmp_path / "cache"))
    return write_text(tmp_path / "text")
