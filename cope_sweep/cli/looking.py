"""`status`, `report`, `perplexity`: what came of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from cope_sweep.cli.options import (
    ABLATIONS,
    STORE,
    AblationArg,
    AblationsDir,
    CheckpointArg,
    Json,
    ScaleOpt,
    Sets,
    Store,
    escaped,
    find_checkpoint,
    grid,
    load_plan,
    make_console,
    print_json,
    read_text,
    token_ids,
)
from cope_sweep.errors import UserError

Format = Literal["terminal", "markdown", "latex", "csv", "parquet", "html", "json"]


def status(
    what: Annotated[
        str | None,
        typer.Argument(help="An ablation, or a run's id; none: every sweep on this store.", show_default=False),
    ] = None,
    scale: ScaleOpt = None,
    sets: Sets = [],
    ablations: AblationsDir = ABLATIONS,
    store: Store = STORE,
    as_json: Json = False,
) -> None:
    """How far sweeps and runs are, and why what failed did.

    Example: `cope-sweep status quickstart`
    """
    from cope_sweep.queries import run_status
    from cope_sweep.record import Ledger
    from cope_sweep.record.ledger import RUN_ID

    ledger = Ledger(store)
    if what is None:
        _sweeps(ledger.sweeps(), as_json, f"no sweep yet on {ledger.root}; start one with: cope-sweep run quickstart")
        return
    if RUN_ID.fullmatch(what):
        folder = ledger.run(what)
        if folder.spec is None:
            raise UserError(f"no run {what} on the store {ledger.root}; `cope-sweep plan ABLATION` lists ids")
        _run({**folder.spec, "status": folder.status, "state": folder.state, "result": folder.result}, as_json)
        return
    stands = run_status(load_plan(what, ablations, scale, sets), ledger)
    if as_json:
        print_json(stands)
        return
    shown = grid("run", "row", "seed", "status", "step", "worker", "")
    for run in stands["runs"]:
        step = f"{run['step']}/{run['steps']}"
        cells = (
            run["run_id"],
            run["row"],
            run["seed"],
            run["status"],
            step,
            run["worker_id"] or "",
            run["message"] or "",
        )
        shown.add_row(*map(escaped, cells), style="red" if run["status"] == "failed" else "")
    make_console().print(shown)


def _sweeps(records: list[dict[str, object]], as_json: bool, if_none: str) -> None:
    keys = ("sweep_id", "ablation", "status", "executor", "started_ms", "ended_ms")
    if as_json:
        print_json([{key: record.get(key) for key in keys} for record in records])
    elif records:
        shown = grid("sweep", "ablation", "status", "through")
        for record in records:
            shown.add_row(*(escaped(record[key]) for key in keys[:4]))
        make_console().print(shown)
    else:
        make_console().print(if_none)


def _run(document: dict[str, object], as_json: bool) -> None:
    if as_json:
        print_json(document)
        return
    state = dict(document["state"])  # type: ignore[call-overload]
    traceback = state.pop("traceback", None)
    make_console().print_json(json.dumps(document | {"state": state}))
    if traceback:
        make_console().print(traceback, style="red", markup=False, highlight=False)


def report(
    ablation: AblationArg,
    form: Annotated[Format, typer.Option("--format", help="How to draw it.")] = "terminal",
    every_run: Annotated[
        bool, typer.Option("--runs", help="A line for each run, not for each row (csv, parquet).")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file to write.", show_default=False)] = None,
    scale: ScaleOpt = None,
    sets: Sets = [],
    ablations: AblationsDir = ABLATIONS,
    store: Store = STORE,
    as_json: Annotated[bool, typer.Option("--json", help="The same as `--format json`.")] = False,
) -> None:
    """The ablation's table: mean ± standard deviation over seeds, beside the published numbers.

    Example: `cope-sweep report quickstart --format latex -o table.tex`

    Example: `cope-sweep report quickstart --runs --format parquet -o runs.parquet`
    """
    from cope_sweep.record import Ledger
    from cope_sweep.results import table

    form = "json" if as_json else form
    if every_run and form not in ("csv", "parquet"):
        raise UserError(f"--runs goes with --format csv or parquet, not {form}; json has every run in any case")
    shown = table(load_plan(ablation, ablations, scale, sets), Ledger(store))
    try:
        if form == "parquet":
            if output is None:
                raise UserError("parquet is binary; name a file for it with --output FILE")
            shown.to_parquet(output, runs=every_run)
            return
        if form == "terminal" and output is None:
            make_console().print(shown.to_rich())
            return
        renderers: dict[str, Callable[[], str]] = {
            "terminal": shown.to_markdown,
            "markdown": shown.to_markdown,
            "latex": shown.to_latex,
            "html": shown.to_html,
            "csv": lambda: shown.to_csv(runs=every_run),
            "json": lambda: json.dumps(shown.to_json(), indent=2) + "\n",
        }
        text = renderers[form]()
        if output is not None:
            output.write_text(text, encoding="utf-8")
        else:
            sys.stdout.write(text)
    except OSError as error:
        raise UserError(f"{output}: {error.strerror}; name another file with --output") from error


def perplexity(
    run_or_folder: CheckpointArg,
    tokens: Annotated[
        list[str],
        typer.Option("--tokens", metavar='"ID ID …"', help="A sequence of token ids; repeatable.", show_default=False),
    ] = [],
    text: Annotated[str | None, typer.Option("--text", help="A text; `-`: standard input.", show_default=False)] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            help="A text file; one that ends in .json, or `-` for standard input: a list of lists of token ids.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Of a text: tokens in a window; none: as in training.", show_default=False),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1, help="Of a text: tokens from one window to the next; none: disjoint windows.", show_default=False
        ),
    ] = None,
    store: Store = STORE,
    as_json: Json = False,
) -> None:
    """The perplexity of a text or of token sequences under a finished run's model, each token given those before it.

    A text takes a model that was trained on text: `wikitext`, `code`. One that was trained on its task's answers only
    has learned nothing about the other tokens.

    Example: `cope-sweep perplexity 95199d1142de555d --tokens "3 14 14 7 15"`

    Example: `cope-sweep perplexity 0b1c2d3e4f506172 --file notes.txt --stride 128`
    """
    asks_text = text is not None or (file is not None and str(file) != "-" and file.suffix != ".json")
    if asks_text:
        if tokens or (text is not None and file is not None):
            raise UserError("give one of --text, --file and --tokens")
    elif context is not None or stride is not None:
        raise UserError("--context and --stride are for a text: --text, or --file notes.txt")
    sequences = [] if asks_text else _sequences(tokens, file)
    folder = find_checkpoint(run_or_folder, store)

    from cope_sweep.inference import Predictor

    predictor = Predictor.load(folder)
    try:
        if asks_text:
            of_text = predictor.text_perplexity(read_text(text, file), context=context, stride=stride)
            answer = of_text.__dict__
            told = (
                f"perplexity {of_text.perplexity:.4f} per token, {of_text.word_perplexity:.4f} per word, "
                f"{of_text.bits_per_byte:.4f} bits per byte, over {of_text.tokens} tokens, {of_text.words} words, "
                f"{of_text.size_bytes} bytes"
            )
        else:
            measured = predictor.perplexity(sequences)
            answer = measured.__dict__
            bits = f"{measured.bits_per_token:.4f} bits per token"
            told = f"perplexity {measured.perplexity:.4f} over {measured.tokens} tokens ({bits})"
    except ValueError as error:
        raise UserError(str(error)) from error
    print_json(answer) if as_json else make_console().print(told, soft_wrap=True)


def _sequences(tokens: list[str], file: Path | None) -> list[list[int]]:
    """The sequences of token ids that were given. Raises UserError."""
    sequences = [token_ids(text) for text in tokens]
    if file is not None:
        try:
            sequences += json.loads(sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{file}: not a JSON list of lists of token ids ({error})") from error
    if not sequences:
        raise UserError('nothing to score; give --tokens "3 14 14 7", --file ids.json, --text "…" or --file notes.txt')
    return sequences
