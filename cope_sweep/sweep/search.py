"""A search by suggestions: which row of an ablation comes next, by Optuna.

Optuna keeps its state in a study in its own storage: in the schema `optuna` of an index in PostgreSQL, or else in the
store's file `optuna.db`. Sweeps of one ablation share the study, one after another and at the same time, as any workers
of Optuna do. Optuna knows which rows were suggested, and their results; whether a run has ended, the store says.

A trial of Optuna is a row with all of its seeds, and its value the mean over them. A row has the id of its first run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import random
import sqlite3
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

from cope_sweep.config import Plan, Row, RunSpec, SpecError, row_of
from cope_sweep.config.ablation import Goal
from cope_sweep.config.points import Dimension, chosen_parameters, dimensions_of, parameters_of
from cope_sweep.store import Status, Store, StoreError
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.files import create_database_file
from cope_sweep.store.index import IndexUnavailable
from cope_sweep.store.index.database import on_network, sqlite_file, sqlite_url
from cope_sweep.store.store import STUDY_FILE
from cope_sweep.sweep.executor import ENDED

RUN_ID = "run_id"
"""The user attribute of a trial that has its row's id. A trial without it is not a valid row, or is not decided yet."""
MAX_ASKS = 100
"""The number of times that the sampler is asked for a new row. After that, the space counts as used up."""
DECISION_S = 60.0
"""The time after which a process that has asked for a suggestion, and has not decided about it, counts as dead."""
BUSY_TIMEOUT_S = 60
"""The time for which a writer of the file waits for another one."""
OPEN_TRIES = 20
"""Processes that make the tables at the same time disturb each other. The later ones try again."""
OPEN_INTERVAL_S = 0.1

logger = logging.getLogger(__name__)


@dataclass
class _OpenRow:
    """A row that was returned, and is not told to the study yet."""

    row: Row
    trial: Trial | None
    """Its trial, if this search has asked for it."""
    to_train: Sequence[RunSpec] = ()
    """The runs that this sweep trains."""
    ends: dict[str, tuple[Status, float | None]] = field(default_factory=dict)
    """Run id → status and value, of the runs that have ended since."""
    reports: dict[int, dict[str, float]] = field(default_factory=dict)
    """Step → run id → the metric's value at that evaluation."""


