"""A search by suggestions: which row of an ablation comes next, by Optuna.

An ablation has one study at each scale, in Optuna's own storage: in the schema `optuna` of an index in PostgreSQL, or
else in the store's file `optuna.db`. One sweep at a time drives it. Which rows were trained, and how they ended, the
store says: a sweep that starts tells the study what it does not know yet.

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
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.trial import BaseTrial, FixedTrial, FrozenTrial, Trial, TrialState, create_trial
from sqlalchemy import text

from cope_sweep.config import Plan, Row, RunSpec, SpecError, row_of
from cope_sweep.config.ablation import Goal
from cope_sweep.config.points import Dimension, chosen_parameters, parameters_of
from cope_sweep.store import ENDED, RunRecord, Status, Store, StoreError
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.files import create_database_file
from cope_sweep.store.index import IndexUnavailable
from cope_sweep.store.index.database import BUSY_TIMEOUT_S, on_network, sqlite_file, sqlite_url
from cope_sweep.store.store import STUDY_FILE

RUN_ID = "run_id"
"""The user attribute of a trial that has its row's id. A trial without it is not a valid row."""
MAX_ASKS = 100
"""The number of times that the sampler is asked for a new row. After that, the space counts as used up."""

logger = logging.getLogger(__name__)


@dataclass
class _OpenRow:
    """A row that has not ended."""

    row: Row
    trial: Trial | None = None
    """Its trial, if this search has asked for it."""
    in_training: set[str] = field(default_factory=set)
    """The ids of the runs that this sweep trains and that have not ended."""
    reports: dict[int, dict[str, float]] = field(default_factory=dict)
    """Step → run id → the metric's value at that evaluation."""


