"""The search of a sweep, with a real study of Optuna, on a function instead of trainings."""

import math
import multiprocessing
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import FrozenTrial

from cope_sweep.config import Plan, Row, RunSpec, plan_of_recorded, row_of
from cope_sweep.config.points import dimensions_of, parameters_of
from cope_sweep.store import ENDED, Status, Store
from cope_sweep.store.index import IndexUnavailable
from cope_sweep.sweep import search as search_module
from cope_sweep.sweep.search import RUN_ID, Search, study_name, study_url
from tests.helpers.ablation_texts import load
from tests.helpers.databases import Postgres
from tests.helpers.finished_runs import begin, fail, finish, stop
from tests.helpers.sweeps import end as end_run

TEXT = """\
title: A test
base:
  task: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4}
  model: {dim: 8, heads: 2, layers: 1}
  train: {steps: 60}
  evaluate: {every: 10}
grid:
  model.position: {CoPE: [cope], RoPE: [rope], none: []}
  model.layers: [1, 2]
metrics: [{name: in_dist/token_error}]
search:
  kind: optuna
  samples: 60
  space:
    train.lr: {log_uniform: [1e-4, 1e-1]}
    train.warmup: {int_uniform: [0, 60]}
    train.schedule: {choice: [constant, {kind: cosine}]}
"""
METRIC = "in_dist/token_error"
SMALL = (
    TEXT[: TEXT.index("  model.layers:")]
    + "metrics: [{name: in_dist/token_error}]\nsearch: {kind: optuna, samples: 10}\n"
)


def error_of(run: RunSpec) -> float:
    """An error that is least for CoPE with one layer at lr = 3e-3, without warm-up."""
    position = {"cope": 0.0, "rope": 1.0}.get("".join(spec.kind for spec in run.model.position), 2.0)
    return position + run.model.layers + abs(math.log10(run.train.lr / 3e-3)) + run.train.warmup / 60


def short(samples: int) -> str:
    return TEXT.replace("samples: 60", f"samples: {samples}")


@dataclass
class Sweep:
    """A sweep without Ray, and the ones after it: the rows that they have recorded, in order."""

    store: Store
    text: str = TEXT
    rows: list[Row] = field(default_factory=list)

    @property
    def plan(self) -> Plan:
        return plan_of_recorded(load(self.text), [(row.runs[0].run_id, row.labels) for row in self.rows])

    def search(self, *, skipped: Collection[Status] = ("finished",), max_runs: int | None = None) -> Search:
        return Search(self.plan, self.store, skipped=skipped, max_runs=max_runs)

    def next_run(self, search: Search) -> RunSpec:
        row = search.next_row()
        assert row is not None
        self.rows.append(row)
        return row.runs[0]

    def train(self, search: Search, run: RunSpec) -> None:
        search.report(run.run_id, 10, 9.0)
        finish(self.store, run, {METRIC: error_of(run)})
        search.end(run.run_id)

    def run(self, runs: int | None = None) -> None:
        search = self.search()
        for _ in range(search.remaining if runs is None else runs):
            self.train(search, self.next_run(search))

    @property
    def ids(self) -> list[str]:
        return [row.runs[0].run_id for row in self.rows]

    @property
    def trials(self) -> list[FrozenTrial]:
        """What Optuna has stored, as another process sees it."""
        return optuna.load_study(study_name=study_name(self.plan), storage=study_url(self.store)).trials

    @property
    def states(self) -> list[str]:
        return [trial.state.name for trial in self.trials]


@pytest.fixture
def sweep(store: Store) -> Sweep:
    return Sweep(store)


def test_sweeps_one_after_another_find_the_minimum_and_repeat_nothing(sweep: Sweep) -> None:
    for trials in (7, 5, 20):
        sweep.run(trials)
    assert sweep.search().remaining == 60 - 32
    sweep.run()
    assert len(set(sweep.ids)) == len(sweep.ids) == 60
    errors = [error_of(row.runs[0]) for row in sweep.rows]
    assert min(errors) < 1.6
    assert sum(errors[-20:]) < 1.4 * sum(errors[:10])
    # The sampler knows the results of all earlier sweeps: it does not start at random again.
    assert sum(len(row.runs[0].model.position) and row.runs[0].model.layers == 1 for row in sweep.rows[-20:]) >= 12
    search = sweep.search()
    assert (search.remaining, search.is_exhausted, search.ended_early) == (0, True, False)
    assert {trial.user_attrs[RUN_ID]: trial.value for trial in sweep.trials} == dict(
        zip(sweep.ids, errors, strict=True)
    )


