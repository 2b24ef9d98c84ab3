"""The commands that show what is planned and what was measured: list, plan, status, runs, best, diff and logs."""

import csv
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter

import pyarrow.parquet as pq
import pytest
import yaml
from sqlalchemy import update

from cope_sweep.api.runs import GetLog
from cope_sweep.config import expand, load_ablation, with_overrides
from cope_sweep.config.estimate import RAY_START_S
from cope_sweep.read.queries import Queries
from cope_sweep.store import Store, SweepRun
from cope_sweep.store.index.tables import runs
from tests.cli.conftest import COMMANDS, TINY
from tests.helpers.finished_runs import fail, finish
from tests.helpers.sweeps import begin, end, write_sweep
from tests.helpers.tiny import tiny_run


def test_list(stored):
    (entry,) = stored.json("list")
    assert (entry["name"], entry["rows"], entry["seeds"], entry["runs"], entry["finished"]) == ("tiny", 2, 2, 4, 1)
    assert entry["counts"] == {"finished": 1, "failed": 1, "stopped": 1, "interrupted": 1}
    assert "error" not in entry
    out, _ = stored("list")
    for text in ("A tiny copy", "2 × 2", "1/4", "1 failed, 1 interrupted, 1 stopped"):
        assert all(word in out for word in text.split(", "))


def test_list_shows_the_runs_at_each_scale(shell):
    shell.write("heir", "title: Heir\ninherit: tiny\nscales: {brief: {seeds: [7]}}\n")
    (entry,) = [entry for entry in shell.json("list") if entry["name"] == "heir"]
    assert entry["at_scales"] == {"brief": {"runs": 2, "finished": 0, "counts": {"pending": 2}, "same_runs": False}}
    out, _ = shell("list")
    (line,) = [line for line in out.splitlines() if line.startswith("heir")]
    assert re.search(r" 0/4 +brief 0/2", line)


def test_list_shows_the_error_of_a_faulty_file(shell):
    shell.write("broken", "title: [\n")
    out, _ = shell("list")
    assert "broken" in out
    assert "not valid YAML" in " ".join(out.split())
    assert "A tiny copy" in out


def test_plan(stored):
    plan = stored.json("plan", "tiny", "--set", "seeds=[0,7]")
    assert (plan["finished"], plan["to_do"]) == (1, 3)
    assert plan["counts"] == {"finished": 1, "stopped": 1, "pending": 2}
    assert {run["parameters"] for run in plan["runs"]} == {936, 936 + 64 * 4}
    assert plan["estimated_s"] >= plan["least_s"] > RAY_START_S
    assert plan["basis"].startswith("scaled from this store's finished runs")
    out, err = stored("plan", "tiny", "--set", "seeds=[0,7]")
    assert "seeds 0, 7: 4 runs" in err
    assert "1 finished, 3 to do: about " in out
    assert "1.2 k" in out
    assert "MiB" in out


def test_plan_with_a_schedule_counts_stopped_runs_as_ended(stored):
    words = ("plan", "tiny", "--set", "seeds=[0,7]", "--set", "schedule=asha")
    assert stored.json(*words)["basis"].startswith("measured on this store")
    assert "1 finished, 1 stopped early, 2 to do: about " in stored(*words)[0]


def test_the_kernels_of_a_plan(shell):
    options = ["plan", "tiny", "--attention", "--set", "resources.attention=blocked"]
    entries = shell.json(*options)
    assert [(entry["row"], entry["device"]) for entry in entries] == [
        (row, device) for row in ("CoPE", "none") for device in ("cpu", "cuda")
    ]
    assert {(entry["attention"], entry["reason"]) for entry in entries} == {("blocked", None)}
    fused = ["plan", "tiny", "--attention", "--set", "resources.attention=native"]
    hard = shell.json(*fused, "--set", "model.hard_attention=true", "--set", "resources.device=cpu")
    assert {(entry["attention"], entry["device"]) for entry in hard} == {("blocked", "cpu")}
    assert all("attention is hard" in entry["reason"] for entry in hard)
    out, _ = shell(*fused, "--set", "model.hard_attention=true")
    assert "attention is hard" in " ".join(out.split())


