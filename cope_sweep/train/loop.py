"""Trains one run: its attempt, agreement between ranks, and failures; resume, train, evaluate, save; its reports."""

from __future__ import annotations

import math
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal

from cope_sweep.config import RunSpec
from cope_sweep.errors import CheckpointError
from cope_sweep.model import check_reach
from cope_sweep.model.checkpoint import save_model
from cope_sweep.store import Event, RunFolder, Status
from cope_sweep.store.errors import DamagedError, FencedError
from cope_sweep.text import TOKENIZER_FILE
from cope_sweep.train.facts import Clock, machine_facts, reset_peak, speed_facts
from cope_sweep.train.resume import ResumeWriter, load_resume
from cope_sweep.train.runtime import Runtime
from cope_sweep.train.trainer import Diverged, Trainer, check_finite
from cope_sweep.train.workers import DataError, broadcast_flag, broadcast_number, prepare_data

LOG_EVERY = 10
"""Steps between two points of the training loss's curve."""
REPORT_EVERY_S = 0.2
"""Shortest time between two progress events."""
SAVE_TIME_RATIO = 19
"""The time between two resume files is at least this many times what writing the last one took, so that writing takes
at most a 20th of the time. Not applied where a file is wanted after every step."""
MAX_MESSAGE_CHARACTERS = 500

StopRequest = Literal["interrupted", "stopped"]
"""Why a run ends before its last step: `interrupted` continues later, `stopped` was ended by a scheduler."""
_REQUESTS: tuple[StopRequest | None, ...] = (None, "interrupted", "stopped")

Outcome = Literal["finished", "failed", "interrupted", "stopped", "fenced"]


def train_run(
    run: RunSpec,
    folder: RunFolder,
    runtime: Runtime,
    *,
    attempt: int | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    should_stop: Callable[[], StopRequest | None] = lambda: None,
) -> Outcome:
    """Train `run` from its last resume file to the end, and write everything to its folder.

    With several ranks, all call this with the same arguments. Only rank 0 writes, and its `should_stop` decides. The
    caller holds the run's lease, or ensures otherwise that nothing else trains the run.

    Args:
        run: The run.
        folder: Its folder (`Store.run`), which need not exist. Nothing else of the store is read or written.
        runtime: How this worker executes runs.
        attempt: The number of the attempt, from the run's lease; None: the next one.
        on_event: Called with every event.
        should_stop: Asked after each step; a request ends the run, which can be continued.

    Returns:
        "finished": the run has a result, from now or from before.
        "failed": an error is recorded with its traceback (a loss that is not finite, a sequence that is too long for an
            encoding, out of memory, …). It is not raised, so that the next run can follow.
        "interrupted", "stopped": what `should_stop` returned.
        "fenced": a newer attempt of the run has begun elsewhere; nothing of it was overwritten.

    Raises, with several ranks, an error that may have occurred on one rank only, after it is recorded: the ranks are
    no longer in step and have to be restarted.
    """
    if runtime.rank > 0:
        # Rank 0 writes. It broadcasts what it finds in the same order as below.
        if not broadcast_flag(runtime, False):
            return "finished"
        if not broadcast_flag(runtime, False):
            return "fenced"
        try:
            reporter = RunReporter(run, runtime.worker_id, None, on_event)
            return TrainingLoop(run, folder, runtime, reporter).run(should_stop)
        except Diverged:
            return "failed"
    if not broadcast_flag(runtime, folder.status != "finished"):
        folder.repair(run)
        return "finished"
    try:
        folder = folder.begin(run, runtime.worker_id, attempt)
    except FencedError:
        broadcast_flag(runtime, False)
        return "fenced"
    broadcast_flag(runtime, True)
    reporter = RunReporter(run, runtime.worker_id, folder, on_event)
    try:
        return TrainingLoop(run, folder, runtime, reporter).run(should_stop)
    except FencedError:
        if runtime.world_size > 1:
            raise
        return "fenced"
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_MESSAGE_CHARACTERS]
        _record_failure(folder, message)
        reporter.report("failed", message)
        if runtime.world_size > 1 and not isinstance(error, Diverged):
            raise
        return "failed"