class Search:
    """The search of one sweep: the rows to train, one after another, and what became of them.

    First come rows that have ended and that no sweep has recorded, because a sweep was killed or deleted: nothing of
    them is trained, but whoever asks records them. Then rows of earlier sweeps whose runs have not ended, then new
    ones.
    """

    def __init__(self, plan: Plan, store: Store, *, skipped: Collection[Status], max_runs: int | None) -> None:
        """Continue the search of a plan.

        Args:
            plan: A plan whose `search` is not None, with the rows that sweeps have recorded.
            store: The store.
            skipped: The statuses of runs that are not trained again.
            max_runs: The most runs to train; None: no limit.

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
        self._skipped = skipped
        self._known: set[str] = set()
        """The ids of the rows that were suggested, by any sweep."""
        self._next: deque[_OpenRow] = deque()
        """The rows that are returned next."""
        self._open: dict[str, _OpenRow] = {}
        """Row id → row, of those that were returned and have not ended."""
        self._row_ids: dict[str, str] = {}
        """Run id → row id, of the runs of rows that were returned."""
        self._is_stuck = False
        """Nothing new is suggested before another run has ended."""
        with self._answering():
            self._storage = _opened_storage(store)
            self._study = self._opened_study(plan.search.seed)
            self._continue()

    def close(self) -> None:
        """Close the connections to Optuna's database. No other method is called afterwards."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    @property
    def waiting(self) -> list[Row]:
        """The rows that are known and yet to be returned, most of them from earlier sweeps."""
        return [opened.row for opened in self._next]

    @property
    def new_rows(self) -> int:
        """The number of rows yet to be suggested, to this sweep or to a later one."""
        is_used_up = self._is_stuck and not self._open  # every suggestion is known, and no result can change that
        return 0 if is_used_up else max(0, self._plan.samples - len(self._known))

    @property
    def remaining(self) -> int:
        """The number of rows yet to be returned, by this search or by a later sweep's."""
        return len(self._next) + self.new_rows

    @property
    def is_spent(self) -> bool:
        """As many runs as may be were handed out to be trained."""
        return self._left == 0

    @property
    def is_exhausted(self) -> bool:
        """`next_row` returns nothing any more."""
        return self.is_spent or not self.remaining

    @property
    def ended_early(self) -> bool:
        """There are fewer rows than the ablation asks for: the sampler finds no more that are new."""
        return not self.remaining and len(self._known) < self._plan.samples

    def next_row(self) -> Row | None:
        """The next row, or None if there is none yet. Unless `is_exhausted`, ask again later, or when a run has ended.

        Whoever asks records the row with the sweep, and trains `runs_to_train`. Raises IndexUnavailable; ask again
        then.
        """
        if self.is_spent:
            return None
        with self._answering():
            self._tell_open()
            if not self._next:
                self._suggest()
            if not self._next:
                return None
            row = self._next[0].row
            statuses = self._store.index.statuses(run.run_id for run in row.runs)
        opened = self._open[_row_id(row)] = self._next.popleft()
        to_train = [run.run_id for run in row.runs if statuses.get(run.run_id) not in self._skipped][: self._left]
        opened.in_training = set(to_train)
        if self._left is not None:
            self._left -= len(to_train)
        self._row_ids |= {run.run_id: _row_id(row) for run in row.runs}
        return row

    def runs_to_train(self, row: Row) -> Sequence[RunSpec]:
        """The runs of a row that was just returned that are to be trained, as many as may be.

        The others have ended before, in a sweep of another ablation, say.
        """
        opened = self._open.get(_row_id(row))  # None: the study has been told how all of them ended
        return [run for run in row.runs if opened and run.run_id in opened.in_training]

    def report(self, run_id: str, step: int, value: float) -> None:
        """Tell the metric's value at an evaluation of a run. A value that is not finite is ignored.

        The study gets the mean when all runs of the row have one at this step. What it misses, because the database
        does not answer or another sweep has asked for the trial, it gets at the end of the row.
        """
        row = self._open.get(self._row_ids.get(run_id, ""))
        if row is None or row.trial is None or not math.isfinite(value):
            return
        values = row.reports.setdefault(step, {})
        values[run_id] = value
        if len(values) == len(row.row.runs):
            with contextlib.suppress(IndexUnavailable, UpdateFinishedTrialError), self._answering():
                row.trial.report(statistics.fmean(values.values()), step)

    def end(self, run_id: str) -> None:
        """A run of a row has ended, and the store says how. It is not to be called for a run that goes on later.

        The study learns the result of a row when all of its runs have ended. Where the database does not answer, that
        is told later: by the next call, or by the next sweep.
        """
        row = self._open.get(self._row_ids.get(run_id, ""))
        if row is None:
            return
        row.in_training.discard(run_id)
        self._is_stuck = False
        with contextlib.suppress(IndexUnavailable), self._answering():
            self._tell_open()

    def _continue(self) -> None:
        """Tell the study the results that it does not know, and have rows wait that are to be recorded or trained."""
        rows, trials = {_row_id(row): row for row in self._plan.rows}, self._trials()
        recorded = set(rows)
        for row_id, of_row in trials.items():
            if row_id not in rows:  # a sweep was killed before it had recorded the row, or was deleted since
                with contextlib.suppress(SpecError, KeyError):
                    rows[row_id] = row_of(self._plan.ablation, of_row[0].params)
        self._known |= rows.keys()
        told = self._tell(rows.values(), self._skipped)
        self._next.extend(_OpenRow(row) for row_id, row in rows.items() if row_id in told - recorded)
        self._next.extend(_OpenRow(row) for row_id, row in rows.items() if row_id not in told)

    def _suggest(self) -> None:
        """Have a new row wait, if there is one now."""
        for _ in range(MAX_ASKS):
            trials = self._trials()
            self._known |= trials.keys()  # also those of another sweep, which may have started since
            if self._is_stuck or len(self._known) >= self._plan.samples:
                return
            trial = self._study.ask()
            chosen_parameters(self._plan.ablation, partial(_parameter, trial))
            try:
                row = row_of(self._plan.ablation, trial.params)
            except SpecError as error:
                logger.warning("a suggestion is not a valid run: %s", error)
                self._study.tell(trial, state=TrialState.FAIL)
                continue
            row_id = _row_id(row)
            if row_id in self._known:
                trial.set_user_attr(RUN_ID, row_id)
                self._tell_again(trial, trials.get(row_id, []))
                continue
            # Before the database is asked again, which may fail: then the row is returned by the next call.
            self._known.add(row_id)
            self._next.append(_OpenRow(row, trial))
            if len(row.runs) > 1:
                trial.set_user_attr("run_ids", [run.run_id for run in row.runs])
            trial.set_user_attr(RUN_ID, row_id)
            return
        self._is_stuck = True

    # -- the study -------------------------------------------------------------------------------------------------

    def _trials(self) -> dict[str, list[FrozenTrial]]:
        """Row id → its trials."""
        trials: dict[str, list[FrozenTrial]] = {}
        for trial in self._study.get_trials(deepcopy=False):
            if RUN_ID in trial.user_attrs:
                trials.setdefault(trial.user_attrs[RUN_ID], []).append(trial)
        return trials

    def _tell_open(self) -> None:
        """Tell the study the results of the open rows whose runs have all ended."""
        ended = [opened.row for opened in self._open.values() if not opened.in_training]
        for row_id in self._tell(ended, {*ENDED, *self._skipped}) if ended else ():
            del self._open[row_id]

    def _tell(self, rows: Collection[Row], ended: Collection[Status]) -> set[str]:
        """Tell the study how rows have ended whose runs all have one of these statuses. Returns their ids."""
        trials, told = self._trials(), set()
        records = self._store.index.records(run.run_id for row in rows for run in row.runs)
        for row in rows:
            of_row = [records[run.run_id] for run in row.runs if run.run_id in records]
            if len(of_row) == len(row.runs) and all(record.status in ended for record in of_row):
                self._tell_row(row, of_row, trials.get(_row_id(row), []))
                told.add(_row_id(row))
        return told

    def _tell_row(self, row: Row, records: Sequence[RunRecord], trials: Sequence[FrozenTrial]) -> None:
        """Tell the trials of a row that wait for it how it has ended. If none does, a result becomes a new trial."""
        state, value = _outcome(records, self.metric)
        is_told = any(trial.state in (state, TrialState.COMPLETE) for trial in trials)
        waiting = [trial for trial in trials if not trial.state.is_finished()]
        if not waiting and (is_told or state == TrialState.FAIL):
            return
        values = self._reported(row)
        for trial in waiting:
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, trial.number)
            for step in values.keys() - trial.intermediate_values.keys():
                self._storage.set_trial_intermediate_value(trial_id, step, values[step])
            self._study.tell(trial.number, value, state, skip_if_finished=True)
        if not waiting:
            # As if the study had suggested the row: this gives the parameters that it has, and their distributions.
            suggested = FixedTrial(parameters_of(self._plan.ablation, row.labels))
            chosen_parameters(self._plan.ablation, partial(_parameter, suggested))
            last = values[max(values)] if values else None
            self._study.add_trial(
                create_trial(
                    state=state,
                    value=value if state == TrialState.COMPLETE else last,
                    params=suggested.params,
                    distributions=suggested.distributions,
                    user_attrs={RUN_ID: _row_id(row)},
                    intermediate_values=values,
                )
            )

    def _tell_again(self, trial: Trial, trials: Sequence[FrozenTrial]) -> None:
        """Tell a trial that repeats a row, which has these trials, the result of that row."""
        decided = [trial for trial in trials if trial.value is not None]
        if not decided:
            self._study.tell(trial, state=TrialState.FAIL)
        elif decided[-1].state == TrialState.COMPLETE:
            self._study.tell(trial, decided[-1].value)
        else:
            for step, value in decided[-1].intermediate_values.items():
                trial.report(value, step)
            self._study.tell(trial, state=TrialState.PRUNED)

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
        self._study_id = self._storage.get_study_id_from_name(study.study_name)
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
    """Optuna's storage. Raises StoreError where another version of Optuna has made its tables."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url, database = study_url(store), store.index.database
    options: dict[str, Any] = {"pool_pre_ping": True}
    if path := sqlite_file(url):
        options = {"creator": partial(_connection, path)}
    else:
        with database.writing() as connection:
            connection.execute(text("CREATE SCHEMA IF NOT EXISTS optuna"))
    # A lock, because Optuna fails where two processes make its tables at the same time.
    with database.writing():
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


def _outcome(records: Sequence[RunRecord], metric: str) -> tuple[TrialState, float | None]:
    """Optuna's state and value of a row whose runs have ended: the mean, if all are finished."""
    values = [record.value(metric) for record in records if record.status == "finished"]
    known = [value for value in values if value is not None]
    if len(known) == len(records):
        return TrialState.COMPLETE, statistics.fmean(known)
    statuses = {record.status for record in records}
    is_pruned = "stopped" in statuses and "failed" not in statuses
    return TrialState.PRUNED if is_pruned else TrialState.FAIL, None


def _parameter(trial: BaseTrial, dimension: Dimension) -> str | float:
    """What a trial suggests for a dimension."""
    numbers = dimension.numbers
    if numbers is None:
        return trial.suggest_categorical(dimension.name, dimension.choices)
    low, high = numbers.bounds
    if numbers.is_int:
        return trial.suggest_int(dimension.name, int(low), int(high), log=numbers.is_log)
    return trial.suggest_float(dimension.name, low, high, log=numbers.is_log)
