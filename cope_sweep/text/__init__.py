"""Text as token ids: strict reading of files and datasets, tokenizers, and memory-mapped shards that a machine makes
once.
"""

from cope_sweep.text.cache import CorpusName, cache_dir, data_dir
from cope_sweep.text.corpus import Corpus, open_corpus
from cope_sweep.text.hub import fetch_tokenizer
from cope_sweep.text.order import permuted
from cope_sweep.text.reading import TextError
from cope_sweep.text.sources import SplitFiles, TextSource
from cope_sweep.text.tokenizer import END_OF_TEXT, TOKENIZER_FILE, TextTokenizer, TokenizerFiles

__all__ = [
    "END_OF_TEXT",
    "TOKENIZER_FILE",
    "Corpus",
    "CorpusName",
    "SplitFiles",
    "TextError",
    "TextSource",
    "TextTokenizer",
    "TokenizerFiles",
    "cache_dir",
    "data_dir",
    "fetch_tokenizer",
    "open_corpus",
    "permuted",
]
