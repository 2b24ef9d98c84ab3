"""The benchmark of `cope-sweep sync` measures what it says."""

import pytest
from cope_benchmarks import sync as benchmark
from cope_benchmarks.save import markdown

from cope_sweep.errors import UserError


@pytest.mark.slow
def test_the_benchmark_sends_the_same_data_as_the_client():
    measured = benchmark.measure(100)
    assert measured["runs"] == 100
    assert measured["ratio"] > 0
    assert "MLflow's client: data sets and models" in markdown(benchmark.table(measured))


def test_other_numbers_of_runs_are_refused():
    with pytest.raises(UserError, match="multiple of 100"):
        benchmark.measure(50)
