"""The benchmarks of a CPU measure what they say, at small sizes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cope_benchmarks import attention, data, prefill, serve, step, store, sweep
from cope_benchmarks.gpu_problems import Problem
from cope_benchmarks.report import GOALS, AtMost, Rows, goals_table, table
from cope_benchmarks.timing import times
from typer.testing import CliRunner

from cope_sweep.cli.application import app
from cope_sweep.store.rebuild import check
from cope_sweep.tasks import MQAR
from tests.tiny import tiny_run

ROOT = Path(__file__).parents[2]


def test_every_goal_is_in_the_readme():
    text = (ROOT / "tests" / "benchmarks" / "README.md").read_text()
    for bench, goals in GOALS.items():
        for what, goal in goals.items():
            assert f"| `{bench}` | {what} | {goal} |" in text


@pytest.mark.parametrize("bench", ["sweep", "store", "serve", "data"])
def test_stored_measurements_have_the_names_of_goals(bench):
    measured = json.loads((ROOT / "tests" / "benchmarks" / "results" / f"{bench}.json").read_text())
    assert set(GOALS[bench]) <= set(measured["rows"])


def test_goals_are_shown_beside_what_was_measured(monkeypatch):
    monkeypatch.setitem(GOALS, "some", {"size": AtMost(5, " B"), "other": AtMost(1)})
    rows = Rows("some")
    rows.add("size", 12_345.6, " B", " of all")
    rows.add("more", 0.5)
    measured = rows.measured()
    assert "| size | 12,346 B of all | ≤ 5 B |\n| more | 0.5 |  |\n" in table(measured)
    assert "| size | ≤ 5 B | 7 B | no |" in goals_table("some", {"size": 7.0})


def test_a_folder_that_cannot_be_written_is_reported_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    result = CliRunner().invoke(app, ["bench", "attention", "--keep", str(tmp_path / "file" / "results")])
    assert result.exit_code == 2
    assert re.search(r"--keep .*file/results: .*name a folder", " ".join(result.output.split()))


LIMITED = """
from cope_benchmarks.command import limit_to_avx2
limit_to_avx2()
from cope_sweep.kernels.native import build
print(build.best_target())
"""


@pytest.mark.slow
def test_avx2_limits_torch_and_the_native_kernels():
    """In a process of its own: torch reads the limit when it is imported."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("the processor has no AVX2")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", LIMITED], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["avx2"]


TINY = Problem(batch=2, heads=2, tokens=70, head_dim=16, p_max=9, dtype="float32")


@pytest.mark.slow
def test_alternatives_of_attention_are_checked_and_timed(monkeypatch):
    case = attention.Case("tiny", TINY, attention.CPU_CASES[0].alternatives)
    found = attention.measure(2, (case,))["rows"]["tiny"]["alternatives"]
    assert not [name for name, row in found.items() if "failed" in row]
    assert all(row["forward"]["median_ms"] > 0 and row["extra_mb"] >= 0 for row in found.values())
    totals = [found[name]["forward_backward"]["median_ms"] for name in ("native", attention.SDPA)]
    assert found["native"]["of_sdpa"] == pytest.approx(totals[0] / totals[1], abs=1e-3)

    # What is wrong is not timed, and there are no ratios to it.
    listing = attention.peers.listing
    monkeypatch.setattr(attention.peers, "listing", lambda x: listing(x) * 1.2)
    monkeypatch.setattr(attention, "_sdpa", lambda problem, backend, x: x["q"] + x["k"].detach() + x["v"])
    wrong = attention.measure(2, (case,))
    found = wrong["rows"]["tiny"]["alternatives"]
    assert "output is off by" in found[attention.LISTING]["failed"]
    assert "k is off by" in found[attention.SDPA]["failed"]
    assert not {"times_faster_than_listing", "of_sdpa"} & found["native"].keys()
    assert "| tiny | native |" in attention.table(wrong)


@pytest.mark.slow
def test_alternatives_of_a_training_step_are_checked_and_timed(monkeypatch):
    listing = step.peers.listing
    monkeypatch.setattr(step.peers, "listing", lambda x: listing(x) * 1.2)
    measured = step.measure(2, step.TINY)
    rows = measured["rows"]["tiny"]
    assert [name for name, row in rows.items() if "failed" in row] == ["CoPE, the paper's listing"]
    assert step.numbers(measured)["tiny: SDPA, no positions ÷ SDPA"] == 1
    assert "| tiny | CoPE, native |" in step.table(measured)


