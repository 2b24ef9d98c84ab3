import pytest

from tests.helpers.texts import write_corpus


def text_task(folder):
    """The keys of a task that reads a short text, which is written to `folder`."""
    write_corpus(folder)
    return {"kind": "wikitext", "corpus": "a-text", "folder": str(folder), "tokens": 16, "vocabulary": 280}


@pytest.fixture
def text(tmp_path, monkeypatch):
    """The keys of a task that reads a short text, with an empty cache."""
    monkeypatch.setenv("COPE_SWEEP_CACHE", str(tmp_path / "cache"))
    return text_task(tmp_path / "text")
