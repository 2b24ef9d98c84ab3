r"""Code: language modelling of source files (Golovneva et al. 2024, section 5.5).

    "¶def mean(values):\n    return sum(values) / len(values)\n¶import os\n …"      ¶ begins a file

The paper's mix of code is not public. The default corpus is the standard library of the running Python, which every
machine has without a download. `python-packages` is 25 times as large: the packages of the project's own
environment, at pinned versions (`text.packages`). Any folder of source files can be used instead; `corpus` names it.

Each file is a document. The SHA-256 of its content assigns it to training, validation or test. So copies of a file are
in the same split, and the location of the folder does not matter. With `split_folders`, the names of a file's first
folders assign it instead, so that all files of a project are in one split.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, Strict, model_validator

from cope_sweep.errors import InvalidValue
from cope_sweep.frozen import Positive
from cope_sweep.tasks.language import FolderTask, Share
from cope_sweep.text import CorpusName, TextError
from cope_sweep.text.packages import package_files
from cope_sweep.text.reading import Files, file_digest
from cope_sweep.text.sources import Shares

STDLIB, PACKAGES = "python-stdlib", "python-packages"

Patterns = Annotated[tuple[str, ...], Strict(False)]
"""Accepts a list too: files have no tuples."""


class Code(FolderTask):
    """Language modelling of source files."""

    kind: Literal["code"] = "code"
    corpus: CorpusName = Field(
        default=STDLIB,
        description="python-stdlib: the standard library of the running Python; python-packages: packages of the "
        "project's environment, at pinned versions; any other name: your own folder.",
    )
    tokens: Positive = Field(default=4096, description="Number of tokens in a context.")
    vocabulary: Annotated[int, Field(ge=257, le=10**9)] = Field(
        default=32000, description="Number of token ids of the model; the tokenizer may have fewer."
    )
    suffixes: Patterns = Field(default=(".py",), description="Suffixes of the files to read.")
    exclude: Patterns = Field(
        default=("test", "tests", "idle_test", "site-packages", "dist-packages", "_sysconfigdata_*", ".*"),
        description="Patterns of names of folders and files to leave out.",
    )
    validation_share: Share = Field(default=0.05, description="Share of the files, chosen by hash.")
    test_share: Share = Field(default=0.05, description="Share of the files, chosen by hash.")
    split_folders: Annotated[int, Field(ge=0, le=100)] = Field(
        default=0,
        description="The first so many folders of a file's path decide its split, instead of its content; 0: its "
        "content.",
    )

    @model_validator(mode="after")
    def _check_folder(self) -> Self:
        if self.folder is not None and self.corpus in (STDLIB, PACKAGES):
            raise InvalidValue(
                f"task.folder is set, and task.corpus is {self.corpus}; give your corpus a name, for example "
                "task.corpus=my-code",
                key="task.corpus",
                value=self.corpus,
            )
        if self.corpus == PACKAGES:
            names = ("suffixes", "exclude", "validation_share", "test_share", "split_folders")
            self.refuse(names, f"{PACKAGES} has its own files and splits", within="task")
        return self

    def text_folder(self) -> Path | None:
        folders = {STDLIB: "stdlib", PACKAGES: "purelib"}
        return Path(sysconfig.get_paths()[folders[self.corpus]]) if self.corpus in folders else super().text_folder()

    def files(self) -> Mapping[str, Files]:
        if self.corpus == PACKAGES:
            return package_files()
        folder = self.text_folder()
        if folder is None:
            raise TextError(
                f"the corpus {self.corpus!r} has no folder; set task.folder, or put its files in "
                f"$COPE_SWEEP_DATA/{self.corpus}",
                code="no_corpus",
                corpus=self.corpus,
            )
        if not folder.is_dir():
            raise TextError(
                f"{folder}: no such folder; set task.folder to the folder of {self.corpus}",
                code="no_such_file",
                file=str(folder),
                corpus=self.corpus,
            )
        splits: dict[str, list[Path]] = {"train": [], "validation": [], "test": []}
        for path in self._sources(folder):
            splits[self._split(path, folder)].append(path)
        for split, paths in splits.items():
            if not paths:
                raise TextError(
                    f"{folder}: the hash assigns none of its files with the suffixes {', '.join(self.suffixes)} to the "
                    f"split {split!r}; add files, or increase task.validation_share and task.test_share",
                    code="empty_split",
                    file=str(folder),
                    split=split,
                    suffixes=list(self.suffixes),
                )
        return {split: Files(tuple(paths), one_document=False) for split, paths in splits.items()}

    def _sources(self, folder: Path) -> Iterator[Path]:
        """The files to read, without empty ones, in an order that is the same on every machine."""
        paths = []
        for root, names, files in os.walk(folder):
            # In place: os.walk does not enter folders that are removed from its list.
            names[:] = [name for name in names if not self._excluded(name)]
            paths += [Path(root) / name for name in files if name.endswith(self.suffixes) and not self._excluded(name)]
        for path in sorted(paths, key=lambda path: path.relative_to(folder).parts):
            if path.is_file() and path.stat().st_size:
                yield path

    def _excluded(self, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in self.exclude)

    def _split(self, path: Path, folder: Path) -> str:
        shares = Shares(self.validation_share, self.test_share)
        if not self.split_folders:
            return shares.split_of(file_digest(path))
        above = path.relative_to(folder).parts[:-1][: self.split_folders]
        return shares.split_of(hashlib.sha256("/".join(above).encode()).digest())
