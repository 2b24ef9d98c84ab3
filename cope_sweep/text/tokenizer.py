r"""Byte-level BPE (Sennrich et al. 2016; Radford et al. 2019): GPT-2's tokenizer, one trained on a text, or any other
`tokenizer.json` that loses nothing.

Those of SentencePiece's kind write a blank as `▁`, so that a `▁` of the text is a blank, too, and rare bytes as
`<0x0A>`; the blank that they add before a text is left out. NFC is the only normalisation of characters that is
allowed. The text is the normalised one then.

Encoding is lossless: every text is recovered to the byte. A document starts with the token `<|endoftext|>`. The same
characters inside a text are tokenised as ordinary text.

    "a  new\nline"  →  a · ␠ · ␠new · ↵ · line      5 tokens, 12 bytes, 4 words: a, new, the end of the line, line

Words are separated by blanks. The end of a line also counts as a word, as in WikiText.

Shapes: N sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cope_sweep.text.reading import TextError, file_digest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
GPT2_IDS = 50257
GPT2_FILES = ((TOKENIZER_FILE,), ("vocab.json", "merges.txt"))
"""Sets of files; each set contains the whole tokenizer."""
GPT2_REPOSITORIES = ("openai-community/gpt2", "gpt2")
END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>", "<EOT>")
"""What tokenizers call the token between documents; the first that a tokenizer has counts."""
SMALLEST_VOCABULARY = 257
"""Number of ids of a tokenizer without merges: 256 bytes and the end-of-text token."""

_METASPACE = "▁"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_BLANK_REPLACED = {"type": "Replace", "pattern": {"String": " "}, "content": _METASPACE}


def byte_letters() -> dict[str, int]:
    """Letter of a GPT-2 vocabulary → byte. Printable bytes represent themselves; others have letters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class TextTokenizer:
    """Converts text to ids and back, and counts words and bytes. Threads and processes can share one."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        """`name` is used in error messages. Raises TextError for one that changes a text or has no end of text."""
        data = json.loads(tokenizer.to_str())
        steps = _steps(data["normalizer"])
        for step in steps:
            if step["type"] != "NFC" and step != _BLANK_REPLACED:
                raise TextError(
                    f"{name}: it has a normalizer ({step['type']}), which changes the text before tokenising it; use a "
                    "tokenizer without one",
                    code="unusable_tokenizer",
                    file=name,
                    reason="normalizer",
                )
        tokenizer.encode_special_tokens = True  # the characters of a special token in a text are ordinary text
        # A tokenizer.json may ask for both, and a text would lose its end or get tokens that it does not have.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._is_normalised = {"type": "NFC"} in steps
        self._has_metaspace = _BLANK_REPLACED in steps or any(
            step["type"] == "Metaspace" for step in _steps(data["pre_tokenizer"])
        )
        self.name = name
        vocabulary = tokenizer.get_vocab()
        end_token = next((token for token in END_TOKENS if token in vocabulary), None)
        if end_token is None:
            raise TextError(
                f"{name}: has none of the tokens {', '.join(END_TOKENS)}; every document must start with one",
                code="unusable_tokenizer",
                file=name,
                reason=f"no token {END_OF_TEXT}",
            )
        self.end_of_text: int = vocabulary[end_token]
        self.ids: int = max(vocabulary.values()) + 1
        """Number of token ids; ids are 0 … ids − 1."""
        self._token_bytes = _token_bytes(tokenizer, name, has_metaspace=self._has_metaspace)
        self._token_bytes[self.end_of_text] = b""

    # -- constructors

    @classmethod
    def load(cls, path: Path) -> TextTokenizer:
        """The tokenizer of a `tokenizer.json`. Raises TextError."""
        from tokenizers import Tokenizer

        if not path.is_file():
            raise TextError(f"{path}: no such file", code="no_such_file", file=str(path))
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            tokenizer = Tokenizer.from_str(json.dumps(_without_added_blank(data)))
        except Exception as error:  # the library raises no narrower class
            raise TextError(f"{path}: not a tokenizer ({error})", code="not_a_tokenizer", file=str(path)) from error
        return cls(tokenizer, str(path))

    @classmethod
    def gpt2(cls, paths: Sequence[Path]) -> TextTokenizer:
        """GPT-2's tokenizer, from one of the sets `GPT2_FILES`. Raises TextError."""
        if len(paths) == 1:
            loaded = cls.load(paths[0])
        else:
            from tokenizers import models

            try:
                model = models.BPE.from_file(*map(str, paths))
            except Exception as error:  # as in `load`
                raise TextError(
                    f"{paths[0].parent}: vocab.json and merges.txt are not a BPE ({error})",
                    code="not_a_tokenizer",
                    file=str(paths[0].parent),
                ) from error
            loaded = cls(_byte_level(model, special=True), str(paths[0].parent))
        if loaded.ids != GPT2_IDS:
            raise TextError(
                f"{loaded.name}: has {loaded.ids:,} ids, and GPT-2's tokenizer has {GPT2_IDS:,}",
                code="not_gpt2",
                file=loaded.name,
                ids=loaded.ids,
            )
        return loaded

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary: int) -> TextTokenizer:
        """A BPE with at most `vocabulary` ids; fewer if the text has too few pairs that occur twice."""
        from tokenizers import models, pre_tokenizers, trainers

        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            min_frequency=2,
            special_tokens=[END_OF_TEXT],
            # Sorted, because the library gives a set of Rust in another order in each process.
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer = _byte_level(models.BPE())
        tokenizer.train_from_iterator(texts, trainer=trainer)
        return cls(tokenizer, "the tokenizer trained on this text")

    def save(self, path: Path) -> None:
        """Write a `tokenizer.json`. Raises OSError."""
        # Not by its own `save`, which raises a bare Exception if the disk is full.
        path.write_text(self._tokenizer.to_str(), encoding="utf-8")

    @cached_property
    def digest(self) -> str:
        """SHA-256 of vocabulary and merges, and of how another tokenizer than GPT-2's divides a text before it."""
        data = json.loads(self._tokenizer.to_str())
        merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in data["model"].get("merges", [])]
        content: list[Any] = [sorted(self._tokenizer.get_vocab().items()), merges]
        splitter = data["pre_tokenizer"] or {}
        is_plain = splitter.get("type") == "ByteLevel" and splitter.get("use_regex", True)
        if not is_plain or data["normalizer"]:  # GPT-2's is the one that vocabulary and merges determine
            content.append([data["normalizer"], splitter, data["added_tokens"]])
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    # -- text and ids

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, uint32, without an end-of-text token. Raises TextError if bytes would be lost."""
        if self._is_normalised:
            # As the tokenizer does, so that the bytes of the ids can be compared with those of the text.
            texts = [unicodedata.normalize("NFC", text) for text in texts]
        if self._has_metaspace:
            texts = [text.replace(_METASPACE, " ") for text in texts]
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [np.array(encoding.ids, dtype=np.uint32) for encoding in encoded]
        # Not every tokenizer that loses bytes can be told by its file, so each text is checked.
        bytes_V = self._table["bytes"]
        for text, text_ids in zip(texts, ids, strict=True):
            if int(bytes_V[text_ids].sum()) != len(text.encode()):
                raise TextError(
                    f"{self.name}: its ids do not represent every byte of a text (it may add spaces); "
                    "use GPT-2's tokenizer, or train one: task.tokenizer=bpe",
                    code="unusable_tokenizer",
                    file=self.name,
                    reason="loses bytes",
                )
        return ids

    def pieces(self, ids: Iterable[int]) -> list[bytes]:
        """The bytes of each id, not necessarily whole characters; none for the end-of-text token."""
        return [self._token_bytes.get(int(index), b"") for index in ids]

    def units(self, before_NT: np.ndarray, tokens_NT: np.ndarray, counts_NT: np.ndarray) -> dict[str, np.ndarray]:
        """Numbers of `words` and `bytes` of each sequence, int64, shape (N,).

        A word is counted with the token that contains its first byte.

        Args:
            before_NT: The token before each token.
            tokens_NT: The tokens to count.
            counts_NT: bool; tokens where it is false are not counted.
        """
        table = self._table
        begins_NT = table["begins"][tokens_NT] & table["ends_blank"][before_NT]
        return {
            "words": ((table["words"][tokens_NT] + begins_NT) * counts_NT).sum(-1, dtype=np.int64),
            "bytes": (table["bytes"][tokens_NT] * counts_NT).sum(-1, dtype=np.int64),
        }

    @cached_property
    def _table(self) -> np.ndarray:
        """The counts of each id, shape (V,); a special token counts as a blank without bytes."""
        table = np.zeros(self.ids, dtype=[("bytes", int), ("words", int), ("begins", int), ("ends_blank", int)])
        for index, token in self._token_bytes.items():
            blank = [byte in b" \t\n\r\v\f" for byte in token]
            # Ends of lines, and words that start inside the token. A word at its start depends on the token before.
            words = token.count(b"\n") + sum(before and not here for before, here in itertools.pairwise(blank))
            table[index] = (len(token), words, bool(token) and not blank[0], not token or blank[-1])
        return table


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer: one of the sets `GPT2_FILES`, or a `tokenizer.json`."""

    paths: tuple[Path, ...]
    is_gpt2: bool = False

    def key(self) -> list[str]:
        """The digests of the files. Raises TextError."""
        return [file_digest(path).hex() for path in self.paths]

    def load(self) -> TextTokenizer:
        """The tokenizer. Raises TextError."""
        return TextTokenizer.gpt2(self.paths) if self.is_gpt2 else TextTokenizer.load(self.paths[0])


