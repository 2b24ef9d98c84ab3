"""The benchmark of the service measures a real server."""

import pytest
from cope_benchmarks import serve as benchmark
from cope_benchmarks import serve_overload, serve_perplexity, serve_tables
from cope_benchmarks.save import markdown

from cope_sweep.cli.output import grid

SMALL = serve_perplexity.ABLATION.replace("layers: 4, dim: 256", "layers: 1, dim: 32")


@pytest.mark.slow
def test_the_benchmark_measures_a_server(monkeypatch):
    monkeypatch.setattr(serve_perplexity, "ABLATION", SMALL)
    monkeypatch.setattr(serve_perplexity, "CLIENTS", 4)
    monkeypatch.setattr(serve_perplexity, "IDLE_REQUESTS", 3)
    monkeypatch.setattr(serve_overload, "CAPACITY_S", 1.0)
    monkeypatch.setattr(serve_overload, "CLIENTS", 120)
    # 1,024 tokens each: room for 8 of the 16 … 120 clients that ask at a time
    monkeypatch.setattr(serve_overload, "QUEUE_TOKENS", 16 * 1024)
    measured = benchmark.measure(overload_s=5, sequences=8, turns=1)
    speeds = measured["tokens_per_s"]
    assert set(speeds) == {"offline", "clients", "one at a time", "offline, one by one"}
    assert measured["clients_to_offline"] == pytest.approx(speeds["clients"] / speeds["offline"], rel=0.05)
    assert measured["idle_ms"]["service"] > 0
    shown = markdown(benchmark.table(measured))
    assert "4 clients : one at a time" in shown

    overload = measured["overload"]
    assert set(overload["statuses"]) == {"200", "429"}, "what is too much is refused, and nothing else fails"
    assert overload["without_retry_after"] == 0
    assert overload["statuses"]["429"] > overload["statuses"]["200"]
    assert overload["accepted_s"]["p99"] < 60, "an accepted request waits for a bounded queue"
    assert overload["memory_mb"][-1] < overload["memory_mb"][0] + 200
    assert "answers by status" in shown


@pytest.mark.slow
def test_tables_and_runs_of_a_server(tmp_path, monkeypatch):
    monkeypatch.setattr(serve_tables, "CHANGES", 1)
    monkeypatch.setattr(serve_tables, "PEER_RUNS", 1000)
    measured = benchmark.measure_reading(tmp_path, 1000, turns=1, seconds=0.2)
    assert measured["runs"] == 1000
    routes = measured["routes"]
    assert routes[serve_tables.CONSTANT]["ratio"] == 1.0
    assert set(serve_tables.GOALS) < set(routes)
    assert all(each["requests_per_s"] > 0 and each["server_us"] > 0 for each in routes.values())
    assert len(measured["fresh_s"]) == 1
    assert measured["mlflow"]["mlflow_runs"] == 1000
    shown = grid("service", "measured", "goal")
    serve_tables.add_rows(shown, measured)
    assert "filtered page of runs" in markdown(shown)
