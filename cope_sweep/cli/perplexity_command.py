"""The command `perplexity`: scores token ids or a text with a finished run's model."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cope_sweep.cli.options import STORE, CheckpointArg, Json, StoreOpt, find_checkpoint, read_text, token_ids
from cope_sweep.cli.output import make_console, print_json
from cope_sweep.cli.remote import ServerOpt, connect
from cope_sweep.errors import UserError

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
    server: ServerOpt = None,
    as_json: Json = False,
) -> None:
    """Print the perplexity of token sequences or of a text under a finished run's model.

    Each token is scored given the tokens before it. For a model that was not trained on text (`wikitext`, `code`), a
    text is the labels of tokens with blanks between them. Such a model is scored on what its task trains, the answers,
    so a sequence has to contain them.

    Example: `cope-sweep perplexity 95199d1142de555d --text "_ 3 _ 7 > 3 7"`

    Example: `cope-sweep perplexity 0b1c2d3e4f506172 --file notes.txt --stride 128`
    """
    is_text = text is not None or (file is not None and str(file) != "-" and file.suffix != ".json")
    if is_text and (tokens or (text is not None and file is not None)):
        raise UserError("give one of --text, --file and --tokens")
    if not is_text and (context is not None or stride is not None):
        raise UserError("--context and --stride are for a text: --text, or --file notes.txt")
    sequences = [] if is_text else _sequences(tokens, file)
    if server is not None:
        body: dict[str, Any] = {"text": read_text(text, file)} if is_text else {"tokens": sequences}
        body |= {name: value for name, value in (("context", context), ("stride", stride)) if value is not None}
        values = _scored_by(server, run_or_folder, body)
    else:
        values = _scored_here(run_or_folder, root, read_text(text, file) if is_text else sequences, context, stride)
    line = _text_line(values) if "words" in values else _tokens_line(values)
    if as_json:
        print_json(values)
    else:
        make_console().print(line, soft_wrap=True)


def _scored_here(
    run_or_folder: str, root: str, given: str | list[list[int]], context: int | None, stride: int | None
) -> dict[str, Any]:
    """The measures of a text or of token sequences under a checkpoint of this machine. Raises UserError."""
    folder = find_checkpoint(run_or_folder, root)  # before torch is imported, which takes seconds

    from cope_sweep.inference import Predictor

    predictor = Predictor.load(folder)
    try:
        if isinstance(given, str) and predictor.reads_text:
            return asdict(predictor.text_perplexity(given, context=context, stride=stride))
        if isinstance(given, str):  # of labels
            given = [predictor.vocabulary.encode(given).tolist()]
        return asdict(predictor.perplexity(given, context=context, stride=stride))
    except ValueError as error:
        raise UserError(str(error)) from error


def _scored_by(server: str, run_id: str, body: dict[str, Any]) -> dict[str, Any]:
    """The same measures from a service. Raises UserError."""
    with connect(server) as client:
        total = client.perplexity(run_id, body).total
    values = total.model_dump(include={"nll_sum", "tokens", "positions", "perplexity", "bits_per_token"})
    if total.text is not None:
        values |= total.text.model_dump(include={"words", "size_bytes", "word_perplexity", "bits_per_byte"})
    # The service sends null for a number that overflows.
    return {key: math.inf if value is None else value for key, value in values.items()}


def _text_line(scored: dict[str, Any]) -> str:
    return (
        f"perplexity {scored['perplexity']:.4f} per token, {scored['word_perplexity']:.4f} per word, "
        f"{scored['bits_per_byte']:.4f} bits per byte, over {scored['tokens']} tokens, {scored['words']} words, "
        f"{scored['size_bytes']} bytes"
    )


def _tokens_line(scored: dict[str, Any]) -> str:
    return (
        f"perplexity {scored['perplexity']:.4f} over the {scored['tokens']} of {scored['positions']} tokens that the "
        f"task trains ({scored['bits_per_token']:.4f} bits per token)"
    )


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
