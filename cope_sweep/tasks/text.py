r"""Text: language modelling of any text files, or of a dataset of the Hugging Face hub.

    {"text": "The lobster is a species …"}      JSON lines: each is a document, tokenised as `¶The lobster is a …`

Files are plain text (each is a document), JSON lines, also compressed, or Parquet (each row is a document, in the
column `column`). They are a file, a folder or a glob of this machine (`path`), or a dataset of the hub (`dataset`), of
which only as much is downloaded as `limit_tokens` or `limit_bytes` ask for.

Where files or the dataset name their splits (`train.jsonl`, `validation-00000-of-00002.parquet`), these are used.
Otherwise `validation_share` and `test_share` are held out by hash: of a plain text file of 16 KiB or more two
neighbouring stretches, of anything else whole documents, so that copies of a document are in the same split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from cope_sweep.errors import InvalidValue
from cope_sweep.frozen import Amount
from cope_sweep.tasks.base import NamedContent, next_name
from cope_sweep.tasks.language import LanguageModelling, Share
from cope_sweep.text import CorpusName, TextError, TextSource, data_dir
from cope_sweep.text.cache import name_of_path
from cope_sweep.text.hub import REPOSITORY, REVISION, HubTexts, Listing, choose_files, list_dataset
from cope_sweep.text.sources import TRAIN, Limit, LocalTexts, Shares, check_shards, find_files, splits_by_name


def _check_dataset(name: str) -> str:
    if not REPOSITORY.fullmatch(name):
        raise InvalidValue(
            f"{name!r} is not a dataset of the Hugging Face hub; write owner/name, as in HuggingFaceFW/fineweb-edu, or "
            "task.path for files of this machine",
            code="invalid_dataset_name",
            key="task.dataset",
            value=name,
        )
    return name


def _check_revision(revision: str) -> str:
    if not REVISION.fullmatch(revision) or ".." in revision:
        raise InvalidValue(
            f"task.revision = {revision!r} is not a revision; write a branch, a tag or a commit",
            key="task.revision",
            value=revision,
        )
    return revision


class Text(LanguageModelling):
    """Language modelling of any text: files of this machine, or a dataset of the Hugging Face hub."""

    NON_IDENTITY_FIELDS: ClassVar[tuple[str, ...]] = ("path", "tokenizer_file")

    kind: Literal["text"] = "text"
    corpus: CorpusName = Field(
        default="text",
        description="The name of the text, part of a run's identity. Without it: the name of `path` or `dataset`.",
    )
    path: str | None = Field(
        default=None,
        description="A file, a folder or a glob of .txt, .jsonl (also .gz, .zst) or .parquet files; null: "
        "$COPE_SWEEP_DATA/<corpus>. Not part of a run's identity.",
    )
    dataset: Annotated[str, AfterValidator(_check_dataset)] | None = Field(
        default=None, description="A dataset of the Hugging Face hub, for example HuggingFaceFW/fineweb-edu."
    )
    configuration: str | None = Field(
        default=None, description="Configuration of the dataset, for example sample-10BT; null: its default."
    )
    split: str = Field(default=TRAIN, description="The split of the dataset to train on.")
    revision: Annotated[str, AfterValidator(_check_revision)] = Field(
        default="main", description="Branch, tag or commit of the dataset. Runs record the commit."
    )
    files: str | None = Field(
        default=None,
        description="A glob of the dataset's files to train on, instead of configuration and split: "
        "`data/python/*.parquet`.",
    )
    column: str = Field(default="text", description="The column of the text, in JSON lines and Parquet files.")
    encoding: Literal["utf-8", "latin-1", "cp1252"] = Field(
        default="utf-8", description="Encoding of plain text files of this machine."
    )
    validation_share: Share = Field(
        default=0.05, description="Share held out by hash, where the text has no validation split."
    )
    test_share: Share = Field(default=0.05, description="Share held out by hash, where the text has no test split.")
    limit_tokens: Amount | None = Field(
        default=None,
        description="Each split ends with the piece of text, of about 65,536 characters at most, by which it has so "
        "many tokens: 20k, 300M, 1.5B. Reading stops where the training split has them.",
    )
    limit_bytes: Amount | None = Field(default=None, description="The same, by bytes of text.")

    @model_validator(mode="before")
    @classmethod
    def _name_corpus(cls, data: Any) -> Any:
        """Without a `corpus`, use the name of the path or dataset."""
        if not isinstance(data, dict) or "corpus" in data:
            return data
        place = data.get("path") or data.get("dataset")
        if not isinstance(place, str):
            return data
        if data.get("path") is not None:
            return data | {"corpus": name_of_path(place)}
        return data | {"corpus": place.replace("/", "--")} if REPOSITORY.fullmatch(place) else data

    @model_validator(mode="after")
    def _check_place_keys(self) -> Self:
        if self.path is not None and self.dataset is not None:
            raise InvalidValue(
                "task.path and task.dataset are both set; remove one of them", key="task.path", value=self.path
            )
        if self.dataset is None:
            of_datasets = ("configuration", "split", "revision", "files")
            self.refuse(of_datasets, "it is for a dataset (task.dataset)", within="task")
        else:
            self.refuse(("encoding",), "it is for text files of this machine (task.path)", within="task")
        if self.files is not None:
            self.refuse(("configuration", "split"), "task.files chooses the files", within="task")
        return self

    @property
    def places(self) -> dict[str, str]:
        return super().places | ({"dataset": self.dataset} if self.dataset is not None else {})

    def named_content(self) -> dict[str, NamedContent]:
        renamed = {"corpus": next_name(self.corpus)}
        if self.dataset is not None:
            content = NamedContent(f"{self.dataset}@{self.revision}", renamed, is_local=False)
        else:
            path = self.path or str(data_dir() / self.corpus)
            content = NamedContent(path, renamed | ({} if self.path else {"path": path}))
        return super().named_content() | {"data": content}

    def check_place(self) -> None:
        super().check_place()
        if self.path is not None:
            find_files(self.path)

    def text_source(self) -> TextSource:
        limit = Limit(self.limit_tokens, self.limit_bytes)
        if self.dataset is not None:
            listing = self._listing()
            chosen = choose_files(listing, self.configuration, self.split, self.files)
            return HubTexts(listing, chosen, self.column, self._shares(chosen), limit)
        source_files = self._local_files()
        by_name = splits_by_name([str(path) for path in source_files])
        files = (
            {split: tuple(map(Path, names)) for split, names in by_name.items()} if by_name else {TRAIN: source_files}
        )
        # A glob that names some shards on purpose, without `*`, may leave out others.
        if self.path is None or "*" in self.path or Path(self.path).expanduser().is_dir():
            check_shards([str(path) for path in source_files])
        return LocalTexts(files, self.column, self.encoding, self._shares(files), limit)

    def data_source(self) -> str | None:
        if self.dataset is None:
            return None
        parts = self.files or " ".join(part for part in (self.configuration, self.split) if part)
        return f"{self.dataset} {parts} at {self._listing().commit}"

    def _listing(self) -> Listing:
        return list_dataset(str(self.dataset), self.revision)

    def _shares(self, files: Any) -> Shares:
        return Shares(
            0.0 if "validation" in files else self.validation_share, 0.0 if "test" in files else self.test_share
        )

    def _local_files(self) -> tuple[Path, ...]:
        if self.path is not None:
            return find_files(self.path)
        place = data_dir() / self.corpus
        if not place.exists():
            raise TextError(
                f"the corpus {self.corpus!r} has no place: set task.path to a file, a folder or a glob, or "
                f"task.dataset to a dataset of the hub, or put its files in $COPE_SWEEP_DATA/{self.corpus}",
                code="no_corpus",
                corpus=self.corpus,
            )
        return find_files(str(place))
