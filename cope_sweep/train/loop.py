"""Trains one run: starts an attempt, restores its state, trains, evaluates, saves, and reports progress.

Read from top to bottom: `train_run` deals with attempts and errors, `_train` with the parts of a training, and
`TrainingLoop` with its steps and its end.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from cope_sweep.config import RunSpec
from cope_sweep.errors import CheckpointError
from cope_sweep.model import check_reach
from cope_sweep.model.checkpoint import save_model
from cope_sweep.model.load import HeadLoad, beyond_warnings, head_loads, largest_position, load_warnings
from cope_sweep.signals import described, user_code
from cope_sweep.store import AttemptWriter, Event, RunFolder, Status
from cope_sweep.store.artifacts import RESUME_FILE, SPEC_FILE, short_message
from cope_sweep.store.errors import DamagedError, FencedError, StoreUnreachable
from cope_sweep.train.facts import Clock, machine_facts, reset_peak, speed_facts
from cope_sweep.train.resume import ResumeWriter, load_state
from cope_sweep.train.runtime import Runtime
from cope_sweep.train.trainer import Diverged, Trainer, check_finite
from cope_sweep.train.workers import DataError, broadcast_choice, broadcast_flag, check_steps, prepare_data

LOG_EVERY = 10
"""Steps between two points of the training loss's curve. Reading the loss makes the host wait for the GPU."""
REPORT_EVERY_S = 0.2
"""Shortest time between two events about steps alone: small models make hundreds of steps a second."""
SAVE_TIME_RATIO = 19
"""The time between two resume files is at least this many times what writing the last one took, so that writing takes
at most a 20th of the time. Not applied where a file is wanted after every step."""
SAMPLED_SEQUENCES = 4
"""Test sequences on which a run measures what its position logits do, once at the first and at the last evaluation."""

