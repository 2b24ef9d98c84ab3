"""The command `perplexity`: scores token ids or a text with a finished run's model."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cope_sweep.cli.options import CheckpointArg, Json, find_checkpoint, read_text, token_ids
from cope_sweep.cli.output import make_console, print_json
from cope_sweep.cli.source import Source, asks, option
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from cope_sweep.client import Client

FileOpt = Annotated[
    Path | None,
    typer.Option(
        "--file",
        help="A text file. If it ends in .json, or is `-` (standard input): a JSON list of lists of token ids.",
        show_default=False,
    ),
]


@asks(
    "cope_sweep.api.requests:PerplexityRequest",
    without=["models", "log_probabilities", "token_labels", "top"],
    tokens=option(kind=list[str], metavar='"ID ID …"', help="A sequence of token ids. May be repeated."),
    text=option(kind=str | None, help="A text; `-` reads standard input."),
)
def perplexity(
    run_or_folder: CheckpointArg, request: dict[str, Any], source: Source, file: FileOpt = None, as_json: Json = False
) -> None:
    """Print the perplexity of token sequences or of a text under a finished run's model.

    Each token is scored given the tokens before it. For a model that was not trained on text (`wikitext`, `code`), a
    text is the labels of tokens with blanks between them. Such a model is scored on what its task trains, the answers,
    so a sequence has to contain them.

    Example: `cope-sweep perplexity 95199d1142de555d --text "_ 3 _ 7 > 3 7"`

    Example: `cope-sweep perplexity 0b1c2d3e4f506172 --file notes.txt --stride 128`
    """
    run_or_folder = source.run_id(run_or_folder)
    tokens, text, context, stride = (request[name] for name in ("tokens", "text", "context", "stride"))
    is_text = text is not None or (file is not None and str(file) != "-" and file.suffix != ".json")
    if is_text and (tokens or (text is not None and file is not None)):
        raise UserError("give one of --text, --file and --tokens")
    if not is_text and (context is not None or stride is not None):
        raise UserError("--context and --stride are for a text: --text, or --file notes.txt")
    given = read_text(text, file) if is_text else _sequences(tokens, file)
    if source.client is not None:
        scored = {"text" if is_text else "tokens": given, "context": context, "stride": stride}
        body = {"models": [run_or_folder]} | {name: value for name, value in scored.items() if value is not None}
        values = _scored_by(source.client, body)
    else:
        values = _scored_here(find_checkpoint(run_or_folder, source.store), given, context, stride)
    line = _text_line(values) if "words" in values else _tokens_line(values)
    if as_json:
        print_json(values)
    else:
        make_console().print(line, soft_wrap=True)


def _scored_here(folder: Path, given: str | list[list[int]], context: int | None, stride: int | None) -> dict[str, Any]:
    """The measures of a text or of token sequences under a checkpoint of this machine. Raises UserError."""
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


def _scored_by(client: Client, body: dict[str, Any]) -> dict[str, Any]:
    """The same measures from a service. Raises UserError."""
    total = client.perplexity(body).results[0].total
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


def _sequences(tokens: Sequence[str], file: Path | None) -> list[list[int]]:
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
