"""The synthetic store is one that the commands know, and the benchmark of it measures what it says."""

from collections import Counter

import pytest
from cope_benchmarks import store as benchmark
from cope_benchmarks.save import markdown
from cope_benchmarks.synthetic_store import write_ablation, write_store

from cope_sweep.errors import UserError
from cope_sweep.results import table
from cope_sweep.store.rebuild import check


def test_a_synthetic_store_is_a_finished_ablation(tmp_path):
    plan = write_ablation(tmp_path / "all.yaml", 200)
    part = write_ablation(tmp_path / "part.yaml", 100)
    store = write_store(tmp_path / "store", plan)
    assert Counter(store.index.statuses().values()) == {"finished": 200}
    assert list(check(store.files, store.index, checksums=True)) == []
    assert table(part, store).complete
    assert [sweep.runs for sweep in store.index.sweeps()] == [200]
    assert store.run(plan.runs[0].run_id).curve()[-1]["step"] == 50


@pytest.mark.slow
def test_the_benchmark_measures_a_small_store(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "SMALL", 100)
    monkeypatch.setattr(benchmark, "MEDIUM", 200)
    monkeypatch.setattr(benchmark, "REPETITIONS", 1)
    measured = benchmark.measure(300, tmp_path)
    assert [plan["finished"] for plan in measured["plans"]] == [200, 300]
    assert (measured["check"]["differences"], measured["rebuild"]["runs_per_s"] > 0) == (0, True)
    assert set(benchmark.GOALS) <= set(measured["questions"])
    assert "rebuild the index" in markdown(benchmark.table(measured))


def test_too_few_runs_are_refused():
    with pytest.raises(UserError, match="a multiple of 100"):
        benchmark.measure(50)