def _record_failure(folder: RunFolder, message: str) -> None:
    """Write the error that is being handled to the run's folder, if it can be written."""
    try:
        folder.fail(message, traceback.format_exc())
    except (OSError, FencedError) as error:
        # A full disk, most often. The event still has the reason of the failure.
        sys.stderr.write(f"{folder.path}: the failure cannot be recorded ({error}): {message}\n")


class RunReporter:
    """Writes a run's metrics to its folder and sends progress events to a listener."""

    def __init__(
        self, spec: RunSpec, worker_id: str, folder: RunFolder | None, on_event: Callable[[Event], None]
    ) -> None:
        """`folder` is None in workers that write nothing: those of rank 1 and above."""
        self.step = 0
        self.metrics: dict[str, float] = {}
        """The latest value of each metric."""
        self._spec, self._worker_id, self._folder, self._on_event = spec, worker_id, folder, on_event
        self._first_step = 0
        self._started_s = self._reported_s = time.monotonic()

    def start(self, step: int) -> None:
        """Training starts after `step` completed steps; an event is sent, and speed is measured from here."""
        self.step = self._first_step = step
        self._started_s = time.monotonic()
        self.report("running")

    def log(self, metrics: Mapping[str, float]) -> None:
        """Append metrics of the current step to the run's curve. Raises Diverged where a value is not finite."""
        for name, value in metrics.items():
            check_finite(name, value, self.step)
        self.metrics |= metrics
        if self._folder:
            self._folder.log({"step": self.step, **metrics})

    def report_throttled(self) -> None:
        """Send a `running` event, unless the last event was sent less than REPORT_EVERY_S ago."""
        if time.monotonic() - self._reported_s >= REPORT_EVERY_S:
            self.report("running")

    def report(self, status: Status, message: str | None = None, *, evaluated: bool = False) -> None:
        """Send an event. `evaluated`: whether the test sets were evaluated at the present step."""
        self._reported_s = time.monotonic()
        steps, elapsed_s = self.step - self._first_step, self._reported_s - self._started_s
        self._on_event(
            Event(
                run_id=self._spec.run_id,
                status=status,
                step=self.step,
                steps=self._spec.train.steps,
                metrics=dict(self.metrics),
                steps_per_s=steps / elapsed_s if steps and elapsed_s > 0 else None,
                worker_id=self._worker_id,
                message=message,
                evaluated=evaluated,
            )
        )