class Search:
    """The search of one sweep: the rows to train, one after another, and what became of them.

    Rows of earlier sweeps whose runs have not ended come first, then new ones. Last come those that other sweeps have
    suggested meanwhile and that have not ended: whoever asks waits for their results, and trains them if they are given
    up. Together, all sweeps suggest as many rows as the ablation asks for.
    """

    def __init__(
        self, plan: Plan, store: Store, *, retry_failed: bool, stopped_counts: bool, max_runs: int | None
    ) -> None:
        """Continue the search of a plan.

        Args:
            plan: A plan whose `search` is not None, with the rows that sweeps have recorded.
            store: The store.
            retry_failed: Whether runs that have failed before are suggested again.
            stopped_counts: Whether a run that was stopped early has ended; else it is suggested again.
            max_runs: How many runs are to be trained at most; None: no limit.

        Raises:
            IndexUnavailable: The database does not answer.
            StoreError: Another version of Optuna has made the study.
        """
        if plan.search is None:
            raise ValueError(f"the ablation {plan.name} has no search by suggestions")
        self.metric = str(plan.search.metric)
        """The metric that is optimised."""
        self.goal: Goal = plan.search.goal or "min"
        self._plan, self._store, self._left = plan, store, max_runs
        self._ended: set[Status] = {"finished"}
        if stopped_counts:
            self._ended.add("stopped")
        if not retry_failed:
            self._ended.add("failed")
        self._distributions = {dimension.name: _distribution(dimension) for dimension in dimensions_of(plan.ablation)}
        self._rows = {_row_id(row): row for row in plan.rows}
        """Row id → row, of the rows that sweeps have recorded and those that this search has returned."""
        self._again: dict[str, Row] = {}
        """The rows of earlier sweeps that are still to be returned."""
        self._open: dict[str, _OpenRow] = {}
        """Row id → row, of those that were returned and have not ended."""
        self._row_ids: dict[str, str] = {}
        """Run id → row id, of the runs of open rows."""
        self._trials: dict[str, list[FrozenTrial]] = {}
        """Row id → its trials, of all sweeps."""
        self._others: dict[str, Row] = {}
        """The rows that other sweeps have suggested meanwhile and that have not ended."""
        self._undecided: list[int] = []
        """The numbers of the trials that another sweep has asked for and may have as its row."""
        self._is_stuck = False
        """Whether nothing new is suggested before another run has ended."""
        with self._answering():
            self._storage = _opened_storage(store)
            self._study = self._opened_study(plan.search.seed)
            self._continue()

    def close(self) -> None:
        """Close the connections to Optuna's database. No other method is called afterwards."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    @property
    def remaining(self) -> int:
        """The number of rows yet to be returned, by this search or by a later sweep's."""
        return len(self._again) + self._open_samples + len(self._others)

    @property
    def is_exhausted(self) -> bool:
        """Whether `next_row` returns nothing any more."""
        return self._left == 0 or not self.remaining

    @property
    def ended_early(self) -> bool:
        """Whether there are fewer rows than the ablation asks for: the sampler finds no more that are new."""
        return not self.remaining and len(self._recorded_rows()) < self._plan.samples

    def next_row(self) -> Row | None:
        """The next row. None: none now; unless `is_exhausted`, ask again a little later, or when a run has ended.

        Whoever asks records the row with the sweep, and trains `runs_to_train`. Raises IndexUnavailable; ask again
        then.
        """
        if self._left == 0:
            return None
        with self._answering():
            self._tell_ends()
            row = _first(self._again) or self._suggested() or _first(self._others)
            if row is None:
                return None
            statuses = self._store.index.statuses(run.run_id for run in row.runs)
        row_id = _row_id(row)
        self._again.pop(row_id, None)
        self._others.pop(row_id, None)
        self._rows[row_id] = row
        to_train = [run for run in row.runs if statuses.get(run.run_id) not in self._ended][: self._left]
        if self._left is not None:
            self._left -= len(to_train)
        self._open.setdefault(row_id, _OpenRow(row, None)).to_train = to_train
        self._row_ids |= {run.run_id: row_id for run in row.runs}
        return row

    def runs_to_train(self, row: Row) -> Sequence[RunSpec]:
        """The runs of a row that was returned that are to be trained, as many as may be.

        The others have ended before, in a sweep of another ablation, say: `end` tells their results at once.
        """
        return self._open[_row_id(row)].to_train

    def report(self, run_id: str, step: int, value: float) -> None:
        """Tell the metric's value at an evaluation of a run. A value that is not finite is ignored.

        The study gets the mean when all runs of the row have one at this step. Where the database does not answer, it
        is in no trial.
        """
        row = self._open.get(self._row_ids.get(run_id, ""))
        if row is None or row.trial is None or not math.isfinite(value):
            return
        values = row.reports.setdefault(step, {})
        values[run_id] = value
        if len(values) == len(row.row.runs):
            with contextlib.suppress(IndexUnavailable, UpdateFinishedTrialError), self._answering():
                row.trial.report(statistics.fmean(values.values()), step)

    def end(self, run_id: str, status: Status, value: float | None) -> None:
        """Tell how a run ended. It has no effect for a run that goes on later.

        The study learns the result of a row when all of its runs have ended. Where the database does not answer, that
        is told later: by the next call, or by the next sweep.

        Args:
            run_id: A run of a row that was returned.
            status: "finished": `value` is its result. "stopped": what was reported counts. "failed": nothing is known.
            value: The metric's last value; None: there is none.
        """
        row = self._open.get(self._row_ids.get(run_id, ""))
        if status not in ENDED or row is None:
            return
        row.ends[run_id] = status, value
        self._is_stuck = False
        with contextlib.suppress(IndexUnavailable), self._answering():
            self._tell_ends()

    # -- rows ------------------------------------------------------------------------------------------------------

    def _continue(self) -> None:
        """Tell the study what is known of the rows of earlier sweeps, and find those that have not ended."""
        self._look()
        for row_id, trials in self._trials.items():
            if row_id not in self._rows and (row := self._row_of(trials[0])) is not None:
                self._rows[row_id] = row
        self._others.clear()
        records = self._store.index.records(run.run_id for row in self._rows.values() for run in row.runs)
        for row_id, row in self._rows.items():
            of_row = [records[run.run_id] for run in row.runs if run.run_id in records]
            if len(of_row) == len(row.runs) and all(record.status in self._ended for record in of_row):
                self._tell(row_id, *_outcome([(record.status, record.value(self.metric)) for record in of_row]))
            else:
                self._again[row_id] = row

    def _suggested(self) -> Row | None:
        """A new row, now owned by this search; None: there is none now."""
        for _ in range(MAX_ASKS):
            if not self._open_samples:
                return None
            trial = self._study.ask()
            chosen_parameters(self._plan.ablation, partial(_parameter, trial))
            self._look()
            try:
                row = row_of(self._plan.ablation, trial.params)
            except SpecError as error:
                logger.warning("a suggestion is not a valid run: %s", error)
                self._study.tell(trial, state=TrialState.FAIL)
                continue
            row_id = _row_id(row)
            recorded = self._recorded_rows()
            if row_id in recorded:
                self._tell_again(trial, row_id)
                continue
            undecided = sum(number < trial.number for number in self._undecided)
            if len(recorded) + undecided >= self._plan.samples:  # another sweep was faster
                self._study.tell(trial, state=TrialState.FAIL)
                return None
            trial.set_user_attr(RUN_ID, row_id)
            if len(row.runs) > 1:
                trial.set_user_attr("run_ids", [run.run_id for run in row.runs])
            self._open[row_id] = _OpenRow(row, trial)
            return row
        self._is_stuck = True
        return None

    @property
    def _open_samples(self) -> int:
        """The number of rows that may still be new."""
        if self._is_stuck and not self._open:  # every suggestion is known, and no result can change that
            return 0
        return max(0, self._plan.samples - len(self._recorded_rows()))

    def _recorded_rows(self) -> set[str]:
        """The rows that were suggested, by any sweep."""
        return self._rows.keys() | self._trials.keys()

    def _row_of(self, trial: FrozenTrial) -> Row | None:
        """The row of a trial that has its id; None if it is none of the ablation."""
        with contextlib.suppress(SpecError, KeyError):
            row = row_of(self._plan.ablation, trial.params)
            if _row_id(row) == trial.user_attrs[RUN_ID]:
                return row
        return None

    # -- the study -------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Read the trials of the study, also of other sweeps."""
        self._trials, self._undecided = {}, []
        oldest = datetime.now() - timedelta(seconds=DECISION_S)
        for trial in self._study.get_trials(deepcopy=False):
            if RUN_ID in trial.user_attrs:
                self._trials.setdefault(trial.user_attrs[RUN_ID], []).append(trial)
            elif not trial.state.is_finished() and (trial.datetime_start or oldest) > oldest:
                self._undecided.append(trial.number)
        foreign_trials = {}
        for row_id, trials in self._trials.items():
            if row_id not in self._rows and not all(trial.state.is_finished() for trial in trials):
                row = self._others.get(row_id) or self._row_of(trials[0])
                if row is not None:
                    foreign_trials[row_id] = row
        self._others = foreign_trials

    def _tell_ends(self) -> None:
        """Tell the study the results of the open rows whose runs have all ended."""
        self._look()
        for row_id, open_row in list(self._open.items()):
            if not open_row.ends:
                continue
            other_run_ids = [run.run_id for run in open_row.row.runs if run.run_id not in open_row.ends]
            if any(run.run_id in other_run_ids for run in open_row.to_train):
                continue
            records = self._store.index.records(other_run_ids) if other_run_ids else {}
            ends = [
                *open_row.ends.values(),
                *((record.status, record.value(self.metric)) for record in records.values()),
            ]
            if len(ends) == len(open_row.row.runs) and all(status in ENDED for status, _ in ends):
                self._tell(row_id, *_outcome(ends))
                del self._open[row_id]

    def _tell(self, row_id: str, state: TrialState, value: float | None) -> None:
        """Tell each trial that waits for a row how it ended. If none does, a result becomes a new trial."""
        trials = self._trials.get(row_id, [])
        is_told = any(trial.state in (state, TrialState.COMPLETE) for trial in trials)
        open_row = self._open.get(row_id)
        for trial in trials:
            if trial.state.is_finished():
                continue
            if state == TrialState.PRUNED and (open_row is None or open_row.trial is None):
                # Another process has asked for it, so what is reported here is in no trial.
                self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
            else:
                self._study.tell(trial.number, value, state, skip_if_finished=True)
                is_told = True
        if not is_told and state != TrialState.FAIL:
            self._add(row_id, state, value)

    def _tell_again(self, trial: Trial, row_id: str) -> None:
        """Tell a trial that repeats a row the result of that row."""
        trial.set_user_attr(RUN_ID, row_id)
        decided = [trial for trial in self._trials.get(row_id, []) if trial.value is not None]
        if not decided:
            self._study.tell(trial, state=TrialState.FAIL)
        elif decided[-1].state == TrialState.COMPLETE:
            self._study.tell(trial, decided[-1].value)
        else:
            for step, value in decided[-1].intermediate_values.items():
                trial.report(value, step)
            self._study.tell(trial, state=TrialState.PRUNED)

    def _add(self, row_id: str, state: TrialState, value: float | None) -> None:
        """Add a trial of a row that has ended, with what it has reported."""
        row = self._rows[row_id]
        values = self._reported(row)
        last = values[max(values)] if values else None
        parameters = parameters_of(self._plan.ablation, row.labels)
        self._study.add_trial(
            create_trial(
                state=state,
                value=value if state == TrialState.COMPLETE else last,
                params=parameters,
                distributions={name: self._distributions[name] for name in parameters},
                user_attrs={RUN_ID: row_id},
                intermediate_values=values,
            )
        )

    def _reported(self, row: Row) -> dict[int, float]:
        """Step → the mean of the metric at that evaluation, of the steps that all runs of a row have in the store."""
        of_runs = []
        for run in row.runs:
            values: dict[int, float] = {}
            with contextlib.suppress(DamagedError):
                for line in self._store.run(run.run_id).curve():
                    value = line.get(self.metric)
                    if value is not None and math.isfinite(value):
                        values[int(line["step"])] = float(value)
            of_runs.append(values)
        steps = set.intersection(*map(set, of_runs))
        return {step: statistics.fmean(values[step] for values in of_runs) for step in sorted(steps)}

    def _opened_study(self, seed: int) -> optuna.Study:
        study = optuna.create_study(
            storage=self._storage,
            study_name=study_name(self._plan),
            direction="minimize" if self.goal == "min" else "maximize",
            load_if_exists=True,
        )
        study.set_user_attr("metric", self.metric)
        # Without the number of trials, the random draws at the start of a search would be repeated.
        trials = len(study.get_trials(deepcopy=False))
        study.sampler = optuna.samplers.TPESampler(seed=random.Random(f"{seed}/{trials}").getrandbits(31))
        return study

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Turn errors of Optuna's database into errors of the index."""
        with self._store.index.database.errors():
            try:
                yield
            except StorageInternalError as error:
                raise error.__cause__ or error from error


