"""One run, from its ledger folder to its result: lock, resume, train, evaluate, record. What every worker calls."""

from __future__ import annotations

import math
import platform
import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed

from cope_sweep.errors import UserError
from cope_sweep.model import check_reach
from cope_sweep.model.checkpoint import CheckpointError, save_model
from cope_sweep.record import Event, Ledger, RunFolder, Status
from cope_sweep.record.ledger import replacing
from cope_sweep.spec import RunSpec
from cope_sweep.text import TOKENIZER_FILE
from cope_sweep.train.clock import Clock
from cope_sweep.train.memory import peak_bytes, reset_peak
from cope_sweep.train.resume import load_resume, save_resume
from cope_sweep.train.runtime import Runtime
from cope_sweep.train.trainer import Trainer, learning_rate

LOG_EVERY = 10
"""Steps from one point of the training loss's curve to the next."""
SAVING_RATIO = 19
"""A checkpoint comes no sooner than this many times what the last one took: at most a 20th of the time goes there,
unless one is wanted after every step."""
TELL_EVERY_S = 0.2
"""Seconds from one progress event to the next, at least."""

Outcome = Literal["finished", "failed", "interrupted", "busy"]


class Diverged(Exception):
    """A loss is not finite any more."""


class DataError(UserError):
    """What a task reads is not what the run was begun on, or not what other workers read."""


