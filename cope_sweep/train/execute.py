"""One run, from its ledger folder to its result: lock, resume, train, evaluate, record. What every worker calls."""

from __future__ import annotations

import math
import platform
import time
import traceback
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed

from cope_sweep.model.checkpoint import CheckpointError, save_model
from cope_sweep.record import Event, Ledger, RunFolder, Status
from cope_sweep.record.ledger import replacing
from cope_sweep.spec import RunSpec
from cope_sweep.train.checkpoint import load_resume, save_resume
from cope_sweep.train.execution import Execution
from cope_sweep.train.memory import peak_bytes, reset_peak
from cope_sweep.train.trainer import Trainer, learning_rate

LOG_EVERY = 10
"""Steps from one point of the training loss's curve to the next."""
TELL_EVERY_S = 0.2
"""Seconds from one progress event to the next, at least."""

Outcome = Literal["finished", "failed", "interrupted", "busy"]


class Diverged(Exception):
    """A loss is not finite any more."""


def execute(
    spec: RunSpec,
    ledger: Ledger,
    execution: Execution,
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
    if execution.rank > 0:
        # Rank 0 holds the lock and writes; it says in the same order what it found.
        if not _agreed(execution, False):
            return "busy"
        if not _agreed(execution, False):
            return "finished"
        try:
            return _train(spec, folder, execution, _Voice(spec, execution, None, on_event), should_stop)
        except Diverged:
            return "failed"
    with folder.lock() as held:
        if not _agreed(execution, held):
            return "busy"
        if not _agreed(execution, folder.status != "finished"):
            return "finished"
        folder.begin(spec, execution.where)
        voice = _Voice(spec, execution, folder, on_event)
        try:
            return _train(spec, folder, execution, voice, should_stop)
        except Exception as error:
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
            folder.fail(message, traceback.format_exc())
            voice.tell("failed", message)
            if execution.world_size > 1 and not isinstance(error, Diverged):
                raise
            return "failed"


def _agreed(execution: Execution, mine: bool) -> bool:
    """Rank 0's word, on every rank."""
    if execution.world_size == 1:
        return mine
    word = torch.tensor(int(mine), device=execution.device)
    torch.distributed.broadcast(word, src=0)
    return bool(word.item())


def _train(
    spec: RunSpec, folder: RunFolder, execution: Execution, voice: _Voice, should_stop: Callable[[], bool]
) -> Outcome:
    writes = execution.rank == 0
    began_s = time.monotonic()
    reset_peak(execution.device)
    trainer = _start(spec, folder, execution)
    if writes:
        folder.rewind(trainer.step)
    voice.start(trainer.step)
    first_step, evaluate_s = trainer.step, 0.0
    saved_s = time.monotonic()
    while not trainer.done:
        trainer.train_step()
        step = voice.step = trainer.step
        if step == 1 or step % LOG_EVERY == 0 or trainer.done:
            voice.log({"train/loss": trainer.mean_loss(), "train/lr": learning_rate(spec.train, step)})
        if step % spec.evaluate.every == 0 and not trainer.done:
            evaluating_s = time.monotonic()
            voice.log(trainer.evaluate(spec.evaluate.sequences))
            evaluate_s += time.monotonic() - evaluating_s
        voice.tell_now_and_then()
        # Several ranks must ask together, which costs a message: not at every step.
        asks = execution.world_size == 1 or step % LOG_EVERY == 0
        if asks and not trainer.done and _agreed(execution, should_stop()):
            if writes:
                _save(folder, trainer)
                folder.set_state("interrupted")
            voice.tell("interrupted")
            return "interrupted"
        if writes and time.monotonic() - saved_s >= execution.checkpoint_every_s:
            _save(folder, trainer)
            saved_s = time.monotonic()
    trained_s = time.monotonic() - began_s - evaluate_s
    metrics = trainer.evaluate(spec.evaluate.final_sequences)
    voice.log(metrics)
    if writes:
        with folder.writing_checkpoint() as path:
            save_model(path, trainer.model, spec)
        tokens = (trainer.step - first_step) * spec.train.batch * spec.task.length("train")
        facts = {
            "steps": trainer.step,
            "resumed_from_step": first_step,
            "tokens_per_s": round(tokens / trained_s, 1),
            "train_s": round(trained_s, 3),
            "wall_s": round(time.monotonic() - began_s, 3),
        }
        folder.finish(voice.latest, facts | _machine(trainer))
    voice.tell("finished")
    return "finished"


def _start(spec: RunSpec, folder: RunFolder, execution: Execution) -> Trainer:
    """A trainer where the run was left; at the start, where there is nothing to go on from, or nothing whole."""
    trainer = Trainer(spec, execution)
    if folder.resume.exists():
        try:
            load_resume(folder.resume, trainer)
        except CheckpointError:
            return Trainer(spec, execution)
    return trainer


def _save(folder: RunFolder, trainer: Trainer) -> None:
    with replacing(folder.resume) as path:
        save_resume(path, trainer)


def _machine(trainer: Trainer) -> dict[str, Any]:
    """Size, memory, place and versions."""
    execution = trainer.execution
    return {
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "peak_memory_bytes": peak_bytes(execution.device),
        "device": torch.cuda.get_device_name() if execution.device == "cuda" else "cpu",
        "precision": execution.precision,
        "threads": execution.threads,
        "workers": execution.world_size,
        "where": execution.where,
        "host": platform.node(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


class _Voice:
    """What a run tells while it trains: rows to its folder (rank 0 has one), events to who listens."""

    def __init__(
        self, spec: RunSpec, execution: Execution, folder: RunFolder | None, on_event: Callable[[Event], None]
    ) -> None:
        self.spec, self.execution, self.folder, self.on_event = spec, execution, folder, on_event
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
                where=self.execution.where,
                message=message,
            )
        )