StopRequest = Literal["interrupted", "stopped"]
"""Why a run ends before its last step: `interrupted` continues later, `stopped` was ended by a scheduler."""
STOP_REQUESTS: tuple[StopRequest, ...] = get_args(StopRequest)

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
    caller holds the run's lease, or ensures otherwise that nothing else trains the run. Settings of the process, as
    torch's number of threads, follow `runtime` until the run ends, and are then as before.

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
            encoding, out of memory, SystemExit of users' code, …). It is not raised, so that the next run can follow.
        "interrupted", "stopped": what `should_stop` returned.
        "fenced": a newer attempt of the run has started elsewhere; nothing of it was overwritten.

    Raises StoreUnreachable, and records no failure: the run can be continued when the object store is back.

    Raises, with several ranks, an error that may have occurred on one rank only, after it is recorded: the ranks are
    no longer in step and have to be restarted.
    """
    files, refusal = _begin(run, folder, runtime, attempt) if runtime.rank == 0 else (None, None)
    refusal = broadcast_choice(runtime, ("finished", "fenced"), refusal)
    if refusal is not None:
        return refusal
    reporter = RunReporter(run, runtime.worker_id, files, on_event)
    try:
        with runtime.applied(), user_code():
            return _train(run, folder, files, runtime, reporter, should_stop)
    except FencedError:
        if runtime.world_size > 1:
            raise
        return "fenced"
    except StoreUnreachable:
        raise
    except Exception as error:
        if files is not None:
            message = short_message(" ".join(described(error).split()))
            try:
                files.fail(message, traceback.format_exc())
            except FencedError:
                return "fenced"
            except OSError as reason:  # a full disk, most often. The event still has the reason of the failure.
                sys.stderr.write(f"{files.path}: the failure cannot be recorded ({reason}): {message}\n")
            reporter.report("failed", message)
        if runtime.world_size > 1 and not isinstance(error, Diverged):
            raise
        return "failed"


def _begin(
    run: RunSpec, folder: RunFolder, runtime: Runtime, attempt: int | None
) -> tuple[AttemptWriter | None, Literal["finished", "fenced"] | None]:
    """The attempt to write to, or why the run is not trained."""
    if folder.status == "finished" and not folder.lost_files().keys() - {SPEC_FILE}:
        folder.repair(run)
        return None, "finished"
    try:
        return folder.begin(run, runtime.worker_id, attempt), None
    except FencedError:
        return None, "fenced"


def _train(
    run: RunSpec,
    folder: RunFolder,
    files: AttemptWriter | None,
    runtime: Runtime,
    reporter: RunReporter,
    should_stop: Callable[[], StopRequest | None],
) -> Literal["finished"] | StopRequest:
    """Train a run that has started. `files` is None in workers that write nothing: all but rank 0.

    Raises DataError if the data have changed since the run's first attempt.
    """
    clock = Clock()
    reset_peak(runtime.device)
    data = prepare_data(run, runtime)
    start = _restore(run, folder, files, runtime, data)
    trainer = start.trainer
    if files:
        files.note(
            f"attempt {files.number} on {runtime.worker_id} ({runtime.device}, {runtime.precision}, "
            f"{runtime.world_size} workers, {runtime.threads} threads) {start}"
        )
    reporter.start(trainer.step)
    clock.start(trainer, start.spent)
    writer = ResumeWriter(files) if files else None
    loop = TrainingLoop(run, files, runtime, reporter, start, data, clock, writer)
    try:
        request = loop.train(should_stop)
        if request is not None:
            return request
        loop.finish()
        return "finished"
    finally:
        trainer.close()
        if writer:
            writer.close()


@dataclass(frozen=True)
class Start:
    """The state in which an attempt starts to train."""

    trainer: Trainer
    step: int
    """Number of steps that earlier attempts have trained."""
    spent: Mapping[str, float]
    """What `Clock.durations` was then."""
    precisions: Sequence[str]
    """The precisions of all attempts whose steps count, in their order."""
    restarted: str | None = None
    """Why the run starts again at the first step although it has started before."""

    def __str__(self) -> str:
        if self.restarted:
            return f"starts again at the first step ({self.restarted})"
        return f"continues after step {self.step}" if self.step else "starts"


def _restore(run: RunSpec, folder: RunFolder, files: AttemptWriter | None, runtime: Runtime, data: str | None) -> Start:
    """Create the trainer, and bring model and curve to the state of the resume file.

    Where that file or the curve up to it is damaged, the run starts again at the first step. Rank 0 decides: on other
    machines, a file may be missing or older. Raises CheckpointError where the ranks would not continue at one step.
    """
    trainer = Trainer(run, runtime)
    notes: dict[str, Any] = {}
    damage = restarted = None
    if broadcast_flag(runtime, folder.resume.exists()):
        try:
            if runtime.rank > 0:
                folder.fetch_resume()
            notes = load_state(folder.resume, trainer)
            if files and "curve" in notes:
                folder.check_curve(notes["curve"])
            _check_data(folder, notes, data)
        except (CheckpointError, DamagedError) as error:
            damage = str(error)
        if broadcast_flag(runtime, damage is not None):
            # Another trainer: the first one may have loaded a part of the file.
            trainer, notes, restarted = Trainer(run, runtime), {}, damage
            if files:
                files.quarantine_file(RESUME_FILE)
        elif damage is not None:
            raise CheckpointError(damage)
        check_steps(runtime, trainer.step)
        if runtime.rank > 0 and folder.objects:
            # All ranks have read it. Rank 0, on the same machine maybe, writes the next one after a step of all ranks.
            folder.resume.unlink(missing_ok=True)
    if files:
        files.rewind(trainer.step, notes.get("curve"))
    precisions = list(dict.fromkeys([*notes.get("precisions", ()), runtime.precision]))
    return Start(trainer, trainer.step, notes.get("spent", {}), precisions, restarted)


def _check_data(folder: RunFolder, notes: Mapping[str, Any], data: str | None) -> None:
    """Raise DataError if the resume file with these notes was trained on other data."""
    if notes.get("data") != data:
        raise DataError(
            f"this run was trained on data {notes.get('data')}, but its task now reads {data}; "
            f"bring the files back to continue, or delete {folder.path} to start again",
            started=notes.get("data"),
            reads=data,
        )


class RunReporter:
    """Writes a run's metrics to its folder and sends progress events to a listener."""

    def __init__(
        self, run: RunSpec, worker_id: str, files: AttemptWriter | None, on_event: Callable[[Event], None]
    ) -> None:
        """`files` is None in workers that write nothing: all but rank 0."""
        self.step = 0
        self.metrics: dict[str, float] = {}
        """The latest value of each metric."""
        self.warnings: tuple[str, ...] = ()
        """What was warned about."""
        self._run, self._worker_id, self._files, self._on_event = run, worker_id, files, on_event
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
        if self._files:
            self._files.log({"step": self.step, **metrics})

    def forget_evaluations(self) -> None:
        """Drop what was measured on test sets: the result has the final evaluation, and nothing of an earlier one."""
        self.metrics = {name: value for name, value in self.metrics.items() if name.startswith("train/")}

    def warn(self, warning: str, measured: str) -> None:
        """Warn in the run's log, with what was measured there, and in all further events."""
        self.warnings += (warning,)
        if self._files:
            self._files.note(f"warning: {warning} ({measured})")

    def report_throttled(self) -> None:
        """Report `running`, unless the last report is less than REPORT_EVERY_S ago."""
        if time.monotonic() - self._reported_s >= REPORT_EVERY_S:
            self.report("running")

    def report(self, status: Status, message: str | None = None, *, evaluated: bool = False) -> None:
        """Send an event. `evaluated`: the test sets were evaluated at the present step."""
        self._reported_s = time.monotonic()
        steps, elapsed_s = self.step - self._first_step, self._reported_s - self._started_s
        steps_per_s = steps / elapsed_s if steps and elapsed_s > 0 else None
        tokens_per_step = self._run.training_tokens / self._run.train.steps
        self._on_event(
            Event(
                run_id=self._run.run_id,
                status=status,
                step=self.step,
                steps=self._run.train.steps,
                metrics=dict(self.metrics),
                steps_per_s=steps_per_s,
                tokens_per_s=None if steps_per_s is None else steps_per_s * tokens_per_step,
                worker_id=self._worker_id,
                message=message,
                evaluated=evaluated,
                warnings=self.warnings,
            )
        )