def test_runs_that_are_too_large_are_marked(shell):
    out, _ = shell("plan", "tiny", "--set", "model.dim=200000", "--set", "resources.device=cpu")
    out = " ".join(out.split())
    assert "too large" in out
    assert "; 4 do not fit into this machine's memory" in out
    assert "too large" not in shell("plan", "tiny")[0]


def test_years_on_a_cpu_are_not_shown_for_runs_that_may_use_a_gpu(shell, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    large = ("plan", "tiny", "--set", "train.steps=1000000000", "--set", "train.batch=100000")
    assert "4 to do: needs a GPU (" in " ".join(shell(*large)[0].split())
    assert re.search(
        r"4 to do: about [\d.,]+ y(, or [\d,.]+ y if the machine stays as busy as now)? \(",
        " ".join(shell(*large, "--set", "resources.gpus=0")[0].split()),
    )


def test_a_plan_that_is_finished_has_no_estimate(stored):
    for run in stored.runs[1:]:
        finish(stored.store, run, {})
    assert stored("plan", "tiny")[0].rstrip().endswith("4 finished, 0 to do")


@pytest.mark.slow
def test_the_commands_import_no_heavy_package(stored):
    """torch takes seconds to import, pandas and mlflow half of one."""
    heavy = ("torch", "pandas", "pyarrow", "matplotlib", "mlflow", "ray", "scipy")
    code = COMMANDS + 'sys.stderr.write(" ".join(sys.modules))'
    for lines, unused in (
        ("--help,figure --help", (*heavy, "numpy", "sqlalchemy", "cope_sweep.config")),
        ("list,status,status tiny,plan tiny,runs,table tiny", heavy),
    ):
        command = [sys.executable, "-c", code, lines]
        done = subprocess.run(command, cwd=stored.folder, env=stored.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert {*unused}.isdisjoint(done.stderr.split()), lines


def test_an_ablation_is_found_by_name_although_a_folder_has_it_too(shell):
    (shell.folder / "tiny").mkdir()
    assert shell.json("plan", "tiny")["to_do"] == 4


def test_an_ablation_is_found_by_path(shell):
    (shell.folder / "here").write_text((shell.folder / "ablations" / "tiny.yaml").read_text())
    assert shell.json("plan", "here")["ablation"] == "here"
    assert shell.json("plan", "ablations/tiny.yaml")["ablation"] == "tiny"


def test_schema(shell):
    assert json.loads(shell("schema")[0])["title"] == "A cope-sweep ablation"


@pytest.mark.parametrize(
    ("words", "code", "data"),
    [
        (["plan", "tiny", "--set", "grid=3"], "unknown_key", {"place": "--set grid=3", "key": "grid"}),
        (["plan", "ablations/none.yaml"], "no_such_file", {"place": "ablations/none.yaml"}),
        (["plan", "zzz", "--ablations", "nowhere"], "not_found", {"name": "zzz"}),
        (["list", "--ablations", "nowhere"], "no_ablations", {}),
    ],
)
def test_bad_input_of_plans(shell, words, code, data):
    shell.refuses(code, *words, **data)
    assert not (shell.folder / "store").exists()


def test_an_empty_store_points_to_results_beside_the_files(shell):
    assert "come with results" not in shell("list")[0]
    (shell.folder / "ablations/results").mkdir()
    (shell.folder / "ablations/results/tiny.parquet").touch()
    (shell.folder / "ablations/results/tiny.curves.parquet").touch()
    assert "cope-sweep table tiny --committed" in shell("list")[0]


@pytest.mark.parametrize("columns", ["30", "60"])
def test_names_and_ids_are_whole_in_a_narrow_terminal(shell, columns):
    """Lines are then longer than the terminal is wide."""
    shell.environment["COLUMNS"] = columns
    (run, *_) = shell.json("plan", "tiny")["runs"]
    assert run["run_id"] in shell("plan", "tiny")[0]
    name = "an_ablation_whose_name_is_longer"
    shell.write(name, "title: Heir\ninherit: tiny\nscales: {brief: {seeds: [7]}, some_more: {seeds: [7]}}\n")
    (line,) = [line for line in shell("list")[0].splitlines() if line.startswith(name)]
    assert re.search(r" Heir +0/4$", line)


def test_the_list_in_a_terminal_of_100_columns_says_what_each_ablation_asks(shell):
    shell.environment["COLUMNS"] = "100"
    scales = ", ".join(f"scale_with_a_long_name_{index}: {{seeds: [7]}}" for index in range(6))
    shell.write("heir", f"title: Heir of another\nreproduces: Table 2\ninherit: tiny\nscales: {{{scales}}}\n")
    (line,) = [line for line in shell("list")[0].splitlines() if line.startswith("heir")]
    assert re.search(r"^heir +Heir of another +.*0/4$", line)


@pytest.fixture
def crowded(shell):
    """An ablation with long names of rows."""
    text = (shell.folder / "ablations" / "tiny.yaml").read_text()
    shell.write(
        "crowded", text.replace("CoPE: [cope]", "CoPE with contextual gates in every one of its layers: [cope]")
    )
    return shell


def test_a_plan_fits_a_terminal_of_80_columns(crowded):
    crowded.environment["COLUMNS"] = "80"
    lines = crowded("plan", "crowded")[0].splitlines()
    (run, *_) = crowded.json("plan", "crowded")["runs"]
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if re.search(r" [01] s( |$)", line)]) == 4, "times are on one line"
    assert run["run_id"] in lines[1]
    first = next(i for i, line in enumerate(lines) if run["run_id"] in line)
    assert set(run["row"].split()) <= set(" ".join(lines[first : first + 3]).split())
    assert "parameters" not in lines[0]
    crowded.environment["COLUMNS"] = "160"
    assert "parameters" in crowded("plan", "crowded")[0]


