"""A search by suggestions: which row of an ablation comes next, by Optuna.

Optuna keeps its state in a study of its own storage: in the schema `optuna` of an index in PostgreSQL, or else in the
store's file `optuna.db`. Sweeps of one ablation share the study, one after another and at the same time, as any workers
of Optuna do. Optuna knows which rows were suggested, and their results; whether a run has ended, the store says.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import random
import sqlite3
import time
from collections.abc import Iterator, Mapping
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

from cope_sweep.config import Plan, Row, SpecError, row_of
from cope_sweep.config.ablation import Goal
from cope_sweep.config.points import Dimension, chosen_parameters, dimensions_of, parameters_of
from cope_sweep.store import Status, Store, StoreError
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.files import create_database_file
from cope_sweep.store.index import IndexUnavailable
from cope_sweep.store.index.database import on_network, sqlite_file, sqlite_url

STUDY_FILE = "optuna.db"
RUN_ID = "run_id"
"""The user attribute of a trial that names its run. A trial without it is no valid run, or is not decided yet."""
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


class Search:
    """The search of one sweep: the rows to train, one after another, and what became of them.

    Rows of earlier sweeps whose runs have not ended come first, then new ones. Last come those that other sweeps have
    suggested meanwhile and that have not ended: whoever asks waits for their results, and trains them if they are given
    up. Together, all sweeps suggest as many rows as the ablation asks for.
    """

    def __init__(
        self, plan: Plan, store: Store, *, retry_failed: bool, stopped_counts: bool, max_rows: int | None
    ) -> None:
        """Continue the search of a plan.

        Args:
            plan: A plan whose `search` is not None, with the rows that sweeps have recorded.
            store: The store.
            retry_failed: Whether runs that have failed before are suggested again.
            stopped_counts: Whether a run that was stopped early has ended; else it is suggested again.
            max_rows: How many rows are returned whose runs have not ended; None: no limit.

        Raises:
            IndexUnavailable: The database does not answer.
            StoreError: Another version of Optuna has made the study.
        """
        if plan.search is None:
            raise ValueError(f"the ablation {plan.name} has no search by suggestions")
        self.metric = str(plan.search.metric)
        """The metric that is optimised."""
        self.goal: Goal = plan.search.goal or "min"
        self._plan, self._store, self._left = plan, store, max_rows
        self._ended: set[Status] = {"finished"}
        if stopped_counts:
            self._ended.add("stopped")
        if not retry_failed:
            self._ended.add("failed")
        self._distributions = {each.name: _distribution(each) for each in dimensions_of(plan.ablation)}
        self._rows = {row.runs[0].run_id: row for row in plan.rows}
        """Run id → row, of the rows that sweeps have recorded and those that this search has returned."""
        self._again: dict[str, Row] = {}
        """The rows of earlier sweeps that are still to be returned."""
        self._open: dict[str, Trial | None] = {}
        """Run id → its trial, if this search has asked for it; of the rows that were returned and have not ended."""
        self._ends: dict[str, tuple[Status, float | None]] = {}
        """Run id → status and value, of the ends that are still to be told."""
        self._trials: dict[str, list[FrozenTrial]] = {}
        """Run id → its trials, of all sweeps."""
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
        """The number of rows that are still to be returned, by this search or by that of a later sweep."""
        return len(self._again) + self._open_samples + len(self._others)

    @property
    def is_exhausted(self) -> bool:
        """Whether `next_row` returns nothing any more."""
        return self._left == 0 or not self.remaining

    @property
    def ended_early(self) -> bool:
        """Whether there are fewer rows than the ablation asks for: the sampler finds no more that are new."""
        return not self.remaining and len(self._known()) < self._plan.samples

    def next_row(self) -> Row | None:
        """The next row. None: none now; unless `is_exhausted`, ask again a little later, or when a run has ended.

        Whoever asks records the row with the sweep. Its run may have ended before, in a sweep of another ablation:
        then it need not be trained, and `end` tells its result at once. Raises IndexUnavailable; ask again then.
        """
        if self._left == 0:
            return None
        with self._answering():
            self._tell_ends()
            row = _first(self._again) or self._suggested() or _first(self._others)
            if row is None:
                return None
            run_id = row.runs[0].run_id
            if self._left is not None and not self.has_ended(run_id):
                self._left -= 1
        self._again.pop(run_id, None)
        self._others.pop(run_id, None)
        self._rows[run_id] = row
        self._open.setdefault(run_id, None)
        return row

    def has_ended(self, run_id: str) -> bool:
        """Whether the run of a row need not be trained, by the store."""
        return self._store.status(run_id) in self._ended

    def report(self, run_id: str, step: int, value: float) -> None:
        """Tell the metric's value at an evaluation of a run. A value that is not finite is ignored.

        Where the database does not answer, it is in no trial.
        """
        trial = self._open.get(run_id)
        if trial is not None and math.isfinite(value):
            with contextlib.suppress(IndexUnavailable, UpdateFinishedTrialError), self._answering():
                trial.report(value, step)

    def end(self, run_id: str, status: Status, value: float | None) -> None:
        """Tell how a run ended. It has no effect for a run that goes on later.

        Where the database does not answer, that is told later: by the next call, or by the next sweep.

        Args:
            run_id: A run whose row was returned.
            status: "finished": `value` is its result. "stopped": what was reported counts. "failed": nothing is known.
            value: The metric's last value; None: there is none.
        """
        if status not in ("finished", "stopped", "failed"):
            return
        self._ends[run_id] = status, value
        self._is_stuck = False
        with contextlib.suppress(IndexUnavailable), self._answering():
            self._tell_ends()

    # -- rows ------------------------------------------------------------------------------------------------------

    def _continue(self) -> None:
        """Tell the study what is known of the rows of earlier sweeps, and find those that have not ended."""
        self._look()
        for run_id, trials in self._trials.items():
            if run_id not in self._rows and (row := self._row_of(trials[0])) is not None:
                self._rows[run_id] = row
        self._others.clear()
        records = self._store.index.records(self._rows)
        for run_id, row in self._rows.items():
            record = records.get(run_id)
            if record is None or record.status not in self._ended:
                self._again[run_id] = row
            else:
                self._tell(run_id, record.status, record.value(self.metric))

    def _suggested(self) -> Row | None:
        """A new row, which is this search's; None: none now."""
        for _ in range(MAX_ASKS):
            if not self._open_samples:
                return None
            trial = self._study.ask()
            chosen_parameters(self._plan.ablation, partial(_parameter, trial))
            self._look()
            try:
                row = row_of(self._plan.ablation, trial.params)
            except SpecError as error:
                logger.warning("a suggestion is no valid run: %s", error)
                self._study.tell(trial, state=TrialState.FAIL)
                continue
            run_id = row.runs[0].run_id
            known = self._known()
            if run_id in known:
                self._tell_again(trial, run_id)
                continue
            undecided = sum(number < trial.number for number in self._undecided)
            if len(known) + undecided >= self._plan.samples:  # another sweep was faster
                self._study.tell(trial, state=TrialState.FAIL)
                return None
            trial.set_user_attr(RUN_ID, run_id)
            self._open[run_id] = trial
            return row
        self._is_stuck = True
        return None

    @property
    def _open_samples(self) -> int:
        """The number of rows that may still be new."""
        if self._is_stuck and not self._open:  # every suggestion is known, and no result can change that
            return 0
        return max(0, self._plan.samples - len(self._known()))

    def _known(self) -> set[str]:
        """The runs that were suggested, by any sweep."""
        return self._rows.keys() | self._trials.keys()

    def _row_of(self, trial: FrozenTrial) -> Row | None:
        """The row of a trial that names its run; None if it is none of the ablation."""
        with contextlib.suppress(SpecError, KeyError):
            row = row_of(self._plan.ablation, trial.params)
            if row.runs[0].run_id == trial.user_attrs[RUN_ID]:
                return row
        return None

    # -- the study -------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Read the trials of the study, also those of other sweeps."""
        self._trials, self._undecided = {}, []
        oldest = datetime.now() - timedelta(seconds=DECISION_S)
        for trial in self._study.get_trials(deepcopy=False):
            if RUN_ID in trial.user_attrs:
                self._trials.setdefault(trial.user_attrs[RUN_ID], []).append(trial)
            elif not trial.state.is_finished() and (trial.datetime_start or oldest) > oldest:
                self._undecided.append(trial.number)
        others = {}
        for run_id, trials in self._trials.items():
            if run_id not in self._rows and not all(trial.state.is_finished() for trial in trials):
                row = self._others.get(run_id) or self._row_of(trials[0])
                if row is not None:
                    others[run_id] = row
        self._others = others

    def _tell_ends(self) -> None:
        self._look()
        for run_id, end in list(self._ends.items()):
            self._tell(run_id, *end)
            self._open.pop(run_id, None)
            del self._ends[run_id]

    def _tell(self, run_id: str, status: Status, value: float | None) -> None:
        """Tell each trial that waits for a run how it ended. If none does, a result becomes a new trial."""
        state, trials = _state(status, value), self._trials.get(run_id, [])
        is_told = any(trial.state in (state, TrialState.COMPLETE) for trial in trials)
        for trial in trials:
            if trial.state.is_finished():
                continue
            if state == TrialState.PRUNED and self._open.get(run_id) is None:
                # Another process has asked for it, so what is reported here is in no trial.
                self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
            else:
                result = value if state == TrialState.COMPLETE else None
                self._study.tell(trial.number, result, state, skip_if_finished=True)
                is_told = True
        if not is_told and state != TrialState.FAIL:
            self._add(run_id, state, value)

    def _tell_again(self, trial: Trial, run_id: str) -> None:
        """Tell a trial that repeats a run what is known of it."""
        trial.set_user_attr(RUN_ID, run_id)
        known = [each for each in self._trials.get(run_id, []) if each.value is not None]
        if not known:
            self._study.tell(trial, state=TrialState.FAIL)
        elif known[-1].state == TrialState.COMPLETE:
            self._study.tell(trial, known[-1].value)
        else:
            for step, value in known[-1].intermediate_values.items():
                trial.report(value, step)
            self._study.tell(trial, state=TrialState.PRUNED)

    def _add(self, run_id: str, state: TrialState, value: float | None) -> None:
        """Add a trial of a run that has ended, with what it has reported."""
        values = self._reported(run_id)
        last = values[max(values)] if values else None
        parameters = parameters_of(self._plan.ablation, self._rows[run_id].labels)
        self._study.add_trial(
            create_trial(
                state=state,
                value=value if state == TrialState.COMPLETE else last,
                params=parameters,
                distributions={name: self._distributions[name] for name in parameters},
                user_attrs={RUN_ID: run_id},
                intermediate_values=values,
            )
        )

    def _reported(self, run_id: str) -> dict[int, float]:
        """Step → the metric's value at that evaluation, of a run in the store."""
        values: dict[int, float] = {}
        with contextlib.suppress(DamagedError):
            for row in self._store.run(run_id).curve():
                value = row.get(self.metric)
                if value is not None and math.isfinite(value):
                    values[int(row["step"])] = float(value)
        return values

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
        """Turn the errors of Optuna's database into those of the index."""
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
    facts = content.model_dump(mode="json", by_alias=True, include={"base", "grid", "zip", "when", "seeds"})
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


def _state(status: Status, value: float | None) -> TrialState:
    """Optuna's state of a run that has ended. Only a finite result counts as one."""
    if status == "finished" and value is not None and math.isfinite(value):
        return TrialState.COMPLETE
    return TrialState.PRUNED if status == "stopped" else TrialState.FAIL


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
