"""The benchmark of the service measures a real server."""

import pytest
from cope_benchmarks import serve as benchmark
from cope_benchmarks.save import markdown


@pytest.mark.slow
def test_the_benchmark_measures_a_server(monkeypatch):
    monkeypatch.setattr(benchmark, "CLIENTS", 4)
    monkeypatch.setattr(benchmark, "IDLE_REQUESTS", 3)
    measured = benchmark.measure(sequences=8, turns=1)
    speeds = measured["tokens_per_s"]
    assert set(speeds) == {"offline", "clients", "one by one"}
    assert measured["clients_to_offline"] == pytest.approx(speeds["clients"] / speeds["offline"], rel=0.05)
    assert measured["idle_ms"]["service"] > 0
    assert "4 clients : one by one" in markdown(benchmark.table(measured))