def test_a_table_in_a_pipe_is_whole(crowded):
    """The output is no terminal, as in all tests here, and nothing says how wide one is."""
    del crowded.environment["COLUMNS"]
    out, err = crowded("plan", "crowded")
    assert err == ""
    assert "parameters" in out
    assert (
        len([line for line in out.splitlines() if "CoPE with contextual gates in every one of its layers" in line]) == 2
    )


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("model.heads=3", "invalid_value"),
        ("task.kind=foo", "unknown_kind"),
        ("model.position=[{kind: cope, p_max: 0}]", "invalid_value"),
        ("model.position=cope", "wrong_type"),
    ],
)
def test_errors_of_set_name_the_option_once(shell, value, code):
    shell.refuses(code, "plan", "tiny", "--set", value, place=f"--set {value}")
    assert shell("plan", "tiny", "--set", value, code=2)[1].count("--set") == 1


def test_status_of_an_ablation(stored):
    status = stored.json("status", "tiny")
    assert status["counts"] == {"finished": 1, "failed": 1, "stopped": 1, "interrupted": 1}
    runs = {run["run_id"]: run for run in status["runs"]}
    finished, failed, stopped, damaged = (runs[run.run_id] for run in stored.runs)
    assert (finished["status"], finished["step"], finished["steps"], finished["worker_id"]) == (
        "finished",
        6,
        6,
        "here",
    )
    assert failed["message"] == "Diverged: the loss is nan"
    assert stopped["message"] == "stopped at step 3 by asha"
    assert "result.json" in damaged["message"]
    out, _ = stored("status", "tiny")
    for run in stored.runs:
        assert run.run_id in out
    assert "6/6" in out
    assert "stopped at step 3 by asha" in " ".join(out.split())


def test_status_of_a_run(stored):
    run = stored.json("status", stored.runs[0].run_id)
    assert (run["status"], run["state"]["attempt"], run["sweeps"]) == ("finished", 1, [stored.sweep_id])
    assert run["spec"]["model"]["position"][0]["kind"] == "cope"
    assert run["result"]["metrics"]["in_dist/token_error"] == 12.5
    assert run["state"]["status"] == "finished", "state.json still says running"


def test_status_of_a_run_is_a_page(stored):
    run = stored.runs[0]
    out, _ = stored("status", run.run_id)
    lines = out.splitlines()
    assert lines[0] == f"{run.run_id}: finished, step {run.train.steps} of {run.train.steps}"
    assert len(lines) < 40
    assert "tiny" in out
    assert stored.sweep_id in out
    (model,) = (line for line in lines if line.startswith("model  "))
    assert f", layers {run.model.layers}" in model.replace("  ", ", ")
    assert any(line.split()[:1] == ["in_dist/token_error"] for line in lines)
    assert f"cope-sweep logs {run.run_id}" in out


