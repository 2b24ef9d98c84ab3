"""The tools that act: check the text of an ablation file, plan, run, wait and stop."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Annotated, Any

import anyio
from anyio.to_thread import run_sync
from mcp_types import ContentBlock
from pydantic import BaseModel, ConfigDict, Field

from cope_services.http.components import Components
from cope_services.mcp.answers import markdown, table_lines
from cope_services.mcp.questions import Start, Tool, text_page
from cope_services.mcp.training import Training
from cope_sweep.api.ablations import PlanCost
from cope_sweep.api.question import arguments_of, fields_of
from cope_sweep.api.requests import SweepRequest, UnicodeText
from cope_sweep.cli.output import estimated_time
from cope_sweep.config import Plan
from cope_sweep.errors import UserError, counted
from cope_sweep.read.queries.progress import ProgressTracker
from cope_sweep.read.tables.comparisons import least_compared
from cope_sweep.read.tables.stats import least_seeds
from cope_sweep.store import ACTIVE, SweepProgress

MAX_WAIT_S = 300
POLL_S = 0.5


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SweepArguments(Strict):
    sweep_id: Annotated[str, Field(max_length=100, description="The id of a sweep.")]


class WaitArguments(SweepArguments):
    seconds: Annotated[float, Field(ge=0, le=MAX_WAIT_S, description="Return after this time at the latest.")] = 60


class CheckArguments(Strict):
    text: UnicodeText = Field(max_length=200_000, description="The text of an ablation file (YAML).")
    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$", description="The name it shall have.")] = "ablation"


class Check(Tool):
    """Says what is wrong with the text of an ablation file, or how many runs it has."""

    name = "check"
    description = (
        "Check the text of an ablation file before anything is trained: every error with its line, its key, and what "
        "would be accepted; or the number of its rows and runs. Nothing is written."
    )
    arguments = CheckArguments

    async def answer(self, components: Components, arguments: CheckArguments) -> list[ContentBlock]:
        async with components.work["sweeps"].slot():
            return text_page(await run_sync(self._lines, components, arguments))

    @staticmethod
    def _lines(components: Components, arguments: CheckArguments) -> list[str]:
        request = SweepRequest(spec=arguments.text, name=arguments.name)
        try:
            _, _, plan = components.sweeps.planned(request, is_new=False)
        except UserError as error:
            return _problems(error)
        rows, content = len(plan.rows), plan.ablation.content
        seeds = len(content.row_seeds)
        lines = [f"valid: {rows} rows × {seeds} seeds = {len(plan.runs)} runs"]
        lines += [f"scale {scale}: a smaller or larger size of it" for scale in content.scales]
        return [*lines, *_advice(plan)]


def _problems(error: UserError) -> list[str]:
    """Each problem of a text, with its code, line and key."""
    listed = error.data.get("problems")
    problems: list[Any] = list(listed) if isinstance(listed, list | tuple) else []
    if not problems:
        problems = [{"code": error.code, "message": str(error), "data": error.data}]
    head = f"invalid: {len(problems)} problem{'s' * (len(problems) > 1)}"
    return [head, *(f"- {' '.join(str(each['message']).split())} (code: {each['code']})" for each in problems)]


def _advice(plan: Plan) -> list[str]:
    """Whether so many seeds can show any difference, and whether it says in advance what is tested."""
    content = plan.ablation.content
    advice = []
    seeds, comparisons = len(content.row_seeds), least_compared(plan)
    needed = least_seeds(comparisons, is_paired=content.paired)
    if needed is None:
        advice.append(f"too many comparisons: among {comparisons:,}, no number of seeds can make one significant")
    elif comparisons and seeds < needed:
        advice.append(
            f"too few seeds: with {seeds} of them and {comparisons} comparison{'s' * (comparisons > 1)}, no difference "
            f"can be significant; declare at least {needed} before you train, more for small differences"
        )
    if not content.has_claims:
        advice.append("no claims: declare what you expect (`claims`) before the first run starts")
    return advice


class PlanSweep(Tool):
    """What a sweep would train, and what it would cost."""

    name = "plan"
    description = (
        "The runs that a sweep would train, by row, with estimated time and memory on this machine. Nothing is started "
        "or recorded. Give `ablation`, a name; or `spec`, the text of a file, with a `name`."
    )

    def __init__(self) -> None:
        self.arguments = arguments_of(SweepRequest, (), {"start": (Start, 0)})

    async def answer(self, components: Components, arguments: Any) -> list[ContentBlock]:
        request = SweepRequest(**fields_of(SweepRequest, arguments))
        async with components.work["sweeps"].slot():
            cost = await run_sync(components.sweeps.preview, request)
        return text_page(cost_lines(cost), arguments.start)


def cost_lines(cost: PlanCost) -> list[str]:
    """The costs of a plan: in total, and by row."""
    suggested = f" ({cost.to_suggest} not suggested yet)" if cost.to_suggest else ""
    time = estimated_time(cost.estimated_s, cost.least_s, lacks_gpu=cost.lacks_gpu)
    groups = counted(cost.worker_groups, "worker group")
    lines = [
        f"{cost.ablation}: {cost.finished} runs finished, {cost.to_do} to train{suggested}",
        f"estimated time: {time} ({groups}; {cost.basis})" if cost.to_do else "nothing is left to train",
    ]
    rows: dict[str, list[Any]] = {}
    for run in cost.runs:
        rows.setdefault(run.row, []).append(run)
    table = []
    for name, runs in rows.items():
        statuses = ", ".join(f"{number} {status}" for status, number in Counter(run.status for run in runs).items())
        seconds = sum(run.estimated_s for run in runs if run.to_do)
        memory_mib = max(run.estimated_memory_bytes for run in runs) / 2**20
        fits = "" if all(run.fits for run in runs) else ": too large for this machine"
        table.append([name, statuses, runs[0].parameters, f"{seconds / 60:.1f} min", f"{memory_mib:.0f} MiB{fits}"])
    return [*lines, "", *table_lines(("row", "runs", "parameters", "time", "memory of a run"), table)]


class RunSweep(Tool):
    """Starts a sweep in the background."""

    name = "run"
    trains = True
    description = (
        "Train the unfinished runs of an ablation in the background, within the budget of this server; returns the id "
        "of the sweep at once. Runs that are finished anywhere in the store are not trained again. Then `wait`. Give "
        "`ablation`, a name; or `spec`, the text of a file, with a `name`. Do not add seeds until p is small: declare "
        "them before."
    )

    def __init__(self, training: Training) -> None:
        self.training = training
        self.arguments = arguments_of(SweepRequest, ("time_budget_s",))

    async def answer(self, components: Components, arguments: Any) -> list[ContentBlock]:
        request = SweepRequest(**fields_of(SweepRequest, arguments))
        sweep_id = await run_sync(self.training.run, request)
        return text_page([f"sweep_id: {sweep_id}", self.training.left_text, f"next: wait(sweep_id={sweep_id})"])


class WaitForSweep(Tool):
    """The progress of a sweep."""

    name = "wait"
    description = "Wait until a sweep ends, or for `seconds`; then its progress: runs by status, failures, time left."
    arguments = WaitArguments

    async def answer(self, components: Components, arguments: WaitArguments) -> list[ContentBlock]:
        tracker = ProgressTracker(components.queries.store, arguments.sweep_id)
        watched, end_s = components.watchers, time.monotonic() + arguments.seconds
        while True:
            progress: SweepProgress = await watched.in_thread(lambda _: tracker.poll(), arguments.sweep_id)
            if progress.status not in ACTIVE or time.monotonic() >= end_s:
                break
            await anyio.sleep(POLL_S)
        lines = markdown(progress)
        if progress.status in ACTIVE:
            lines.append(f"next: wait(sweep_id={progress.sweep_id})")
        else:
            sweep = await run_sync(components.queries.sweep_summary, progress.sweep_id)
            table: dict[str, object] = {"name": sweep.ablation, "scale": sweep.scale, "set": sweep.sets}
            given = ", ".join(f"{name}={json.dumps(value)}" for name, value in table.items() if value)
            lines.append(f"next: get_sweep(sweep_id={progress.sweep_id}), get_table({given})")
        return text_page(lines)


class StopSweep(Tool):
    """Stops a sweep that this server has started."""

    name = "stop"
    trains = True
    description = "Stop a sweep that this server has started. Its runs write checkpoints first; `run` continues them."
    arguments = SweepArguments

    def __init__(self, training: Training) -> None:
        self.training = training

    async def answer(self, components: Components, arguments: SweepArguments) -> list[ContentBlock]:
        await run_sync(self.training.stop, arguments.sweep_id)
        return text_page([f"sweep {arguments.sweep_id} stops; next: wait(sweep_id={arguments.sweep_id})"])
