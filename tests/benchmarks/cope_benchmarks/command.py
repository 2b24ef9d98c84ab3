"""The commands `cope-sweep bench …`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cope_benchmarks.instructions import limit_to_avx2
from cope_sweep.cli.options import Json
from cope_sweep.cli.output import grid, make_console, print_json
from cope_sweep.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Measure kernels, training steps, data, the sweep, the store, results and the service on this machine, beside "
    "alternatives in the same run.",
)

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

Device = Annotated[
    str, typer.Option("--device", help="cuda; or cpu: a dry run of tiny shapes, which needs TRITON_INTERPRET=1.")
]


@app.command()
def attention(
    as_json: Json = False,
    keep: Keep = None,
    threads: Threads = None,
    repetitions: Repetitions = 9,
    avx2: Annotated[
        bool, typer.Option("--avx2", help="Use no better instructions than AVX2, in all alternatives.")
    ] = False,
) -> None:
    """Measure attention with CoPE on this CPU: native and blocked kernels, the paper's listing and torch's SDPA.

    Takes about six minutes. Outputs and gradients are checked before anything is timed. Results are kept by instruction
    set: attention-avx512.json, attention-avx2.json.

    Example: `cope-sweep bench attention --threads 1 --avx2 --keep results`
    """
    if avx2:
        limit_to_avx2()
    from cope_benchmarks.attention import measure, table

    _check_writable(keep)
    _use_threads(threads)
    measured = measure(repetitions=repetitions)
    name = f"attention-{measured['machine']['cpu_capability'].lower()}"
    _show(name, measured, table(measured), as_json, keep)


@app.command()
def step(
    as_json: Json = False,
    keep: Keep = None,
    threads: Threads = None,
    repetitions: Repetitions = 9,
    memory: Annotated[
        bool,
        typer.Option(
            "--memory", help="Instead, peak memory of a step of GPT-2's size, with and without logits as a whole."
        ),
    ] = False,
    device: Annotated[
        str, typer.Option("--device", help="cpu; or cuda: the paper's models on a GPU, resumable with --keep.")
    ] = "cpu",
) -> None:
    """Measure training steps with CoPE on this CPU or a GPU, and those of the same model with SDPA and no positions.

    Example: `cope-sweep bench step --keep results`

    Example: `cope-sweep bench step --device cuda --keep results/gpu`
    """
    from cope_benchmarks.step import measure, table

    _check_writable(keep)
    if device != "cpu":
        from cope_benchmarks import step_cuda

        _check_device(device)
        with _user_errors():
            measured = step_cuda.measure(keep, device)
        _show_markdown("step", measured, step_cuda.table(measured), as_json, keep)
        return
    _use_threads(threads)
    if memory:
        from cope_benchmarks import step_memory

        measured = step_memory.measure()
        _show("step_memory", measured, step_memory.table(measured), as_json, keep)
        return
    measured = measure(repetitions)
    _show("step", measured, table(measured), as_json, keep)


@app.command()
def gpu(
    as_json: Json = False,
    keep: Keep = None,
    device: Device = "cuda",
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="Begin no case after so many seconds.")] = 540,
) -> None:
    """Measure attention with CoPE on a GPU, beside torch's SDPA, flex_attention and the paper's listing.

    Takes up to nine minutes, the most important cases first. With --keep, results are written as they come, and the same
    command continues. Outputs and gradients are checked before anything is timed. Without a GPU it reports so.

    Example: `cope-sweep bench gpu --keep results`
    """
    from cope_benchmarks.gpu import measure, table

    _check_writable(keep)
    _check_device(device)
    with _user_errors():
        measured = measure(keep, device, seconds)
    _show_markdown("gpu", measured, table(measured), as_json, keep)


@app.command()
def tune(
    as_json: Json = False,
    keep: Keep = None,
    device: Device = "cuda",
    table: Annotated[
        Path | None,
        typer.Option("--table", help="Write this table of configurations.", show_default="the one that kernels read"),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="Begin nothing after so many seconds.")] = 540,
) -> None:
    """Measure configurations of the Triton kernels on this GPU, and write the fastest to the table that the kernels read.

    Takes up to nine minutes, the most important kinds of problems first. With --keep, the same command continues.
    Training never tunes: it uses the table.

    Example: `cope-sweep bench tune --keep results`
    """
    from cope_benchmarks.tune import measure, table_of
    from cope_sweep.kernels import tuning

    _check_writable(keep)
    _check_device(device)
    with _user_errors():
        measured = measure(table or tuning.PATH, keep, device, seconds)
    _show_markdown("tune", measured, table_of(measured), as_json, keep)


@contextmanager
def _user_errors() -> Iterator[None]:
    """Report results of another machine, or a bad table, as an error of the user's."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def _show_markdown(name: str, measured: dict[str, Any], table: str, as_json: bool, folder: Path | None) -> None:
    if folder is not None:
        (folder / f"{name}.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
        (folder / f"{name}.md").write_text(table, encoding="utf-8")
    print_json(measured) if as_json else typer.echo(table)


@app.command()
def instructions(
    as_json: Json = False,
    keep: Keep = None,
    head_dim: Annotated[
        list[int] | None, typer.Option("--head-dim", help="May be repeated.", show_default="64, 128")
    ] = None,
) -> None:
    """Compile the Triton kernels for GPUs that need not be there: registers, spills, and instructions of a tile.

    Example: `cope-sweep bench instructions --head-dim 64`
    """
    from cope_benchmarks.kernels_ahead import measure, table

    _check_writable(keep)
    measured = measure(tuple(head_dim or (64, 128)))
    _show("instructions", measured, table(measured), as_json, keep)


def _check_writable(folder: Path | None) -> None:
    """Raise UserError if `folder` cannot be written, before minutes of measuring."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"--keep {folder}: {error.strerror}; name a folder that can be written") from error


def _check_device(device: str) -> None:
    if device not in ("cuda", "cpu"):
        raise UserError(f"--device {device}: no such device; accepted: cuda, cpu")


def _use_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _show(name: str, measured: dict[str, Any], table: Table, as_json: bool, folder: Path | None) -> None:
    from cope_benchmarks.save import save_measurement

    if folder is not None:
        save_measurement(folder, name, measured, table)
    print_json(measured) if as_json else make_console().print(table)


@app.command()
def sweep(
    as_json: Json = False,
    keep: Keep = None,
    runs: Annotated[int, typer.Option("--runs", min=10, help="Runs of one step.")] = 1_000,
    short_runs: Annotated[
        int, typer.Option("--short-runs", min=2, help="Runs of 50 steps, which are trained in several ways.")
    ] = 20,
    peer_runs: Annotated[
        int, typer.Option("--peer-runs", min=1, help="Of these, by one TorchTrainer each: 10 to 30 s a run.")
    ] = 4,
    repetitions: Annotated[
        int, typer.Option("--repetitions", min=1, help="How many times the sweep and a bare trainable are timed.")
    ] = 3,
    part: Annotated[
        list[str] | None,
        typer.Option(
            "--part", help="Measure this part only, and keep the others that are in FOLDER.", show_default="all"
        ),
    ] = None,
) -> None:
    """Measure the sweep: many trivial runs, MLflow, the time between runs, other ways to use Ray, and faults.

    Takes about fifteen minutes on two quiet cores.

    Example: `cope-sweep bench sweep --keep results`

    Example: `cope-sweep bench sweep --part trivial_runs --runs 300 --keep results`
    """
    from cope_benchmarks.sweep import PARTS, measure, table

    _check_writable(keep)
    if unknown := set(part or ()) - set(PARTS):
        raise UserError(f"--part {min(unknown)}: no such part; accepted: {', '.join(PARTS)}")
    measured = measure(runs, short_runs, peer_runs, repetitions, parts=part or PARTS)
    kept = keep / "sweep.json" if keep and part else None
    if kept and kept.exists():
        measured = json.loads(kept.read_text()) | measured
    _show("sweep", measured, table(measured), as_json, keep)


@app.command()
def store(
    as_json: Json = False,
    keep: Keep = None,
    runs: Annotated[int, typer.Option("--runs", help="Runs of the store: a multiple of 100.")] = 100_000,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Write the store here, or use the one that is here.", show_default="temporary"),
    ] = None,
) -> None:
    """Measure how fast a store of many finished runs is indexed, listed, filtered, tabulated, compared and checked.

    Takes about five minutes for 100,000 runs, and 3 GB of disk.

    Example: `cope-sweep bench store --keep results`
    """
    from cope_benchmarks.store import measure, table

    _check_writable(keep)
    measured = measure(runs, folder)
    _show("store", measured, table(measured), as_json, keep)


@app.command()
def serve(
    as_json: Json = False,
    keep: Keep = None,
    overload: Annotated[
        float, typer.Option("--overload", help="Seconds of ten times as many requests as the server can answer.")
    ] = 0,
    runs: Annotated[
        int, typer.Option("--runs", min=0, help="Also measure tables and pages of a store of so many runs: 100000.")
    ] = 0,
) -> None:
    """Measure the service's perplexity: 32 clients, against one offline batch, and against one request after another.

    Example: `cope-sweep bench serve --overload 60 --runs 100000 --keep results`
    """
    from cope_benchmarks.serve import measure, table

    _check_writable(keep)
    if runs % 1000:
        raise UserError(f"--runs {runs}: a multiple of 1,000")
    measured = measure(overload, runs)
    _show("serve", measured, table(measured), as_json, keep)


@app.command()
def results(
    as_json: Json = False,
    keep: Keep = None,
    runs: Annotated[int, typer.Option("--runs", help="Runs of the store: a multiple of 100.")] = 100_000,
    mlflow_runs: Annotated[
        int, typer.Option("--mlflow-runs", help="Runs that MLflow is filled with: a multiple of 100.")
    ] = 1_000,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Write the store here, or use the one that is here.", show_default="temporary"),
    ] = None,
) -> None:
    """Measure how fast tables and frames of many runs are made, beside MLflow's `search_runs` of the same runs.

    Takes about ten minutes for 100,000 runs, and 3 GB of disk.

    Example: `cope-sweep bench results --keep results`
    """
    from cope_benchmarks.results import measure, table

    _check_writable(keep)
    measured = measure(runs, mlflow_runs, folder)
    _show("results", measured, table(measured), as_json, keep)


@app.command()
def sync(
    as_json: Json = False,
    keep: Keep = None,
    runs: Annotated[int, typer.Option("--runs", help="Runs of the store: a multiple of 100.")] = 1_000,
) -> None:
    """Measure `cope-sweep sync` to a new MLflow database, beside MLflow's own client with the same data.

    Takes about five minutes for 1,000 runs.

    Example: `cope-sweep bench sync --keep results`
    """
    from cope_benchmarks.sync import measure, table

    _check_writable(keep)
    measured = measure(runs)
    _show("sync", measured, table(measured), as_json, keep)


@app.command()
def data(as_json: Json = False) -> None:
    """Measure how many sequences per second each task generates, and how many its training step consumes, at the paper's sizes.

    Example: `cope-sweep bench data`
    """
    from cope_benchmarks.data import measure

    measured = measure()
    if as_json:
        print_json(measured)
        return
    shown = grid("task", "tokens", "generated, sequences/s", "trained, sequences/s", "generated / trained", "corpus")
    for kind, row in measured["tasks"].items():
        numbers = (f"{row['generated_per_s']:,.0f}", f"{row['trained_per_s']:,.2f}", f"{row['ratio']:,.0f} ×")
        style = "red" if row["ratio"] < measured["min_ratio"] else ""
        shown.add_row(kind, str(row["tokens"]), *numbers, row["corpus"] or "", style=style)
    make_console().print(shown)