def test_every_suggestion_is_a_run_with_short_numbers(sweep: Sweep) -> None:
    sweep.run(8)
    for row in sweep.rows:
        run = row.runs[0]
        assert run.train.lr == float(f"{run.train.lr:.4g}")
        assert run.model.layers in (1, 2)
        assert row.name.count(" · ") == 4
        assert row.labels["train.schedule"] in ("constant", "cosine")


def test_the_seed_decides_the_suggestions(tmp_path: Path) -> None:
    texts = {"first": TEXT, "second": TEXT, "other": TEXT.replace("samples: 60", "samples: 60\n  seed: 7")}
    sweeps = {name: Sweep(Store(tmp_path / name, create=True), text) for name, text in texts.items()}
    for name, runs in (("first", 12), ("second", 12), ("other", 1)):
        sweeps[name].run(runs)
    assert sweeps["first"].ids == sweeps["second"].ids
    assert sweeps["other"].ids[0] != sweeps["first"].ids[0]


PINNED = """\
title: A test
base:
  task: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4}
  model: {dim: 8, heads: 2, layers: 1}
  train: {steps: 60}
  evaluate: {every: 10}
grid: {model.position: {CoPE: [cope], RoPE: [rope], none: []}}
metrics: [{name: in_dist/token_error}]
search:
  kind: optuna
  samples: 20
  space: {train.lr: {log_uniform: [1e-4, 1e-1]}, train.warmup: {int_uniform: [0, 60]}}
"""


def test_the_first_suggestions_are_pinned(store: Store) -> None:
    sweep = Sweep(store, PINNED)
    sweep.run(5)
    assert [row.name for row in sweep.rows] == [
        "none · 0.01195 · 48", "RoPE · 0.0001662 · 27", "none · 0.0001283 · 57", "none · 0.01287 · 19", "none · 0.01304 · 5",
    ]  # fmt: skip


def test_what_a_killed_sweep_has_suggested_comes_first_and_is_told_by_its_trial(sweep: Sweep) -> None:
    """A sweep is killed before it has recorded a row; before its run has begun; after its run has finished."""
    search = sweep.search()
    unrecorded, pending, finished = (search.next_row() for _ in range(3))
    assert unrecorded
    assert pending
    assert finished
    sweep.rows = [pending, finished]
    finish(sweep.store, finished.runs[0], {METRIC: 0.5})
    again = sweep.search()
    assert again.remaining == 60 - 1
    rows = [again.next_row(), again.next_row()]
    assert unrecorded in rows
    assert pending in rows
    assert sweep.states == ["RUNNING", "RUNNING", "COMPLETE"]
    finish(sweep.store, pending.runs[0], {METRIC: 0.25})
    again.end(pending.runs[0].run_id)
    assert sweep.states == ["RUNNING", "COMPLETE", "COMPLETE"]
    assert sweep.trials[1].value == 0.25


def test_rows_that_ended_and_were_not_recorded_are_returned_first_with_nothing_to_train(sweep: Sweep) -> None:
    sweep.run(3)
    pending = sweep.search().next_row()
    assert pending
    lost, sweep.rows = sweep.rows[1:], [sweep.rows[0], pending]
    search = sweep.search(max_runs=1)
    rows = [search.next_row() for _ in range(4)]
    assert rows == [*lost, pending, None]
    assert [len(search.runs_to_train(row)) for row in rows if row] == [0, 0, 1]
    assert search.remaining == 60 - 4
    assert sweep.states == ["COMPLETE"] * 3 + ["RUNNING"]


