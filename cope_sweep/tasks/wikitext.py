r"""WikiText (Merity et al. 2016): Wikipedia articles with 103 M or 2 M words (Golovneva et al. 2024, section 5.4).

    " = Homarus gammarus = \n \n Homarus gammarus , known as the European lobster or common lobster , is a species …"

There are four corpora: `wikitext-103` and `wikitext-2`, in which rare words are replaced by `<unk>`, and
`wikitext-103-raw` and `wikitext-2-raw`, which keep them. They are read from a folder (`folder`, or
$COPE_SWEEP_DATA/<corpus>) with files for the three splits under any of the usual names:

    wiki.train.tokens  wiki.valid.raw  test.txt  validation.parquet  train-00000-of-00002.parquet …

Without such a folder they are downloaded once from the Hugging Face hub (Salesforce/wikitext). The paper does not say
what unit its perplexity has. Here it is per token of the tokenizer; perplexity per word, as WikiText counts words, and
bits per byte are reported too.

A corpus with any other name is the user's own, in files of the same names. The word counts of the four are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from cope_sweep.tasks.language import FolderTask
from cope_sweep.text import Corpus, CorpusName, TextError
from cope_sweep.text.reading import Files
from cope_sweep.text.sources import splits_in_name

REPOSITORY = "Salesforce/wikitext"
CONFIGS = {
    "wikitext-103": "wikitext-103-v1",
    "wikitext-103-raw": "wikitext-103-raw-v1",
    "wikitext-2": "wikitext-2-v1",
    "wikitext-2-raw": "wikitext-2-raw-v1",
}
"""Corpus → its folder in the hub's repository."""
HELD_OUT_WORDS = {"validation": 213_886, "test": 241_211}
"""Words of the validation and test splits, without ends of lines; the same in all four corpora."""
WORDS = {"wikitext-103": 101_425_671, "wikitext-2": 2_051_910}
"""Words of the training split, without ends of lines. With them wikitext-103 has the published 103,227,021."""
TOLERANCE = 0.001
"""Relative tolerance of word counts: copies differ in blank lines and ends of files."""
SUFFIXES = (".tokens", ".raw", ".txt", ".parquet")


class WikiText(FolderTask):
    """Language modelling of Wikipedia articles, or of your own text."""

    kind: Literal["wikitext"] = "wikitext"
    corpus: CorpusName = Field(
        default="wikitext-103",
        description="wikitext-103, wikitext-103-raw, wikitext-2 or wikitext-2-raw; any other name: your own text.",
    )

    def files(self) -> Mapping[str, Files]:
        folder = self.data_folder()
        if folder is None:
            folder = self._from_hub()
        try:
            text_files = [path for path in folder.iterdir() if path.suffix in SUFFIXES]
        except OSError as error:
            raise TextError(
                f"{folder}: {error.strerror}; set task.folder to the folder of {self.corpus}",
                code="no_such_file",
                file=str(folder),
                corpus=self.corpus,
            ) from error
        by_split: dict[str, list[Path]] = {}
        for path in sorted(text_files):
            for split in splits_in_name(path.name):
                by_split.setdefault(split, []).append(path)
        for split in ("train", *self.TESTS):
            paths = by_split.get(split, [])
            if not paths:
                raise TextError(
                    f"{folder}: no file of the split {split!r}; name it so that it contains the word, for example "
                    f"wiki.{split}.tokens, with one of the suffixes {', '.join(SUFFIXES)}",
                    code="empty_split",
                    file=str(folder),
                    split=split,
                    suffixes=list(SUFFIXES),
                )
            if len(paths) > 1 and any(path.suffix != ".parquet" for path in paths):
                names = [path.name for path in paths]
                raise TextError(
                    f"{folder}: several files of the split {split!r} ({', '.join(names)}); remove all but one",
                    code="ambiguous_split",
                    file=str(folder),
                    split=split,
                    files=names,
                )
        return {split: Files(tuple(by_split[split])) for split in ("train", *self.TESTS)}

    def check_corpus(self, corpus: Corpus) -> None:
        if self.corpus not in CONFIGS:
            return
        expected = HELD_OUT_WORDS | {"train": WORDS[self.corpus.removesuffix("-raw")]}
        for split, read in corpus.splits.items():
            words = read.words - read.lines
            if abs(words - expected[split]) > TOLERANCE * expected[split]:
                raise TextError(
                    f"this is not {self.corpus}: its split {split!r} has {expected[split]:,} words, and the files have "
                    f"{words:,}; give your own text another name, for example task.corpus=my-text",
                    code="another_text",
                    corpus=self.corpus,
                    split=split,
                    expected=expected[split],
                    words=words,
                )

    def _from_hub(self) -> Path:
        """The corpus's folder in the hub's local cache; downloads it if it is not there."""
        if self.corpus not in CONFIGS:
            raise TextError(
                f"the corpus {self.corpus!r} is not one of {', '.join(CONFIGS)}, and it has no folder; "
                f"set task.folder, or put its files in $COPE_SWEEP_DATA/{self.corpus}",
                code="no_corpus",
                corpus=self.corpus,
            )
        from huggingface_hub import snapshot_download

        config = CONFIGS[self.corpus]
        try:
            # Without a network this returns what an earlier call downloaded.
            root = snapshot_download(REPOSITORY, repo_type="dataset", allow_patterns=[f"{config}/*.parquet"])
        except Exception as error:  # the hub's client and its transport have no common base class
            reason = " ".join(str(error).split())[:200]
        else:
            if (Path(root) / config).is_dir():
                return Path(root) / config
            reason = f"the repository has no folder {config}"
        raise TextError(
            f"{self.corpus} is not on this machine and cannot be downloaded from the Hugging Face hub ({reason}); "
            f"set task.folder to a folder with its files, or put them in $COPE_SWEEP_DATA/{self.corpus}",
            code="no_download",
            corpus=self.corpus,
            reason=reason,
        )
