"""Optuna's suggestions, on a function instead of trainings, and once through Tune."""

import copy
import math
import pickle
from dataclasses import dataclass, field

import pytest
from ray.tune.search import Searcher

from cope_sweep.plan import Row, expand, plan_of_recorded
from cope_sweep.spec import RunSpec
from cope_sweep.store import Status
from cope_sweep.sweep.search import RunSearch
from tests.spec.ablations import load

METRIC = "in_dist/token_error"
TEXT = """\
title: A test
base:
  task: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4}
  model: {dim: 8, heads: 2, layers: 1}
  train: {steps: 60}
  evaluate: {every: 10}
grid: {model.position: {CoPE: [cope], RoPE: [rope], none: []}}
zip: [{model.layers: [1, 2], train.batch: [8, 16]}]
metrics: [{name: in_dist/token_error}]
search:
  kind: optuna
  samples: 60
  space:
    train.lr: {log_uniform: [1e-4, 1e-1]}
    train.warmup: {int_uniform: [0, 60]}
    train.schedule: {choice: [constant, {kind: cosine}]}
"""
SMALL = TEXT[: TEXT.index("zip:")] + "metrics: [{name: in_dist/token_error}]\nsearch: {kind: optuna, samples: 10}\n"


def error_of(run: RunSpec) -> float:
    """An error that is least for CoPE with one layer at lr = 3e-3, without warm-up."""
    position = {"cope": 0.0, "rope": 1.0}.get("".join(spec.kind for spec in run.model.position), 2.0)
    return position + run.model.layers + abs(math.log10(run.train.lr / 3e-3)) + run.train.warmup / 60


@dataclass(frozen=True)
class Known:
    status: Status
    metric: float | None = None

    def value(self, name: str) -> float | None:
        assert name == METRIC
        return self.metric


@dataclass
class Sweep:
    """A sweep without Ray: what was suggested, in order, and how it ended."""

    text: str = TEXT
    rows: list[Row] = field(default_factory=list)
    results: dict[str, Known] = field(default_factory=dict)
    retry_failed: bool = True

    def search(self) -> RunSearch:
        recorded = [(row.runs[0].run_id, row.labels) for row in self.rows]
        plan = plan_of_recorded(load(self.text), recorded)
        return RunSearch(plan, self.results, self.rows.append, retry_failed=self.retry_failed)

    def train(self, search: RunSearch, number: int) -> None:
        run = self.rows[-1].runs[0]
        self.results[run.run_id] = Known("finished", error_of(run))
        search.on_trial_complete(
            f"trial{number}", {METRIC: error_of(run), "status": "finished", "training_iteration": 6}
        )

    def run(self, trials: int | None = None) -> None:
        search = self.search()
        for number in range(search.trials if trials is None else trials):
            assert search.suggest(f"trial{number}") == {"run_id": self.rows[-1].runs[0].run_id}
            search.on_trial_result(f"trial{number}", {METRIC: 9.0, "training_iteration": 1})
            self.train(search, number)

    @property
    def ids(self) -> list[str]:
        return [row.runs[0].run_id for row in self.rows]


def test_the_search_finds_the_minimum_and_repeats_nothing():
    sweep = Sweep()
    sweep.run()
    assert len(set(sweep.ids)) == 60
    errors = [error_of(row.runs[0]) for row in sweep.rows]
    assert min(errors) < 1.6
    assert sum(errors[-20:]) < 0.7 * sum(errors[:10]) * 2
    assert sweep.search().trials == 0


def test_every_suggestion_is_a_run_with_short_numbers():
    sweep = Sweep()
    sweep.run(12)
    for row in sweep.rows:
        run = row.runs[0]
        assert run.train.lr == float(f"{run.train.lr:.4g}")
        assert (run.model.layers, run.train.batch) in ((1, 8), (2, 16))
        assert row.name.count(" · ") == 5
        assert row.labels["train.schedule"] in ("constant", "cosine")


def test_the_seed_decides_the_suggestions():
    first, second, other = Sweep(), Sweep(), Sweep(TEXT.replace("samples: 60", "samples: 60\n  seed: 7"))
    for sweep in (first, second, other):
        sweep.run(15)
    assert first.ids == second.ids != other.ids


def test_the_same_command_continues_the_search():
    sweep = Sweep()
    for trials in (7, 5, 20):
        sweep.run(trials)
    assert sweep.search().trials == 60 - 32
    sweep.run()
    assert len(set(sweep.ids)) == len(sweep.ids) == 60
    assert min(error_of(row.runs[0]) for row in sweep.rows) < 1.6
    # The sampler knows the results of all earlier sweeps: it does not start at random again.
    assert sum(len(row.runs[0].model.position) and row.runs[0].model.layers == 1 for row in sweep.rows[-20:]) >= 12


