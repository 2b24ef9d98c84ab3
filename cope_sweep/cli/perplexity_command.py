"""The command `perplexity`: scores token ids or a text with a finished run's model."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cope_sweep.cli.options import STORE, CheckpointArg, Json, StoreOpt, find_checkpoint, read_text, token_ids
from cope_sweep.cli.output import make_console, print_json
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from cope_sweep.inference import Predictor

TokensOpt = Annotated[
    list[str],
    typer.Option("--tokens", metavar='"ID ID …"', help="A sequence of token ids. May be repeated.", show_default=False),
]
TextOpt = Annotated[str | None, typer.Option("--text", help="A text; `-` reads standard input.", show_default=False)]
FileOpt = Annotated[
    Path | None,
    typer.Option(
        "--file",
        help="A text file. If it ends in .json, or is `-` (standard input): a JSON list of lists of token ids.",
        show_default=False,
    ),
]
ContextOpt = Annotated[
    int | None,
    typer.Option(
        min=1, help="For a text: tokens in a window. Default: the context of the training.", show_default=False
    ),
]
StrideOpt = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="For a text: tokens from the start of one window to the next. Default: the context (disjoint windows).",
        show_default=False,
    ),
]


def perplexity(
    run_or_folder: CheckpointArg,
    tokens: TokensOpt = [],
    text: TextOpt = None,
    file: FileOpt = None,
    context: ContextOpt = None,
    stride: StrideOpt = None,
    root: StoreOpt = STORE,
    as_json: Json = False,
) -> None:
    """Print the perplexity of token sequences or of a text under a finished run's model.

    Each token is scored given the tokens before it. A text needs a model that was trained on text (`wikitext`,
    `code`). A model of another task was trained on its answers only; its perplexity of other tokens means little.

    Example: `cope-sweep perplexity 95199d1142de555d --tokens "3 14 14 7 15"`

    Example: `cope-sweep perplexity 0b1c2d3e4f506172 --file notes.txt --stride 128`
    """
    is_text = text is not None or (file is not None and str(file) != "-" and file.suffix != ".json")
    if is_text and (tokens or (text is not None and file is not None)):
        raise UserError("give one of --text, --file and --tokens")
    if not is_text and (context is not None or stride is not None):
        raise UserError("--context and --stride are for a text: --text, or --file notes.txt")
    sequences = [] if is_text else _sequences(tokens, file)
    folder = find_checkpoint(run_or_folder, root)  # before torch is imported, which takes seconds

    from cope_sweep.inference import Predictor

    predictor = Predictor.load(folder)
    try:
        if is_text:
            values, line = _score_text(predictor, read_text(text, file), context, stride)
        else:
            values, line = _score_tokens(predictor, sequences)
    except ValueError as error:
        raise UserError(str(error)) from error
    if as_json:
        print_json(values)
    else:
        make_console().print(line, soft_wrap=True)


def _score_text(predictor: Predictor, text: str, context: int | None, stride: int | None) -> tuple[dict[str, Any], str]:
    """The measures of a text as a dictionary, and in one line. Raises UserError."""
    scored = predictor.text_perplexity(text, context=context, stride=stride)
    line = (
        f"perplexity {scored.perplexity:.4f} per token, {scored.word_perplexity:.4f} per word, "
        f"{scored.bits_per_byte:.4f} bits per byte, over {scored.tokens} tokens, {scored.words} words, "
        f"{scored.size_bytes} bytes"
    )
    return asdict(scored), line


def _score_tokens(predictor: Predictor, sequences: list[list[int]]) -> tuple[dict[str, Any], str]:
    """The measures of token sequences as a dictionary, and in one line. Raises UserError."""
    scored = predictor.perplexity(sequences)
    line = (
        f"perplexity {scored.perplexity:.4f} over {scored.tokens} tokens ({scored.bits_per_token:.4f} bits per token)"
    )
    return asdict(scored), line


def _sequences(tokens: list[str], file: Path | None) -> list[list[int]]:
    """The token sequences of `--tokens` and `--file`. Raises UserError."""
    sequences = [token_ids(text) for text in tokens]
    if file is not None:
        try:
            sequences += json.loads(sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{file}: not a JSON list of lists of token ids ({error})") from error
    if not sequences:
        raise UserError('nothing to score; give --tokens "3 14 14 7", --file ids.json, --text "…" or --file notes.txt')
    return sequences
