"""The benchmark of the sweep measures what it says, at small sizes."""

import subprocess
import sys

import pytest
from cope_benchmarks import sweep as benchmark
from cope_benchmarks.save import markdown
from cope_benchmarks.sweep import PEERS, _ablation, _throughput
from cope_benchmarks.sweep_broker import REPORTS, simulate
from cope_benchmarks.sweep_commands import Measured, execute
from cope_benchmarks.sweep_memory import difference
from cope_benchmarks.sweep_processes import usage_by_kind

from cope_sweep.store import Store


@pytest.mark.parametrize("leases", ["memory", "sqlite"])
def test_the_simulated_broker_ends_every_run(tmp_path, leases):
    measured = simulate(leases, 5, 40, tmp_path / "store")
    assert (measured["ended"], measured["runs_per_s"] > 0) == (40, True)
    assert {name: measured["operations"][name] for name in ("start", "report")} == {"start": 40, "report": 40 * REPORTS}
    finished = {"finished": 40} if leases == "sqlite" else {}
    assert Store(tmp_path / "store").index.counts() == finished


def test_times_are_read_from_the_store(tmp_path):
    ablation = _ablation(tmp_path / "few.yaml", 3, 1)
    measured = execute([*PEERS, "loop", str(ablation)], tmp_path / "store")
    assert len(measured.spans_s) == 3
    assert all(gap_s >= 0 for gap_s in measured.gaps_s())
    assert measured.start_s < measured.spans_s[0][0] < measured.ends_s[-1] < measured.start_s + measured.whole_s


def test_growth_is_measured_after_a_fifth_of_the_runs():
    spans_s = [(float(number), number + 0.5) for number in range(10)]
    sizes = ((0, 50, 1), (2, 100, 1), (6, 140, 1), (10, 180, 1))
    samples = [(number, {"driver": {"rss": size, "processes": count}}) for number, size, count in sizes]
    assert Measured(0.0, 11.0, spans_s, samples).growth("rss") == {"driver": 10.0}
    assert Measured(0.0, 11.0, spans_s, samples[:1]).growth("rss") == {}
    one_has_ended = (10, {"driver": {"rss": 20, "processes": 0}})
    assert Measured(0.0, 11.0, spans_s, [*samples, one_has_ended]).growth("rss") == {"driver": 10.0}


def test_the_throughput_of_few_runs_counts_the_start_of_every_run():
    # Two runs at a time. Each takes 1 s, and its processes start within 9 s.
    few = Measured(0.0, 40.0, [(9.0, 10.0), (9.0, 10.0), (19.0, 20.0), (19.0, 20.0)])
    all_s = 10 * 10.0 - 9.0
    assert _throughput(few, 20)["runs_per_s"] == pytest.approx(20 / all_s, abs=1e-4)
    assert _throughput(few, 4)["runs_per_s"] == pytest.approx(4 / 11.0, abs=1e-4)


def test_a_command_that_fails_is_reported_with_its_output(tmp_path):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        execute([*PEERS, "loop", str(tmp_path / "missing.yaml")], tmp_path / "store")
    assert "missing.yaml" in caught.value.output


def test_the_memory_of_a_process_and_its_children_is_measured():
    command = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE) as process:
        while len(found := usage_by_kind(process.pid, pss=True)) < 2:
            assert process.poll() is None
        process.communicate(b"\n")
    assert {kind: part["processes"] for kind, part in found.items()} == {"driver": 1, "Ray": 1}
    assert usage_by_kind(process.pid) == {}


def test_memory_beside_a_worker_leaves_the_workers_out():
    def measured(groups):
        kinds = {
            "worker": 900 * groups,
            "trial": 200 * (groups + 1),
            "driver": 300,
            "Ray": 500 * groups,
            "idle": groups,
        }
        return {"groups": groups, "kinds": {kind: {"rss": size, "pss": size // 2} for kind, size in kinds.items()}}

    assert difference([measured(2), measured(4)]) == {"rss": 200, "pss": 100}


@pytest.mark.slow
def test_the_benchmark_measures_a_small_sweep(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "LONG_RUNS", 2)
    # The other ways take minutes.
    sizes = {"long_steps": 20, "footprint_groups": (1, 2), "broker_groups": 5, "broker_runs": 50}
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    measured = benchmark.measure(10, 4, 1, **sizes, ways=("engine", "loop"))
    assert measured["trivial_runs"]["runs_per_s"] > 0
    ways = measured["ways"]["ways"]
    assert {name: way["runs"] for name, way in ways.items()} == {"engine": 4, "loop": 4}
    workers = [each["kinds"]["worker"]["processes"] for each in measured["footprint"]]
    assert workers == [1, 2]
    assert all("worker" not in each["head"] and each["head"]["broker"] == 1 for each in measured["footprint"])
    assert all(times["first_step_s"] > times["process_started_s"] for times in measured["recovery"].values())
    assert [each["ended"] for each in measured["broker"]] == [50, 5]
    assert "≥ 20" in markdown(benchmark.table(measured))