def test_rows_that_are_not_finished_are_suggested_first(sweep: Sweep) -> None:
    search = sweep.search()
    runs = [sweep.next_run(search) for _ in range(5)]
    finish(sweep.store, runs[0], {METRIC: 1.0})
    fail(sweep.store, runs[1])
    stop(sweep.store, runs[2])
    for run in runs[:3]:
        search.end(run.run_id)
    again = sweep.search()
    assert again.remaining == 55 + 4
    rows = [again.next_row() for _ in range(5)]
    assert [row.runs[0].run_id for row in rows[:4] if row] == sweep.ids[1:]
    assert rows[4]
    assert rows[4].runs[0].run_id not in sweep.ids
    kept = sweep.search(skipped=ENDED)
    rows = [kept.next_row() for _ in range(2)]
    assert [row.runs[0].run_id for row in rows if row] == sweep.ids[3:]


def test_interrupted_runs_that_are_left_out_are_not_suggested_again(sweep: Sweep) -> None:
    search = sweep.search()
    run = sweep.next_run(search)
    folder = begin(sweep.store, run)
    folder.set_state("interrupted")
    end_run(sweep.store, folder)
    kept = sweep.search(skipped=(*ENDED, "interrupted"))
    assert kept.remaining == 59
    row = kept.next_row()
    assert row is not None
    assert row.runs[0].run_id != run.run_id


def test_a_row_has_ended_when_the_runs_that_are_not_left_out_have(sweep: Sweep) -> None:
    sweep.text = TEXT + "seeds: [0, 1]\n"
    search = sweep.search()
    run = sweep.next_run(search)
    folder = begin(sweep.store, run)
    folder.set_state("interrupted")
    end_run(sweep.store, folder)
    search.end(run.run_id)
    kept = sweep.search(skipped=(*ENDED, "interrupted"))
    row = kept.next_row()
    assert row is not None
    (other,) = kept.runs_to_train(row)
    finish(sweep.store, other, {METRIC: 0.5})
    assert sweep.states == ["RUNNING"]
    kept.end(other.run_id)
    assert sweep.states == ["FAIL"]


def test_another_space_or_metric_starts_with_the_results_that_fit(sweep: Sweep) -> None:
    sweep.run(6)
    names = {study_name(sweep.plan)}
    with_cope = sum("CoPE" in row.name for row in sweep.rows)
    sweep.text = TEXT.replace("CoPE: [cope], ", "")
    assert sweep.search().remaining == 60 - (6 - with_cope)
    assert sweep.states == ["COMPLETE"] * (6 - with_cope)
    names.add(study_name(sweep.plan))
    for text, rows, trials in (
        (TEXT.replace("log_uniform: [1e-4, 1e-1]", "uniform: [1e-4, 1e-1]"), 6, 6),
        (
            TEXT.replace("samples: 60", "samples: 60\n  metric: in_dist/token_error\n  goal: min"),
            6,
            6,
        ),  # the same study
        (TEXT.replace("metrics: [", "metrics: [{name: dense/loss}, "), 6, 0),  # these runs do not have it
        (TEXT.replace("dim: 8", "dim: 16"), 0, 0),
    ):
        sweep.text = text
        assert (len(sweep.plan.rows), sweep.search().remaining) == (rows, 60 - rows)
        assert sweep.states == ["COMPLETE"] * trials
        names.add(study_name(sweep.plan))
    assert len(names) == 5
    assert all(name.startswith("test.") for name in names)


def test_a_study_that_was_lost_is_made_again(sweep: Sweep) -> None:
    sweep.run(4)
    values = {trial.user_attrs[RUN_ID]: trial.value for trial in sweep.trials}
    (sweep.store.root / "optuna.db").unlink()
    assert sweep.search().remaining == 56
    assert {trial.user_attrs[RUN_ID]: trial.value for trial in sweep.trials} == values
    assert all(trial.intermediate_values for trial in sweep.trials)


def test_stopped_runs_are_pruned_and_failed_ones_have_no_value(sweep: Sweep) -> None:
    search = sweep.search()
    runs = [sweep.next_run(search) for _ in range(4)]
    for run in runs:
        search.report(run.run_id, 10, 4.0)
        search.report(run.run_id, 20, 3.0)
    stop(sweep.store, runs[0])  # its curve has another step: 3, with an error of 0.5
    fail(sweep.store, runs[1])
    finish(sweep.store, runs[3], {METRIC: 3.0})
    for run in (runs[0], runs[1], runs[3]):
        search.end(run.run_id)
    assert sweep.states == ["PRUNED", "FAIL", "RUNNING", "COMPLETE"]
    assert sweep.trials[0].intermediate_values == {3: 0.5, 10: 4.0, 20: 3.0}
    assert sweep.trials[0].value == 3.0