def test_rows_that_are_not_finished_are_suggested_first():
    sweep = Sweep()
    sweep.run(6)
    ended: list[Status] = ["finished", "interrupted", "failed", "stopped", "running", "damaged"]
    for run_id, status in zip(sweep.ids, ended, strict=True):
        sweep.results[run_id] = Known(
            status, sweep.results[run_id].metric if status in ("finished", "stopped") else None
        )
    before = sweep.ids
    search = sweep.search()
    assert search.trials == 54 + 4
    again = [search.suggest(f"trial{number}")["run_id"] for number in range(6)]
    assert again[:4] == [before[1], before[2], before[4], before[5]]
    assert not set(again[4:]) & set(before)


def test_failed_rows_are_left_alone_on_request():
    sweep = Sweep(retry_failed=False)
    sweep.run(3)
    sweep.results[sweep.ids[0]] = Known("failed")
    search = sweep.search()
    assert search.trials == 57
    assert search.suggest("trial0")["run_id"] not in sweep.ids[:3]


def test_a_changed_ablation_starts_a_new_search():
    sweep = Sweep()
    sweep.run(4)
    sweep.text = TEXT.replace("dim: 8", "dim: 16")
    assert sweep.search().trials == 60
    sweep.text = TEXT.replace("CoPE: [cope], ", "")
    assert sweep.search().trials == 60 - sum("CoPE" not in row.name for row in sweep.rows)


def states(search: RunSearch) -> list[str]:
    return [trial.state.name for trial in search._ot_study.trials]


def test_stopped_runs_are_pruned_and_failed_ones_have_no_value():
    sweep = Sweep()
    search = sweep.search()
    for number in range(4):
        search.suggest(f"trial{number}")
        search.on_trial_result(f"trial{number}", {METRIC: 3.0, "training_iteration": 1, "status": "running"})
    search.on_trial_complete("trial0", {METRIC: 3.0, "status": "running"})
    search.on_trial_complete("trial1", {METRIC: 3.0, "status": "failed"})
    search.on_trial_complete("trial2", None, error=True)
    search.on_trial_complete("trial3", {METRIC: 3.0, "status": "finished"})
    assert states(search) == ["PRUNED", "FAIL", "FAIL", "COMPLETE"]
    for run_id, status in zip(sweep.ids, ("stopped", "failed", "failed", "finished"), strict=True):
        sweep.results[run_id] = Known(status, 3.0 if status in ("stopped", "finished") else None)
    sweep.retry_failed = False
    assert states(sweep.search()) == ["PRUNED", "FAIL", "FAIL", "COMPLETE"]


def test_results_without_the_metric_or_without_a_finite_value_are_ignored():
    sweep = Sweep()
    search = sweep.search()
    search.suggest("trial0")
    search.on_trial_result("trial0", {"train/loss": 1.0, "training_iteration": 1})
    search.on_trial_result("trial0", {METRIC: math.nan, "training_iteration": 2})
    search.on_trial_complete("trial0", {METRIC: math.inf, "status": "finished"})
    assert states(search) == ["FAIL"]


def test_a_small_space_is_exhausted():
    sweep = Sweep(SMALL)
    search = sweep.search()
    for number in range(3):
        assert search.suggest(f"trial{number}") == {"run_id": sweep.ids[-1]}
        if number < 2:
            sweep.train(search, number)
    assert sorted(row.name for row in sweep.rows) == ["CoPE", "RoPE", "none"]
    assert search.suggest("trial3") is None  # one is still running
    sweep.train(search, 2)
    assert search.suggest("trial4") == Searcher.FINISHED


def test_tune_may_pickle_it():
    search = Sweep().search()
    assert isinstance(pickle.loads(pickle.dumps(search)), Searcher)
    assert isinstance(copy.deepcopy(search), Searcher)


def test_a_plan_without_suggestions_is_refused():
    grid = expand(load(TEXT[: TEXT.index("search:")]))
    with pytest.raises(ValueError, match="the ablation test has no search by suggestions"):
        RunSearch(grid, {}, lambda row: None)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_tune_asks_for_runs_and_returns_their_results(tmp_path, monkeypatch):
    from ray import tune

    # Evaluations before the last one may lack the metric.
    monkeypatch.setenv("TUNE_DISABLE_STRICT_METRIC_CHECKING", "1")

    sweep = Sweep(TEXT.replace("samples: 60", "samples: 9"))
    search = sweep.search()

    def trial(config):
        tune.report({"status": "running", "train/loss": 1.0})
        tune.report({"status": "finished", METRIC: float(int(config["run_id"], 16))})

    tune.Tuner(
        tune.with_resources(trial, {"cpu": 0.5}),
        param_space={"broker": "name"},
        tune_config=tune.TuneConfig(
            search_alg=search, num_samples=search.trials, max_concurrent_trials=2, metric=None, mode=None
        ),
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    ).fit()
    assert len(set(sweep.ids)) == 9
    assert search.results == {run_id: ("finished", float(int(run_id, 16))) for run_id in sweep.ids}