def test_status_of_the_store(stored):
    (sweep,) = stored.json("status")
    assert (sweep["sweep_id"], sweep["ablation"], sweep["status"], sweep["executor"]) == (
        stored.sweep_id, "tiny", "failed", "local",
    )  # fmt: skip
    assert (sweep["started_ms"], sweep["ended_ms"]) == (1000, 2000)
    assert sweep["counts"] == {"finished": 1, "failed": 1, "stopped": 1, "interrupted": 1}
    out, _ = stored("status")
    assert stored.sweep_id in out
    assert "1 stopped" in out


def test_status_of_a_sweep(stored):
    sweep = stored.json("status", stored.sweep_id)
    assert [member["status"] for member in sweep["members"]] == ["finished", "failed", "stopped", "interrupted"]
    out, _ = stored("status", stored.sweep_id)
    assert f"{stored.sweep_id}: tiny, failed, " in out
    assert "node-3 was left out: no GPU" in out
    assert stored.runs[2].run_id in out


def test_status_of_a_sweep_says_why_runs_wait(stored):
    plan = expand(load_ablation(stored.folder / "ablations" / "tiny.yaml"))
    record = write_sweep(Store(stored.folder / "store"), plan)
    members = stored.json("status", record.sweep_id)["members"]
    assert [bool(member["reason"]) for member in members] == [False, True, True, True]
    out, _ = stored("status", record.sweep_id)
    assert members[3]["reason"].split(";")[0] in " ".join(out.split())


def test_status_of_an_empty_store_says_how_to_start(shell):
    assert shell.json("status") == []
    assert "cope-sweep run quickstart" in shell("status")[0]


def test_status_shows_the_traceback_of_a_failed_run(stored):
    failed = stored.runs[1].run_id
    out, _ = stored("status", failed)
    assert "Traceback (most recent call last)" in out
    assert '"traceback"' not in out
    assert "Traceback" in stored.json("status", failed)["state"]["traceback"]


def test_the_index_may_be_in_another_database(stored, tmp_path):
    other = f"sqlite:///{tmp_path / 'other.db'}"
    assert stored.json("status", "tiny", "--index", other)["counts"]["finished"] == 1
    os.remove(stored.folder / "store" / "index.db")
    stored.environment["COPE_SWEEP_INDEX"] = other
    assert stored.json("status", "tiny")["counts"]["stopped"] == 1
    assert not (stored.folder / "store" / "index.db").exists()
    assert Counter(Store(stored.folder / "store", index=other).index.statuses().values()) == {
        "finished": 1, "failed": 1, "stopped": 1, "interrupted": 1,
    }  # fmt: skip


def test_report_writes_a_file(stored):
    assert stored("table", "tiny", "--output", "table.md") == ("", "")
    assert (stored.folder / "table.md").read_text() == stored("table", "tiny", "--format", "markdown")[0]
    assert stored.json("table", "tiny")["rows"][0]["row"] == "CoPE"


def test_a_planned_run_of_a_sweep_has_not_started(stored):
    run = tiny_run(seed=9)
    members = [SweepRun(run_id=run.run_id, row="CoPE", labels={}, seed=9)]
    write_sweep(stored.store, stored.plan, sweep_id="20260730-130000-abcd", runs=members)
    stored.refuses("not_found", "status", run.run_id, run_id=run.run_id)
    _, err = stored("status", run.run_id, code=2)
    assert f"run {run.run_id} has not started: CoPE of tiny" in err


@pytest.mark.parametrize(
    ("words", "code", "data"),
    [
        (["status", "0123456789abcdef"], "not_found", {"run_id": "0123456789abcdef"}),
        (["status", "20260101-000000-abcd"], "not_found", {"sweep_id": "20260101-000000-abcd"}),
        (["table", "tiny", "--runs", "--format", "latex"], "format_without_runs", {"format": "latex"}),
        (["table", "tiny", "--output", "table.html"], "unknown_format", {"file": "table.html"}),
        (["report", "tiny", "--output", "report.pdf"], "unknown_format", {"file": "report.pdf"}),
        (["table", "tiny", "--format", "csv", "--output", "nowhere/x.csv"], "not_writable", {"file": "nowhere/x.csv"}),
    ],
)
def test_bad_input_of_results(shell, words, code, data):
    shell.refuses(code, *words, **data)


