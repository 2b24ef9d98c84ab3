"""The commands `cope-sweep bench …`."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cope_sweep.cli.options import JsonOpt
from cope_sweep.cli.output import print_json
from cope_sweep.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Measure kernels, training steps, data, the sweep, the store and the service on this machine. "
    "Exit code 1: a goal is missed, or what was to be timed is wrong.",
)

Precision = StrEnum("Precision", ["fp32", "bf16"])
BOTH = list(Precision)
Keep = Annotated[
    Path | None,
    typer.Option("--keep", help="Write the measurement to this folder, as JSON and Markdown.", show_default=False),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", min=1, help="Number of torch threads; with 1, CPU time is measured.", show_default="all cores"
    ),
]
Repetitions = Annotated[
    int, typer.Option("--repetitions", min=2, help="How many times each alternative is timed, in turns.")
]


@app.command()
def attention(
    as_json: JsonOpt = False,
    keep: Keep = None,
    threads: Threads = None,
    repetitions: Repetitions = 9,
    avx2: Annotated[bool, typer.Option("--avx2", help="Use at most AVX2 in every alternative.")] = False,
) -> None:
    """Measure attention with CoPE on this CPU: native kernels, PyTorch in blocks, the paper's listing and torch's SDPA.

    Takes about six minutes. Outputs and gradients are checked before anything is timed. Results are kept by instruction
    set: attention-avx512.json, attention-avx2.json.

    Example: `cope-sweep bench attention --threads 1 --avx2 --keep results`
    """
    if avx2:
        limit_to_avx2()
    _measure("attention", (repetitions,), as_json, keep, threads, "attention-{cpu_capability}")


@app.command()
def step(as_json: JsonOpt = False, keep: Keep = None, threads: Threads = None, repetitions: Repetitions = 9) -> None:
    """Measure training steps on this CPU: ours with CoPE and RoPE, plain PyTorch's and x-transformers' (`pip install -e .[test]`).

    Example: `cope-sweep bench step --threads 1 --keep results`
    """
    _measure("step", (repetitions,), as_json, keep, threads)


@app.command()
def prefill(
    as_json: JsonOpt = False,
    keep: Keep = None,
    threads: Threads = None,
    repetitions: Repetitions = 3,
    positions: Annotated[
        list[str] | None,
        typer.Option(
            "--position", help="A further value of model.position: `alibi`, `[cope, rope]`.", show_default=False
        ),
    ] = None,
    tokens: Annotated[list[int], typer.Option("--tokens", min=1, help="Length of the prompt.")] = [1024, 4096],  # noqa: B006
    precisions: Annotated[list[Precision], typer.Option("--precision", help="Number format.")] = BOTH,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Layers of the model; GPT-2 small has 12.")] = 12,
) -> None:
    """Measure the forward pass of a model of GPT-2 small's size over a prompt: no encoding, RoPE, CoPE, FoX, the paper's listing.

    On a GPU if there is one. The listing needs gigabytes of memory at 4,096 tokens.

    Example: `cope-sweep bench prefill --position alibi --tokens 1024 --precision fp32`
    """
    _measure("prefill", (positions or (), tokens, precisions, repetitions, layers), as_json, keep, threads)


@app.command()
def decode(
    as_json: JsonOpt = False,
    keep: Keep = None,
    threads: Threads = None,
    repetitions: Repetitions = 9,
    tokens: Annotated[list[int], typer.Option("--tokens", min=1, help="Length of the context.")] = [256, 1024, 4096],  # noqa: B006
    layers: Annotated[int, typer.Option("--layers", min=1, help="Layers of the model; GPT-2 small has 12.")] = 12,
) -> None:
    """Measure what one token costs after a cached context, on this CPU: no encoding, RoPE, and CoPE with several gates and tables.

    Example: `cope-sweep bench decode --layers 3 --threads 1`
    """
    _measure("decode", (tokens, repetitions, layers), as_json, keep, threads)


@app.command()
def gates(
    as_json: JsonOpt = False,
    keep: Keep = None,
    tokens: Annotated[list[int], typer.Option("--tokens", min=1, help="Length of a row.")] = [512, 2048, 8192],  # noqa: B006
) -> None:
    """Measure the error of positions that are summed in bfloat16, in float32, or in fixed point. Takes seconds.

    Example: `cope-sweep bench gates`
    """
    _measure("gates", (tokens,), as_json, keep)


@app.command()
def sizes(
    as_json: JsonOpt = False,
    keep: Keep = None,
    head_dim: Annotated[int, typer.Option("--head-dim", min=1, max=256, help="Head dimension of the queries.")] = 64,
) -> None:
    """Compile the Triton kernels for an H100, and count registers, memory and instructions. Needs no GPU, and times nothing.

    Example: `cope-sweep bench sizes --head-dim 128`
    """
    _measure("sizes", (head_dim,), as_json, keep)


@app.command()
def sweep(
    as_json: JsonOpt = False,
    keep: Keep = None,
    runs: Annotated[int, typer.Option("--runs", min=10, help="Runs of one step.")] = 1_000,
    repetitions: Annotated[
        int, typer.Option("--repetitions", min=1, help="How many times the sweep and a bare trainable are timed.")
    ] = 3,
) -> None:
    """Measure the sweep: many trivial runs, a bare Tune trainable, MLflow, the time between runs, and a killed process.

    Takes up to fifteen minutes on two quiet cores.

    Example: `cope-sweep bench sweep --keep results`
    """
    _measure("sweep", (runs, repetitions), as_json, keep)


@app.command()
def store(
    as_json: JsonOpt = False,
    keep: Keep = None,
    runs: Annotated[int, typer.Option("--runs", help="Runs of the store: a multiple of 100.")] = 100_000,
) -> None:
    """Measure how fast a store of many finished runs is indexed, asked, compared, reported and checked.

    Takes about eight minutes for 100,000 runs, and 3 GB of disk.

    Example: `cope-sweep bench store --keep results`
    """
    _measure("store", (runs,), as_json, keep)


@app.command()
def serve(
    as_json: JsonOpt = False,
    keep: Keep = None,
    runs: Annotated[int, typer.Option("--runs", help="Runs of the store that is read: a multiple of 1,000.")] = 100_000,
) -> None:
    """Measure the service: perplexity of 32 clients, and tables and pages of many runs.

    Takes about six minutes.

    Example: `cope-sweep bench serve --keep results`
    """
    _measure("serve", (runs,), as_json, keep)


@app.command()
def data(as_json: JsonOpt = False, keep: Keep = None) -> None:
    """Measure how many sequences per second each task generates, and how many its training step consumes, at the paper's sizes.

    Example: `cope-sweep bench data`
    """
    _measure("data", (), as_json, keep)


@app.command()
def agents(
    as_json: JsonOpt = False,
    keep: Keep = None,
    searches: Annotated[int, typer.Option("--searches", min=1, help="Simulated searches of each kind.")] = 20,
) -> None:
    """Measure by which rule a scripted agent finds what is better: one seed, a better mean, or our verdict.

    Takes seconds, trains nothing and asks no language model: runs are drawn from committed results.

    Example: `cope-sweep bench agents --searches 200`
    """
    _measure("agents", (searches,), as_json, keep)


def limit_to_avx2() -> None:
    """Let torch, the libraries of its matrix products, and the native kernels use no better instructions than AVX2.

    Torch reads the limits when it is imported. Raises UserError if it is imported already, or without AVX2.
    """
    if "torch" in sys.modules:
        raise UserError("--avx2 needs a process that has not imported torch; run the command by itself")
    # The native kernels choose their library by torch's limit.
    os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    if capability != "AVX2":
        raise UserError(f"--avx2: this processor's best instructions are {capability}; measure without --avx2")


def _measure(
    module: str,
    arguments: tuple[object, ...],
    as_json: bool,
    folder: Path | None,
    threads: int | None = None,
    name: str = "{bench}",
) -> None:
    """Measure, save and print: the body of all commands. Exits with 1 if a goal is missed, or if results are wrong.

    Args:
        module: The module of this package whose function `measure` returns the measurement. It imports torch.
        arguments: Those of the function.
        as_json: Whether JSON is printed, and not the table.
        folder: Where both are saved. Raises UserError if it cannot be written, before minutes of measuring.
        threads: Of torch; None: as many as it chooses.
        name: Of the files.
    """
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise UserError(f"--keep {folder}: {error.strerror}; name a folder that can be written") from error
    from cope_benchmarks import report

    measured = importlib.import_module(f"cope_benchmarks.{module}").measure(*arguments)
    if folder is not None:
        cpu_capability = measured["machine"]["cpu_capability"].lower()
        report.save(folder, name.format(bench=measured["bench"], cpu_capability=cpu_capability), measured)
    if as_json:
        print_json(measured)
    else:
        typer.echo(report.table(measured))
    if report.failed(measured):
        raise typer.Exit(1)
