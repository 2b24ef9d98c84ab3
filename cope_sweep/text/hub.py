"""Datasets and tokenizers of the Hugging Face hub, by its client, which is imported when one is used.

The name of a revision, as `main`, is resolved once per cache: the commit and the files of the repository are kept in
$COPE_SWEEP_CACHE/hub, so later runs read the same text, also without a network. Files are read over the network as they
are tokenised; no name that the hub gives becomes a path of this machine. Access tokens are the hub client's:
`hf auth login`, or HF_TOKEN. HF_ENDPOINT names another server.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

from cope_sweep.errors import JsonValue
from cope_sweep.text.cache import cache_dir, create_once
from cope_sweep.text.reading import TextError
from cope_sweep.text.sources import (
    NO_LIMIT,
    SPLIT_WORDS,
    TEST,
    TRAIN,
    VALIDATION,
    Limit,
    RowReader,
    Shares,
    SourcePart,
    Split,
    TextDocument,
    check_shards,
    kind_of,
    splits_by_name,
)

REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
"""Name of a dataset or model: owner/name."""
REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
LISTING_FILE = "listing.json"
FORMATS = "Parquet or JSON lines"


@dataclass(frozen=True)
class Listing:
    """A dataset at a commit."""

    dataset: str
    commit: str
    sizes: Mapping[str, int]
    """File → its size in bytes."""
    configurations: Mapping[str, Mapping[Split, list[str]]]
    """Configuration of the dataset's card → split → globs of its files; empty where the card has none."""


def list_dataset(dataset: str, revision: str) -> Listing:
    """A dataset's commit, files and configurations, from the cache, or else from the hub. Raises TextError."""
    # Another server may have another dataset of this name.
    key = hashlib.sha256(json.dumps([_endpoint(), dataset, revision]).encode()).hexdigest()[:32]

    def create(folder: Path) -> None:
        (folder / LISTING_FILE).write_text(json.dumps(_fetch_listing(dataset, revision)), encoding="utf-8")

    path = create_once(cache_dir() / "hub" / key, create) / LISTING_FILE
    try:
        return Listing(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise TextError(
            f"{path.parent}: damaged ({error}); delete this folder, and it will be created again",
            code="damaged_cache",
            file=str(path.parent),
            reason=str(error),
        ) from error


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _fetch_listing(dataset: str, revision: str) -> dict[str, Any]:
    from huggingface_hub import HfApi

    try:
        info = HfApi().dataset_info(dataset, revision=revision, files_metadata=True)
        card: Any = info.card_data
        configs = card.to_dict().get("configs") if card else None
    except Exception as error:  # the hub's client and its transport have no common base class
        raise explained(error, dataset, revision) from error
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
    return {
        "dataset": dataset, "commit": info.sha, "sizes": sizes, "configurations": _configurations(configs),
    }  # fmt: skip


def _configurations(configs: Any) -> dict[str, dict[str, list[str]]]:
    """The configurations of a dataset card. Leaves out what does not have the form that the hub documents."""
    configurations: dict[str, dict[str, list[str]]] = {}
    for entry in configs if isinstance(configs, list) else []:
        if not isinstance(entry, dict) or not isinstance(name := entry.get("config_name"), str):
            continue
        files = entry.get("data_files", [])
        if isinstance(files, str) or (isinstance(files, list) and all(isinstance(item, str) for item in files)):
            files = [{"split": TRAIN, "path": files}]
        splits: dict[str, list[str]] = {}
        for item in files if isinstance(files, list) else []:
            if isinstance(item, dict) and isinstance(item.get("split"), str):
                globs = item.get("path")
                globs = [globs] if isinstance(globs, str) else globs
                splits[item["split"]] = [glob for glob in globs or [] if isinstance(glob, str)]
        configurations[name] = splits
    return configurations


def explained(error: Exception, repository: str, revision: str, *, kind: str = "dataset") -> TextError:
    """The error of the hub's client or of the network as one that says what to do."""
    from huggingface_hub import errors

    place = f"{repository}@{revision}"
    reason = " ".join(str(error).split())[:200]
    url = f"{_endpoint()}/{'datasets/' if kind == 'dataset' else ''}{repository}"
    data: dict[str, JsonValue] = {kind: repository, "revision": revision, "reason": reason}
    # A GatedRepoError is a RepositoryNotFoundError, too, so it is asked for first.
    if isinstance(error, errors.GatedRepoError):
        message = f"the {kind} is gated: accept its conditions at {url}, and log in with `hf auth login` or HF_TOKEN"
        return TextError(f"{place}: {message}", code=f"gated_{kind}", **data)
    if isinstance(error, errors.RevisionNotFoundError):
        message = f"there is no such revision; {url} lists its branches, tags and commits"
        return TextError(f"{place}: {message}", code="no_such_revision", **data)
    if isinstance(error, errors.RepositoryNotFoundError):
        message = f"{_endpoint()} has no such {kind}; check its name, or log in with `hf auth login` if it is private"
        return TextError(f"{place}: {message}", code=f"no_such_{kind}", **data)
    if isinstance(error, (errors.EntryNotFoundError, FileNotFoundError)):
        return TextError(f"{place}: a file is gone ({reason})", code="no_such_file", **data)
    return TextError(
        f"{place}: cannot be read from {_endpoint()} ({type(error).__name__}: {reason}); try again",
        code="no_download",
        **data,
    )


# -- files of a dataset ------------------------------------------------------------------------------------------------


def matching(names: Collection[str], glob: str) -> list[str]:
    """The names that a glob matches, sorted: `*` is within a folder, `**/` any number of folders."""
    # Not fnmatch, whose `*` crosses folders, nor glob, which needs files.
    pattern = ""
    for part in re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]/]+\])", glob):
        wildcard = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(part)
        is_class = part.startswith("[") and part.endswith("]") and len(part) > 2
        pattern += wildcard or (part.replace("\\", "\\\\").replace("[!", "[^") if is_class else re.escape(part))
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise TextError(f"{glob!r} is not a glob ({error})", code="invalid_glob", value=glob) from error
    return sorted(name for name in names if compiled.fullmatch(name))