def test_times_are_those_of_one_call():
    calls = []
    measured = times({"a": lambda: calls.append(1)}, "cpu", 3)["a"]
    assert len(calls) == 1 + 1 + 3  # one compiles, one starts threads
    assert 0 <= measured["median_ms"] < 100


@pytest.mark.slow
def test_prefill_is_checked_and_timed(monkeypatch):
    monkeypatch.setattr(prefill, "GPT2_SMALL", {"dim": 32, "heads": 2})
    measured = prefill.measure(["alibi", "[cope, rope]"], [60, 140], ["fp32", "bf16"], 2, layers=1, vocabulary=50)
    names = [*prefill.ALTERNATIVES, "alibi", "[cope, rope]"]
    assert list(measured["rows"]) == [
        f"{tokens} tokens, {precision}: {name}"
        for precision in ("fp32", "bf16")
        for tokens in (60, 140)
        for name in names
    ]
    assert all(row["number"] > 0 for row in measured["rows"].values())
    without, rope = (measured["rows"][f"140 tokens, bf16: {name}"] for name in ("no encoding", "RoPE"))
    ratio = rope["number"] / without["number"]
    assert float(rope["text"].split(", ")[-1].removesuffix(" × no encoding")) == pytest.approx(ratio, abs=1e-3)

    # An encoding whose logits are wrong is not timed.
    monkeypatch.setitem(prefill.LIMITS, "fp32", -1.0)
    rows = prefill.measure([], [60], ["fp32"], 2, layers=1, vocabulary=50)["rows"]
    assert all(row["number"] == 0 and "logits are off by" in row["text"] for row in rows.values())


def test_a_task_without_an_ablation_has_its_default_fields():
    assert data.run_of("mqar").task == MQAR()


def test_a_synthetic_store_is_a_finished_ablation(tmp_path):
    plan = store.write_ablation(tmp_path / "all.yaml", 200)
    found = store.write_store(tmp_path / "store", plan)
    assert set(found.index.statuses().values()) == {"finished"}
    assert list(check(found, found.index, checksums=True)) == []
    assert [each.runs for each in found.index.sweeps()] == [200]


@pytest.mark.slow
def test_a_small_store(monkeypatch):
    monkeypatch.setattr(store, "SMALL", 1000)
    monkeypatch.setattr(store, "MEDIUM", 1000)
    monkeypatch.setattr(store, "REPETITIONS", 1)
    rows = store.measure(1100)["rows"]
    assert "plan of all runs: expand, hash, compare" in rows
    assert set(GOALS["store"]) - set(rows) == {"plan of 10,000 runs: expand, hash, compare"}


@pytest.mark.slow
def test_a_server(monkeypatch):
    for name, value in {"SEQUENCES": 8, "TURNS": 1, "IDLE_REQUESTS": 3, "SECONDS": 0.2, "CHANGES": 1}.items():
        monkeypatch.setattr(serve, name, value)
    monkeypatch.setattr(serve, "ABLATION", serve.ABLATION.replace("layers: 4, dim: 256", "layers: 1, dim: 32"))
    assert set(GOALS["serve"]) <= set(serve.measure(1000)["rows"])


def test_throughput_counts_from_the_end_of_the_first_run_to_that_of_the_last():
    spans_s = [(9.0, 10.0), (9.0, 10.0), (19.0, 20.0), (19.0, 20.0), (29.0, 30.0)]  # two at a time, 10 s each
    assert sweep.Execution(0.0, 40.0, spans_s).steady_rate == pytest.approx(2 / 10.0)


def test_growth_is_measured_after_a_fifth_of_the_runs():
    spans_s = [(float(number), number + 0.5) for number in range(10)]
    assert sweep.Execution(0.0, 11.0, spans_s, [(0, 50), (2, 100), (6, 140), (10, 180)]).growth_bytes() == 10
    assert sweep.Execution(0.0, 11.0, spans_s, [(2, 100)]).growth_bytes() == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_small_sweep(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    rows = Rows("sweep")
    for part in (sweep.trivial_runs, sweep.recovery):  # the others take minutes
        part(rows, tmp_path, 10, 1)
    assert all(row["number"] > 0 for name, row in rows.rows.items() if name != "growth of the driver")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        sweep.execute(sweep.command_of("bare", tmp_path / "missing.yaml"), tmp_path / "store")
    assert "missing.yaml" in caught.value.output


@pytest.mark.slow
def test_sequences_are_generated_and_trained_on():
    run = tiny_run()
    assert data.generated_per_s(run.task, 4) > 0
    assert data.trained_per_s(run, data.Runtime(), 4) > 0
    assert data.run_of("flip_flop").model.layers == 4