def test_a_run_that_another_process_has_begun_is_pruned_with_all_of_its_values(sweep: Sweep) -> None:
    run = sweep.next_run(sweep.search())
    again = sweep.search()
    assert again.next_row() == sweep.rows[0]
    stop(sweep.store, run)  # at step 3, with an error of 0.5
    again.end(run.run_id)
    assert sweep.states == ["PRUNED"]
    assert (sweep.trials[0].value, sweep.trials[0].intermediate_values) == (0.5, {3: 0.5})
    sweep.search(skipped=("finished", "stopped"))
    assert len(sweep.trials) == 1


def test_a_failed_run_that_finishes_later_counts(sweep: Sweep) -> None:
    search = sweep.search()
    run = sweep.next_run(search)
    fail(sweep.store, run)
    search.end(run.run_id)
    again = sweep.search()
    assert again.next_row() == sweep.rows[0]
    finish(sweep.store, run, {METRIC: 0.5})
    for _ in range(2):
        again.end(run.run_id)
        again = sweep.search()
        assert sweep.states == ["FAIL", "COMPLETE"]
        assert again.remaining == 59


def test_a_run_without_the_metric_has_no_result(sweep: Sweep) -> None:
    search = sweep.search()
    run = sweep.next_run(search)
    search.report(run.run_id, 10, math.nan)
    finish(sweep.store, run, {})
    search.end(run.run_id)
    assert (sweep.states, sweep.trials[0].intermediate_values) == (["FAIL"], {})


def test_a_run_of_another_ablation_is_a_row_like_any_other(tmp_path: Path, sweep: Sweep) -> None:
    twin = Sweep(Store(tmp_path / "twin", create=True))
    run = twin.next_run(twin.search())
    finish(sweep.store, run, {METRIC: 0.5})
    search = sweep.search(max_runs=1)
    assert sweep.next_run(search) == run
    search.end(run.run_id)
    assert sweep.next_run(search) != run  # what has ended before does not count
    assert search.next_row() is None
    assert (search.is_exhausted, search.remaining, search.ended_early) == (True, 58, False)


def test_a_repeated_run_is_told_what_is_known(store: Store) -> None:
    """All points of the space but one are known: the sampler repeats them until it finds that one."""
    sweep = Sweep(store, SMALL)
    search = sweep.search()
    first = sweep.next_run(search)
    second = sweep.next_run(search)
    for step in (10, 20):
        search.report(second.run_id, step, 2.0)
    sweep.train(search, first)
    stop(store, second)
    search.end(second.run_id)
    sweep.next_run(search)
    repeats = [trial for trial in sweep.trials if trial.user_attrs[RUN_ID] in (first.run_id, second.run_id)]
    for trial in repeats:
        is_first = trial.user_attrs[RUN_ID] == first.run_id
        assert trial.state.name == ("COMPLETE" if is_first else "PRUNED")
        assert trial.value == (error_of(first) if is_first else 2.0)


def test_a_small_space_is_exhausted(store: Store) -> None:
    sweep = Sweep(store, SMALL)
    search = sweep.search()
    assert search.remaining == 3
    for _ in range(3):
        sweep.train(search, sweep.next_run(search))
    assert sorted(row.name for row in sweep.rows) == ["CoPE", "RoPE", "none"]
    assert (search.next_row(), search.is_exhausted, search.ended_early) == (None, True, False)