def choose_files(listing: Listing, configuration: str | None, split: str, glob: str | None) -> dict[Split, list[str]]:
    """The files of the training split, and of validation and test where the dataset has them. Raises TextError."""
    if glob is not None:
        return {TRAIN: _readable(listing, matching(listing.sizes, glob), f"task.files={glob}", complete="*" in glob)}
    configurations = listing.configurations
    if not configurations:
        return _by_name(listing, configuration, split)
    name = configuration
    if not name and "default" in configurations:
        name = "default"
    elif not name and len(configurations) == 1:
        name = next(iter(configurations))
    if name is None or name not in configurations:
        listed = ", ".join(configurations)
        which = "has several configurations" if name is None else f"has no configuration {name!r}"
        raise TextError(
            f"{listing.dataset}: {which}; set task.configuration to one of {listed}",
            code="unknown_configuration",
            dataset=listing.dataset,
            configuration=name,
            allowed=list(configurations),
        )
    splits = {
        split_name: [file for glob in globs for file in matching(listing.sizes, glob)]
        for split_name, globs in configurations[name].items()
    }
    return _chosen(listing, splits, split, f"its configuration {name!r}")


def _by_name(listing: Listing, configuration: str | None, split: str) -> dict[Split, list[str]]:
    """The files of a dataset without configurations, by their names."""
    names = [name for name in listing.sizes if kind_of(name) in ("json", "parquet")]
    if configuration is not None:
        names = [name for name in names if name.startswith(f"{configuration}/")]
    splits = splits_by_name(names) or {split: names}
    return _chosen(listing, splits, split, f"its folder {configuration}" if configuration else "it")