def test_diff_of_two_runs(stored):
    left, right = stored.runs[0], stored.runs[2]
    finish(stored.store, right, {"in_dist/token_error": 20.0}, {"parameters": 7})
    out, _ = stored("diff", left.run_id, right.run_id)
    assert "1 of 1 runs finished" in out
    assert "model.position" in out
    assert "in_dist/token_error" in out
    assert "+7.5" in out
    stored.environment["COLUMNS"] = "60"
    out = stored("diff", left.run_id, right.run_id)[0]
    (heading,) = [line.split() for line in out.splitlines() if line.startswith("metric ")]
    assert heading == ["metric", "left", "right", "difference", "runs"]
    assert "difference: right minus left; runs: finished runs, left and right" in " ".join(out.split())
    assert "in_dist/token_error" in out
    assert max(map(len, out.splitlines())) <= 60
    found = stored.json("diff", left.run_id, right.run_id)
    assert (found["metrics"][0]["left"], found["metrics"][0]["right"]) == (12.5, 20.0)
    assert stored.json("diff", stored.sweep_id, stored.sweep_id)["spec"] == []
    stored.refuses("not_comparable", "diff", left.run_id, stored.sweep_id)


def test_a_run_is_named_by_its_first_digits(stored):
    first, second = stored.runs[0].run_id, stored.runs[1].run_id
    assert stored.json("status", first[:6])["run_id"] == first
    assert stored.json("logs", first[:6])["run_id"] == first
    assert stored.json("diff", first[:6], second[:7])["left"] == first
    other = first[:5] + ("0" if first[5] != "0" else "1")
    stored.refuses("not_found", "status", other, name=other)
    stored.refuses("not_found", "status", "abc", name="abc")  # three digits are not enough
    twin = first[:8] + "00000000"
    with stored.store.index.database.writing() as connection:
        connection.execute(update(runs).where(runs.c.run_id == second).values(run_id=twin))
    stored.refuses("ambiguous_run_id", "status", first[:8], run_id=first[:8])
    stored.write(first[:6], (stored.folder / "ablations" / "tiny.yaml").read_text())
    assert stored.json("status", first[:6])["ablation"] == first[:6], "an ablation has this name"


def test_runs_of_the_same_row_and_seed_show_what_differs(stored):
    assert "train.lr" not in stored("runs")[0]
    faster = expand(with_overrides(stored.plan.ablation, assignments=["train.lr=0.5", "seeds=[0]"]))
    finish(stored.store, faster.rows[0].runs[0], {"in_dist/token_error": 1.0})
    write_sweep(stored.store, faster, sweep_id="20260730-130000-abcd")
    out, _ = stored("runs")
    values = {line.split()[0]: line.split() for line in out.splitlines()}
    assert "train.lr" in values["run"]
    assert "0.5" in values[faster.rows[0].runs[0].run_id]
    assert "0.001" in values[stored.runs[0].run_id]
    assert "0.001" not in values[stored.runs[1].run_id], "no other run has its row and seed"


def test_runs_are_filtered_by_any_value(stored):
    cope = [stored.runs[0].run_id, stored.runs[1].run_id]
    found = stored.json("runs", "--filter", "model.position=cope", "--sort", "seed")
    assert [run["run_id"] for run in found["runs"]] == cope
    assert (found["total"], found["limit"], found["offset"]) == (2, 100, 0)
    assert found["runs"][0]["values"] == {"model.position": "cope", "seed": 0}
    assert (found["runs"][0]["ablations"], found["runs"][0]["row"]) == (["tiny"], "CoPE")
    best = stored.json("runs", "--filter", "in_dist/token_error<20", "--filter", "facts.parameters>1000")
    assert [run["run_id"] for run in best["runs"]] == cope[:1]
    statuses = stored.json("runs", "--status", "stopped", "--status", "interrupted", "--sweep", stored.sweep_id)
    assert {run["status"] for run in statuses["runs"]} == {"stopped", "interrupted"}


