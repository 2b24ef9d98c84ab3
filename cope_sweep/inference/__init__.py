"""Log-probabilities, perplexity and generation with a checkpoint's model, as numpy arrays and numbers.

    log p(token t | tokens < t),  perplexity = exp(−Σ log p / n),  bits per token = −Σ log p / (n·ln 2)

Perplexity is over the n tokens that the task trains (`Task.with_targets`); the model was never asked for the others.
The first token of a sequence has no context: it is an input and is never scored. A text is preceded by the end-of-text
token, as in training, so every token of the text is scored.

Batching and windows change results by rounding errors only. The same call gives the same bits.

predictor ─▶ scoring (batches of windows, perplexity), vocabulary (text ↔ ids)
generation ─▶ predictor
"""

from cope_sweep.errors import NotFiniteError, TokensError
from cope_sweep.inference.generation import Generation, Sampling, generate
from cope_sweep.inference.predictor import Predictor
from cope_sweep.inference.scoring import (
    Perplexity,
    Scores,
    TextPerplexity,
    Window,
    fitting,
    score,
    tokens_read,
    windows,
)
from cope_sweep.inference.vocabulary import (
    LabelVocabulary,
    TokenIds,
    Vocabulary,
    decode,
    validate_sequence,
    validate_token_ids,
)


def _load_pyfunc(path: str) -> Predictor:
    """The checkpoint in a folder. MLflow calls this in `mlflow.pyfunc.load_model`."""
    return Predictor.load(path)


__all__ = [
    "Generation", "LabelVocabulary", "NotFiniteError", "Perplexity", "Predictor", "Sampling",
    "Scores", "TextPerplexity", "TokenIds", "TokensError", "Vocabulary", "Window",
    "decode", "fitting", "generate", "score", "tokens_read", "validate_sequence", "validate_token_ids", "windows",
]  # fmt: skip