def _chosen(listing: Listing, splits: Mapping[str, list[str]], split: str, where: str) -> dict[Split, list[str]]:
    if split not in splits:
        raise TextError(
            f"{listing.dataset}: {where} has no split {split!r}; set task.split to one of {', '.join(splits)}",
            code="unknown_split",
            dataset=listing.dataset,
            split=split,
            allowed=list(splits),
        )
    chosen = {TRAIN: _readable(listing, splits[split], f"the split {split!r} of {where}")}
    for name, files in splits.items():
        own = SPLIT_WORDS.get(name)
        if own in (VALIDATION, TEST) and name != split and own not in chosen and files:
            chosen[own] = _readable(listing, files, f"the split {name!r} of {where}")
    return chosen


def _readable(listing: Listing, names: list[str], where: str, *, complete: bool = True) -> list[str]:
    """The files that can be read. Raises TextError where there are none.

    `complete`: raise it also where one of several numbered files is missing.
    """
    names = list(dict.fromkeys(name for name in names if kind_of(name) in ("json", "parquet")))
    if not names:
        raise TextError(
            f"{listing.dataset}: {where} has no file in {FORMATS}; choose others with task.files, or take the hub's "
            "conversion with task.revision=refs/convert/parquet",
            code="no_such_file",
            dataset=listing.dataset,
            commit=listing.commit,
        )
    if complete:
        check_shards(names)
    return names


@dataclass(frozen=True)
class HubTexts:
    """Files of a dataset of the hub, read over the network."""

    listing: Listing
    files: Mapping[Split, list[str]]
    column: str
    shares: Shares
    limit: Limit = NO_LIMIT

    splits: tuple[Split, ...] = (TRAIN, VALIDATION, TEST)

    @property
    def size_bytes(self) -> int:
        return sum(self.listing.sizes[name] for names in self.files.values() for name in names)

    def key(self) -> JsonValue:
        return {
            "dataset": self.listing.dataset, "commit": self.listing.commit, "files": dict(self.files),
            "column": self.column, "shares": [self.shares.validation, self.shares.test],
            "limit": [self.limit.tokens, self.limit.size_bytes],
        }  # fmt: skip

    def parts(self, full: Collection[Split]) -> Iterator[SourcePart]:
        named = [(split, name) for split, names in self.files.items() for name in names]
        for split, name in named:
            if split in full:
                continue
            rows = RowReader(
                f"{self.listing.dataset}@{self.listing.commit[:12]}/{name}",
                self.listing.sizes[name],
                functools.partial(self._open, name),
                self.column,
            )
            with self._explained_errors():
                for part in rows.parts(split, self.shares):
                    yield replace(part, documents=functools.partial(self._documents, part))

    def _documents(self, part: SourcePart) -> Iterator[TextDocument]:
        with self._explained_errors():
            yield from part.documents()

    @contextlib.contextmanager
    def _explained_errors(self) -> Iterator[None]:
        try:
            yield
        except TextError:
            raise
        except Exception as error:  # the hub's client and its transport have no common base class
            raise explained(error, self.listing.dataset, self.listing.commit[:12]) from error

    def _open(self, name: str) -> IO[bytes]:
        # The commit, and not the branch, which may move while files are read. The known size saves a request per file.
        path = f"datasets/{self.listing.dataset}@{self.listing.commit}/{name}"
        return cast("IO[bytes]", _file_system(_endpoint()).open(path, "rb", size=self.listing.sizes[name] or None))


@functools.cache
def _file_system(endpoint: str) -> Any:
    """The hub's files; one object for all threads, so that a folder is listed once."""
    from huggingface_hub import HfFileSystem

    return HfFileSystem(endpoint=endpoint)


# -- tokenizers --------------------------------------------------------------------------------------------------------


def fetch_tokenizer(repository: str, revision: str | None, name: str) -> Path:
    """A file of a model's repository in the hub's cache; downloaded if it is not there. Raises TextError."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, name, revision=revision))
    except Exception as error:  # as above
        raise explained(error, repository, revision or "main", kind="tokenizer") from error
