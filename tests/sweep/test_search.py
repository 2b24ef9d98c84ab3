"""Optuna's suggestions, on a function instead of trainings."""

import math
from dataclasses import dataclass, field

from cope_sweep.config import Row, RunSpec, plan_of_recorded
from cope_sweep.store import Status
from cope_sweep.sweep.search import Known, RowSearch
from tests.config.ablations import load

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


@dataclass
class Sweep:
    """A sweep without Ray: what was suggested, in order, and how it ended."""

    text: str = TEXT
    rows: list[Row] = field(default_factory=list)
    results: dict[str, Known] = field(default_factory=dict)
    retry_failed: bool = True

    def search(self) -> RowSearch:
        recorded = [(row.runs[0].run_id, row.labels) for row in self.rows]
        plan = plan_of_recorded(load(self.text), recorded)
        return RowSearch(plan, self.results, retry_failed=self.retry_failed)

    def next_run(self, search: RowSearch) -> RunSpec | None:
        if (row := search.next_row()) is None:
            return None
        self.rows.append(row)
        return row.runs[0]

    def train(self, search: RowSearch, run: RunSpec) -> None:
        search.report(run.run_id, 10, 9.0)
        self.results[run.run_id] = ("finished", error_of(run))
        search.end(run.run_id, "finished", error_of(run))

    def run(self, runs: int | None = None) -> None:
        search = self.search()
        for _ in range(search.left if runs is None else runs):
            self.train(search, self.next_run(search))

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
    assert sweep.search().left == 0


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
    assert sweep.search().left == 60 - 32
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
        sweep.results[run_id] = (status, sweep.results[run_id][1] if status in ("finished", "stopped") else None)
    before = sweep.ids
    search = sweep.search()
    assert search.left == 54 + 4
    again = [sweep.next_run(search).run_id for _ in range(6)]
    assert again[:4] == [before[1], before[2], before[4], before[5]]
    assert not set(again[4:]) & set(before)


def test_a_changed_ablation_starts_a_new_search():
    sweep = Sweep()
    sweep.run(4)
    sweep.text = TEXT.replace("dim: 8", "dim: 16")
    assert sweep.search().left == 60
    sweep.text = TEXT.replace("CoPE: [cope], ", "")
    assert sweep.search().left == 60 - sum("CoPE" not in row.name for row in sweep.rows)


def states(search: RowSearch) -> list[str]:
    return [trial.state.name for trial in search.study.trials]


def test_stopped_runs_are_pruned_and_failed_ones_have_no_value():
    sweep = Sweep()
    search = sweep.search()
    ended: list[Status] = ["stopped", "failed", "interrupted", "finished"]
    for run in [sweep.next_run(search) for _ in ended]:
        search.report(run.run_id, 10, 3.0)
    for run_id, status in zip(sweep.ids, ended, strict=True):
        search.end(run_id, status, 3.0)
        sweep.results[run_id] = ("failed" if status == "interrupted" else status, 3.0)
    assert states(search) == ["PRUNED", "FAIL", "FAIL", "COMPLETE"]
    sweep.retry_failed = False
    again = sweep.search()
    assert states(again) == states(search)
    reported = [each.study.trials[0].intermediate_values for each in (search, again)]
    assert [list(values.values()) for values in reported] == [[3.0], [3.0]]


def test_values_that_are_not_finite_are_no_results():
    search = Sweep().search()
    run_id = search.next_row().runs[0].run_id
    search.report(run_id, 10, math.nan)
    search.end(run_id, "finished", math.inf)
    assert states(search) == ["FAIL"]


def test_a_small_space_is_exhausted():
    sweep = Sweep(SMALL)
    search = sweep.search()
    for _ in range(2):
        sweep.train(search, sweep.next_run(search))
    last = sweep.next_run(search)
    assert sorted(row.name for row in sweep.rows) == ["CoPE", "RoPE", "none"]
    assert search.next_row() is None
    assert search.left == 7  # a run has not ended, and its result may lead to another suggestion
    sweep.train(search, last)
    assert search.next_row() is None
    assert search.left == 0