def find_gpt2(folders: Iterable[Path]) -> list[Path] | None:
    """GPT-2's tokenizer files in one of the folders, else in the local cache of the Hugging Face hub, else None."""
    for folder in folders:
        for names in GPT2_FILES:
            if all((folder / name).is_file() for name in names):
                return [folder / name for name in names]
    from huggingface_hub import try_to_load_from_cache

    for repository in GPT2_REPOSITORIES:
        for names in GPT2_FILES:
            found = [try_to_load_from_cache(repository, name) for name in names]
            # Neither None nor the marker of a file that the hub is known to lack.
            paths = [Path(path) for path in found if isinstance(path, str)]
            if len(paths) == len(names):
                return paths
    return None


def _byte_level(model: Any, *, special: bool = False) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if special:
        tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _token_bytes(tokenizer: Tokenizer, name: str, *, has_metaspace: bool) -> dict[int, bytes]:
    """The bytes of each id; none for special tokens. Raises TextError if a token is not made of bytes."""
    letters = byte_letters()
    added = tokenizer.get_added_tokens_decoder()
    result = {}
    for token, index in tokenizer.get_vocab().items():
        if index in added:
            result[index] = b"" if added[index].special else token.encode()
        elif has_metaspace:
            byte = _BYTE_TOKEN.fullmatch(token)
            result[index] = bytes([int(byte[1], 16)]) if byte else token.replace(_METASPACE, " ").encode()
        else:
            try:
                result[index] = bytes(letters[letter] for letter in token)
            except KeyError:
                raise TextError(
                    f"{name}: not a byte-level BPE, because its token {token!r} is not made of bytes",
                    code="unusable_tokenizer",
                    file=name,
                    reason="not bytes",
                    token=token,
                ) from None
    return result


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, as its file has them."""
    if not part:
        return []
    inner = part.get("normalizers", part.get("pretokenizers"))
    return [part] if inner is None else [step for part in inner for step in _steps(part)]


def _without_added_blank(data: Any) -> Any:
    """The content of a `tokenizer.json` that adds no blank before a text (SentencePiece's `add_dummy_prefix`)."""
    normalizers = [step for step in _steps(data.get("normalizer")) if step["type"] != "Prepend"]
    changed = {**data, "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None}
    splitter = data.get("pre_tokenizer")
    if splitter and splitter.get("type") == "Metaspace":
        changed["pre_tokenizer"] = {**splitter, "prepend_scheme": "never"}
    return changed
