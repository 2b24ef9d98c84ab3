"""The benchmark of the sweep measures what it says, at small sizes."""

import subprocess
import sys

import pytest
from cope_benchmarks import sweep as benchmark
from cope_benchmarks.save import markdown
from cope_benchmarks.sweep import Measured, _ablation, _command, execute, usage_by_kind


def test_times_are_read_from_the_store(tmp_path):
    measured = execute(_command("loop", _ablation(tmp_path / "few.yaml", 3, 1)), tmp_path / "store")
    assert len(measured.spans_s) == 3
    assert all(gap_s >= 0 for gap_s in measured.gaps_s())
    assert measured.start_s < measured.spans_s[0][0] < measured.ends_s[-1] < measured.start_s + measured.whole_s


def test_growth_is_measured_after_a_fifth_of_the_runs_while_trials_are_alive():
    spans_s = [(float(number), number + 0.5) for number in range(10)]
    sizes = ((0, 50), (2, 100), (6, 140), (10, 180))
    trial = {"trial": {"rss": 7, "processes": 1}}
    samples = [(number, {"driver": {"rss": size, "processes": 1}, **trial}) for number, size in sizes]
    assert Measured(0.0, 11.0, spans_s, samples).growth("rss") == {"driver": 10.0, "trial": 0.0}
    assert Measured(0.0, 11.0, spans_s, samples[:1]).growth("rss") == {}
    one_has_ended = (10, {"driver": {"rss": 20, "processes": 0}, **trial})
    trials_have_ended = (10, {"driver": {"rss": 900, "processes": 1}})
    assert Measured(0.0, 11.0, spans_s, [*samples, one_has_ended, trials_have_ended]).growth("rss")["driver"] == 10.0


def test_the_throughput_of_few_runs_counts_the_start_of_every_run():
    # Two runs at a time. Each takes 1 s, and its processes start within 9 s.
    few = Measured(0.0, 40.0, [(9.0, 10.0), (9.0, 10.0), (19.0, 20.0), (19.0, 20.0)])
    all_s = 10 * 10.0 - 9.0
    assert few.rate(20, 2) == pytest.approx(20 / all_s)
    assert few.rate(4, 2) == pytest.approx(4 / 11.0)
    assert few.steady_rate == pytest.approx(3 / 10.0)


def test_the_sweep_and_the_bare_trainable_take_turns(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(benchmark, "execute", lambda command, store: order.append(command[0]))
    benchmark._in_turns({name: [name] for name in ("engine", "bare", "loop")}, tmp_path, 3)
    assert order == ["engine", "bare", "loop", "bare", "engine", "engine", "bare"]


def test_a_command_that_fails_is_reported_with_its_output(tmp_path):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        execute(_command("loop", tmp_path / "missing.yaml"), tmp_path / "store")
    assert "missing.yaml" in caught.value.output


def test_the_memory_of_a_process_and_its_children_is_measured():
    command = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE) as process:
        while len(found := usage_by_kind(process.pid)) < 2:
            assert process.poll() is None
        process.communicate(b"\n")
    assert {kind: part["processes"] for kind, part in found.items()} == {"driver": 1, "Ray": 1}
    assert usage_by_kind(process.pid) == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_benchmark_measures_a_small_sweep(monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    # The other parts take minutes.
    measured = benchmark.measure(10, 4, 1, 1, ways=("loop",), parts=("trivial_runs", "recovery"))
    assert all(rate > 0 for rate in measured["trivial_runs"]["runs_per_s"].values())
    assert measured["recovery"]["first_step_s"] > measured["recovery"]["process_started_s"]
    text = markdown(benchmark.table(measured))
    assert all(goal in text for goal in ("≥ 25", "≥ 0.8", "≤ 20 s"))
