"""The benchmark of results measures what it says."""

import pytest
from cope_benchmarks import results as benchmark
from cope_benchmarks.save import markdown

from cope_sweep.errors import UserError


@pytest.mark.slow
def test_the_benchmark_measures_a_small_store(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "SMALL", 100)
    monkeypatch.setattr(benchmark, "REPETITIONS", 1)
    monkeypatch.setattr(benchmark, "FORMATS", ("markdown",))
    measured = benchmark.measure(200, 100, tmp_path)
    assert [report["runs"] for report in measured["reports"]] == [100, 200]
    assert measured["frame"]["frame_shape"][0] == 200
    assert measured["mlflow"]["runs"] == 100
    assert measured["mlflow"]["times_faster"] > 0
    assert "report of 200 runs, markdown" in markdown(benchmark.table(measured))


def test_too_few_runs_are_refused():
    with pytest.raises(UserError, match="multiples of 100"):
        benchmark.measure(50)