def _first(rows: Mapping[str, Row]) -> Row | None:
    return next(iter(rows.values()), None)


def study_name(plan: Plan) -> str:
    """The name of a plan's study: `ablation.scale.digest`.

    The digest is of everything that decides what the parameters and the value of a trial mean. Another space, metric or
    base is another study; it starts with the recorded results that fit.
    """
    content, search = plan.ablation.content, plan.search
    facts = content.model_dump(mode="json", by_alias=True, include={"base", "grid", "when"})
    facts["layers"] = {key: layer.value for key, layer in plan.ablation.layers.items()}
    facts["seeds"] = content.row_seeds
    if search is not None:
        facts |= search.model_dump(mode="json", include={"space", "metric", "goal"})
    facts["runs"] = [row.runs[0].run_id for row in plan.examples]  # they change with versions of tasks and encodings
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
    return ".".join([plan.name, *([plan.ablation.scale] if plan.ablation.scale else []), digest])


def study_url(store: Store) -> str:
    """The URL of a store's Optuna database, as Optuna's own tools take it. It has the password of the index."""
    url = store.index.database.engine.url
    if url.get_backend_name() == "sqlite":
        return sqlite_url(store.root / STUDY_FILE)
    return url.update_query_dict({"options": "-csearch_path=optuna"}).render_as_string(hide_password=False)