@pytest.mark.parametrize(
    ("words", "code", "data"),
    [
        (["--filter", "model.layers"], "invalid_condition", {"condition": "model.layers"}),
        (["--sort", "in_dist/tokenerror"], "unknown_key", {"key": "in_dist/tokenerror"}),
        (["--sweep", "20260101-000000-abcd"], "not_found", {"sweep_id": "20260101-000000-abcd"}),
        (["--sweep", "20260101-000000-abcd", "-o", "x.csv"], "not_found", {"sweep_id": "20260101-000000-abcd"}),
        (["-o", "runs.txt"], "unknown_format", {}),
        (["--format", "exe"], "unknown_format", {}),
        (["--format", "parquet"], "missing_option", {"option": "--output", "format": "parquet"}),
        (["--curves"], "missing_option", {"option": "--output"}),
        (["-o", "nowhere/runs.csv"], "not_writable", {"file": "nowhere/runs.csv"}),
        (["--filter", "model.layer=1", "-o", "runs.csv"], "unknown_key", {"key": "model.layer"}),
        (["--limit", "100", "-o", "runs.csv"], "no_effect", {"option": "limit"}),
        (["--offset", "1", "--format", "csv"], "no_effect", {"option": "offset"}),
    ],
)
def test_bad_input_of_runs(stored, words, code, data):
    stored.refuses(code, "runs", *words, **data)


def test_runs_are_exported_with_all_their_values(stored):
    assert stored.json("runs", "-o", "all.csv") == {"file": "all.csv", "format": "csv"}
    assert "none of" in stored("runs", "--offset", "9999")[0]
    out, _ = stored("runs", "--filter", "model.position=cope", "-o", "runs.parquet")
    assert "all matching runs are in runs.parquet" in out
    table = pq.read_table(stored.folder / "runs.parquet")
    cope = [stored.runs[0].run_id, stored.runs[1].run_id]
    assert table.column("run_id").to_pylist() == sorted(cope)
    assert set(table.column("model.position").to_pylist()) == {"cope"}
    assert table.column("train.steps").to_pylist() == [6, 6]
    stored("runs", "--sort", "seed", "--format", "csv", "-o", "runs.txt")
    lines = list(csv.DictReader((stored.folder / "runs.txt").open()))
    assert [line["seed"] for line in lines] == ["0", "0", "1", "1"]
    finished = next(line for line in lines if line["status"] == "finished")
    assert (finished["in_dist/token_error"], finished["sweeps"]) == ("12.5", stored.sweep_id)
    assert [path.name for path in stored.folder.glob(".runs*")] == []


def test_a_failed_export_leaves_the_file(stored):
    (stored.folder / "runs.csv").write_text("before")
    stored("runs", "--filter", "model.layer=1", "-o", "runs.csv", code=2)
    assert (stored.folder / "runs.csv").read_text() == "before"


SEARCH = "search: {kind: random, samples: 3, space: {train.lr: {log_uniform: [1e-4, 1e-2]}}}\n"


@pytest.fixture
def searched(shell):
    """Three draws for each of two rows; the later a draw the better."""
    shell.write("searched", TINY + SEARCH)
    shell.plan = expand(load_ablation(shell.folder / "ablations" / "searched.yaml"))
    store = Store(shell.folder / "store", create=True)
    for number, row in enumerate(shell.plan.rows):
        for run in row.runs:
            finish(store, run, {"in_dist/token_error": 50.0 - number})
    return shell


def test_the_table_has_a_line_for_each_row_of_the_grid(searched):
    out, _ = searched("best", "searched")
    lines = out.splitlines()
    assert lines[0].split()[:7] == ["row", "of", "1", "of", "2", "of", "3"]
    assert lines[1].split()[:4] == ["CoPE", "50", "49", "48"]
    assert lines[2].split()[:4] == ["none", "47", "46", "45"]
    assert "in_dist/token_error, mean over seeds [0, 1]" in out
    assert "With so few seeds a draw may be best by luck: tune by 3 or more." in " ".join(out.split())


