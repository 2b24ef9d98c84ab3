r"""Code: source files to predict (Golovneva et al. 2024, section 5.5).

    "¶def mean(values):\n    return sum(values) / len(values)\n¶import os\n …"      ¶ begins a file

The paper's mix of code is not public. The default corpus is the standard library of the Python that runs this, so that
there is code on every machine, with nothing to download; any folder of source files will do (`corpus` names it).

A file is a document. The SHA-256 of its content says whether it is for training, validation or test, so that files that
are copies of each other stay together, wherever the folder lies.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, Strict, model_validator

from cope_sweep.tasks.language import LanguageModelling
from cope_sweep.text import TextError
from cope_sweep.text.reading import Files, file_digest

STDLIB = "python-stdlib"

Share = Annotated[float, Field(gt=0, lt=0.5)]
Patterns = Annotated[tuple[str, ...], Strict(False)]
"""Not strict of the tuple: a file's list is welcome."""


class Code(LanguageModelling):
    """Source files to predict."""

    kind: Literal["code"] = "code"
    corpus: str = Field(
        default=STDLIB, description="python-stdlib: of the Python that runs this; another name: a folder of your own."
    )
    tokens: Annotated[int, Field(ge=1)] = Field(default=4096, description="Tokens in a context.")
    vocabulary: Annotated[int, Field(ge=257)] = Field(
        default=32000, description="Token ids of the model; a tokenizer may use fewer."
    )
    suffixes: Patterns = Field(default=(".py",), description="Ends of the names of files to read.")
    exclude: Patterns = Field(
        default=("test", "tests", "idle_test", "site-packages", "dist-packages", "_sysconfigdata_*", ".*"),
        description="Patterns of folders and files to leave out.",
    )
    validation_share: Share = Field(default=0.05, description="Share of the files, by hash.")
    test_share: Share = Field(default=0.05, description="Share of the files, by hash.")

    @model_validator(mode="after")
    def _own_corpora_have_a_name(self) -> Self:
        if self.folder is not None and self.corpus == STDLIB:
            raise ValueError(f"task.folder is not {STDLIB}: name your corpus, as task.corpus=my-code")
        return self

    def files(self) -> Mapping[str, Files]:
        folder = Path(sysconfig.get_paths()["stdlib"]) if self.corpus == STDLIB else self.data_folder()
        if folder is None:
            raise TextError(
                f"the corpus {self.corpus!r} comes from a folder: set task.folder, "
                f"or put it in $COPE_SWEEP_DATA/{self.corpus}"
            )
        if not folder.is_dir():
            raise TextError(f"{folder}: no such folder; task.folder names that of {self.corpus}")
        splits: dict[str, list[Path]] = {"train": [], "validation": [], "test": []}
        for path in self._sources(folder):
            splits[self._split(path)].append(path)
        for split, paths in splits.items():
            if not paths:
                raise TextError(
                    f"{folder}: of its files in {', '.join(self.suffixes)} none fell to the split {split!r}; "
                    "it needs more files, or larger shares"
                )
        return {split: Files(tuple(paths), one_document=False) for split, paths in splits.items()}

    def _sources(self, folder: Path) -> Iterator[Path]:
        """The files to read, those with nothing in them left out, in an order that no machine changes."""
        paths = []
        for root, names, files in os.walk(folder):
            names[:] = [name for name in names if not self._excluded(name)]
            paths += [Path(root) / name for name in files if name.endswith(self.suffixes) and not self._excluded(name)]
        for path in sorted(paths, key=lambda path: path.relative_to(folder).parts):
            if path.is_file() and path.stat().st_size:
                yield path

    def _excluded(self, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in self.exclude)

    def _split(self, path: Path) -> str:
        share = int.from_bytes(file_digest(path)[:8]) / 2**64
        if share < self.validation_share:
            return "validation"
        return "test" if share < self.validation_share + self.test_share else "train"