def test_a_search_that_finds_nothing_new_ends_early(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are not whole, and only two values of four digits."""
    monkeypatch.setattr(search_module, "MAX_ASKS", 20)
    text = SMALL.replace("samples: 10", "samples: 10, space: {train.lr: {uniform: [0.1, 0.1001]}}")
    sweep = Sweep(store, text.replace("{CoPE: [cope], RoPE: [rope], none: []}", "[[]]"))
    search = sweep.search()
    runs = [sweep.next_run(search), sweep.next_run(search)]
    assert search.next_row() is None
    assert not search.is_exhausted  # a result may lead to another suggestion
    for run in runs:
        sweep.train(search, run)
    assert search.next_row() is None
    assert (search.remaining, search.is_exhausted, search.ended_early) == (0, True, True)


def test_a_sweep_that_runs_beside_another_one_suggests_no_more_rows_than_the_ablation_asks_for(store: Store) -> None:
    sweeps = [Sweep(store, short(4)) for _ in range(2)]
    searches = [each.search() for each in sweeps]
    for each, search in [*zip(sweeps, searches, strict=True)] * 2:
        each.train(search, each.next_run(search))
    assert [(search.next_row(), search.remaining) for search in searches] == [(None, 0), (None, 0)]
    assert len({*sweeps[0].ids, *sweeps[1].ids}) == 4
    assert set(sweeps[0].states) == {"COMPLETE"}


def _suggest(root: Path, start: "multiprocessing.Barrier", found: "multiprocessing.SimpleQueue") -> None:  # type: ignore[valid-type]
    sweep = Sweep(Store(root), short(8))
    start.wait()
    search = sweep.search()
    while (row := search.next_row()) is not None:
        sweep.rows.append(row)
        if sweep.store.status(row.runs[0].run_id) != "finished":
            finish(sweep.store, row.runs[0], {METRIC: error_of(row.runs[0])})
        search.end(row.runs[0].run_id)
    found.put(sweep.ids)


@pytest.mark.thorough
def test_processes_that_start_at_once_share_one_study(tmp_path: Path) -> None:
    """Two processes make the file, its tables and the study at the same time."""
    store = Store(tmp_path / "store", create=True)
    assert store.index.revision() >= 0
    context = multiprocessing.get_context("spawn")
    start, found = context.Barrier(2), context.SimpleQueue()
    processes = [context.Process(target=_suggest, args=(store.root, start, found)) for _ in range(2)]
    for process in processes:
        process.start()
    rows = {run_id for _ in processes for run_id in found.get()}
    for process in processes:
        process.join()
    assert len(rows) in (8, 9)  # both may ask for the last one
    told = {trial.user_attrs[RUN_ID] for trial in Sweep(store, short(8)).trials if trial.state.name == "COMPLETE"}
    assert told == rows


def test_a_study_in_postgresql_outlives_its_server(tmp_path: Path, postgres: Postgres) -> None:
    sweep = Sweep(Store(tmp_path / "store", index=postgres.new_database(), create=True), short(3))
    search = sweep.search()
    run = sweep.next_run(search)
    finish(sweep.store, run, {METRIC: 0.5})
    postgres.stop()
    try:
        search.report(run.run_id, 10, 0.5)
        search.end(run.run_id)
        with pytest.raises(IndexUnavailable):
            search.next_row()
    finally:
        postgres.start()
    sweep.next_run(search)
    assert sweep.states == ["COMPLETE", "RUNNING"]
    search.close()
    assert sweep.search().remaining == 2


# -- several seeds --

SEEDS = "seeds: [3, 4, 5]\n" + short(6)


def test_each_suggestion_is_trained_with_all_seeds_and_its_value_is_their_mean(store: Store) -> None:
    sweep = Sweep(store, SEEDS)
    search = sweep.search()
    row = search.next_row()
    assert row is not None
    assert [run.seed for run in row.runs] == [3, 4, 5]
    assert search.runs_to_train(row) == list(row.runs)
    for run, value in zip(row.runs, (1.0, 2.0, 6.0), strict=True):
        assert sweep.states == ["RUNNING"]
        search.report(run.run_id, 10, value + 1)
        finish(store, run, {METRIC: value})
        search.end(run.run_id)
    (trial,) = sweep.trials
    assert (trial.state.name, trial.value, trial.intermediate_values) == ("COMPLETE", 3.0, {6: 3.0, 10: 4.0})
    assert trial.user_attrs["run_ids"] == [run.run_id for run in row.runs]


@pytest.mark.parametrize(
    ("ends", "state"),
    [([finish, stop, finish], "PRUNED"), ([finish, stop, fail], "FAIL"), ([finish, finish], "RUNNING")],
)
def test_a_row_of_which_not_all_seeds_finish(ends: list[Callable[..., None]], state: str, store: Store) -> None:
    sweep = Sweep(store, SEEDS)
    search = sweep.search()
    row = search.next_row()
    assert row is not None
    for run, end in zip(row.runs, ends, strict=False):
        end(store, run, *[{METRIC: 1.0}] * (end is finish))
        search.end(run.run_id)
    assert sweep.states == [state]


def test_the_next_sweep_trains_the_seeds_that_are_left(store: Store) -> None:
    sweep = Sweep(store, SEEDS)
    search = sweep.search(max_runs=2)
    row = search.next_row()
    assert row is not None
    sweep.rows.append(row)
    assert [run.seed for run in search.runs_to_train(row)] == [3, 4]
    assert search.is_exhausted
    for run in row.runs[:2]:
        finish(store, run, {METRIC: 1.0})
        search.end(run.run_id)
    again = sweep.search()
    assert again.next_row() == row
    assert [run.seed for run in again.runs_to_train(row)] == [5]
    for run in row.runs[:2]:
        again.end(run.run_id)
    assert sweep.states == ["RUNNING"]
    finish(store, row.runs[2], {METRIC: 4.0})
    again.end(row.runs[2].run_id)
    assert [trial.value for trial in sweep.trials] == [2.0]
    assert sweep.search().remaining == 5


def test_fewer_seeds_for_each_sample_than_the_ablation_has(store: Store) -> None:
    one = Sweep(store, short(6).replace("samples: 6", "samples: 6\n  seeds_per_sample: 1"))
    assert study_name(one.plan) == study_name(Sweep(store, short(6)).plan)
    several = Sweep(store, SEEDS.replace("samples: 6", "samples: 6\n  seeds_per_sample: 2"))
    row = several.search().next_row()
    assert row is not None
    assert [run.seed for run in row.runs] == [3, 4]
    assert plan_of_recorded(several.plan.ablation, [(row.runs[1].run_id, row.labels)]).rows == (row,)


# -- labels and parameters --


def numbers() -> st.SearchStrategy[str]:
    def of(kind: str, low: float, high: float) -> str:
        return f"{{{kind}: [{min(low, high)}, {max(low, high)}]}}"

    floats = st.floats(1e-6, 1e3, allow_nan=False)
    different = st.tuples(floats, floats).filter(lambda pair: abs(pair[0] - pair[1]) > 1e-3)
    return st.builds(lambda kind, pair: of(kind, *pair), st.sampled_from(["uniform", "log_uniform"]), different)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), space=numbers())
def test_labels_and_parameters_mean_the_same_row(data: st.DataObject, space: str) -> None:
    plan = plan_of_recorded(load(TEXT.replace("{log_uniform: [1e-4, 1e-1]}", space)), [])
    parameters: dict[str, str | float] = {}
    for dimension in dimensions_of(plan.ablation):
        if dimension.numbers is None:
            parameters[dimension.name] = data.draw(st.sampled_from(dimension.choices))
        else:
            low, high = dimension.numbers.bounds
            values = st.integers(int(low), int(high)) if dimension.numbers.is_int else st.floats(low, high)
            parameters[dimension.name] = data.draw(values)
    row = row_of(plan.ablation, parameters)
    again = parameters_of(plan.ablation, row.labels)
    assert row_of(plan.ablation, again) == row
    assert parameters_of(plan.ablation, row_of(plan.ablation, again).labels) == again
    assert plan_of_recorded(plan.ablation, [(row.runs[0].run_id, row.labels)]).rows == (row,)
    exact = {name: value for name, value in parameters.items() if name != "train.lr"}
    assert {name: again[name] for name in exact} == exact


def test_a_field_is_suggested_only_where_the_row_has_its_encoding(store: Store) -> None:
    space = "samples: 30, space: {model.position.cope.p_max: {int_uniform: [2, 5]}}"
    sweep = Sweep(store, SMALL.replace("samples: 10", space))
    sweep.run()
    names = [row.name for row in sweep.rows]
    assert sorted(names) == sorted([*(f"CoPE · p_max {n}" for n in range(2, 6)), "RoPE", "none"])
    params = [trial.params for trial in sweep.trials if RUN_ID in trial.user_attrs]
    assert all(("model.position.cope.p_max" in each) == (each["model.position"] == "CoPE") for each in params)
    assert sweep.search().remaining == 0