def test_the_best_rows_of_a_grid(shell):
    plan = shell.plan = expand(load_ablation(shell.folder / "ablations" / "tiny.yaml"))
    store = Store(shell.folder / "store", create=True)
    out, _ = shell("best", "tiny")
    assert "No row is finished" in out
    for number, row in enumerate(plan.rows):
        for run in row.runs:
            finish(store, run, {"in_dist/token_error": 50.0 - number})
    out, _ = shell("best", "tiny", "--top", "1")
    lines = out.splitlines()
    assert lines[0].split() == ["rank", "in_dist/token_error", "position"]
    assert lines[1].split()[:2] == ["1", "49"]
    assert lines[1].split()[-1] == plan.rows[1].name
    (only,) = shell.json("best", "tiny", "--top", "1")["rows"]
    assert [draw["row"] for draw in only["draws"]] == [plan.rows[1].name]
    shell.refuses("no_effect", "best", "tiny", "--yaml", "--top", "1", option="top")
    out, _ = shell("best", "tiny", "--yaml")
    assert list(yaml.safe_load(out)["scales"]) == ["best"]


def test_the_best_values_as_json_and_as_conditions(searched):
    answer = searched.json("best", "searched")
    lr = [row.runs[0].train.lr for row in searched.plan.rows]
    best = answer["rows"][0]["best"]
    assert (best["values"], best["score"]) == ({"train.lr": lr[2]}, 48.0)
    assert best["run_ids"] == [run.run_id for run in searched.plan.rows[2].runs]
    assert len(answer["rows"][0]["draws"]) == 3
    out, _ = searched("best", "searched", "--yaml")
    assert yaml.safe_load(out)["when"][1] == {"if": {"model.position": "none"}, "set": {"train.lr": lr[5]}}


def test_what_cannot_be_answered_is_an_error(searched):
    searched.refuses("not_finished", "best", "tiny", "--yaml")
    searched.refuses("unknown_metric", "best", "searched", "--metric", "x", metric="x")
    searched.refuses("no_effect", "best", "searched", "--top", "1", option="top")
    searched.refuses("conflicting_options", "best", "searched", "--yaml", "--json", options=["--yaml", "--json"])


def test_a_table_of_runs(stored):
    out, _ = stored("table", "tiny", "--runs")
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    first, failed = stored.runs[0].run_id, stored.runs[1].run_id
    assert lines["run"][:4] == ["run", "position", "seed", "status"]
    assert lines[first][1:5] == ["CoPE", "0", "finished", "12.50"]
    assert lines[failed][1:5] == ["CoPE", "1", "failed", "–"]
    assert [run_id for run_id in lines if run_id in {run.run_id for run in stored.runs}] == [
        r.run_id for r in stored.runs
    ]


def test_logs_as_json_are_those_of_the_service(stored):
    failed = stored.runs[1].run_id
    queries = Queries(Store(stored.folder / "store"))
    assert stored.json("logs", failed) == queries.ask(GetLog(run_id=failed)).model_dump()
    assert stored.json("logs", failed, "--tail", "1") == queries.ask(GetLog(run_id=failed, tail=1)).model_dump()
    out, _ = stored("logs", failed, "--tail", "1")
    assert out.splitlines() == queries.ask(GetLog(run_id=failed, tail=1)).lines
    out, _ = stored("logs", failed, "--tail", "0")
    assert out == ""
    stored.refuses("conflicting_options", "logs", failed, "--follow", "--json", options=["--json", "--follow"])


def test_a_terminal_obeys_nothing_that_a_run_says(stored):
    run = stored.runs[2].run_id
    fail(stored.store, stored.runs[2], "lost \x1b]52;c;aGk=\x07 it")
    for command in (["logs", run], ["status", run], ["status", stored.sweep_id]):
        out, _ = stored(*command)
        assert "\x1b" not in out
        assert r"lost \x1b]52;c;aGk=\x07 it" in out