def train_run(
    spec: RunSpec,
    ledger: Ledger,
    runtime: Runtime,
    *,
    on_event: Callable[[Event], None] = lambda event: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Train `spec` to its end, from where it was left, and enter everything in the ledger.

    A run that fails (a loss that is not finite, a sequence too long for an encoding, out of memory, …) is entered as
    failed, with its traceback, and returns "failed": nothing is raised, and the next run can follow. "interrupted":
    `should_stop` said so, and the run can be resumed. "busy": another living process trains it now.

    With several ranks, all call this with the same arguments; rank 0 alone writes, and its `should_stop` decides. An
    error that may have struck one rank only is raised, once entered: the ranks are out of step, and must start anew.
    """
    folder = ledger.run(spec.run_id)
    if runtime.rank > 0:
        # Rank 0 holds the lock and writes; it says in the same order what it found.
        if not _agreed(runtime, False):
            return "busy"
        if not _agreed(runtime, False):
            return "finished"
        try:
            return _train(spec, folder, runtime, _Voice(spec, runtime, None, on_event), should_stop)
        except Diverged:
            return "failed"
    with folder.lock() as held:
        if not _agreed(runtime, held):
            return "busy"
        if not _agreed(runtime, folder.status != "finished"):
            return "finished"
        folder.begin(spec, runtime.worker_id)
        voice = _Voice(spec, runtime, folder, on_event)
        try:
            return _train(spec, folder, runtime, voice, should_stop)
        except Exception as error:
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
            folder.fail(message, traceback.format_exc())
            voice.tell("failed", message)
            if runtime.world_size > 1 and not isinstance(error, Diverged):
                raise
            return "failed"


def _agreed(runtime: Runtime, mine: bool) -> bool:
    """Rank 0's word, on every rank."""
    if runtime.world_size == 1:
        return mine
    word = torch.tensor(int(mine), device=runtime.device)
    torch.distributed.broadcast(word, src=0)
    return bool(word.item())


def _train(
    spec: RunSpec, folder: RunFolder, runtime: Runtime, voice: _Voice, should_stop: Callable[[], bool]
) -> Outcome:
    writes = runtime.rank == 0
    clock = Clock()
    reset_peak(runtime.device)
    data = _prepared(spec, runtime)
    trainer, notes = _start(spec, folder, runtime, data)
    if writes:
        folder.rewind(trainer.step)
    voice.start(trainer.step)
    clock.start(trainer, notes.get("spent", {}))
    first_step = trainer.step
    saved_s, saving_s = time.monotonic(), 0.0

    def save() -> None:
        with clock.apart(), replacing(folder.resume) as path:
            save_resume(path, trainer, {"data": data, "spent": clock.spent()})

    while not trainer.done:
        trainer.train_step()
        if trainer.step == first_step + 1:
            clock.warm()
        step = voice.step = trainer.step
        if step == 1 or step % LOG_EVERY == 0 or trainer.done:
            voice.log({"train/loss": trainer.mean_loss(), "train/lr": learning_rate(spec.train, step)})
        if step % spec.evaluate.every == 0 and not trainer.done:
            with clock.apart():
                voice.log(trainer.evaluate(spec.evaluate.sequences))
        voice.tell_now_and_then()
        # Several ranks must ask together, which costs a message: not at every step.
        asks = runtime.world_size == 1 or step % LOG_EVERY == 0
        if asks and not trainer.done and _agreed(runtime, should_stop()):
            if writes:
                save()
                folder.set_state("interrupted")
            voice.tell("interrupted")
            return "interrupted"
        every_s = runtime.checkpoint_every_s
        if writes and (not every_s or time.monotonic() - saved_s >= max(every_s, SAVING_RATIO * saving_s)):
            began_s = time.monotonic()
            save()
            saved_s = time.monotonic()
            saving_s = saved_s - began_s
    speed = clock.tokens_per_s()
    with clock.apart():
        voice.log(trainer.evaluate(spec.evaluate.final_sequences))
        left_out = _evaluate_windows(spec, trainer, voice)
    if writes:
        with folder.writing_checkpoint() as path:
            save_model(path, trainer.model, spec)
            if tokenizer := spec.task.tokenizer_json:
                shutil.copyfile(tokenizer, path / TOKENIZER_FILE)
        facts = {"steps": trainer.step, "resumed_from_step": first_step, "tokens_per_s": speed, **clock.spent()}
        told = {"data": data, "contexts_left_out": left_out}
        folder.finish(voice.latest, facts | {name: text for name, text in told.items() if text} | _machine(trainer))
    voice.tell("finished")
    return "finished"


def _prepared(spec: RunSpec, runtime: Runtime) -> str | None:
    """Have ready what the task reads; its fingerprint.

    Raises UserError where it cannot be used, or is not what other workers read.
    """
    task = spec.task
    task.prepare()
    for context in spec.evaluate.contexts:
        for split in task.TESTS:
            task.windows(split, context, spec.evaluate.stride or context)  # a text too short says so now
    mine = task.fingerprint()
    if runtime.world_size == 1:
        return mine
    every: list[str | None] = [None] * runtime.world_size
    torch.distributed.all_gather_object(every, mine)
    if len(set(every)) > 1:
        read = ", ".join(f"rank {rank} {data}" for rank, data in enumerate(every))
        raise DataError(f"the workers read different data: {read}; give every node the same files")
    return mine


def _start(spec: RunSpec, folder: RunFolder, runtime: Runtime, data: str | None) -> tuple[Trainer, Mapping[str, Any]]:
    """A trainer where the run was left, and its notes; at the start, where there is nothing whole to go on from.

    Raises DataError where the run was begun on other data.
    """
    trainer = Trainer(spec, runtime)
    if not folder.resume.exists():
        return trainer, {}
    try:
        notes = load_resume(folder.resume, trainer)
    except CheckpointError:
        return Trainer(spec, runtime), {}
    if notes.get("data") != data:
        raise DataError(
            f"this run was begun on data {notes.get('data')}, and what its task reads now is {data}; "
            f"bring the files back to go on, or delete {folder.path} to begin again"
        )
    return trainer, notes


def _evaluate_windows(spec: RunSpec, trainer: Trainer, voice: _Voice) -> str:
    """Log what windows of each context give; which of them cannot be measured, and why."""
    out_of_reach: dict[int, str] = {}
    broken = []
    for context in spec.evaluate.contexts:
        try:
            check_reach(spec, context)
        except ValueError as error:
            out_of_reach[context] = str(error)
            continue
        measured = trainer.evaluate_windows(context, spec.evaluate.final_sequences)
        # A model that breaks down out there is still one that was trained: the cell stays empty, the run stands.
        finite = {name: value for name, value in measured.items() if math.isfinite(value)}
        broken += [f"{name} is {value}" for name, value in measured.items() if name not in finite]
        voice.log(finite)
    reasons = list(out_of_reach.values())[:1]  # it is the same for all of them
    return "; ".join([f"{', '.join(map(str, out_of_reach))}: {reason}" for reason in reasons] + broken)


def _machine(trainer: Trainer) -> dict[str, Any]:
    """Size, memory (this worker's), place and versions."""
    runtime = trainer.runtime
    share = math.ceil(trainer.spec.train.batch / runtime.world_size)
    return {
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "peak_memory_bytes": peak_bytes(runtime.device),
        "device": torch.cuda.get_device_name() if runtime.device == "cuda" else "cpu",
        "precision": runtime.precision,
        "threads": runtime.threads,
        "workers": runtime.world_size,
        "micro_batch": min(runtime.micro_batch or share, share),
        "checkpoint_activations": runtime.checkpoint_activations,
        "worker_id": runtime.worker_id,
        "host": platform.node(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


class _Voice:
    """What a run tells while it trains: rows to its folder (rank 0 has one), events to who listens."""

    def __init__(
        self, spec: RunSpec, runtime: Runtime, folder: RunFolder | None, on_event: Callable[[Event], None]
    ) -> None:
        self.spec, self.runtime, self.folder, self.on_event = spec, runtime, folder, on_event
        self.step = self.first_step = 0
        self.latest: dict[str, float] = {}
        self.started_s = self.told_s = time.monotonic()
        self.tell("running")

    def start(self, step: int) -> None:
        """Training begins at `step`; speed counts from here."""
        self.step = self.first_step = step
        self.started_s = time.monotonic()

    def log(self, metrics: dict[str, float]) -> None:
        """Enter a row of the curves. Raises Diverged where a value is not finite."""
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise Diverged(f"{name} is {value} at step {self.step}; lower train.lr, or set train.clip")
        self.latest |= metrics
        if self.folder:
            self.folder.log({"step": self.step} | metrics)

    def tell_now_and_then(self) -> None:
        if time.monotonic() - self.told_s >= TELL_EVERY_S:
            self.tell("running")

    def tell(self, status: Status, message: str | None = None) -> None:
        self.told_s = time.monotonic()
        steps, elapsed_s = self.step - self.first_step, self.told_s - self.started_s
        self.on_event(
            Event(
                run_id=self.spec.run_id,
                status=status,
                step=self.step,
                steps=self.spec.train.steps,
                metrics=dict(self.latest),
                steps_per_s=steps / elapsed_s if steps and elapsed_s > 0 else None,
                worker_id=self.runtime.worker_id,
                message=message,
            )
        )