class TrainingLoop:
    """Trains a run from its last resume file to the end. Rank 0 writes to the run's folder, other ranks do not."""

    def __init__(self, spec: RunSpec, folder: RunFolder, runtime: Runtime, reporter: RunReporter) -> None:
        """Prepare the data and restore the training. Raises DataError where the data have changed."""
        self.clock = Clock()
        reset_peak(runtime.device)
        self.spec, self.folder, self.runtime, self.reporter = spec, folder, runtime, reporter
        self.writes = runtime.rank == 0
        self.data = prepare_data(spec, runtime)
        self.restarted: str | None = None
        """Why the run starts again at the first step although it was begun before."""
        notes = self._restore()
        self.first_step = self.trainer.step
        if self.writes:
            folder.note(self._beginning())
        reporter.start(self.first_step)
        self.clock.start(self.trainer, notes.get("spent", {}))
        self.writer = ResumeWriter(folder)

    def run(self, should_stop: Callable[[], StopRequest | None]) -> Literal["finished", "interrupted", "stopped"]:
        """Train until the last step or a request of rank 0's `should_stop`, then write result or resume file."""
        try:
            return self._run(should_stop)
        finally:
            self.trainer.close()
            self.writer.close()

    def _run(self, should_stop: Callable[[], StopRequest | None]) -> Literal["finished", "interrupted", "stopped"]:
        trainer = self.trainer
        while not trainer.done:
            trainer.train_step()
            if trainer.step == self.first_step + 1:
                self.clock.end_warm_up()
            self._log_step()
            # A decision of all ranks takes a message, and only a logged step has its loss summed over the ranks. So
            # several ranks neither stop nor save after every step.
            may_end = self.runtime.world_size == 1 or trainer.step % LOG_EVERY == 0
            if may_end and not trainer.done and (request := self._stop_request(should_stop)):
                self._save()
                if self.writes:
                    self.writer.wait()
                    self.folder.note(f"{request} after step {trainer.step}")
                    self.folder.set_state(request)
                self.reporter.report(request)
                return request
            if may_end and not trainer.done and self._save_is_due():
                self._save()
                if not self.runtime.checkpoint_every_s:
                    self.writer.wait()
        self._finish()
        return "finished"

    def _beginning(self) -> str:
        """First lines of the run's log in an attempt."""
        runtime, step = self.runtime, self.first_step
        start = f"continues after step {step}" if step else "starts"
        if self.restarted:
            start = f"starts again at the first step ({self.restarted})"
        return (
            f"attempt {self.folder.attempt} on {runtime.worker_id} ({runtime.device}, {runtime.precision}, "
            f"{runtime.world_size} workers, {runtime.threads} threads) {start}"
        )

    def _stop_request(self, should_stop: Callable[[], StopRequest | None]) -> StopRequest | None:
        """The request of rank 0, on every rank."""
        return _REQUESTS[broadcast_number(self.runtime, _REQUESTS.index(should_stop() if self.writes else None))]

    def _restore(self) -> dict[str, Any]:
        """Create the trainer, and bring model and curve to the state of the resume file; returns the file's notes.

        Where that file or the curve up to it is damaged, the run starts again at the first step.
        """
        self.trainer = Trainer(self.spec, self.runtime)
        notes: dict[str, Any] = {}
        try:
            notes = self._load_resume()
        except (CheckpointError, DamagedError) as error:
            self.trainer, self.restarted = Trainer(self.spec, self.runtime), str(error)
            if self.writes:
                self.folder.put_aside(self.folder.resume.name)
        if self.writes:
            self.folder.rewind(self.trainer.step, notes.get("curve"))
        return notes

    def _load_resume(self) -> dict[str, Any]:
        """Load the resume file, if there is one; returns its notes. Raises CheckpointError, DamagedError, DataError."""
        path = self.folder.resume
        if not path.exists():
            return {}
        notes = load_resume(path, self.trainer)
        if "curve" in notes:
            self.folder.check_curve(notes["curve"])
        self._check_data(notes)
        return notes

    def _check_data(self, notes: dict[str, Any]) -> None:
        if notes.get("data") != self.data:
            raise DataError(
                f"this run was started on data {notes.get('data')}, but its task now reads {self.data}; "
                f"bring the files back to continue, or delete {self.folder.path} to start again"
            )

    def _log_step(self) -> None:
        """Log the training loss and evaluate, where the step is due for it."""
        trainer, train, evaluate = self.trainer, self.spec.train, self.spec.evaluate
        step = self.reporter.step = trainer.step
        if step == 1 or step % LOG_EVERY == 0 or trainer.done:
            rates = train.optimizer.rates(train.lr)
            rates = {name: train.learning_rate(rate, step) for name, rate in rates.items()}
            self.reporter.log({"train/loss": trainer.mean_loss(), **rates})
        if step % evaluate.every == 0 and not trainer.done:
            with self.clock.paused():
                self._log_evaluation(trainer.evaluate(evaluate.sequences))
            self.reporter.report("running", evaluated=True)
        self.reporter.report_throttled()

    def _log_evaluation(self, metrics: dict[str, float]) -> None:
        self.reporter.log(metrics)
        if self.writes:
            values = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            self.folder.note(f"step {self.trainer.step}: {values}")

    def _save_is_due(self) -> bool:
        """Whether a resume file is due, by rank 0's clock, on every rank."""
        every_s, writer = self.runtime.checkpoint_every_s, self.writer
        if not every_s:
            return True
        shortest_s = max(every_s, SAVE_TIME_RATIO * writer.duration_s)
        due = self.writes and not writer.busy and time.monotonic() - writer.saved_s >= shortest_s
        return broadcast_flag(self.runtime, due)

    def _save(self) -> None:
        """Begin to write the resume file; it is complete at the next `wait` of the writer. Every rank calls this."""
        with self.clock.paused():
            self.trainer.collect_state()
            if not self.writes:
                return
            notes = {"data": self.data, "spent": self.clock.durations(), "curve": self.folder.curve_mark()}
            self.writer.write(self.trainer, notes)

    def _finish(self) -> None:
        """Evaluate, and write checkpoint and result."""
        speed = self.clock.tokens_per_s()
        with self.clock.paused():
            left_out = self._evaluate_finally()
        if self.writes:
            with self.folder.writing_checkpoint() as path:
                save_model(path, self.trainer.model, self.spec)
                if tokenizer := self.spec.task.tokenizer_json:
                    shutil.copyfile(tokenizer, path / TOKENIZER_FILE)
            optional = {
                "data": self.data,
                "tokenizer": self.spec.task.tokenizer_name(),
                "contexts_left_out": left_out,
                "restarted": self.restarted,
            }
            facts = {
                "steps": self.trainer.step,
                "resumed_from_step": self.first_step,
                **self.clock.durations(),
                **{name: text for name, text in optional.items() if text},
                **speed_facts(self.trainer, speed),
                **machine_facts(self.trainer),
            }
            self.writer.wait()  # `finish` deletes the file
            self.folder.note(f"finished after step {self.trainer.step}, {facts['wall_s']} s in all attempts")
            self.folder.finish(self.reporter.metrics, facts)
        self.reporter.report("finished", evaluated=True)

    def _evaluate_finally(self) -> str:
        """Log the metrics after the last step, with each variant; returns what was not measured, and why."""
        sequences = self.spec.evaluate.final_sequences
        self._log_evaluation(self.trainer.evaluate(sequences))
        left_out = [self._evaluate_other_lengths()]
        for variant in self.spec.evaluate.variants:
            with self.trainer.model.encodings(self.spec.variant(variant)):
                self._log_evaluation(_prefixed(f"{variant}/", self.trainer.evaluate(sequences)))
                left_out.append(self._evaluate_other_lengths(f"{variant}/"))
        return "; ".join(dict.fromkeys(reason for reason in left_out if reason))

    def _evaluate_other_lengths(self, prefix: str = "") -> str:
        """Log the metrics on windows of each context and on longer sequences; returns which were left out, and why.

        `prefix` begins the names of the metrics.
        """
        evaluate, task = self.spec.evaluate, self.spec.task
        lengths: list[tuple[str, int, int, Callable[[int, int], dict[str, float]]]] = [
            (str(context), context, context, self.trainer.evaluator.evaluate_windows) for context in evaluate.contexts
        ]
        for times in evaluate.lengths:
            tokens = task.longer(times).length(task.TESTS[0])
            lengths.append((f"{times}x", tokens, times, self.trainer.evaluator.evaluate_longer))
        out_of_reach: dict[str, str] = {}
        not_finite = []
        for name, tokens, length, evaluate_at in lengths:
            try:
                check_reach(self.spec, tokens)
            except ValueError as error:
                out_of_reach[name] = str(error)
                continue
            measured = _prefixed(prefix, evaluate_at(length, evaluate.final_sequences))
            # The model may break down beyond its training length. The run does not fail for that.
            finite = {name: value for name, value in measured.items() if math.isfinite(value)}
            not_finite += [f"{name} is {value}" for name, value in measured.items() if name not in finite]
            self.reporter.log(finite)
        reasons = list(out_of_reach.values())[:1]  # the same for all lengths
        return "; ".join([f"{', '.join(out_of_reach)}: {reason}" for reason in reasons] + not_finite)


def _prefixed(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    return {prefix + name: value for name, value in metrics.items()}
