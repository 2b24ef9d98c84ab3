"""The benchmark of the service measures a real server."""

import pytest
from cope_benchmarks import serve as benchmark
from cope_benchmarks import serve_overload, serve_perplexity
from cope_benchmarks.save import markdown

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