@dataclass(frozen=True)
class TrainingLoop:
    """The steps of a run, and its end. Rank 0 has `files` and `writer`, and writes; for other ranks both are None."""

    run: RunSpec
    files: AttemptWriter | None
    runtime: Runtime
    reporter: RunReporter
    start: Start
    data: str | None
    """The fingerprint of the task's data."""
    clock: Clock
    writer: ResumeWriter | None

    @property
    def trainer(self) -> Trainer:
        return self.start.trainer

    def train(self, should_stop: Callable[[], StopRequest | None]) -> StopRequest | None:
        """Train until the last step, or until rank 0's `should_stop` asks for an end, which is returned."""
        trainer = self.trainer
        while not trainer.done:
            trainer.train_step()
            if trainer.step == self.start.step + 1:
                self.clock.end_warm_up()
            self._log_step()
            # A decision of all ranks takes a message, and only a logged step has its loss summed over the ranks. So
            # several ranks neither stop nor save after every step.
            may_end = self.runtime.world_size == 1 or trainer.step % LOG_EVERY == 0
            if trainer.done or not may_end:
                continue
            request = broadcast_choice(self.runtime, STOP_REQUESTS, should_stop() if self.files else None)
            if request is not None:
                self._end(request)
                return request
            if self._save_is_due():
                self._save()
                if self.writer and not self.runtime.checkpoint_every_s:
                    self.writer.wait()
        return None

    def _end(self, request: StopRequest) -> None:
        self._save()
        if self.files and self.writer:
            self.writer.wait()  # before the status, which says that the run can be continued
            self.files.note(f"{request} after step {self.trainer.step}")
            self.files.set_state(request)
        self.reporter.report(request)

    def _log_step(self) -> None:
        trainer, train, evaluate = self.trainer, self.run.train, self.run.evaluate
        step = self.reporter.step = trainer.step
        if step == 1 or step % LOG_EVERY == 0 or trainer.done:
            rates = {name: train.learning_rate(rate, step) for name, rate in train.learning_rates.items()}
            self.reporter.log({"train/loss": trainer.mean_loss(), **rates})
        if step % evaluate.every == 0 and not trainer.done:
            with self.clock.paused():
                self._log_evaluation(trainer.evaluate(evaluate.sequences))
                if step == evaluate.every:
                    self._warn_of_positions(finished=False)
            self.reporter.report("running", evaluated=True)
        self.reporter.report_throttled()

    def _log_evaluation(self, metrics: dict[str, float]) -> None:
        self.reporter.log(metrics)
        if self.files:
            values = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            self.files.note(f"step {self.trainer.step}: {values}")

    def _warn_of_positions(self, *, finished: bool) -> list[HeadLoad]:
        """Warn if all heads count beyond the last embedding, or if a `finished` model's position logits do nothing.

        Returns what was measured; nothing in other processes than the one that writes files.
        """
        if not self.files or not any(encoding.scores for encoding in self.run.model.position):
            return []
        with self.runtime.autocast():
            loads = head_loads(self.trainer.model, self.trainer.evaluator.sample_sequences(SAMPLED_SEQUENCES))
        if not finished or self.run.evaluate.every >= self.run.train.steps:
            for warning in beyond_warnings(loads):
                self.reporter.warn(*warning)
        if finished:
            for warning in load_warnings(loads):
                self.reporter.warn(*warning)
        return loads

    def _save_is_due(self) -> bool:
        """By rank 0's clock, on every rank."""
        every_s, writer = self.runtime.checkpoint_every_s, self.writer
        if not every_s:
            return True
        due = False
        if writer and not writer.busy:
            due = time.monotonic() - writer.saved_s >= max(every_s, SAVE_TIME_RATIO * writer.duration_s)
        return broadcast_flag(self.runtime, due)

    def _save(self) -> None:
        """Start to write the resume file; it is complete at the next `wait` of the writer. Every rank calls this."""
        with self.clock.paused():
            self.trainer.collect_state()
            if self.files and self.writer:
                notes = {
                    "data": self.data,
                    "spent": self.clock.durations(),
                    "precisions": self.start.precisions,
                    "curve": self.files.mark_curve(),
                }
                self.writer.write(self.trainer, notes)

    def finish(self) -> None:
        """Evaluate, and write checkpoint and result."""
        speed = self.clock.tokens_per_s()
        with self.clock.paused():
            left_out = self._evaluate_finally()
            loads = self._warn_of_positions(finished=True)
        if self.files and self.writer:
            # The result is the last file: it makes the run finished, and has the checksums of the others.
            with self.clock.paused(), self.files.save_checkpoint() as path:
                save_model(path, self.trainer.model, self.run)
                self.run.task.save_tokenizer(path)
            facts = self._facts(speed, left_out)
            if (position := largest_position(loads)) is not None:
                facts["largest_position"] = round(position, 3)
            self.writer.wait()  # `finish` deletes the resume file, which may still be written
            self.files.note(f"finished after step {self.trainer.step}, {facts['wall_s']} s in all attempts")
            self.files.finish(self.reporter.metrics, facts)
        self.reporter.report("finished", evaluated=True)

    def _facts(self, tokens_per_s: float, left_out: str) -> dict[str, Any]:
        """Facts of the result. `left_out`: contexts that were not measured, and why."""
        optional = {
            "data": self.data,
            "data_source": self.run.task.data_source(),
            "tokenizer": self.run.task.tokenizer_name(),
            "contexts_left_out": left_out,
            "restarted": self.start.restarted,
        }
        return {
            "steps": self.trainer.step,
            "resumed_from_step": self.start.step,
            **self.clock.durations(),
            **{name: text for name, text in optional.items() if text},
            **speed_facts(self.trainer, tokens_per_s),
            **machine_facts(self.trainer),
            "precision": ", then ".join(self.start.precisions),
        }

    def _evaluate_finally(self) -> str:
        """Log the metrics after the last step, with each variant; returns what was not measured, and why."""
        sequences = self.run.evaluate.final_sequences
        self.reporter.forget_evaluations()
        self._log_evaluation(self.trainer.evaluate(sequences))
        left_out = [self._evaluate_other_lengths()]
        for variant in self.run.evaluate.variants:
            with self.trainer.model.encodings(self.run.variant(variant)):
                self._log_evaluation(_prefixed(f"{variant}/", self.trainer.evaluate(sequences)))
                left_out.append(self._evaluate_other_lengths(f"{variant}/"))
        return "; ".join(dict.fromkeys(reason for reason in left_out if reason))

    def _evaluate_other_lengths(self, prefix: str = "") -> str:
        """Log the metrics on windows of each context and on longer sequences; returns which were left out, and why.

        `prefix` begins the names of the metrics.
        """
        evaluate, task = self.run.evaluate, self.run.task
        lengths: list[tuple[str, int, int, Callable[[int, int], dict[str, float]]]] = [
            (str(context), context, context, self.trainer.evaluator.evaluate_windows) for context in evaluate.contexts
        ]
        if (places := evaluate.positions) is not None:
            lengths.append((f"positions to {places}", places, places, self.trainer.evaluator.evaluate_positions))
        for times in evaluate.lengths:
            tokens = task.longer(times).length(task.TESTS[0])
            lengths.append((f"{times}x", tokens, times, self.trainer.evaluator.evaluate_longer))
        out_of_reach: dict[str, str] = {}
        not_finite = []
        for name, tokens, length, evaluate_at in lengths:
            try:
                check_reach(self.run, tokens)
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