def _opened_storage(store: Store) -> RDBStorage:
    """Optuna's storage. Several processes may make its tables at the same time."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for _ in range(OPEN_TRIES - 1):
        with contextlib.suppress(DBAPIError, StorageInternalError):
            return _storage(study_url(store))
        time.sleep(OPEN_INTERVAL_S)
    return _storage(study_url(store))


def _storage(url: str) -> RDBStorage:
    """Raises DBAPIError, StorageInternalError, and StoreError where another version of Optuna has made the tables."""
    if path := sqlite_file(url):
        options: dict[str, Any] = {"creator": partial(_connection, path)}
    else:
        options = {"pool_pre_ping": True}
        engine = create_engine(url)
        with engine.begin() as connection:
            connection.execute(text("CREATE SCHEMA IF NOT EXISTS optuna"))
        engine.dispose()
    try:
        return RDBStorage(url, options)
    except RuntimeError as error:  # it has the command that mends this
        raise StoreError(f"the study cannot be opened: {error}", code="unusable_study") from error


def _connection(path: Path) -> sqlite3.Connection:
    """A connection to the study's file that does not wait for the disk at each of Optuna's many small writes."""
    create_database_file(path)
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
    connection.execute(f"PRAGMA journal_mode = {'DELETE' if on_network(path) else 'WAL'}")
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def _row_id(row: Row) -> str:
    return row.runs[0].run_id


def _outcome(ends: Sequence[tuple[Status, float | None]]) -> tuple[TrialState, float | None]:
    """Optuna's state and value of a row whose runs have ended so. Only the mean of finite results counts as one."""
    values = [value for status, value in ends if status == "finished" and value is not None and math.isfinite(value)]
    if len(values) == len(ends):
        return TrialState.COMPLETE, statistics.fmean(values)
    statuses = {status for status, _ in ends}
    is_pruned = "stopped" in statuses and "failed" not in statuses
    return TrialState.PRUNED if is_pruned else TrialState.FAIL, None


def _parameter(trial: Trial, dimension: Dimension) -> str | float:
    """What a trial suggests for a dimension."""
    numbers = dimension.numbers
    if numbers is None:
        return trial.suggest_categorical(dimension.name, dimension.choices)
    low, high = numbers.bounds
    if numbers.is_int:
        return trial.suggest_int(dimension.name, int(low), int(high), log=numbers.is_log)
    return trial.suggest_float(dimension.name, low, high, log=numbers.is_log)


def _distribution(dimension: Dimension) -> BaseDistribution:
    numbers = dimension.numbers
    if numbers is None:
        return CategoricalDistribution(dimension.choices)
    low, high = numbers.bounds
    if numbers.is_int:
        return IntDistribution(int(low), int(high), log=numbers.is_log)
    return FloatDistribution(low, high, log=numbers.is_log)
