"""The benchmarks of a CPU measure what they say, at small sizes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cope_benchmarks import attention, data, decode, gates, prefill, serve, step, store, sweep, synthetic
from cope_benchmarks.gpu_problems import Problem
from cope_benchmarks.report import GOALS, OF_OURS, OF_SDPA, README, Goal, Rows, failed, goals
from cope_benchmarks.timing import times
from typer.testing import CliRunner

from cope_sweep.cli.application import app
from cope_sweep.store.damage import find_differences
from cope_sweep.tasks import MQAR
from tests.helpers.tiny import tiny_run

ROOT = Path(__file__).parents[2]


# Goals, tables and files


def test_the_goals_are_those_of_the_readme():
    assert {bench: len(goals) for bench, goals in GOALS.items()} == {
        "step": 2, "gpu": 9, "sweep": 5, "store": 11, "serve": 6, "data": 1,
    }  # fmt: skip
    assert GOALS["sweep"]["growth of the driver"] == Goal("≤", 50, "KB/run")
    assert GOALS["gpu"][f"T 4096: triton: {OF_SDPA}"] == Goal("≤", 1.25)


QUOTED = {
    (bench, what): (float(number.replace(",", "")), missed == ", missed")
    for bench, what, number, missed in re.findall(
        r"^\| `(\w+)` \| (.+?) \| [≤≥] .+? \| ([\d.,]*\d)[^|,]*(, missed)? \|$", README.read_text("utf-8"), re.MULTILINE
    )
}
"""Bench and goal → what README.md says was measured, and whether the goal is missed."""


@pytest.mark.parametrize("file", ["sweep", "store", "serve", "data", "step-avx512", "gpu/nvidia_h100_80gb_hbm3/gpu"])
def test_the_readme_quotes_stored_measurements(file):
    measured = json.loads((README.parent / "results" / f"{file}.json").read_text())
    table = (README.parent / "results" / f"{file}.md").read_text()
    # Files of before rows had columns have one number a row.
    numbers = {what: row["number"] for what, row in measured["rows"].items() if "number" in row}
    numbers |= {what: number for what, _, number in goals(measured)}
    bench = measured["bench"]
    assert set(GOALS[bench]) <= set(numbers)
    for what, goal in GOALS[bench].items():
        assert QUOTED[bench, what] == (pytest.approx(numbers[what], rel=0.01), not goal.reached(numbers[what])), what
        assert re.search(rf"^\| {re.escape(what)} \|.* {goal.sign} {goal.limit:g}\b", table, re.MULTILINE), what


def test_both_readmes_quote_the_stored_training_steps():
    rows = json.loads((README.parent / "results" / "step-avx512.json").read_text())["rows"]
    sizes = ("2 layers × 128, T 511", "quick start: 2 layers × 64, T 40")

    def ratios(alternative):
        return [rows[f"{size}: {alternative}"]["÷ ours"] for size in sizes]

    table = README.read_text("utf-8").partition("## Training steps")[2].partition("*Plain PyTorch*")[0]
    quoted = dict(re.findall(r"^\| (.+?) \| (\d\.\d\d \| \d\.\d\d) \|$", table, re.MULTILINE))
    names = {"ours, RoPE": "RoPE"} | {f"{of}, RoPE": f"{of}, RoPE" for of in ("plain PyTorch", "x-transformers")}
    names |= {name: name for name in ("plain PyTorch, no positions", "x-transformers, CoPE")}
    assert {name: [float(number) for number in text.split(" | ")] for name, text in quoted.items()} == {
        name: pytest.approx(ratios(alternative), abs=0.0051) for name, alternative in names.items()
    }
    sentence = re.search(
        r"takes ([\d.]+) of the time of plain PyTorch .*?, and a third of\s+x-transformers' CoPE; at the quick start's "
        r"size it takes ([\d.]+) and ([\d.]+)\.",
        (README.parents[2] / "README.md").read_text("utf-8"),
    )
    (plain, plain_small), (theirs, theirs_small) = ratios("plain PyTorch, no positions"), ratios("x-transformers, CoPE")
    assert [float(number) for number in sentence.groups()] == pytest.approx(
        [1 / plain, 1 / plain_small, 1 / theirs_small], abs=0.0051
    )
    assert 1 / theirs == pytest.approx(1 / 3, abs=0.05)


@pytest.mark.parametrize("limit", [20_000, 5])
def test_a_command_keeps_what_was_measured_and_a_missed_goal_is_exit_code_1(limit, tmp_path, monkeypatch):
    monkeypatch.setitem(GOALS, "data", {"size": Goal("≤", limit, "B"), "a: speed": Goal("≥", 2), "other": Goal("≤", 1)})
    rows = Rows("data", {"a": {"speed": 3.14159, "time": {"median_ms": 120.4, "spread_ms": 0.25}, "more": {}}})
    rows.add("size", 12_345.6, "B", of="all")
    monkeypatch.setattr(data, "measure", rows.measured)
    result = CliRunner().invoke(app, ["bench", "data", "--keep", str(tmp_path)])
    assert result.exit_code == int(limit == 5)
    text = (tmp_path / "data.md").read_text()
    assert text in result.output
    assert "|  | speed | time | measured | unit | of |\n" in text
    assert "| a | 3.14 | 120 ± 0.25 |  |  |  |\n| size |  |  | 12,346 | B | all |\n" in text
    assert (
        f"| size | ≤ {limit} B | 1.235e+04 B | {'no' if limit == 5 else 'yes'} |\n| a: speed | ≥ 2 | 3.142 | yes |"
        in text
    )
    as_json = CliRunner().invoke(app, ["bench", "data", "--json"])
    kept = json.loads((tmp_path / "data.json").read_text())
    assert json.loads(as_json.output)["rows"] == kept["rows"] == rows.rows
    assert {"processor", "torch", "load"} <= kept["machine"].keys()


def test_a_folder_that_cannot_be_written_is_reported_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    result = CliRunner().invoke(app, ["bench", "attention", "--keep", str(tmp_path / "file" / "results")])
    assert result.exit_code == 2
    assert re.search(r"--keep .*file/results: .*name a folder", " ".join(result.output.split()))


def test_times_are_those_of_one_call():
    calls = []
    measured = times({"a": lambda: calls.append(1)}, 3)["a"]
    assert len(calls) == 1 + 3  # the first compiles and starts threads
    assert 0 <= measured["median_ms"] < 100
    sleeping = times(
        {"a": lambda: subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True)}, 1, warm=False
    )
    assert sleeping["a"]["cpu_ms"] > 5  # of the process that it waited for


# Kernels and training steps

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
    measured = attention.measure(2, (case,))
    assert not failed(measured)
    found = measured["rows"]
    assert all(row["forward, ms"]["median_ms"] > 0 and row["extra MB"] >= 0 for row in found.values())
    native, listing, sdpa = (found[f"tiny: {name}"] for name in ("native", attention.LISTING, attention.SDPA))
    of = [row[attention.BOTH]["median_ms"] for row in (native, listing, sdpa)]
    assert native[OF_SDPA] == pytest.approx(of[0] / of[2], abs=1e-3)
    assert listing[OF_OURS] == pytest.approx(of[1] / of[0], abs=1e-3)

    # What is wrong is not timed, and there are no ratios to it.
    right = attention.peers.listing
    monkeypatch.setattr(attention.peers, "listing", lambda x: right(x) * 1.2)
    monkeypatch.setattr(attention, "_sdpa", lambda problem, backend, x: x["q"] + x["k"].detach() + x["v"])
    measured = attention.measure(2, (case,))
    assert failed(measured)
    found = measured["rows"]
    assert "output is off by" in found[f"tiny: {attention.LISTING}"]["failed"]
    assert "k is off by" in found[f"tiny: {attention.SDPA}"]["failed"]
    assert OF_SDPA not in found["tiny: native"]


@pytest.mark.slow
def test_alternatives_of_a_training_step_are_checked_and_timed(monkeypatch):
    pytest.importorskip("x_transformers")
    listing, rotate = step.peers.listing, step.peers.PlainAttention.rotate
    rows = step.measure(2, step.TINY)["rows"]
    assert not [name for name, row in rows.items() if "failed" in row]
    assert list(rows) == [f"tiny: {name}" for name in (*step.ALTERNATIVES, *step.PEERS)]
    assert rows["tiny: SDPA, no positions"][OF_SDPA] == rows["tiny: CoPE, native"][OF_OURS] == 1
    assert all(row["a step, ms"]["median_ms"] > 0 for row in rows.values())
    assert {name.partition(": ")[0] for name in GOALS["step"]} <= set(step.MODELS)

    # What is wrong is not timed.
    monkeypatch.setattr(step.peers, "listing", lambda x: listing(x) * 1.2)
    monkeypatch.setattr(step.peers.PlainAttention, "rotate", lambda self, x: rotate(self, x) * 1.2)
    rows = step.measure(2, step.TINY)["rows"]
    wrong = ["CoPE, the paper's listing", step.PLAIN_ROPE]
    assert [name for name, row in rows.items() if "failed" in row] == [f"tiny: {name}" for name in wrong]


def test_a_model_of_others_that_sees_the_future_is_not_timed():
    class Leaky(step.nn.Module):
        def __init__(self, sizes):
            super().__init__()
            self.embedding = step.nn.Embedding(sizes.vocabulary, sizes.vocabulary)

        def forward(self, tokens):
            return self.embedding(tokens).sum(1, keepdim=True).expand(-1, tokens.shape[1], -1)

    assert step.Peer(step.TINY["tiny"], Leaky).failure("leaky") == "it is not causal"


@pytest.mark.slow
def test_prefill_is_checked_and_timed(monkeypatch):
    monkeypatch.setattr(prefill, "GPT2_SMALL", {"dim": 32, "heads": 2})
    measured = prefill.measure(["[cope, rope]"], [60, 1400], ["fp32", "bf16"], 2, layers=1, vocabulary=50)
    names = ["no encoding", "RoPE", "CoPE", "FoX", "CoPE, the paper's listing", "[cope, rope]"]
    sizes = [f"{tokens} tokens, {precision}" for precision in ("fp32", "bf16") for tokens in ("60", "1,400")]
    assert list(measured["rows"]) == [f"{size}: {name}" for size in sizes for name in names]
    none, rope = (measured["rows"][f"60 tokens, bf16: {name}"] for name in names[:2])
    assert rope["÷ no encoding"] == pytest.approx(rope["tokens/s"] / none["tokens/s"], abs=1e-3)

    # An encoding whose logits are wrong is not timed.
    monkeypatch.setitem(prefill.LIMITS, "fp32", -1.0)
    rows = prefill.measure([], [60], ["fp32"], 2, layers=1, vocabulary=50)["rows"]
    assert all("logits are off by" in row["failed"] for row in rows.values())


# Data, stores, the service and the sweep


@pytest.mark.slow
def test_sequences_are_generated_and_trained_on():
    assert min(data.sequences_per_s(tiny_run(), data.Runtime(), 4)) > 0
    assert data.run_of("flip_flop").model.layers == 4
    assert data.run_of("mqar").task == MQAR()  # which has no ablation


def test_a_synthetic_store_is_a_finished_ablation(tmp_path):
    plan = synthetic.write_grid(tmp_path, "all", 200)
    found = synthetic.write_store(tmp_path, plan)
    assert set(found.index.statuses().values()) == {"finished"}
    assert list(find_differences(found, checksums=True)) == []
    assert [each.runs for each in found.index.sweeps()] == [200]


@pytest.mark.slow
def test_a_small_store(monkeypatch):
    for name, value in {"SMALL": 1000, "MEDIUM": 1000, "REPETITIONS": 1}.items():
        monkeypatch.setattr(store, name, value)
    rows = store.measure(1100)["rows"]
    assert set(GOALS["store"]) - set(rows) == {"plan of 10,000 runs: expand, hash, compare"}


@pytest.mark.slow
def test_a_server(monkeypatch):
    for name, value in {"SEQUENCES": 8, "TURNS": 1, "IDLE_REQUESTS": 3, "SECONDS": 0.2, "CHANGES": 1}.items():
        monkeypatch.setattr(serve, name, value)
    monkeypatch.setitem(serve.MODEL, "model", {"layers": 1, "dim": 32, "heads": 2, "position": ["cope"]})
    assert set(GOALS["serve"]) <= set(serve.measure(1000)["rows"])


def test_throughput_and_growth_are_those_after_the_first_runs():
    spans_s = [(9.0, 10.0), (9.0, 10.0), (19.0, 20.0), (19.0, 20.0), (29.0, 30.0)]  # two at a time, 10 s each
    assert sweep.Execution(0.0, 40.0, spans_s).steady_rate == pytest.approx(2 / 10.0)
    samples = [(0, 50), (1, 100), (1, 110), (2, 130), (3, 140), (5, 180)]
    assert sweep.Execution(0.0, 40.0, spans_s, samples).growth_bytes() == 20


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [(0, 50), (1, 100), (5, 180)],  # nearly nothing from the first half
        [(1, 100), (1, 110), (2, 130), (3, 140)],  # not up to the end
        [(1, 200), (1, 210), (2, 230), (5, 180)],  # memory was given back
    ],
)
def test_growth_that_was_not_measured_does_not_pass(samples, tmp_path, monkeypatch):
    spans_s = [(start, start + 1.0) for start in range(5)]
    execution = sweep.Execution(0.0, 40.0, spans_s, samples)
    monkeypatch.setattr(sweep, "train_runs", lambda *arguments, **options: execution)
    rows = Rows("sweep")
    sweep.trivial_runs(rows, tmp_path, 5, 1)
    assert "failed" in rows.rows["growth of the driver"]
    assert failed(rows.measured())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_small_sweep(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    rows = Rows("sweep")
    sweep.trivial_runs(rows, tmp_path, 10, 1)
    sweep.recovery(rows, tmp_path)  # the others take minutes
    assert all(row["measured"] > 0 for name, row in rows.rows.items() if name != "growth of the driver")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        sweep.execute(sweep.command("run", "missing"), tmp_path / "other")
    assert "missing" in caught.value.output


def test_decoding_is_checked_and_timed(monkeypatch):
    monkeypatch.setattr(decode, "GPT2_SMALL", {"dim": 32, "heads": 2})
    measured = decode.measure([20, 300], 2, layers=2, vocabulary=50)
    assert len(measured["rows"]) == 2 * len(decode.ALTERNATIVES)
    row = measured["rows"]["300 tokens: CoPE"]
    assert row["a token (ms)"]["median_ms"] > 0
    assert row["cached MB"] == pytest.approx(2 * 2 * 300 * 32 * 4 / 1e6)  # two layers, keys and values
    assert measured["rows"]["300 tokens: CoPE, separate gate keys"]["cached MB"] == pytest.approx(
        1.5 * row["cached MB"]
    )
    assert not failed(measured)
    monkeypatch.setattr(decode, "LIMIT", -1.0)
    assert all("failed" in row for row in decode.measure([20], 2, layers=1, vocabulary=50)["rows"].values())


def test_sums_in_bfloat16_are_off_by_positions_and_others_are_not():
    rows = gates.measure([2048])["rows"]
    of_half = {name: rows[f"2,048 tokens, gates near ½: {name}"]["largest error"] for name in gates.FORMATS}
    assert of_half["bfloat16"] > 1
    assert of_half["float32"] < 1e-3
    assert of_half["fixed point, 2⁻¹⁸"] < 2048 * 2**-18
