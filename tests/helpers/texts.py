"""Small texts and corpora for tests."""

import random
from pathlib import Path

WORDS = ["the", "cat", "lobster", "European", "is", "a", "species", "of", "@-@", "<unk>", "naïve", "日本", ",", "."]


def prose(lines: int, seed: int = 0) -> str:
    """Lines in the format of WikiText: titles, blank lines, and words separated by blanks."""
    rng = random.Random(seed)
    written = []
    for _ in range(lines):
        words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12)))
        written.append(rng.choice([f" {words} \n", f" = {words} = \n", " \n", f" {words} {rng.randint(0, 999)} \n"]))
    return "".join(written)


def write_corpus(folder: Path, *, train: int = 300, validation: int = 60, test: int = 60) -> Path:
    """A folder with three splits of the given numbers of lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, lines) in enumerate({"train": train, "valid": validation, "test": test}.items()):
        (folder / f"wiki.{split}.tokens").write_bytes(prose(lines, seed).encode())
    return folder