def test_logs_of_a_sweep_are_those_of_its_driver(trained, stored):
    sweep_id = trained.first["sweep"]["sweep_id"]
    lines = trained("logs", sweep_id)[0].splitlines()
    texts = [line.partition("  ")[2] for line in lines]
    assert texts[0].startswith(f"sweep {sweep_id} starts on ")
    assert texts[1] == "4 runs to train, 0 finished before"
    assert sum(", seed 0): finished, step 6 of 6" in text for text in texts) == 2
    assert texts[-1].endswith(" s: 4 trained")
    assert trained.json("logs", sweep_id, "--tail", "1") == {
        "sweep_id": sweep_id,
        "lines": lines[-1:],
        "truncated": True,
    }
    stored.refuses("no_log", "logs", stored.sweep_id, sweep_id=stored.sweep_id)
    stored.refuses("not_found", "logs", "20260101-000000-ffff", sweep_id="20260101-000000-ffff")


def test_a_row_names_its_best_run(stored):
    finished, failed = stored.runs[0].run_id, stored.runs[1].run_id
    assert stored.json("status", "tiny/CoPE")["run_id"] == finished
    assert stored.json("diff", "tiny/CoPE", failed)["left"] == finished
    assert stored.json("logs", "tiny/CoPE")["run_id"] == finished
    stored.refuses("names_an_ablation", "logs", "tiny", ablation="tiny", rows=["CoPE", "none"])
    stored.refuses("names_an_ablation", "perplexity", "tiny", "--tokens", "1 2", ablation="tiny", rows=["CoPE", "none"])
    stored.refuses("not_finished", "perplexity", "tiny/none", "--tokens", "1 2", row="none")
    stored.refuses("not_found", "perplexity", "tin", "--tokens", "1 2", run_id="tin")


def test_a_store_knows_the_ablation_of_its_sweep(trained):
    """After `run /some/where/tiny.yaml`, its file is not needed."""
    folder = ["--ablations", "empty"]
    (trained.folder / "empty").mkdir()
    out, err = trained("table", "tiny", *folder)
    assert "CoPE" in out
    (sweep_id,) = re.findall(r"the ablation of sweep (\S+)", " ".join(err.split()))
    assert Store(trained.folder / "store").sweep(sweep_id).ablation == "tiny"
    assert trained.json("runs", "--ablation", "tiny", *folder)["total"] == 4
    assert trained.json("plan", "tiny", *folder)["finished"] == 4
    assert trained.json("run", "tiny", "--local", "--no-mlflow", *folder)["sweep"]["reused"] == 4
    assert [each["name"] for each in trained.json("list", *folder)] == ["tiny"]
    trained.refuses("not_found", "table", "tinny", *folder, name="tinny")


def test_logs_follow_a_run_to_its_end(shell):
    run = tiny_run()
    store = Store(shell.folder / "store", create=True)
    folder = begin(store, run)
    folder.note("first line")

    def train():
        time.sleep(1)
        folder.note("last line")
        folder.set_state("interrupted")
        end(store, folder)

    thread = threading.Thread(target=train)
    thread.start()
    out, _ = shell("logs", run.run_id, "-f")
    thread.join()
    assert [line.partition("  ")[2] for line in out.splitlines()] == ["first line", "last line"]


def test_logs_of_a_run_without_one(shell):
    shell.refuses("not_found", "logs", "0" * 16, run_id="0" * 16)
    shell.refuses("not_found", "logs", "x", run_id="x")


def test_tried_shows_what_differs_from_the_group_above(shell):
    encodings = "{A: [{kind: cope, p_max: 2}], B: [{kind: cope, p_max: 3}], C: [rope]}"
    grid = f"  model.position: {encodings}\n  model.layers: [1, 2]\n"
    shell.write("wide", TINY.replace("  model.position: {CoPE: [cope], none: []}\n", grid))
    plan = expand(load_ablation(shell.folder / "ablations" / "wide.yaml"))
    for run in plan.runs:
        finish(Store(shell.folder / "store"), run, {"in_dist/token_error": 1.0})
    shell.environment["COLUMNS"] = "400"
    out, _ = shell("tried", "train.lr")
    first, *others = [line.split("1 ± 0 (2)")[1].strip() for line in out.splitlines() if "1 ± 0 (2)" in line]
    assert first.startswith("layers=1, position=cope, ")
    assert "p_max=2" in first
    assert others[0] == "… p_max=3"
    assert others[2].startswith("layers=2, position=cope, ")
    assert [text.partition("position=")[2].partition(",")[0] for text in others] == ["", "rope", "cope", "", "rope"]
