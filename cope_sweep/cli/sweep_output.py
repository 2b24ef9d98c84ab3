"""Output of `run` and `submit` about a sweep: its expected cost, its end, and commands that are useful next."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from cope_sweep.cli.options import STORE
from cope_sweep.cli.output import escaped, estimated_time

if TYPE_CHECKING:
    from rich.console import Console

    from cope_sweep.config import Plan, RunSpec
    from cope_sweep.store import Status, Store
    from cope_sweep.sweep.sweep import SweepOutcome

EXAMPLE_TEXT = "Of position, and of context."
MAX_EXAMPLE_TOKENS = 64


def print_cost(
    console: Console, plan: Plan, store: Store, *, leave_out: Collection[Status] = (), max_runs: int | None = None
) -> None:
    """Say how many runs a sweep will train, and how long that takes, before it starts.

    `leave_out` are further statuses of runs that it does not train, and `max_runs` is how many it trains at most.
    """
    from cope_sweep.read.queries import plan_cost

    ended: list[Status] = ["finished"] if plan.schedule is None else ["finished", "stopped"]
    costs = plan_cost(plan, store, leave_out={*ended, *leave_out}, max_runs=max_runs)
    if costs.to_do:
        time = estimated_time(costs.estimated_s, costs.least_s, lacks_gpu=costs.lacks_gpu)
        text = f"{_runs(costs.to_do)} to train: about {time} ({costs.basis})"
        console.print(escaped(text), soft_wrap=True, style="dim")


def overrides(scale: str | None, sets: list[str]) -> list[str]:
    """The arguments that change an ablation's file as `scale` and `sets` do."""
    return [*(["--scale", scale] if scale else []), *(part for value in sets for part in ("--set", value))]


def plan_arguments(ablation: str, scale: str | None, sets: list[str], store: str) -> str:
    """The arguments that name the same plan and store in another command."""
    return shlex.join([ablation, *overrides(scale, sets), *(["--store", store] if Path(store) != Path(STORE) else [])])


def _executable_folder() -> str:
    """The prefix of commands that are shown to the user: empty where `cope-sweep` is on the path."""
    return "" if shutil.which("cope-sweep") else f"{Path(sys.argv[0]).parent}/"


def print_outcome(console: Console, outcome: SweepOutcome, same_plan: str) -> None:
    """How the sweep ended, and what to do about runs that are not finished."""
    if outcome.sweep_id is None and not outcome.failed:
        console.print(f"Nothing to train: all {outcome.reused} runs are finished.")
    if outcome.failed:
        command = f"{_executable_folder()}cope-sweep status {same_plan}"
        console.print(
            f"[red]{_runs(outcome.failed)} failed[/red]. {escaped(command)} shows the errors; "
            "the same `run` command tries them again, unless it has --keep-failed.",
            soft_wrap=True,
        )
    if outcome.stopped:
        console.print(f"{_runs(outcome.stopped)} stopped early by the schedule; `cope-sweep retry` trains them on.")
    if outcome.left:
        reason = "".join(f": {escaped(each)}" for each in outcome.stop_reasons[:1])
        console.print(
            f"[yellow]Interrupted[/yellow] with {_runs(outcome.left)} to do{reason}; the same command continues from "
            "there.",
            soft_wrap=True,
        )


def _runs(number: int) -> str:
    return f"{number} run{'s' * (number != 1)}"


def print_next_steps(
    console: Console, plan: Plan, store: Store, uri: str | None, same_plan: str, *, again: str | None
) -> None:
    """Commands that are useful after a sweep; `again` are the words after `cope-sweep` that continue it."""
    prefix = _executable_folder()
    at_store = [] if store.root == Path(STORE).absolute() else ["--store", str(store.root)]
    steps = [] if again is None else [(f"{prefix}cope-sweep {again}", "continues with the runs that are left")]
    steps.append((f"{prefix}cope-sweep table {same_plan} --format latex", "the table in LaTeX"))
    if uri and uri.startswith("sqlite:"):
        steps.append((f"{prefix}mlflow ui --backend-store-uri {uri}", "curves, parameters and files of every run"))
    serve = shlex.join([f"{prefix}cope-sweep", "serve", *at_store])
    steps.append((serve, "the REST service, and a page at http://127.0.0.1:8000"))
    statuses = store.index.statuses(each.run_id for each in plan.runs)
    finished = next((each for each in plan.runs if statuses.get(each.run_id) == "finished"), None)
    if finished and (example := _example_input(finished, store)):
        words = [f"{prefix}cope-sweep", "perplexity", finished.run_id, *example, *at_store]
        steps.append((shlex.join(words), "the perplexity of token ids or a text under a checkpoint"))
    console.print("Next:", style="bold")
    for command, description in steps:
        # One line each, whatever the width of the terminal, so that it can be copied.
        line = f"  [bold cyan]{escaped(command)}[/bold cyan]   [dim]{description}[/dim]"
        console.print(line, soft_wrap=True, highlight=False)


def _example_input(run: RunSpec, store: Store) -> list[str]:
    """Arguments of `perplexity` that fit the run's task: a text, or a test sequence if it is short; else none."""
    if (store.run(run.run_id).checkpoint / "tokenizer.json").exists():
        return ["--text", EXAMPLE_TEXT]
    if run.task.length(run.task.TESTS[0]) > MAX_EXAMPLE_TOKENS:
        return []
    tokens = run.task.sequences(run.task.TESTS[0], 0, 0, 1).whole()[0]
    return ["--tokens", " ".join(map(str, tokens))]
